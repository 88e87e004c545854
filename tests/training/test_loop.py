"""When things happen: what is saved, what is kept, and what a failed save does."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import make_batch
from tiny_states import TinyPhase, TinyRun, tiny_state

from grouper.advice import checks, live_checks
from grouper.advice.live_checks import LiveChecks
from grouper.config.schema import GRPOConfig
from grouper.errors import CheckError, Interrupted, ModelError, RunFolderError
from grouper.models.folders import BEST_FILE
from grouper.training import checkpoint, loop
from grouper.training.hooks import Hook
from grouper.training.loop import run_phase
from grouper.training.run import Run
from grouper.training.saved_state import OPTIMIZER_FOLDER, numbered
from grouper.training.state import TrainState
from grouper.types import StepReport, Tally


def run(path: Path, total: int = 6, *, desk: dict[str, Any] | None = None, **config: Any) -> Any:
    desk = TinyRun(path, **(desk or {}))
    phase = TinyPhase(desk, tiny_state(), GRPOConfig(**config), total)
    run_phase(desk, phase.state, phase.step)  # type: ignore[arg-type]  # what it asks of a session
    return desk


def saved(path: Path) -> dict[int, str]:
    return {
        step: "".join(
            letter
            for letter, name in (("o", OPTIMIZER_FOLDER), ("b", BEST_FILE))
            if (folder / name).exists()
        )
        for step, folder in numbered(path / "grpo")
    }


def test_the_best_policy_stays_and_the_newest_can_be_gone_on_from(tmp_path: Path) -> None:
    accuracies = {0: 0.1, 1: 0.4, 2: 0.4, 3: 0.3, 4: 0.2, 5: 0.2, 6: 0.3}
    run(
        tmp_path,
        desk={"accuracies": accuracies},
        evaluate_every=1,
        checkpoint_every=2,
        keep_checkpoints=1,
    )
    # Of equal accuracies the earlier one; weights alone, since no checkpoint was due at 1.
    assert saved(tmp_path) == {1: "b", 6: "o"}


def test_validation_by_epoch_and_off(tmp_path: Path) -> None:
    """Ten items and four a step: epochs end within steps 3 and 5."""
    accuracies = {0: 0.0, 3: 0.4, 5: 0.3, 6: 0.2}  # any other step would not be found
    run(tmp_path / "on", desk={"accuracies": accuracies}, evaluate_every="epoch")
    assert saved(tmp_path / "on") == {3: "b", 6: "o"}
    run(tmp_path / "off", desk={"accuracies": {}}, evaluate_every=0)
    assert saved(tmp_path / "off") == {6: "o"}


@pytest.mark.parametrize(("look", "expected"), [(1, {6}), (400, {2, 4, 6})])
def test_checkpoints_are_also_due_after_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: int, expected: set[int]
) -> None:
    """T12: a kill costs no more than that. Each look at the clock takes so many seconds here."""
    seconds = itertools.count(0, look)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    run(tmp_path, keep_checkpoints=6)
    assert set(saved(tmp_path)) == expected


def test_an_interrupt_saves_where_it_stopped(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, desk={"stop_at": 3}, checkpoint_every=2)
    assert saved(tmp_path) == {2: "o", 3: "o"}


def fail_at(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    honest = checkpoint.save_policy

    def full(policy: Any, tokenizer: Any, folder: Path, *rest: Any) -> None:
        honest(policy, tokenizer, folder, *rest)
        if int(folder.name.split("-")[1].split(".")[0]) in steps:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_policy", full)


def test_a_failed_save_warns_is_recorded_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_at(monkeypatch, {2})
    desk = run(tmp_path, checkpoint_every=2)
    assert saved(tmp_path) == {4: "o", 6: "o"}
    assert not list((tmp_path / "grpo").glob(".*"))
    assert "No space left on device" in caplog.text
    events = {report.step: report.events for report in desk.folder.read_metrics()}
    assert len(events) == 6
    assert [step for step, found in events.items() if found] == [3]
    assert events[3][0].startswith("save-failed: no checkpoint at step 2")


def test_the_last_save_of_a_run_that_is_stopped_must_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, {3})
    with pytest.raises(RunFolderError, match="No space left"):
        run(tmp_path, desk={"stop_at": 3}, checkpoint_every=2)
    assert saved(tmp_path) == {2: "o"}


class SplitPhase(TinyPhase):
    """Memory runs out in the third step, while log-probs are scored."""

    def step(self, desk: TinyRun, state: TrainState) -> StepReport:
        if state.step == 2:
            state.replica.policy.token_limit = 12
        return super().step(desk, state)


class SplitRehearsal(Hook):
    """Memory runs out before the first step."""

    def phase_begins(self, run: Run, state: TrainState) -> None:
        state.replica.policy.token_limit = 24


def test_that_memory_ran_out_is_recorded_wherever_it_did(tmp_path: Path) -> None:
    desk = TinyRun(tmp_path)
    phase = SplitPhase(desk, tiny_state(), GRPOConfig(), 4)
    run_phase(desk, phase.state, phase.step, [SplitRehearsal()])  # type: ignore[arg-type]  # as above
    events = {report.step: report.events for report in desk.folder.read_metrics()}
    what = "nondeterministic_event: memory split, at most {} tokens per slice from now on"
    assert {step: found for step, found in events.items() if found} == {
        1: (what.format(24),),
        3: (what.format(12),),
    }


class BrokenPhase(TinyPhase):
    """From the third step on nothing is finite."""

    def step(self, desk: TinyRun, state: TrainState) -> StepReport:
        report = super().step(desk, state)
        broken = report.step > 2
        state.skipped = state.skipped + 1 if broken else 0
        state.suspect = make_batch() if broken else None
        return report


def test_the_run_stops_after_so_many_updates_that_are_not_finite(tmp_path: Path) -> None:
    desk = TinyRun(tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: demo")
    config = GRPOConfig(checkpoint_every=2)
    phase = BrokenPhase(desk, tiny_state(), config, 9)
    with pytest.raises(ModelError, match="nothing finite came out of 3 updates") as caught:
        run_phase(desk, phase.state, phase.step)  # type: ignore[arg-type]  # what it asks of a session
    assert caught.value.where == "grpo step 5"
    assert f"{tmp_path / 'grpo' / 'checkpoint-4'} is from before" in caught.value.fix
    assert saved(tmp_path) == {2: "o", 4: "o"}
    assert len(desk.folder.read_metrics()) == 5
    folder = tmp_path / "nan_dump" / "grpo-000005"
    assert {path.name for path in folder.iterdir()} == {
        "batch.safetensors",
        "texts.jsonl",
        "metrics.jsonl",
    }


def test_where_there_is_no_checkpoint_none_is_promised(tmp_path: Path) -> None:
    """R10: the checkpoints that were named as being from before were not there."""
    desk = TinyRun(tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: demo")
    phase = BrokenPhase(desk, tiny_state(), GRPOConfig(), 9)
    with pytest.raises(ModelError, match="there is no checkpoint of this phase"):
        run_phase(desk, phase.state, phase.step)  # type: ignore[arg-type]  # what it asks of a session


class CutOffPhase(TinyPhase):
    """From the tenth step on every completion is cut off."""

    def tallies(self, step: int) -> dict[str, Tally]:
        return {"completion/truncated": Tally.of([float(step >= 10)])}


@pytest.mark.parametrize("on_finding", ["warn", "stop"])
def test_a_finding_is_told_recorded_and_heeded(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    on_finding: str,
) -> None:
    for module in (checks, live_checks):
        monkeypatch.setattr(module, "WINDOW", 4)
    desk = TinyRun(tmp_path, recipe=SimpleNamespace(on_finding=on_finding))
    phase = CutOffPhase(desk, tiny_state(), GRPOConfig(checkpoint_every=3), 20)
    if on_finding == "warn":
        run_phase(desk, phase.state, phase.step, [LiveChecks()])  # type: ignore[arg-type]  # what it asks of a session
        assert sorted(saved(tmp_path)) == [18, 20]
    else:
        with pytest.raises(CheckError, match=r"sampling\.max_new_tokens.*checkpoint-6 is from be"):
            run_phase(desk, phase.state, phase.step, [LiveChecks()])  # type: ignore[arg-type]  # what it asks of a session
        assert sorted(saved(tmp_path)) == [6, 9]
    assert "grpo step 12: check truncated: 75% of the completions" in caplog.text
    events = [(r.step, event) for r in desk.folder.read_metrics() for event in r.events]
    assert len(events) == 1
    assert events[0][0] == 12
    assert events[0][1].startswith("check truncated: 75% of the completions are truncated")
