"""`grouper chat`: a conversation."""

from __future__ import annotations


def test_a_conversation(grouper, finished_run, monkeypatch):
    lines = iter(["/stats", "What is 3 + 4?", "", "And 2 more?", "/new", "What is 1 + 1?"])

    def typed(prompt: str = "") -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    called = grouper("chat", finished_run, "--max-new-tokens", "12")
    assert called.code == 0, called.err
    assert called.err.count(" per second), ended by ") == 3
