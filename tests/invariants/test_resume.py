"""Resumed equals uninterrupted, bit for bit: weights, optimizer, rollouts, metrics."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_records import record, unsigned

from grouper.api import train
from grouper.config.loading import load_recipe
from grouper.errors import CheckpointError, Interrupted, RunFolderError
from grouper.models.folders import STATE_FILE
from grouper.runs import folder as run_folder
from grouper.runs.progress import Progress
from grouper.training import checkpoint
from grouper.training.run import Run
from grouper.training.saved_state import is_complete
from grouper.training.stop_signal import StopSignal
from grouper.training.validation import Validation

OPTIMIZER_FILE = "optimizer/0.safetensors"

SMALL = [
    "model.new.hidden_size=32",
    "model.new.intermediate_size=64",
    "data.sft.options.count=40",
    "data.train.options.count=12",
    "data.validation.options.count=4",
    "data.test.options.count=4",
    "sft.batch_size=16",
    "sft.steps=5",
    "sft.evaluate_every=2",
    "sft.checkpoint_every=2",
    # Three epoch edges of twelve problems lie inside the six steps of five prompts.
    "grpo.steps=6",
    "grpo.prompts_per_step=5",
    "grpo.group_size=4",
    "grpo.evaluate_every=2",
    "grpo.checkpoint_every=2",
    "grpo.allow_truncation=true",
    "grpo.require_correct_in_group=false",
    "grpo.tokens_per_micro_batch=200",
    "sampling.max_new_tokens=12",
    "grading.symbolic=false",
    # A random model gives no two rewards that differ; letters it happens to write do.
    "rewards=[{name: 'reward_by_length.py:shorter'}]",
]

REWARD = """
def shorter(*, completions, completion_ids, **kwargs):
    return [float(len(ids) + sum(ids) % 3) for ids in completion_ids]
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward_by_length.py").write_text(REWARD)
    return tmp_path


def run(name: str, *overrides: str, resume: bool = False) -> Path:
    recipe = load_recipe("demo", [*SMALL, f"output_dir={name}", *overrides])
    with Run(recipe, Progress(quiet=True), resume=resume) as open_run:
        return train(open_run).path


def interrupt_after(monkeypatch: pytest.MonkeyPatch, phase: str, step: int) -> Callable[[], None]:
    """Ask the session to stop once `phase` has finished `step`, as Ctrl-C would."""
    honest = StopSignal.raise_if_requested
    progress = Progress.step

    asked = {"stop": False}

    def watch(self: Progress, report: Any, total: int | None = None) -> None:
        progress(self, report, total)
        asked["stop"] = (report.phase, report.step) == (phase, step)

    def stopped(self: StopSignal, what: str = "", *, together: bool = False) -> None:
        self.requested = self.requested or asked["stop"]
        honest(self, what, together=together)

    monkeypatch.setattr(Progress, "step", watch)
    monkeypatch.setattr(StopSignal, "raise_if_requested", stopped)
    return monkeypatch.undo


