"""The run folder: what is refused, what is written, what a resume forgets."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import deque
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from grouper.api import Solution, append_jsonl
from grouper.config import loading
from grouper.config.loading import load_recipe
from grouper.errors import RunFolderError
from grouper.evaluation.evaluate import settings_name
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.files import read_lines, write_lines
from grouper.runs import folder as folder_module
from grouper.runs.folder import RunFolder, load_run
from grouper.runs.records import RunInfo, rollout_rows
from grouper.types import (
    Completion,
    FinishReason,
    Grade,
    Problem,
    Prompt,
    Reward,
    Rollout,
    RolloutGroup,
    SamplingParams,
    StepReport,
    Tally,
    Verdict,
)


def create(path: Path, *, recipe_yaml: str = "name: demo\n", **changes: Any) -> RunFolder:
    info = RunInfo(recipe_hash="aaaa", versions={"torch": "2.13.0"}, fingerprints={"train": "f1"})
    of_info = {name: changes.pop(name) for name in [*changes] if name in RunInfo.model_fields}
    return RunFolder.create(
        path, info.model_copy(update=of_info), recipe_yaml=recipe_yaml, **changes
    )


def make_report(phase: str, step: int) -> StepReport:
    return StepReport(
        phase=phase,
        step=step,
        status="learning",
        events=("grader timeout",),
        tallies={"reward/total": Tally.of([0.1, 0.2, 1.3]), "loss": Tally.of([])},
    )


def make_group(index: int, rewards: list[float | None]) -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            completion=Completion(
                token_ids=(5, 6, 2),
                logprobs=(-0.5, -0.25, -0.125),
                text=f"=  {value} é",
                finish_reason=FinishReason.STOP_TOKEN,
                policy_version=4,
            ),
            grade=Grade(
                verdict=Verdict.CORRECT if value else Verdict.NO_ANSWER,
                extracted=str(value) if value else None,
                stage="number",
                reason="because",
            ),
            reward=Reward(
                components={"correctness": value, "format": 0.5},
                weights={"correctness": 1.0, "format": 0.1},
            ),
        )
        for value in rewards
    )
    return RolloutGroup(
        problem=Problem(id=f"p/{index}", question="q", answer="1", source="p"),
        prompt=Prompt(problem_id=f"p/{index}", text="Q: q", token_ids=(7, 8)),
        params=SamplingParams(),
        rollouts=rollouts,
    )


def make_result(name: str, phase: str, step: int, *, split: str = "validation") -> EvaluationResult:
    verdicts = [Verdict.CORRECT, Verdict.NOT_SCORED, Verdict.NO_ANSWER]
    return EvaluationResult(
        name=name,
        phase=phase,
        step=step,
        split=split,
        samples=1,
        card={"seed": 3, "sampling": {"stop": ["x"]}},
        items=tuple(
            EvaluationItem(
                problem_id=f"p/{i}",
                subject="algebra",
                level=None,
                sample=0,
                prompt="Q",
                completion="A",
                answer="1",
                extracted=None,
                verdict=verdict,
                reason="r",
                stage="text",
                finish_reason=FinishReason.LENGTH,
                tokens=3,
            )
            for i, verdict in enumerate(verdicts)
        ),
    )


# Opening


def test_a_new_folder_holds_the_recipe_and_what_it_ran_with(tmp_path):
    run = create(tmp_path / "out" / "demo")
    assert (run.path / "recipe.yaml").read_text() == "name: demo\n"
    info = run.read_info()
    assert (info.recipe_hash, info.versions) == ("aaaa", {"torch": "2.13.0"})
    assert info.fingerprints == {"train": "f1"}


def test_only_the_host_part_of_run_json_differs_between_equal_runs(tmp_path):
    infos = [create(tmp_path / name).read_info() for name in "ab"]
    assert all(info.host.pop("started") for info in infos)
    assert infos[0] == infos[1]


def test_a_run_json_of_another_shape_is_damage(tmp_path):
    file = create(tmp_path).path / "run.json"
    for change in ({"recipe_hash": None}, {"mood": "fine"}, {"changes": [{"step": 1}]}):
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        with pytest.raises(RunFolderError, match=f"not a run folder.*{next(iter(change))}"):
            create(tmp_path, resume=True)
        file.unlink()
        create(tmp_path)


def test_another_recipe_is_refused_with_both_hashes_and_nothing_is_touched(tmp_path):
    run = create(tmp_path / "r")
    run.append_metrics(make_report("sft", 1))
    for resume in (False, True):
        with pytest.raises(RunFolderError, match=r"hash aaaa, yours is bbbb.*--overwrite"):
            create(tmp_path / "r", recipe_hash="bbbb", recipe_yaml="x", resume=resume)
    assert len(run.read_metrics()) == 1
    assert (run.path / "recipe.yaml").read_text() == "name: demo\n"


def test_the_same_recipe_needs_resume_or_overwrite(tmp_path):
    run = create(tmp_path / "r")
    run.append_metrics(make_report("sft", 1))
    with pytest.raises(RunFolderError, match=r"already holds.*--resume"):
        create(tmp_path / "r")
    assert len(create(tmp_path / "r", resume=True).read_metrics()) == 1
    (run.path / "sft" / "final").mkdir(parents=True)
    (run.path / "notes.txt").write_text("mine")
    run = create(tmp_path / "r", recipe_hash="bbbb", overwrite=True)
    assert run.read_metrics() == []
    assert not (run.path / "sft").exists()
    assert (run.path / "notes.txt").read_text() == "mine"


def test_a_folder_that_is_no_run_is_never_cleared(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match=r"not a run of Grouper.*thesis\.tex"):
        create(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


def test_a_run_killed_in_its_first_moment_can_be_started_again(tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: demo\n")
    (tmp_path / ".run.json.123.tmp").write_text("{")
    assert create(tmp_path).read_info().recipe_hash == "aaaa"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("changed", "base_is_kept"),
    [
        ({}, True),
        ({"recipe_hash": "bbbb", "recipe_yaml": "{seed: 0, grpo: {steps: 9, beta: 1.0}}"}, True),
        ({"recipe_hash": "bbbb", "recipe_yaml": "{seed: 1, grpo: {steps: 6}}"}, False),
        ({"fingerprints": {"train": "f2"}}, False),
        ({"code": {"mine.py": "c2"}}, False),
    ],
)
def test_a_run_that_trained_nothing_stands_in_nobodys_way(tmp_path, changed, base_is_kept, resume):
    """Its corrected recipe was refused as another run. What still holds of it is kept."""
    before = {"recipe_yaml": "{seed: 0, grpo: {steps: 6}}", "code": {"mine.py": "c1"}}
    run = create(tmp_path, **before)
    run.write_evaluation(make_result("base", "base", 0))
    (tmp_path / "eval_runs").mkdir()
    run = create(tmp_path, **before | changed, resume=resume)
    assert (run.read_evaluation("base") is not None) is base_is_kept
    assert (tmp_path / "eval_runs").is_dir()
    info, now = run.read_info(), {"fingerprints": {"train": "f1"}} | before | changed
    assert info.recipe_hash == now.get("recipe_hash", "aaaa")
    assert (info.fingerprints, info.code) == (now["fingerprints"], now["code"])
    assert (run.path / "recipe.yaml").read_text() == now["recipe_yaml"]
    run.append_metrics(make_report("sft", 1))
    with pytest.raises(RunFolderError, match="another recipe"):
        create(tmp_path, recipe_hash="eeee", recipe_yaml="seed: 7")


@pytest.mark.parametrize(
    "left",
    ["metrics.jsonl", "rollouts/grpo-000001.jsonl.gz", "sft/checkpoint-5", "nan_dump/sft-000003"],
)
def test_a_run_that_trained_something_is_never_begun_again_by_itself(tmp_path, left):
    run = create(tmp_path)
    assert run.is_untrained()
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_text("x")
    assert not run.is_untrained()
    with pytest.raises(RunFolderError, match="another recipe"):
        create(tmp_path, recipe_hash="bbbb")
    with pytest.raises(RunFolderError, match=f"`grouper run {tmp_path} --resume`"):
        create(tmp_path)


def test_changed_data_is_refused_and_a_new_data_set_is_added(tmp_path):
    create(tmp_path).append_metrics(make_report("sft", 1))
    with pytest.raises(RunFolderError, match="data changed since this run began: train"):
        create(tmp_path, resume=True, fingerprints={"train": "f2"})
    run = create(tmp_path, resume=True, fingerprints={"test": "f3"})
    assert run.read_info().fingerprints == {"train": "f1", "test": "f3"}


def test_another_recipe_is_refused_by_the_settings_that_differ(tmp_path):
    run = create(tmp_path, recipe_yaml="grpo: {steps: 6, beta: 0.0}\nthreads: 1\n")
    run.append_metrics(make_report("sft", 1))
    with pytest.raises(RunFolderError) as caught:
        create(
            tmp_path, recipe_hash="bbbb", recipe_yaml="grpo: {steps: 8, beta: 0.0}\nthreads: 2\n"
        )
    assert "grpo.steps 6 -> 8." in str(caught.value)
    assert "--allow-changes" in str(caught.value)


def test_changes_that_are_allowed_are_recorded_with_their_place(tmp_path):
    create(tmp_path, recipe_yaml="grpo: {steps: 6}\n").append_metrics(make_report("sft", 1))
    run = create(
        tmp_path,
        recipe_hash="bbbb",
        recipe_yaml="grpo: {steps: 8}\n",
        fingerprints={"train": "f2"},
        resume=True,
        allow_changes=True,
    )
    assert run.recipe_hashes() == {"aaaa", "bbbb"}
    changes = {"data.train": ["f1", "f2"], "grpo.steps": [6, 8]}
    assert run.changes_begin_at("grpo", 4) == changes
    (recorded,) = run.read_info().changes
    assert recorded.model_dump() == {
        "phase": "grpo",
        "step": 4,
        "hash_before": "aaaa",
        "hash": "bbbb",
        "changes": changes,
    }
    assert (run.path / "recipe.yaml").read_text() == "grpo: {steps: 8}\n"
    # From now on that is the recipe of the run.
    again = create(
        tmp_path,
        recipe_hash="bbbb",
        recipe_yaml="grpo: {steps: 8}\n",
        fingerprints={"train": "f2"},
        resume=True,
    )
    assert again.changes_begin_at("grpo", 6) == {}
    assert len(again.read_info().changes) == 1


def test_a_run_is_given_more_steps_without_allowing_changes(tmp_path):
    create(tmp_path, recipe_yaml="{seed: 0, grpo: {steps: 6}}").append_metrics(
        make_report("sft", 1)
    )
    longer = {"recipe_hash": "bbbb", "recipe_yaml": "{seed: 0, grpo: {steps: 8}}"}
    with pytest.raises(RunFolderError, match=r"grpo\.steps 6 -> 8"):
        create(tmp_path, **longer)
    with pytest.raises(RunFolderError, match="seed 0 -> 1"):
        create(tmp_path, **longer | {"recipe_yaml": "{seed: 1, grpo: {steps: 8}}"}, resume=True)
    run = create(tmp_path, **longer, resume=True)
    assert run.changes_begin_at("grpo", 6) == {"grpo.steps": [6, 8]}


def test_fewer_checkpoints_are_kept_without_allowing_changes(tmp_path):
    """As we advise where the disk is full."""
    run = create(tmp_path, recipe_yaml="{seed: 0, grpo: {keep_checkpoints: 4}}")
    run.append_metrics(make_report("sft", 1))
    fewer = {"recipe_hash": "bbbb", "recipe_yaml": "{seed: 0, grpo: {keep_checkpoints: 1}}"}
    with pytest.raises(RunFolderError, match="keep_checkpoints 4 -> 1"):
        create(tmp_path, **fewer)
    run = create(tmp_path, **fewer, resume=True)
    assert run.changes_begin_at("grpo", 6) == {"grpo.keep_checkpoints": [4, 1]}
    assert create(tmp_path, **fewer, resume=True).recipe_hashes() == {"aaaa", "bbbb"}


def test_numbers_that_follow_from_the_data_are_recorded(tmp_path):
    run = create(tmp_path)
    for numbers in ({"sft.steps": 12}, {"sft.steps": 12, "grpo.steps": 7}, {"sft.steps": 13}):
        run.record_resolved(numbers)
        assert run.read_info().resolved == numbers


def test_changed_code_is_refused_by_name_and_recorded_when_allowed(tmp_path):
    """R1: the source of a reward file is part of what a run is."""
    create(tmp_path, code={"mine.py": "c1"}).append_metrics(make_report("sft", 1))
    with pytest.raises(RunFolderError, match=r"the code changed since this run began: mine\.py"):
        create(tmp_path, code={"mine.py": "c2"}, resume=True)
    run = create(tmp_path, code={"mine.py": "c2"}, resume=True, allow_changes=True)
    assert run.changes_begin_at("grpo", 4) == {"code.mine.py": ["c1", "c2"]}
    assert create(tmp_path, code={"mine.py": "c2"}, resume=True).read_info().code == {
        "mine.py": "c2"
    }


def test_changes_that_were_allowed_before_nothing_was_trained_are_told_together(tmp_path):
    create(tmp_path, recipe_yaml="seed: 0\n")
    for recipe_hash, text in (("bbbb", "seed: 1\n"), ("cccc", "{seed: 1, threads: 2, note: x}\n")):
        run = create(
            tmp_path, recipe_hash=recipe_hash, recipe_yaml=text, resume=True, allow_changes=True
        )
    create(
        tmp_path,
        recipe_hash="dddd",
        recipe_yaml="{seed: 3, x: 2}\n",
        resume=True,
        allow_changes=True,
    )
    assert run.changes_begin_at("grpo", 4) == {"seed": [0, 3], "x": ["(not there)", 2]}
    assert {change.step for change in run.read_info().changes} == {4}


def test_a_run_that_goes_on_after_its_final_model_is_not_finished(tmp_path):
    run = create(tmp_path)
    (tmp_path / "grpo" / "final").mkdir(parents=True)
    (tmp_path / "grpo" / "final" / "trainer_state.json").write_text('{"step": 1}')
    for step, finished in ((1, True), (2, False)):
        run.append_metrics(make_report("grpo", step))
        assert run.has_finished(["grpo"]) is finished
    assert not run.has_finished(["sft", "grpo"])


def test_allowing_changes_does_not_continue_by_itself(tmp_path):
    create(tmp_path).append_metrics(make_report("sft", 1))
    with pytest.raises(RunFolderError, match="--resume"):
        create(tmp_path, recipe_hash="bbbb", allow_changes=True)


def test_a_path_through_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="cannot write here"):
        create(tmp_path / "file" / "run")


# Metrics


def test_metrics_come_back_exactly(tmp_path):
    run = create(tmp_path)
    reports = [make_report("sft", 1), make_report("grpo", 1)]
    for report in reports:
        run.append_metrics(report)
    assert run.read_metrics() == reports


def test_of_most_metrics_the_mean_alone_is_kept(tmp_path):
    run = create(tmp_path)
    tallies = {"loss": Tally.of([0.5, 1.5]), "policy/kl": Tally.of([0.1, 0.2, 0.4])}
    run.append_metrics(StepReport(phase="grpo", step=1, status="learning", tallies=tallies))
    (found,) = run.read_metrics()
    assert found.tallies == {"loss": Tally.of([1.0]), "policy/kl": tallies["policy/kl"]}


def test_a_step_is_one_flat_line_that_pandas_reads(tmp_path):
    """U13: a table of numbers, and whatever is not finite stays what it is."""
    run = create(tmp_path)
    values = {"loss": math.inf, "grad_norm": -math.inf, "entropy": math.nan, "solve_rate": 0.5}
    tallies = {name: Tally.of([value]) for name, value in values.items()}
    tallies["reward/total"] = Tally.of([0.1, 0.2, 1.3])
    report = StepReport(phase="sft", step=1, tallies=tallies, status="x", events=("one", "two"))
    for _ in range(2):
        run.append_metrics(report)
    table = pd.read_json(tmp_path / "metrics.jsonl", lines=True)
    expected = {"reward/total/min": 0.1, "reward/total/max": 1.3, "reward/total/count": 3}
    for name, value in {**values, **expected}.items():
        assert table[name].dtype.kind in "fi", name
        assert table[name][0] == pytest.approx(value, nan_ok=True), name
    assert "solve_rate/min" not in table
    assert (table["step"] == 1).all()
    assert list(table["events"][0]) == ["one", "two"]
    moments = [datetime.fromisoformat(text) for text in table["time"].astype(str)]
    assert moments[0] <= moments[1] <= datetime.now(UTC)
    assert 0 <= table["elapsed_s"][0] <= table["elapsed_s"][1]
    (row, _) = run.metrics_rows()
    assert row == json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0]) | {
        "entropy": pytest.approx(math.nan, nan_ok=True)
    }


def test_the_seconds_go_on_where_the_last_step_left_them(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(folder_module.time, "monotonic", lambda: now[0])
    for start in (100.0, 5000.0):
        now[0] = start
        run = create(tmp_path, resume=True)
        for step in (1, 2):
            now[0] += 10
            run.append_metrics(make_report("sft", step))
    assert [row["elapsed_s"] for row in run.metrics_rows()] == [10, 20, 30, 40]


@pytest.mark.parametrize(
    "change",
    [{"phase": 3}, {"step": "1"}, {"elapsed_s": None}, {"loss": "low"}, {"events": "none"}],
)
def test_a_line_of_another_shape_is_damage(tmp_path, change):
    run = create(tmp_path)
    run.append_metrics(make_report("sft", 1))
    row = json.loads((tmp_path / "metrics.jsonl").read_text()) | change
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(RunFolderError, match=f"line 1 cannot be read .{next(iter(change))}: "):
        run.read_metrics()


def test_a_half_written_last_line_is_dropped_and_repaired_on_resume(tmp_path):
    run = create(tmp_path)
    run.append_metrics(make_report("sft", 1))
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(whole + whole[:20])
    assert len(run.read_metrics()) == 1
    run = create(tmp_path, resume=True)
    run.append_metrics(make_report("sft", 2))
    assert [r.step for r in run.read_metrics()] == [1, 2]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    run = create(tmp_path)
    run.append_metrics(make_report("sft", 1))
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(whole[:20] + b"\n" + whole)
    with pytest.raises(RunFolderError, match="line 1 cannot be read"):
        run.read_metrics()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_clear_error(tmp_path):
    run = create(tmp_path)
    run.append_metrics(make_report("sft", 1))
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match=r"No space left.*--resume"):
        run.append_metrics(make_report("sft", 1))


SOLUTION = Solution(
    question="q", prompt="p", response="r", answer="4", reason="", finish_reason="length", tokens=3
)


@pytest.mark.parametrize(
    "append",
    [
        lambda run: run.append_metrics(make_report("sft", 2)),
        lambda run: append_jsonl(run.path / "metrics.jsonl", SOLUTION),
    ],
)
def test_a_line_that_did_not_fit_leaves_no_part_behind(tmp_path, append):
    resource = pytest.importorskip("resource")
    import signal

    run = create(tmp_path)
    run.append_metrics(make_report("sft", 1))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 30, limits[1]))
        with pytest.raises(RunFolderError):
            append(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


# Rollouts and evaluations


def write_rollouts(
    run: RunFolder,
    phase: str,
    step: int,
    groups: list[RolloutGroup],
    advantages: list[float | None],
    **more: Any,
) -> None:
    run.write_rollouts(phase, step, rollout_rows(phase, step, groups, advantages, **more))


def test_every_rollout_is_recorded_with_its_story(tmp_path):
    run = create(tmp_path)
    groups = [make_group(0, [1.0, 0.0]), make_group(1, [None])]
    write_rollouts(run, "grpo", 3, groups, [1.0, -1.0, None])
    lines = list(run.read_rollouts())
    assert [(line["group"], line["sample"]) for line in lines] == [(0, 0), (0, 1), (1, 0)]
    assert lines[0] == {
        "phase": "grpo",
        "step": 3,
        "group": 0,
        "sample": 0,
        "problem_id": "p/0",
        "prompt": "Q: q",
        "completion": "=  1.0 é",
        "answer": "1",
        "finish_reason": "stop_token",
        "tokens": 3,
        "policy_version": 4,
        "extracted": "1.0",
        "verdict": "correct",
        "stage": "number",
        "reason": "because",
        "rewards": {"correctness": 1.0, "format": 0.5},
        "reward": 1.05,
        "advantage": 1.0,
        "recipe_hash": "aaaa",
    }
    assert lines[2]["reward"] is None
    assert lines[2]["advantage"] is None


def test_ids_are_kept_on_demand_exactly(tmp_path):
    run = create(tmp_path)
    write_rollouts(run, "grpo", 1, [make_group(0, [1.0])], [0.5], with_ids=True)
    (line,) = run.read_rollouts("grpo", 1)
    assert line["prompt_token_ids"] == [7, 8]
    assert line["token_ids"] == [5, 6, 2]
    assert line["logprobs"] == [-0.5, -0.25, -0.125]


@pytest.mark.parametrize("advantages", [[1.0], [1.0, 2.0, 3.0]])
def test_one_advantage_a_rollout(tmp_path, advantages):
    run = create(tmp_path)
    with pytest.raises(ValueError, match="zip"):
        write_rollouts(run, "grpo", 1, [make_group(0, [1.0, 0.0])], advantages)
    assert not (tmp_path / "rollouts").exists()


def test_steps_are_read_in_order_beyond_six_digits(tmp_path):
    run = create(tmp_path)
    for step in (1_000_000, 2, 999_999):
        write_rollouts(run, "grpo", step, [make_group(0, [1.0])], [0.0])
    (tmp_path / "rollouts" / "notes.jsonl.gz").write_bytes(b"mine")
    assert [line["step"] for line in run.read_rollouts()] == [2, 999_999, 1_000_000]
    assert [line["step"] for line in run.read_rollouts("grpo", 2)] == [2]
    assert list(run.read_rollouts("sft")) == []
    assert (tmp_path / "rollouts" / "grpo-000002.jsonl.gz").exists()


@pytest.mark.parametrize(
    "name",
    [
        "validation-grpo-000020",
        settings_name("test", SamplingParams(temperature=1e6, top_k=10**6), 4, 1),
    ],
)
def test_an_evaluation_comes_back_equal(tmp_path, name):
    run = create(tmp_path)
    result = make_result(name, "grpo", 20)
    run.write_evaluation(result)
    (back,) = run.read_evaluations()
    assert back == result
    assert back.accuracy == 0.5
    assert run.read_evaluation(result.name) == result


def test_numbers_that_do_not_exist_are_null_in_a_summary(tmp_path):
    """M17: strict readers of JSON (jq, browsers, DuckDB) refuse a file that holds NaN."""
    result = make_result("grpo", "grpo", 2)
    unscored = [replace(item, verdict=Verdict.NOT_SCORED, lenient=None) for item in result.items]
    result = replace(result, items=tuple(unscored))
    assert math.isnan(result.accuracy)
    run = create(tmp_path)
    run.write_evaluation(result)
    text = (run.path / "evaluations" / "grpo.json").read_text()
    summary = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the summary"))
    assert summary["accuracy"] is None
    assert math.isnan(run.read_evaluation("grpo").accuracy)


def test_an_evaluation_without_its_summary_does_not_exist(tmp_path):
    run = create(tmp_path)
    run.write_evaluation(make_result("base", "base", 0))
    (tmp_path / "evaluations" / "base.json").unlink()
    assert run.read_evaluations() == []
    assert run.read_evaluation("base") is None


def test_an_evaluation_whose_items_were_lost_is_named(tmp_path):
    """Its phase vanished from every table without a word. A run measures it again."""
    run = create(tmp_path)
    run.write_evaluation(make_result("base", "base", 0))
    (tmp_path / "evaluations" / "base.jsonl.gz").unlink()
    with pytest.raises(RunFolderError, match="the items of this evaluation are lost"):
        run.read_evaluations()
    assert run.name_for("base", "validation", {"seed": 4}) == "base", "as if there were none"


def _foreign_metrics(run: Path, other: Path) -> str:
    shutil.copy(other / "metrics.jsonl", run / "metrics.jsonl")
    return "metrics.jsonl: line 1 is of another run"


def _foreign_line(run: Path, other: Path) -> str:
    with (run / "metrics.jsonl").open("a") as file:
        file.write((other / "metrics.jsonl").read_text())
    return "metrics.jsonl: line 2 is of another run"


def _foreign_rollouts(run: Path, other: Path) -> str:
    shutil.copytree(other / "rollouts", run / "rollouts", dirs_exist_ok=True)
    return "grpo-000001.jsonl.gz: the file is of another run"


def _foreign_evaluation(run: Path, other: Path) -> str:
    shutil.copytree(other / "evaluations", run / "evaluations", dirs_exist_ok=True)
    return "base.json: the evaluation is of another run"


def _foreign_items(run: Path, other: Path) -> str:
    shutil.copy(other / "evaluations" / "base.jsonl.gz", run / "evaluations" / "base.jsonl.gz")
    return "base.json: base.jsonl.gz is damaged, or holds other items"


def _foreign_summary(run: Path, other: Path) -> str:
    shutil.copy(other / "evaluations" / "base.json", run / "evaluations" / "base.json")
    return "base.json: the evaluation is of another run"


def _other_phase(run: Path, other: Path) -> str:
    for suffix in (".json", ".jsonl.gz"):
        folder = run / "evaluations"
        shutil.copy(folder / f"base{suffix}", folder / f"grpo{suffix}")
    return "grpo.json: this is the summary of the evaluation 'base'"


@pytest.mark.parametrize(
    "mix",
    [
        _foreign_metrics,
        _foreign_line,
        _foreign_rollouts,
        _foreign_evaluation,
        _foreign_items,
        _foreign_summary,
        _other_phase,
    ],
)
def test_records_of_another_run_are_named(tmp_path, mix):
    """A run with another seed: everything in it can be read, and was taken."""
    for name, recipe_hash, solved in (("run", "aaaa", 1.0), ("other", "bbbb", 0.0)):
        run = create(tmp_path / name, recipe_hash=recipe_hash)
        run.append_metrics(make_report("grpo", 1))
        write_rollouts(run, "grpo", 1, [make_group(0, [solved, 0.0])], [1.0, -1.0])
        result = make_result("base", "base", 0)
        card = {**result.card, "recipe_hash": recipe_hash}
        items = tuple(replace(item, tokens=4 + int(solved)) for item in result.items)
        run.write_evaluation(replace(result, card=card, items=items))
    text = mix(tmp_path / "run", tmp_path / "other")
    run = RunFolder(tmp_path / "run")
    with pytest.raises(RunFolderError, match=re.escape(text)):
        (run.read_metrics(), [*run.read_rollouts()], run.read_evaluations())
    if mix is _foreign_rollouts:
        with pytest.raises(RunFolderError, match=re.escape(text)):
            deque(run.shown_rollouts(run.rollout_files()[0][2]), maxlen=0)


def test_records_of_earlier_versions_carry_nothing_and_are_read(tmp_path):
    run = create(tmp_path)
    run.append_metrics(make_report("grpo", 1))
    write_rollouts(run, "grpo", 1, [make_group(0, [1.0])], [1.0])
    run.write_evaluation(make_result("base", "base", 0))
    lines = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(lines.replace(',"recipe_hash":"aaaa"', ""))
    (row,) = run.read_rollouts()
    write_lines(run.rollout_files()[0][2], [{k: row[k] for k in row if k != "recipe_hash"}])
    summary = tmp_path / "evaluations" / "base.json"
    content = json.loads(summary.read_text())
    del content["items_crc32"]
    summary.write_text(json.dumps(content))
    again = RunFolder(tmp_path)
    assert len(again.read_metrics()) == len(again.read_evaluations()) == 1
    assert "recipe_hash" not in next(again.read_rollouts())


def test_what_a_run_has_lost_is_listed(tmp_path):
    recipe = load_recipe("demo")
    run = create(tmp_path, recipe_hash=loading.recipe_hash(recipe))
    assert run.losses(recipe) == []
    for phase in ("sft", "grpo"):
        for step in (1, 2):
            run.append_metrics(make_report(phase, step))
        (tmp_path / phase / "final").mkdir(parents=True)
        (tmp_path / phase / "final" / "trainer_state.json").write_text('{"step": 3}')
    write_rollouts(run, "grpo", 2, [make_group(0, [1.0])], [1.0])
    run.write_evaluation(make_result("sft", "sft", 3, split="test"))
    log = tmp_path / "training.log"
    log.write_text("2026-11-27 10:00:00 INFO: sft step 1\n")
    missing = [
        "the lines of metrics.jsonl of sft step 3",
        "the lines of metrics.jsonl of grpo step 3",
        "the rollouts of grpo step 1, 3",
    ]
    assert run.losses() == missing
    both = ["the evaluation of base", "the evaluation of grpo"]
    assert run.losses(recipe) == [*missing, *both]
    other = recipe.override("grpo.beta=0.5")
    instead = "its own recipe.yaml, in whose place there is another one"
    assert run.losses(other) == [*missing, instead, *both]
    for damaged in ("2026-11-27 10:00:00 INF", "2026\0\n", ""):
        log.write_text(damaged)
        assert run.losses() == [*missing, "training.log, and the warnings that it held"]
    log.write_text("2026-11-27 10:00:00 INFO: sft step 1\n")
    (tmp_path / "evaluations" / "sft.jsonl.gz").unlink()
    assert run.losses() == [*missing, "the items of the evaluation sft"]


def test_a_name_cannot_leave_the_folder(tmp_path):
    with pytest.raises(ValueError, match="file name"):
        create(tmp_path).write_evaluation(make_result("../base", "base", 0))


@pytest.mark.parametrize(
    ("file", "where"),
    [("rollouts/grpo-000001.jsonl.gz", "read_rollouts"), ("evaluations/base.jsonl.gz", "")],
)
def test_an_unknown_or_missing_field_is_damage(tmp_path, file, where):
    run = create(tmp_path)
    write_rollouts(run, "grpo", 1, [make_group(0, [1.0])], [math.nan], with_ids=True)
    run.write_evaluation(make_result("base", "base", 0))
    (row, *_) = read_lines(tmp_path / file)

    def read() -> list[Any]:
        return load_run(tmp_path).rollouts if where else run.read_evaluations()

    assert len(read()) == 1
    for damaged in ({**row, "mood": "fine"}, {k: v for k, v in row.items() if k != "stage"}):
        write_lines(tmp_path / file, [damaged])
        with pytest.raises(RunFolderError, match=r"mood: |stage: "):
            read()


# Resuming


def fill(run: RunFolder, until: tuple[str, int]) -> None:
    """Everything a run of 4 SFT and 4 GRPO steps writes, up to a moment."""
    run.write_evaluation(make_result("base", "base", 0, split="test"))
    moments = [(phase, step) for phase in ("sft", "grpo") for step in (1, 2, 3, 4)]
    for phase, step in moments[: moments.index(until) + 1]:
        run.append_metrics(make_report(phase, step))
        if phase == "grpo":
            write_rollouts(run, phase, step, [make_group(step, [1.0, 0.0])], [1.0, -1.0])
        if step % 2 == 0:
            run.write_evaluation(make_result(f"validation-{phase}-{step:06d}", phase, step))
        if step == 4:
            run.write_evaluation(make_result(phase, phase, step, split="test"))


def snapshot(run: RunFolder) -> dict[str, bytes]:
    files = [p for p in run.path.rglob("*") if p.is_file() and p.name != "run.json"]
    found = {str(p.relative_to(run.path)): p.read_bytes() for p in files}
    times = rb'"time":"[^"]*","elapsed_s":[^,]*,'
    return {name: re.sub(times, b"", content) for name, content in found.items()}


@pytest.mark.parametrize("moment", [("sft", 2), ("sft", 4), ("grpo", 1), ("grpo", 3)])
def test_cutting_back_equals_never_having_gone_on(tmp_path, moment):
    short, long = create(tmp_path / "short"), create(tmp_path / "long")
    fill(short, moment)
    fill(long, ("grpo", 4))
    assert snapshot(short) != snapshot(long)
    long.truncate_to(*moment)
    assert snapshot(short) == snapshot(long)


def test_holes_are_the_steps_whose_lines_or_rollouts_were_lost(tmp_path):
    run = create(tmp_path)
    fill(run, ("grpo", 4))
    assert run.missing_records({"sft": 4, "grpo": 4}) == []
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"step":4' not in line))
    rollouts = tmp_path / "rollouts"
    (rollouts / "grpo-000001.jsonl.gz").write_bytes(b"")
    (rollouts / "grpo-000003.jsonl.gz").unlink()
    assert run.missing_records({"sft": 4, "grpo": 4}) == [
        "the lines of metrics.jsonl of sft step 4",
        "the lines of metrics.jsonl of grpo step 4",
        "the rollouts of grpo step 1, 3",
    ]


def test_cutting_back_an_empty_run_does_nothing(tmp_path):
    run = create(tmp_path)
    run.truncate_to("sft", 1)
    assert run.read_metrics() == []
