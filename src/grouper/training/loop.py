"""The loop of a phase: when steps, evaluations and checkpoints happen, not what a step does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from grouper.errors import Interrupted, ModelError, RunFolderError
from grouper.training.checkpoint import save_checkpoint
from grouper.training.hooks import Hook
from grouper.training.nan_dump import write_nan_dump
from grouper.training.rotation import tidy
from grouper.training.run import Run
from grouper.training.saved_state import last_good
from grouper.training.state import TrainState
from grouper.training.validation import Validation
from grouper.types import StepReport

log = logging.getLogger(__name__)

# Skipped updates in a row (something was not finite) before the run stops.
MOST_SKIPPED = 3

# A checkpoint is saved this long after the last one, whatever the recipe says.
SAVED_AFTER = 600.0


def run_phase(
    run: Run,
    state: TrainState,
    step: Callable[[Run, TrainState], StepReport],
    hooks: Sequence[Hook] = (),
) -> None:
    """Run a phase from `state.step` to its end, with hooks around it.

    What is due at a step is done on arrival there, unless it has been done already: a run that was
    killed in the middle of an evaluation catches up when it resumes.

    Args:
        run: the open run.
        state: of the phase; advanced by every step.
        step: takes and reports one step, as `observe.take_step` does.
        hooks: called around the steps.

    Raises:
        GrouperError: what a hook raises or returns as `error`.
        Interrupted: on Ctrl-C, SIGTERM or SIGHUP, after saving a checkpoint.
        ModelError: a log-prob, the loss or its gradient was not finite several times in a row.
        RunFolderError: the metrics, or the checkpoint after an interrupt, cannot be written.
    """
    loop = _Loop(run, state, hooks)
    for hook in hooks:
        hook.phase_begins(run, state)
    tidy(run, state)  # a kill may have come before it
    loop.validation.restart()
    with run.display.track(f"training {state.phase}", state.total) as task:
        try:
            while True:
                task(state.step)
                loop.validation.settle()
                better = loop.validation.measure_if_due()
                ended = loop.has_ended()
                loop.save_if_due(better=better, last=ended)
                if ended:
                    loop.validation.settle(wait=True)
                run.stop.raise_if_requested(f"{state.phase} step {state.step}", together=True)
                if ended:
                    break
                loop.take_step(step)
        except Interrupted:
            if state.step != loop.saved_step:
                loop.save(resumable=True)
            raise
    for hook in hooks:
        hook.phase_ends(run, state)


class _Loop:
    """The work between the steps of a phase, and the events of it that the next step reports.

    A validation may run while the phase trains, one at a time. The weights that are validated are
    saved, since they may be the best. A checkpoint says which validation was still running, and a
    resumed run starts it again.
    """

    def __init__(self, run: Run, state: TrainState, hooks: Sequence[Hook]) -> None:
        self.run = run
        self.state = state
        self.hooks = hooks
        self.config = state.config(run.recipe)
        # Step and time of the last resumable checkpoint; the first step needs none.
        self.saved_step = state.step
        self.saved_at = time.monotonic()
        self.validation = Validation(run, state, self.report)
        self.token_limit = state.replica.policy.token_limit
        # Failures since the last step.
        self.events: list[str] = []

    def report(self, event: str) -> None:
        """Warn of a problem that does not stop training, and add it to the next step's metrics."""
        log.warning("Training continues with %s", event.partition(": ")[2])
        self.events.append(event)

    def take_step(self, step: Callable[[Run, TrainState], StepReport]) -> None:
        """Take one step, call the hooks, and record it with the events since the last step."""
        run = self.run
        state = self.state
        report = step(run, state)
        self._check_token_limit()
        replies = [hook.after_step(run, state, report) for hook in self.hooks]
        state.asked = {}
        hook_events: list[str] = []
        for reply in replies:
            state.asked.update(reply.requests)
            hook_events.extend(reply.events)
        report = replace(report, events=(*self.events, *report.events, *hook_events))
        self.events = []
        run.folder.append_metrics(report)
        run.display.step(report, state.total)
        if state.skipped >= MOST_SKIPPED:
            _stop_broken(run, state)
        if run.processes.rank == 0:
            for event in hook_events:
                log.warning("%s step %d: %s", state.phase, report.step, event)
        for reply in replies:
            if reply.error is not None:
                raise reply.error

    def _check_token_limit(self) -> None:
        """Add an event if memory ran out since the last step, which makes a run irreproducible."""
        limit = self.state.replica.policy.token_limit
        if limit != self.token_limit:
            split = f"memory split, at most {limit} tokens per slice from now on"
            self.events.append(f"nondeterministic_event: {split}")
            self.token_limit = limit

    def has_ended(self) -> bool:
        """Return whether all steps are done, or a hook has requested the end."""
        state = self.state
        hook_name = state.asked.get("stop")
        if hook_name is not None and state.step < state.total:
            self.run.display.say(
                f"{state.phase} ends at step {state.step}: {hook_name} asks for it."
            )
        return hook_name is not None or state.step >= state.total

    def save_if_due(self, *, better: bool, last: bool) -> None:
        """Save a checkpoint if one is due; a failure is reported, and retried at the next one.

        Enough steps have been taken since the last checkpoint, or enough time has passed, as rank 0
        sees it. Also after the last step of a phase, so that a finished run can be extended. The
        policy with the best evaluation so far is saved as well, without the optimizer state.
        """
        state = self.state
        every = self.config.checkpoint_every
        saved_at = self.saved_at
        due = state.step != self.saved_step and (
            last
            or "save" in state.asked
            or (every > 0 and state.step % every == 0)
            or self.run.processes.on_rank0(lambda: time.monotonic() - saved_at >= SAVED_AFTER)
        )
        try:
            if due or better:
                self.save(resumable=due)
        except RunFolderError as error:
            self.report(f"save-failed: no checkpoint at step {state.step}: {error.paragraph()}")

    def save(self, *, resumable: bool) -> None:
        """Save a checkpoint of this step, or its weights alone."""
        run = self.run
        state = self.state
        # The checkpoint that the run resumed from is never replaced by weights alone.
        if resumable or state.step != self.saved_step:
            folder = save_checkpoint(
                run.path,
                state,
                run.prepared.tokenizer,
                recipe_hash=run.hash,
                resumable=resumable,
            )
            for hook in self.hooks:
                hook.checkpoint_saved(run, state, folder)
        if resumable:
            self.saved_step = state.step
            self.saved_at = time.monotonic()
        tidy(run, state)


def _stop_broken(run: Run, state: TrainState) -> None:
    """Save the evidence of updates that were not finite, and raise `ModelError`."""

    def save_evidence() -> tuple[Path, str]:
        """Return the folder of the dump, and the checkpoint to go on from in words."""
        name = f"{state.phase}-{state.step:06d}"
        folder = write_nan_dump(run.path, name, state.suspect, run.prepared.tokenizer)
        return folder, last_good(run.path / state.phase, state.step)

    folder, checkpoint_hint = run.processes.on_rank0(save_evidence)
    raise ModelError(
        f"nothing finite came out of {state.skipped} updates in a row",
        where=f"{state.phase} step {state.step}",
        fix=f"The steps, texts and metrics are in {folder}. Lower "
        f"{state.phase}.optimizer.learning_rate or use model.compute_dtype: float32; "
        f"{checkpoint_hint}. Continue with --resume --allow-changes.",
    )