@pytest.mark.parametrize(
    ("phase", "step", "overrides"),
    [
        pytest.param("sft", 3, (), marks=pytest.mark.slow),
        # The smallest whole run: an epoch ends inside the step before the interruption, and another
        # inside the last one.
        ("grpo", 3, ("sft.steps=2", "sft.evaluate_every=0", "grpo.steps=5")),
        pytest.param("grpo", 4, ("grpo.beta=0.05",), marks=pytest.mark.slow),
        pytest.param("sft", 1, ("model.lora={rank: 4, dropout: 0.2}",), marks=pytest.mark.slow),
        pytest.param(
            "grpo", 5, ("model.lora={rank: 4}", "sft.optimizer.name=adamw"), marks=pytest.mark.slow
        ),
        pytest.param("grpo", 1, ("sampling.dtype=bfloat16",), marks=pytest.mark.slow),
        # With rollouts of the next step that have begun.
        pytest.param(
            "grpo",
            3,
            ("grpo.max_staleness=1", "grpo.dynamic_sampling_rounds=1"),
            marks=pytest.mark.slow,
        ),
        # With its loss scale.
        pytest.param("grpo", 3, ("model.compute_dtype=float16",), marks=pytest.mark.slow),
    ],
)
def test_interrupted_and_resumed_equals_uninterrupted(
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    step: int,
    overrides: tuple[str, ...],
) -> None:
    whole = record(run("whole", *overrides))
    undo = interrupt_after(monkeypatch, phase, step)
    with pytest.raises(Interrupted):
        run("cut", *overrides)
    undo()
    monkeypatch.chdir(workplace)
    checkpoint_folder = workplace / "cut" / "demo" / phase / f"checkpoint-{step}"
    assert is_complete(checkpoint_folder)
    one_step_ahead = "grpo.max_staleness=1" in overrides
    assert (checkpoint_folder / "begun.json").exists() == one_step_ahead
    resumed = record(run("cut", *overrides, resume=True))
    extra = f"{phase}/checkpoint-{step}/"
    resumed = {k: v for k, v in resumed.items() if not k.startswith(extra)}
    whole = {k: v for k, v in whole.items() if not k.startswith(extra)}
    kept = whole.keys() & resumed.keys()
    assert {k for k in whole.keys() ^ resumed.keys() if "checkpoint-" not in k} == set()
    for name in sorted(kept):
        assert resumed[name] == whole[name], name
    assert any(
        line["status"] == "learning" for line in whole["metrics.jsonl"] if line["phase"] == "grpo"
    )


