"""Resumed equals uninterrupted, bit for bit: weights, optimizer, rollouts, metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_records import record

from grouper.errors import CheckpointError, Interrupted
from grouper.recipe import load_recipe
from grouper.tracking.live import Progress
from grouper.training import loop
from grouper.training.checkpoint import OPTIMIZER_FILE, STATE_FILE, is_complete
from grouper.training.run import train
from grouper.training.session import Session

pytestmark = pytest.mark.usefixtures("no_pictures")

SMALL = [
    "model.new.hidden_size=32",
    "model.new.head_dim=8",
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
    "grpo.preflight_prompts=2",
    "grpo.shaping_needs_a_correct=false",
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
    with Session(recipe, Progress(quiet=True), resume=resume) as session:
        return train(session).path


def interrupt_after(monkeypatch: pytest.MonkeyPatch, phase: str, step: int) -> Callable[[], None]:
    """Ask the session to stop once `phase` has finished `step`, as Ctrl-C would."""
    honest = Session.raise_if_stopped
    progress = Progress.step

    asked = {"stop": False}

    def watch(self: Progress, report: Any, total: int | None = None) -> None:
        progress(self, report, total)
        asked["stop"] = (report.phase, report.step) == (phase, step)

    def stopped(self: Session, what: str = "", *, together: bool = False) -> None:
        self._stop_requested = self._stop_requested or asked["stop"]
        honest(self, what, together=together)

    monkeypatch.setattr(Progress, "step", watch)
    monkeypatch.setattr(Session, "raise_if_stopped", stopped)
    return monkeypatch.undo


@pytest.mark.parametrize(
    ("phase", "step", "overrides"),
    [
        ("sft", 3, ()),
        ("grpo", 3, ()),
        ("grpo", 4, ("grpo.beta=0.05",)),
        pytest.param("sft", 1, ("model.lora={rank: 4, dropout: 0.2}",), marks=pytest.mark.slow),
        pytest.param(
            "grpo", 5, ("model.lora={rank: 4}", "sft.optimizer.name=adamw"), marks=pytest.mark.slow
        ),
        pytest.param("grpo", 1, ("sampling.dtype=bfloat16",), marks=pytest.mark.slow),
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
    assert is_complete(workplace / "cut" / "demo" / phase / f"checkpoint-{step}")
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


def test_a_kill_between_checkpoints_loses_only_what_came_after(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = record(run("whole"))

    class Killed(BaseException):
        pass

    honest = loop._evaluate_if_due

    def die(session: Session, phase: loop.Phase) -> None:
        if phase.name == "grpo" and phase.state.step == 5:
            raise Killed
        honest(session, phase)

    monkeypatch.setattr(loop, "_evaluate_if_due", die)
    with pytest.raises(Killed):
        run("cut")
    monkeypatch.setattr(loop, "_evaluate_if_due", honest)
    assert not (workplace / "cut/demo/grpo/checkpoint-5").exists()
    assert record(run("cut", resume=True)) == whole


@pytest.mark.parametrize("name", [OPTIMIZER_FILE, STATE_FILE])
def test_a_damaged_checkpoint_is_skipped_and_the_result_is_the_same(
    workplace: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    whole = record(run("cut", "skip_grpo=true"))
    path = workplace / "cut" / "demo"
    (path / "sft" / "final" / STATE_FILE).unlink()
    (path / "sft" / "checkpoint-4" / name).write_bytes(b"garbage")
    assert record(run("cut", "skip_grpo=true", resume=True)) == whole
    assert "checkpoint-4 is skipped" in caplog.text


def test_a_damaged_checkpoint_with_none_before_it_is_one_paragraph(workplace: Path) -> None:
    path = run("cut", "skip_grpo=true", "sft.keep_checkpoints=1")
    (path / "sft" / "final" / STATE_FILE).unlink()
    (path / "sft" / "checkpoint-4" / OPTIMIZER_FILE).write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="no checkpoint of sft can be used"):
        run("cut", "skip_grpo=true", "sft.keep_checkpoints=1", resume=True)


def test_a_finished_run_resumes_to_its_result_without_training(workplace: Path) -> None:
    first = record(run("whole"))
    assert record(run("whole", resume=True)) == first


def test_only_the_newest_checkpoints_are_kept(workplace: Path) -> None:
    path = run("whole", "sft.checkpoint_every=1", "sft.keep_checkpoints=2", "skip_grpo=true")
    assert sorted(p.name for p in (path / "sft").iterdir()) == [
        "checkpoint-3",
        "checkpoint-4",
        "final",
    ]
