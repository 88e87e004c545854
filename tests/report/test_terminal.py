"""`grouper show` and `grouper watch` as functions: what is read, and what a terminal gets."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from drawn_runs import NASTY, make_run, new_run, result, rollout
from rich.console import Console

from grouper.errors import RunFolderError
from grouper.files import write_lines
from grouper.report import terminal
from grouper.report.terminal import changes, frame, rollout_text, rollouts
from grouper.runs import folder


def printed(*things):
    console = Console(file=io.StringIO(), width=100)
    for thing in things:
        console.print(thing)
    return console.file.getvalue()


def test_the_newest_step_comes_first_and_no_other_file_is_opened(tmp_path, monkeypatch):
    run = make_run(tmp_path / "demo")
    opened = []
    real = folder.read_lines
    monkeypatch.setattr(
        folder, "read_lines", lambda file, parse: (opened.append(file.name), real(file, parse))[1]
    )
    found = rollouts(run)
    assert next(found)["step"] == 5
    assert opened == ["grpo-000005.jsonl.gz"]
    assert len(list(found)) == 5 * 8 - 1


def test_rows_are_picked_by_step_problem_verdict_and_reward(tmp_path):
    run = make_run(tmp_path / "demo")
    assert {row["step"] for row in rollouts(run, step=2)} == {2}
    assert {row["problem_id"] for row in rollouts(run, problem="train/1")} == {"train/1"}
    assert {row["verdict"] for row in rollouts(run, verdict="correct")} == {"correct"}
    best = [row["reward"] for row in rollouts(run, best=True)]
    assert len(best) == 8
    assert best == sorted(best, reverse=True)
    worst = [row["reward"] for row in rollouts(run, worst=True, step=1)]
    assert worst == sorted(best)


def test_what_is_not_there_is_said(tmp_path):
    run = make_run(tmp_path / "demo")
    with pytest.raises(RunFolderError, match=r"no rollouts are stored of step 9.*steps 1 to 5"):
        next(rollouts(run, step=9))
    with pytest.raises(RunFolderError, match=r"no rollouts are stored\b"):
        next(rollouts(new_run(tmp_path / "new")))


def test_a_damaged_file_is_reported_and_the_others_are_read(tmp_path, caplog):
    run = make_run(tmp_path / "demo")
    file = run.path / "rollouts" / "grpo-000005.jsonl.gz"
    file.write_bytes(file.read_bytes()[:-20])
    assert {row["step"] for row in rollouts(run)} >= {1, 2, 3, 4}
    assert "grpo-000005.jsonl.gz: the file cannot be read" in caplog.text


def test_rows_of_another_version_are_shown_and_what_is_no_row_is_reported(tmp_path, caplog):
    run = make_run(tmp_path / "demo")
    file = run.path / "rollouts" / "grpo-000005.jsonl.gz"
    old = {k: v for k, v in rollout(5, 0).items() if k not in ("verdict", "rewards", "prompt")}
    write_lines(file, [old])
    assert "grpo step 5" in printed(rollout_text(next(rollouts(run))))
    assert "grpo step 5" in printed(frame(run))
    write_lines(file, [["no row"]])
    assert next(rollouts(run))["step"] == 4
    assert "grpo-000005.jsonl.gz: the file cannot be read" in caplog.text


def test_no_answer_is_called_nothing():
    assert "read as nothing" in printed(rollout_text({**rollout(1, 0), "extracted": None}))


def test_no_text_steers_the_terminal(tmp_path):
    row = {**rollout(1, 0, text=NASTY), "problem_id": NASTY, "answer": NASTY, "reason": NASTY}
    text = printed(rollout_text(row))
    assert "</script>" in text
    assert not set("\x00\x1b\u202e\u2066\ud83d") & set(text)
    long = printed(rollout_text(rollout(1, 0, text="x" * 1_000_000)))
    assert len(long) < 5000
    assert "[997,000 characters]" in long


def test_no_text_is_markup(tmp_path):
    run = make_run(tmp_path / "demo")
    for step in (1, 4):
        row = {**rollout(step, 0), "problem_id": "[/b]", "answer": "[a, b]"}
        write_lines(run.path / "rollouts" / f"grpo-{step:06d}.jsonl.gz", [row])
    text = printed(*changes(run, 1, 4, None))
    assert "[/b]: the reference is [a, b]" in text


def test_the_same_problems_at_two_steps(tmp_path):
    run = make_run(tmp_path / "demo")
    text = printed(*changes(run, 1, 4, "train/1"))
    assert "train/1: the reference is 2" in text
    assert "step 1: incorrect" in text
    write_lines(run.path / "rollouts" / "grpo-000004.jsonl.gz", [rollout(4, 40)])
    with pytest.raises(RunFolderError, match="steps 1 and 4 have no problem in common"):
        list(changes(run, 1, 4, None))


def test_rollouts_are_compared_where_only_one_of_the_steps_was_evaluated(tmp_path):
    run = make_run(tmp_path / "demo")
    name = "validation-grpo-000004"
    run.write_evaluation(result(name, "grpo", 4, "validation", 3, problem="held-out"))
    assert "train/1: the reference is 2" in printed(*changes(run, 1, 4, "train/1"))
    name = "validation-grpo-000001"
    run.write_evaluation(result(name, "grpo", 1, "validation", 3, problem="held-out"))
    assert "held-out/1: the reference is" in printed(*changes(run, 1, 4, "/1"))


def test_a_frame_shows_where_a_run_is(tmp_path):
    run = make_run(tmp_path / "demo")
    text = printed(frame(run))
    assert "demo: not running, GRPO step 5 of 60, 4.63 s per step, 4 min to go" in text
    assert "Reward by weighted component total" in text
    assert "grpo step 5" in text
    assert "no step has been done yet" in printed(frame(new_run(tmp_path / "new")))


def test_a_frame_of_80_columns_has_the_end_of_each_curve(tmp_path):
    run = make_run(tmp_path / "demo", steps=60)
    console = Console(file=io.StringIO(), width=80)
    console.print(frame(run))
    (line,) = [x for x in console.file.getvalue().splitlines() if x.startswith("KL to the ref")]
    assert line.rstrip().endswith("█")  # it rises to the last step


def test_watch_writes_nothing_and_ends_without_a_terminal(tmp_path):
    run = make_run(tmp_path / "demo")
    before = {p: p.stat().st_mtime_ns for p in run.path.rglob("*")}
    terminal.watch(run, Console(file=io.StringIO(), width=100), seconds=0.1)
    assert {p: p.stat().st_mtime_ns for p in run.path.rglob("*")} == before


def test_watching_a_long_run_does_not_take_a_core_from_it(tmp_path, monkeypatch):
    run, waits = make_run(tmp_path / "demo"), []
    clock = iter([10.0, 13.0, 20.0, 20.1])  # before and after each update
    monkeypatch.setattr(
        terminal, "time", SimpleNamespace(process_time=lambda: next(clock), sleep=waits.append)
    )
    goes_on = iter([True, True, False])
    monkeypatch.setattr(terminal, "is_running", lambda path: next(goes_on))
    monkeypatch.setattr(terminal, "frame", lambda run: "a frame")
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    terminal.watch(run, console, seconds=2.0)
    assert waits == [12.0, 2.0]