@pytest.mark.slow
def test_a_kill_between_checkpoints_loses_only_what_came_after(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = record(run("whole"))

    class Killed(BaseException):
        pass

    honest = Validation.measure_if_due

    def die(between: Validation) -> bool:
        if (between.state.phase, between.state.step) == ("grpo", 5):
            raise Killed
        return honest(between)

    monkeypatch.setattr(Validation, "measure_if_due", die)
    with pytest.raises(Killed):
        run("cut")
    monkeypatch.setattr(Validation, "measure_if_due", honest)
    assert not (workplace / "cut/demo/grpo/checkpoint-5").exists()
    assert record(run("cut", resume=True)) == whole


JUDGE = """
import os, signal
from pathlib import Path

at_step = []

def judge(completions, trainer_state, log_metric, **kwargs):
    if "no idea" in str(completions):
        return [0.0] * len(completions)  # tried before the run
    at_step.append(trainer_state.global_step)
    if at_step.count(3) == 3 and Path("kill").exists():
        Path("kill").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    with Path(os.environ["ASKED"]).open("a") as file:
        file.write("?")
    number = Path(os.environ["ASKED"]).stat().st_size
    log_metric("asked", number)
    if number % 13 == 0:
        raise RuntimeError(f"busy at {number}")
    return [(7 * number + 5 * row) % 17 / 16 for row in range(len(completions))]
"""


@pytest.mark.slow  # 14 s: three runs
def test_a_killed_run_asks_a_function_that_varies_nothing_twice(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers follow from how often it was asked: one more or less, and all would differ."""
    (workplace / "judges.py").write_text(JUDGE)
    judged = "rewards=[{name: 'judges.py:judge', deterministic: false, max_failure_rate: 1.0}]"
    monkeypatch.setenv("ASKED", "asked_whole")
    whole = record(run("whole", judged))
    (workplace / "kill").touch()
    monkeypatch.setenv("ASKED", "asked_cut")
    command = [sys.executable, "-m", "grouper", "run", "demo", *SMALL, judged, "output_dir=cut"]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    answers = workplace / "cut" / "demo" / "reward_answers.jsonl"
    before = answers.read_text().splitlines()
    assert json.loads(before[-1])["place"] == "grpo 3"
    # Step 3 is done again as well: the last checkpoint is of step 2.
    assert not (workplace / "cut/demo/grpo/checkpoint-3").exists()
    assert record(run("cut", judged, resume=True)) == whole
    assert answers.read_text().splitlines()[: len(before)] == before
    assert Path("asked_cut").read_text() == Path("asked_whole").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", [OPTIMIZER_FILE, STATE_FILE])
def test_a_damaged_checkpoint_is_skipped_and_the_result_is_the_same(
    workplace: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    whole = record(run("cut", "skip_grpo=true"))
    path = workplace / "cut" / "demo"
    (path / "sft" / "final" / STATE_FILE).unlink()
    (path / "sft" / "checkpoint-5" / name).write_bytes(b"garbage")
    assert record(run("cut", "skip_grpo=true", resume=True)) == whole
    assert "checkpoint-5 is skipped" in caplog.text


@pytest.mark.slow
def test_a_damaged_checkpoint_with_none_before_it_is_one_paragraph(workplace: Path) -> None:
    path = run("cut", "skip_grpo=true", "sft.keep_checkpoints=1")
    (path / "sft" / "final" / STATE_FILE).unlink()
    (path / "sft" / "checkpoint-5" / OPTIMIZER_FILE).write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="no checkpoint of sft can be used"):
        run("cut", "skip_grpo=true", "sft.keep_checkpoints=1", resume=True)


@pytest.mark.slow
def test_a_finished_run_resumes_to_its_result_without_training(workplace: Path) -> None:
    first = record(run("whole"))
    assert record(run("whole", resume=True)) == first


@pytest.mark.slow
def test_a_finished_run_can_be_prolonged(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """T10: it goes on from its last step; with a constant rate as if it had never ended."""
    constant = ("grpo.optimizer.schedule=constant", "grpo.optimizer.warmup_ratio=0")
    whole = record(run("whole", *constant))
    run("cut", "grpo.steps=4", *constant)
    capsys.readouterr()
    recipe = load_recipe("demo", [*SMALL, "output_dir=cut", *constant])
    with Run(recipe, Progress(), resume=True) as open_run:
        longer = record(train(open_run).path)
    shown = " ".join(capsys.readouterr().err.split())
    assert "Resuming grpo at step 4" in shown
    assert "changed, as allowed: grpo.steps 4 -> 6" in shown
    assert "the learning rate follows the new number of steps" in shown
    for name in sorted(whole.keys() & longer.keys()):
        # What names the recipe differs by the name of its first one, as do the rows made by it.
        if not name.endswith((STATE_FILE, "run.json")):
            assert unsigned(longer[name]) == unsigned(whole[name]), name
    assert {n for n in whole.keys() ^ longer.keys() if "checkpoint-" not in n} == set()


@pytest.mark.slow
def test_fewer_steps_are_another_recipe(workplace: Path) -> None:
    run("cut", "skip_grpo=true")
    with pytest.raises(RunFolderError, match=r"another recipe.*sft\.steps 5 -> 4"):
        run("cut", "skip_grpo=true", "sft.steps=4", resume=True)


@pytest.mark.slow
def test_sft_that_grpo_began_from_is_not_prolonged(
    workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = record(run("cut"))
    again = record(run("cut", "sft.steps=9", resume=True))
    assert "SFT stays at 5 steps of 9: GRPO has begun from it" in caplog.text
    assert again["sft/final/model.safetensors"] == first["sft/final/model.safetensors"]


@pytest.mark.slow
def test_an_edited_reward_is_refused_by_name_unless_allowed(workplace: Path) -> None:
    """R1: the banner said "unchanged", and the results differed."""
    run("cut", "skip_grpo=true")
    (workplace / "reward_by_length.py").write_text(REWARD.replace("% 3", "% 5"))
    with pytest.raises(RunFolderError, match=r"code changed .*: reward_by_length\.py"):
        run("cut", resume=True)
    recipe = load_recipe("demo", [*SMALL, "output_dir=cut"])
    with Run(recipe, Progress(), resume=True, allow_changes=True) as open_run:
        train(open_run)
    assert open_run.folder.read_info().changes[0].changes.keys() == {"code.reward_by_length.py"}


@pytest.mark.slow
@pytest.mark.parametrize("change", ["data.validation.options.count=5", "evaluation.temperature=2"])
def test_the_best_by_another_measure_gives_way_to_the_next(workplace: Path, change: str) -> None:
    path = run("cut", "skip_grpo=true", "sft.steps=2") / "sft"
    file = path / "checkpoint-2" / STATE_FILE
    state = json.loads(file.read_text())
    state["best"] |= {"step": 2, "accuracy": 1.0}  # as problems that were easy would leave it
    file.write_text(json.dumps(state))
    changes = ["skip_grpo=true", "sft.steps=4", change]
    recipe = load_recipe("demo", [*SMALL, "output_dir=cut", *changes])
    with Run(recipe, Progress(), resume=True, allow_changes=True) as open_run:
        train(open_run)
    best = json.loads((path / "final" / STATE_FILE).read_text())["best"]
    assert best["accuracy"] == 0.0
    # As if that had been killed before it saved anything: the change is known to the next resume.
    for folder in ("checkpoint-4", "final"):
        shutil.rmtree(path / folder)
    file.write_text(json.dumps(state))
    with Run(recipe, Progress(), resume=True) as open_run:
        train(open_run)
    best = json.loads((path / "final" / STATE_FILE).read_text())["best"]
    assert best["accuracy"] == 0.0


@pytest.mark.slow
def test_a_run_without_the_kernels_is_told_that_its_numbers_differ(
    workplace: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R2: the banner said "as before"."""
    path = run("cut", "skip_grpo=true")
    if json.loads((path / "run.json").read_text())["versions"]["kernels"] == "none":
        pytest.skip("no C++ compiler")
    (path / "sft" / "final" / STATE_FILE).unlink()
    monkeypatch.setattr("grouper.training.run.kernels_in_use", lambda: "none")
    run("cut", "skip_grpo=true", resume=True)
    assert re.search(r"kernels [0-9a-f]+ -> none.*not be the same bit for bit", caplog.text)


@pytest.mark.slow
def test_what_the_record_has_lost_is_told_by_name(
    workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R6: lost rollouts and lines of metrics.jsonl went unnoticed."""
    path = run("cut", "grpo.evaluate_every=0")
    (path / "grpo" / "final" / STATE_FILE).unlink()
    for step in (1, 2, 4):
        (path / "rollouts" / f"grpo-{step:06d}.jsonl.gz").unlink()
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"phase":"sft","step":2' not in line]
    assert len(kept) == len(lines) - 1
    (path / "metrics.jsonl").write_text("".join(kept))
    run("cut", "grpo.evaluate_every=0", resume=True)
    assert "has lost the rollouts of grpo step 1 to 2, 4." in caplog.text
    assert "has lost the lines of metrics.jsonl of sft step 2." in caplog.text


@pytest.mark.slow
def test_a_checkpoint_counts_only_once_its_metrics_are_on_disk(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    honest = checkpoint.write_state

    def mark(folder: Path, record: Any) -> None:
        order.append("mark")
        honest(folder, record)

    monkeypatch.setattr(run_folder, "sync", lambda path: order.append(path.name))
    monkeypatch.setattr(checkpoint, "write_state", mark)
    run("cut", "skip_grpo=true", "sft.evaluate_every=0")
    saves = order.count("mark")
    assert saves >= 3, "two checkpoints and the final model"
    assert order == ["metrics.jsonl", "demo", "mark"] * saves


@pytest.mark.slow
def test_only_the_newest_checkpoints_are_kept(workplace: Path) -> None:
    path = run("whole", "sft.checkpoint_every=1", "sft.keep_checkpoints=2", "skip_grpo=true")
    assert sorted(p.name for p in (path / "sft").iterdir()) == [
        "checkpoint-4",
        "checkpoint-5",
        "final",
    ]
