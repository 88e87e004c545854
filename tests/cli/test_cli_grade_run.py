"""`grouper grade` of a run: graded again; what differs is listed, nothing is changed."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from grouper.files import read_lines, write_lines


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy in which one rollout and one evaluation item were graded by a worse grader."""
    copy = tmp_path / "demo"
    shutil.copytree(finished_run, copy)
    rollouts = copy / "rollouts" / "grpo-000001.jsonl.gz"
    rows = list(read_lines(rollouts))
    rows[0] |= {
        "completion": "<reasoning>a</reasoning><answer>0.5</answer>",
        "answer": "1/2",
        "verdict": "incorrect",
        "extracted": "0.5",
        "reason": "an old bug",
        "reward": 0.0,
    }
    write_lines(rollouts, rows)
    items = copy / "evaluations" / "grpo.jsonl.gz"
    rows = list(read_lines(items))
    rows[0] |= {"completion": "<answer>7</answer>", "answer": "8", "verdict": "correct"}
    write_lines(items, rows)
    return copy


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_run_graded_by_this_version_does_not_change(grouper, finished_run):
    before = contents(finished_run)
    called = grouper("grade", finished_run)
    assert called.code == 0, called.err
    assert "Rows that come out differently: 0." in called.out
    assert "grpo step 2: 32 rows" in called.out
    assert contents(finished_run) == before


def test_each_flipped_row_is_listed_with_both_reasons(grouper, run, tmp_path):
    output = tmp_path / "flips.jsonl"
    called = grouper("grade", run, "--output", output)
    assert called.code == 0, called.err
    assert "Rows that come out differently: 2." in called.out
    assert "1  incorrect -> correct" in called.out
    assert "1  correct -> incorrect" in called.out
    assert "before incorrect: 0.5 (an old bug), reward 0.0" in called.out
    assert "now    correct: 0.5 (equal numbers), reward 1." in called.out
    flips = [json.loads(line) for line in output.read_text().splitlines()]
    assert [flip["where"] for flip in flips] == ["grpo", "grpo step 1"]
    assert flips[1]["before"]["verdict"] == "incorrect"
    assert flips[1]["after"]["verdict"] == "correct"
    only = grouper("grade", run, "--only", "evaluations")
    assert "Rows that come out differently: 1." in only.out
    assert "step" not in only.out


def test_another_recipe_pays_otherwise_for_the_same_rollouts(grouper, finished_run, tmp_path):
    shown = grouper("recipes", "show", "demo").out
    (tmp_path / "other.yaml").write_text(shown)
    file = tmp_path / "mine.py"
    file.write_text(
        "def length(prompts, completions, kind, completion_ids, **kwargs):\n"
        "    assert completions[0][0]['role'] == 'assistant'\n"  # the demo is a chat
        "    assert all(kind)\n"  # a column of the data
        "    return [float(len(ids)) for ids in completion_ids]\n"
    )
    rewards = f'rewards=[{{name: "{file}:length"}}]'
    called = grouper(
        "grade", finished_run, "--recipe", tmp_path / "other.yaml", "--only", "rollouts", rewards
    )
    assert called.code == 0, called.err
    assert "Rows that come out differently: 64." in called.out, called.out[-500:]
    assert "64  only the reward" not in called.out  # told step by step
    assert "32  only the reward" in called.out
    with gzip.open(finished_run / "rollouts" / "grpo-000001.jsonl.gz", "rt") as lines:
        tokens = json.loads(next(lines))["tokens"]
    assert f"reward {float(tokens)}" in called.out


def test_what_is_no_run_is_refused(grouper, tmp_path):
    grouper("grade", tmp_path / "nothing").refused("is not a file or a run folder")
    grouper("grade", tmp_path).refused("no recipe.yaml")


def test_a_damaged_file_leaves_the_others(grouper, run):
    (run / "rollouts" / "grpo-000002.jsonl.gz").write_bytes(b"no gzip")
    called = grouper("grade", run)
    assert called.code == 0, called.err
    assert "Rows that come out differently: 2." in called.out
    assert "warning: left out: " in called.err
