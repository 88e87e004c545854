"""`grouper synthesize`: right answers as data for SFT."""

from __future__ import annotations


def test_right_answers_as_data(grouper, finished_run, tmp_path):
    target = tmp_path / "right.jsonl"
    words = ("synthesize", finished_run, "--samples", "2", "--output", target)
    called = grouper(*words, "data.train.limit=4", "-q")
    assert called.code == 0, called.err
    assert "right answers of 8 completions" in called.out
    assert target.exists()
    grouper(*words).refused("--output")
