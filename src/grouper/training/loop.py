"""When things happen: steps, evaluations, checkpoints. What a step does is the phase's business."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from grouper.config.schema import GRPOConfig, SFTConfig
from grouper.errors import GrouperError, Interrupted, ModelError, RunFolderError
from grouper.training.checkpoint import (
    TrainState,
    last_good,
    rotate,
    save_checkpoint,
)
from grouper.training.curriculum import evaluation_is_due
from grouper.training.nan_dump import write_nan_dump
from grouper.training.run import Run
from grouper.types import StepReport

log = logging.getLogger(__name__)

# Updates in a row that are not finite and skipped before the run stops.
MOST_SKIPPED = 3

# What a hook may ask for: measure the policy, save a checkpoint, end the phase.
WORDS = ("evaluate", "save", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a hook asks for after a step; the same on every process."""

    asks: Mapping[str, str] = field(default_factory=dict)
    """Some of `WORDS`, and the name of the hook."""
    events: tuple[str, ...] = ()
    """Texts for the step's metrics, which are also warnings."""
    error: GrouperError | None = None
    """Ends the run at once: nothing of the step is saved but its metrics."""


class Hook:
    """What is called around the steps of a phase, on every process, in the order of the hooks."""

    def phase_begins(self, run: Run, state: TrainState) -> None:
        """Before the first step, also of a phase that is resumed."""

    def after_step(self, run: Run, state: TrainState, report: StepReport) -> Asked:
        """After each step, before its metrics are written."""
        del run, state, report
        return Asked()

    def phase_ends(self, run: Run, state: TrainState) -> None:
        """After the last step, before the final model is saved."""


def run_phase(
    run: Run,
    state: TrainState,
    step: Callable[[Run, TrainState], StepReport],
    hooks: Sequence[Hook] = (),
) -> None:
    """Run a phase from `state.step` to its end, with hooks around it.

    Args:
        run: the open run.
        state: where the phase is; moved on by every step.
        step: takes one step, `grpo_step` or `sft_step`.
        hooks: called around the steps.

    Raises:
        GrouperError: what a hook raises or asks to end the run with.
        Interrupted: on Ctrl-C, SIGTERM or SIGHUP, after saving a checkpoint.
        ModelError: a log-prob, the loss or its gradient was not finite several times in a row.
        RunFolderError: the metrics, or the checkpoint after an interrupt, cannot be written.
    """
    for hook in hooks:
        hook.phase_begins(run, state)
    _take_steps(run, state, step, hooks)
    for hook in hooks:
        hook.phase_ends(run, state)


def _take_steps(
    run: Run,
    state: TrainState,
    step: Callable[[Run, TrainState], StepReport],
    hooks: Sequence[Hook],
) -> None:
    """Take the steps that are left of a phase.

    What is due at a step is done when the loop arrives there and looks whether it has been done:
    a run that was killed in the middle of an evaluation makes it up when it resumes.
    """
    saves = _Saves(run, state)
    tidy(run, state)  # a kill may have come in between
    with run.display.track(f"training {state.phase}", state.total) as task:
        try:
            while True:
                task(state.step)
                better = _evaluate_if_due(run, state)
                ended = _has_ended(run, state)
                saves.at_this_step(better=better, last=ended)
                run.raise_if_stopped(f"{state.phase} step {state.step}", together=True)
                if ended:
                    return
                report = step(run, state)
                asked = [hook.after_step(run, state, report) for hook in hooks]
                state.asked = {word: who for one in asked for word, who in one.asks.items()}
                texts = tuple(text for one in asked for text in one.events)
                events = (*saves.take_events(), *report.events, *texts)
                report = replace(report, events=events)
                run.folder.append_metrics(report)
                run.display.step(report, state.total)
                _stop_if_broken(run, state)
                for text in texts if run.processes.rank == 0 else ():
                    log.warning("%s step %d: %s", state.phase, report.step, text)
                for error in filter(None, (one.error for one in asked)):
                    raise error
        except Interrupted:
            saves.before_leaving()
            raise


def phase_config(run: Run, state: TrainState) -> SFTConfig | GRPOConfig:
    """The settings of a phase."""
    config: SFTConfig | GRPOConfig = getattr(run.recipe, state.phase)
    return config


