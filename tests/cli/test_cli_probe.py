"""`grouper probe`: what it says of a set, and of a model that cannot be probed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [
        {
            "question": f"Ann has {n} pens, and {' '.join(['then'] * 9)} gets 2. How many?",
            "answer": "1",
        }
        for n in range(4)
    ]
    rows.append({"question": "1+1?", "answer": "2"})
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_is_probed_beside_a_control(grouper, finished_run, questions, tmp_path):
    out = tmp_path / "probe.jsonl"
    called = grouper("probe", finished_run, "--on", questions, "--output", out, "--quiet")
    assert called.code == 0, called.err
    assert "control (made now)" in called.out
    assert "mine: no more than can be guessed" in called.out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    mine = [row for row in rows if row["set"] == "mine"]
    assert len(mine) == 4, "the short question is left out"
    assert all(row["shown"] + row["ending"] for row in mine)
    assert len(rows) - len(mine) >= 4, "and the control's"


def test_as_json(grouper, finished_run, questions):
    called = grouper("probe", finished_run, "--on", questions, "--limit", 2, "--json", "--quiet")
    assert called.code == 0, called.err
    mine, control = json.loads(called.out)["probes"]
    assert mine["questions"] == control["questions"] == 2
    assert mine["exact"] == 0
    assert mine["high"] > 0.5


def test_what_cannot_be_probed_is_refused(grouper, finished_run, tmp_path):
    grouper("probe", finished_run, "--on", "gsm").refused("there is no suite 'gsm'")
    grouper("probe", tmp_path, "--on", "gsm8k").refused("MODEL")
    assert grouper("probe", finished_run).code == 2
