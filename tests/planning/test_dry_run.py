"""What a run would do, worked out by hand."""

from __future__ import annotations

import json

import pytest

from grouper.errors import GrouperError
from grouper.planning.dry_run import make_plan
from grouper.recipe import load_recipe


def test_the_sizes_are_those_worked_out_by_hand(tmp_path):
    recipe = load_recipe(
        "demo",
        [
            f"output_dir={tmp_path}",
            "data.sft.options.count=70",
            "data.train.options.count=50",
            "sft.steps=null",
            "sft.epochs=2",
            "sft.batch_size=32",
            "grpo.prompts_per_step=16",
            "grpo.group_size=8",
        ],
    )
    plan = make_plan(recipe)
    # 70 / 32 rounds up to 3 steps an epoch; two epochs of 70 are 140 / 32, rounded up: 5 steps.
    assert "32 demonstrations a step, 70 in all, 3 steps an epoch; 5 steps" in plan.sizes[0]
    assert "16 prompts x 8 samples = 128 completions a step, 4 steps an epoch" in plan.sizes[1]
    assert plan.sizes[-1] == f"Output: {tmp_path}/demo (new)"
    assert plan.warnings == ()
    assert list(tmp_path.iterdir()) == []


def test_a_phase_that_is_skipped_is_not_planned(tmp_path):
    recipe = load_recipe("demo", [f"output_dir={tmp_path}", "skip_sft=true"])
    assert not any("demonstrations" in line for line in make_plan(recipe).sizes)
    recipe = load_recipe("demo", [f"output_dir={tmp_path}", "skip_grpo=true"])
    assert not any("GRPO" in line for line in make_plan(recipe).sizes)


def test_everything_that_is_wrong_is_told_at_once(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "notes.txt").write_text("mine")
    (tmp_path / "rewards.py").write_text("def bad(**kwargs):\n    raise KeyError('x')\n")
    recipe = load_recipe(
        "demo",
        [f"output_dir={tmp_path}", f"rewards=[{{name: '{tmp_path}/rewards.py:bad'}}]"],
    )
    with pytest.raises(GrouperError) as caught:
        make_plan(recipe)
    assert "notes.txt" in str(caught.value)
    assert "'bad' raised KeyError" in str(caught.value)
    assert len(caught.value.others) == 1


def test_rewards_are_tried_on_a_row_of_the_data(tmp_path):
    """They see its columns, which a made-up problem does not have."""
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "unit": "m"} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def unit(completions, unit, **kwargs):\n"
        "    assert set(unit) == {'m'}\n"
        "    return [0.0 for _ in completions]\n"
    )
    recipe = load_recipe(
        "demo",
        [
            f"output_dir={tmp_path}",
            "skip_sft=true",
            "data.sft=null",
            f"data.train={{source: file, path: '{tmp_path}/rows.jsonl'}}",
            f"rewards=[{{name: '{tmp_path}/rewards.py:unit'}}]",
        ],
    )
    assert any("3 steps" in line or "prompts x" in line for line in make_plan(recipe).sizes)


def test_a_device_that_is_not_there_is_named_with_everything_else(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = load_recipe("demo", [f"output_dir={tmp_path}", "device=cuda"])
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "notes.txt").write_text("mine")
    with pytest.raises(GrouperError, match="finds no cuda device") as caught:
        make_plan(recipe)
    assert len(caught.value.others) == 1
