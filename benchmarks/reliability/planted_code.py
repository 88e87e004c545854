"""A reward and trackers that are given secrets, and say them as they fail.

`kills_secrets_memory.py` hands them to a run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def judged(completions: list[Any], token: str, judge: dict[str, str], **_: Any) -> list[float]:
    """Fails on some groups, with its token in the message."""
    assert token.startswith("tok-")
    assert judge["api_key"].startswith("key-")
    if len(completions) == 4 and len(str(completions[0])) % 2:
        raise RuntimeError(f"401 for {token}")
    return [float("4" in str(text)) for text in completions]


class Kept:
    """Writes down all that it is told, the recipe first."""

    def __init__(self, run: Any, token: str) -> None:
        assert token.startswith("tok-")
        self.path: Path = run.path / "trackers" / "kept.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.write({"config": dict(run.recipe)})

    def write(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record, default=str) + "\n")

    def step(self, report: Any) -> None:
        self.write({"step": report.step, "events": report.events})


def failing(record: Any, token: str) -> None:
    """Always fails, with its token in the message."""
    raise RuntimeError(f"{type(record).__name__}: 401 for {token}")
