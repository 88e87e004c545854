"""`grouper show`: which completions, in which order, and what a file may hold."""

from __future__ import annotations

import json
import re

import pytest
from drawn_runs import make_run, rollout

from grouper.config.loading import load_recipe, resolved_yaml
from grouper.files import write_lines


def test_what_a_record_or_a_file_of_data_holds_does_not_steer_the_terminal(grouper, tmp_path):
    """Names of rewards, ids and answers: whoever wrote a file chose them."""
    odd = "\x1b\x07\u202e"
    run = make_run(tmp_path / "demo")
    row = rollout(5, 0) | {"problem_id": f"{odd}p", "rewards": {odd: 1.0}, "verdict": "incorrect"}
    write_lines(run.path / "rollouts" / "grpo-000005.jsonl.gz", [row])
    (run.path / "recipe.yaml").write_text(
        resolved_yaml(load_recipe("demo", ["grading.symbolic=false"]))
    )
    facts = {"answer": f"red {odd}", "id": f"{odd}id", "subject": odd, "level": odd}
    rows = [{"question": f"What is 3 + 1?{odd}", **facts}, {"question": "No answer?", "id": odd}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for words in (
        ("show", run.path),
        ("grade", run.path),
        ("data", "show", data),
        ("data", "audit", data),
    ):
        called = grouper(*words)
        assert called.code == 0, (words, called.err)
        assert "audit" in words or "\\x1b" in called.out, called.out
        for sign in odd:
            assert sign not in called.out, (words, repr(called.out))


def test_rows_of_another_program_are_damage_not_a_traceback(grouper, tmp_path):
    run = make_run(tmp_path / "demo")
    rows = [{"problem_id": 5, "reward": "high", "token_texts": 3, "verdict": None}]
    write_lines(run.path / "rollouts" / "grpo-000009.jsonl.gz", rows)
    for command in ("show", "watch", "report"):
        called = grouper(command, run.path)
        assert called.code == 0, called.err


def test_a_folder_that_is_no_run_is_refused(grouper, tmp_path):
    for command in ("report", "show", "watch"):
        grouper(command, tmp_path).refused("this is not a run folder of Grouper", str(tmp_path))
    info = {"format": 2, "recipe_hash": "a", "warp": 9}
    (tmp_path / "run.json").write_text(json.dumps(info))
    grouper("report", tmp_path).refused("this is not a run folder of Grouper")


def test_show_prints_what_was_asked_for(grouper, finished_run):
    called = grouper("show", finished_run)
    assert called.code == 0, called.err
    assert called.out.count("grpo step 2  ") == 5
    one = grouper("show", finished_run, "--step", "1", "--worst", "-n", "1").out
    assert one.count("grpo step 1  ") == 1
    assert "advantage" in one
    assert grouper("show", finished_run, "--problem", "nowhere").out == ("No rollout matches.\n")
    grouper("show", finished_run, "--step", "7").refused("no rollouts are stored of step 7")
    assert "give one" in grouper("show", finished_run, "--best", "--worst").err


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ("", ["5 train/0 0", "5 train/0 1", "5 train/0 2"]),
        ("--verdict correct", ["5 train/0 1", "5 train/0 3", "5 train/1 1"]),
        ("--best", ["5 train/1 3", "5 train/1 1", "5 train/0 3"]),
        ("--worst", ["5 train/0 0", "5 train/0 2", "5 train/1 0"]),
        ("--step 3 --problem train/1", ["3 train/1 0", "3 train/1 1", "3 train/1 2"]),
    ],
)
def test_show_chooses_and_orders(grouper, tmp_path, options, rows):
    called = grouper("show", make_run(tmp_path / "demo").path, *options.split(), "-n", "3")
    assert called.code == 0, called.err
    shown = re.findall(r"^grpo step (\d)  \w+  (\S+), sample (\d)", called.out, re.MULTILINE)
    assert [" ".join(row) for row in shown] == rows


def test_show_puts_two_steps_side_by_side(grouper, tmp_path):
    run = make_run(tmp_path / "demo").path
    for options, problems in (("", ["0", "1"]), ("-n 1", ["0"]), ("--problem train/1", ["1"])):
        called = grouper("show", run, "--diff", "3", "5", *options.split())
        assert called.code == 0, called.err
        assert re.findall(r"train/(\d): the reference is 2", called.out) == problems
        assert "step 3: incorrect" in called.out
        assert "No rollout matches" not in called.out
    for options in ("--step 3", "--verdict correct", "--best", "--worst"):
        called = grouper("show", run, "--diff", "3", "5", *options.split())
        assert (called.code, called.out) == (2, "")
        assert "only --problem and -n go with it" in called.err