def _evaluate_if_due(run: Run, state: TrainState) -> bool:
    """Measure the policy on the validation problems; whether it is better than ever before."""
    step, config = state.step, phase_config(run, state)
    total = step if state.asked.get("stop") else state.total
    due = evaluation_is_due(config, step, total=total, epoch_ended=state.epoch_ended)
    due = due or "evaluate" in state.asked
    if not run.prepared.validation or not due:
        return False
    result = run.folder.read_evaluation(f"validation-{state.phase}-{step:06d}")
    if result is None:
        result = run.evaluate(state.policy, phase=state.phase, step=step, split="validation")
    return state.best.offer(step, result.accuracy)


def _has_ended(run: Run, state: TrainState) -> bool:
    """Whether all steps are done, or a hook has asked for the end."""
    if state.step >= state.total:
        return True
    who = state.asked.get("stop")
    if who is None:
        return False
    run.display.say(f"{state.phase} ends at step {state.step}: {who} asks for it.")
    return True


class _Saves:
    """The checkpoints of one phase: when they are written, and what happens when that fails."""

    def __init__(self, run: Run, state: TrainState) -> None:
        self._run = run
        self._state = state
        self._config = phase_config(run, state)
        self._saved = state.step
        """The step of the last checkpoint to go on from; the beginning needs none."""
        self._since = time.monotonic()
        """When that was."""
        self._events: list[str] = []

    def at_this_step(self, *, better: bool, last: bool) -> None:
        """Save what is due; what fails is reported, and tried again when the next one is due.

        After the last step of a phase, too: a finished run can be prolonged. The policy with the
        best evaluation so far is also saved, though without what training would need to go on
        from it.
        """
        state = self._state
        due = state.step != self._saved and (last or self._is_due())
        if not due and not better:
            return
        try:
            self._save(resumable=due)
        except RunFolderError as error:
            text = f"no checkpoint at step {state.step}: {error.paragraph()}"
            log.warning("Training goes on with %s", text)
            self._events.append(f"save-failed: {text}")

    def _is_due(self) -> bool:
        """Whether enough steps have been taken, or enough time has passed, as rank 0 sees it."""
        every, minutes = self._config.checkpoint_every, self._config.checkpoint_minutes
        if self._state.asked.get("save") or (every > 0 and self._state.step % every == 0):
            return True
        return minutes > 0 and self._run.processes.on_rank0(
            lambda: time.monotonic() - self._since >= 60 * minutes
        )

    def before_leaving(self) -> None:
        """Save where the run is stopped, if that is not on disk already."""
        if self._state.step != self._saved:
            self._save(resumable=True)

    def take_events(self) -> tuple[str, ...]:
        """What has failed since the last step."""
        events, self._events = tuple(self._events), []
        return events

    def _save(self, *, resumable: bool) -> None:
        run, state = self._run, self._state
        # The one that the run has just resumed from is never replaced by weights alone.
        if resumable or state.step != self._saved:
            save_checkpoint(
                run.path,
                state,
                run.prepared.tokenizer,
                recipe_hash=run.hash,
                resumable=resumable,
            )
        if resumable:
            self._saved, self._since = state.step, time.monotonic()
        tidy(run, state)


def tidy(run: Run, state: TrainState) -> None:
    """Remove the checkpoints of a phase that are no longer wanted."""
    config = phase_config(run, state)
    folder, step, keep = run.path / state.phase, state.step, config.keep_checkpoints
    run.processes.on_rank0(lambda: rotate(folder, step=step, keep=keep, best=state.best))


def _stop_if_broken(run: Run, state: TrainState) -> None:
    if state.skipped < MOST_SKIPPED:
        return
    what = f"nothing finite came out of {state.skipped} updates in a row"
    folder = run.processes.on_rank0(
        lambda: write_nan_dump(
            run.path,
            state.suspect,
            run.folder.read_metrics(),
            run.prepared.tokenizer,
            what=f"{what}: a log-prob, the loss or its gradient was infinite or not a number.",
        )
    )
    raise ModelError(
        what,
        where=f"{state.phase} step {state.step}",
        fix=f"The steps, texts and metrics are in {folder}. Lower "
        f"{state.phase}.optimizer.learning_rate or use model.compute_dtype: float32. "
        + run.processes.on_rank0(lambda: _what_is_left(run.path / state.phase, state.step)),
    )


def _what_is_left(phase: Path, step: int) -> str:
    """Which checkpoint a broken phase can go on from, in words."""
    good = last_good(phase, step)
    if good is None:
        return f"No checkpoint of {phase.name} has been saved: it starts again."
    return f"{good[1]} is from before: go on from it with --resume --allow-changes."
