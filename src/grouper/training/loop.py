"""The loop of a phase: when steps, evaluations and checkpoints happen, not what a step does."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace

from grouper.errors import GrouperError, Interrupted, ModelError, RunFolderError
from grouper.evaluation.result import EvaluationResult
from grouper.models.policy import Policy
from grouper.training.checkpoint import save_checkpoint
from grouper.training.curriculum import evaluation_is_due
from grouper.training.hooks import Hook
from grouper.training.nan_dump import write_nan_dump
from grouper.training.rotation import rotate
from grouper.training.run import Run, validation_name
from grouper.training.saved_state import last_good
from grouper.training.state import TrainState
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
    loop.restart_validation()
    with run.display.track(f"training {state.phase}", state.total) as task:
        try:
            while True:
                task(state.step)
                loop.settle_validation()
                better = loop.validate_if_due()
                ended = loop.has_ended()
                loop.save_if_due(better=better, last=ended)
                if ended:
                    loop.settle_validation(wait=True)
                run.raise_if_stopped(f"{state.phase} step {state.step}", together=True)
                if ended:
                    break
                loop.take_step(step)
        except Interrupted:
            if state.step != loop.saved:
                loop.save(resumable=True)
            raise
    for hook in hooks:
        hook.phase_ends(run, state)


class _Loop:
    """What is done between the steps of a phase, and what a failure of it leaves to report.

    A validation may run while the phase trains, one at a time. The weights that are validated are
    saved, since they may be the best. A checkpoint says which validation was still running, and a
    resumed run starts it again.
    """

    def __init__(self, run: Run, state: TrainState, hooks: Sequence[Hook]) -> None:
        self.run, self.state, self.hooks = run, state, hooks
        self.config = state.config(run.recipe)
        # Step and time of the last resumable checkpoint; the first step needs none.
        self.saved, self.since = state.step, time.monotonic()
        self.validation: Future[EvaluationResult] | None = None
        self.token_limit = state.replica.policy.token_limit
        # Failures since the last step.
        self.events: list[str] = []

    def report(self, event: str) -> None:
        """Warn of what does not stop training, and put it into the metrics of the next step."""
        log.warning("Training goes on with %s", event.partition(": ")[2])
        self.events.append(event)

    def take_step(self, step: Callable[[Run, TrainState], StepReport]) -> None:
        """Take one step, call the hooks, and record it with the events before it.

        That memory ran out makes a run irreproducible, whether in this step or since the last.
        """
        run, state = self.run, self.state
        report = step(run, state)
        limit = state.replica.policy.token_limit
        if limit != self.token_limit:
            split = f"memory split, at most {limit} tokens per slice from now on"
            self.events.append(f"nondeterministic_event: {split}")
            self.token_limit = limit
        asked = [hook.after_step(run, state, report) for hook in self.hooks]
        state.asked = {word: who for one in asked for word, who in one.asks.items()}
        texts = [text for one in asked for text in one.events]
        report = replace(report, events=(*self.events, *report.events, *texts))
        self.events = []
        run.folder.append_metrics(report)
        run.display.step(report, state.total)
        if state.skipped >= MOST_SKIPPED:
            _stop_broken(run, state)
        for text in texts if run.processes.rank == 0 else ():
            log.warning("%s step %d: %s", state.phase, report.step, text)
        for error in filter(None, (one.error for one in asked)):
            raise error

    def has_ended(self) -> bool:
        """Whether all steps are done, or a hook has requested the end."""
        state, who = self.state, self.state.asked.get("stop")
        if who is not None and state.step < state.total:
            self.run.display.say(f"{state.phase} ends at step {state.step}: {who} asks for it.")
        return who is not None or state.step >= state.total

    def validate_if_due(self) -> bool:
        """Measure the policy on the validation problems if due; whether it may be the best."""
        run, state, step = self.run, self.state, self.state.step
        total = step if state.asked.get("stop") else state.total
        due = evaluation_is_due(self.config, step, total=total, epoch_ended=state.epoch_ended)
        due = due or "evaluate" in state.asked
        if not run.prepared.validation or not due:
            return False
        result = run.folder.read_evaluation(validation_name(state.phase, step))
        if result is None and run.recipe.evaluation.servers:
            return self.begin_validation(step, lambda: state.replica.policy)
        if result is None:
            result = run.evaluate(
                state.replica.policy, phase=state.phase, step=step, split="validation"
            )
        return state.best.offer(step, result.accuracy, result.interval)

    def restart_validation(self) -> None:
        """Start the validation again that was running at the checkpoint, unless it is due now."""
        run, state, step = self.run, self.state, self.state.best.pending
        state.best.pending = None
        if step not in (None, state.step) and run.recipe.evaluation.servers:
            weights = run.path / state.phase / f"checkpoint-{step}"
            self.begin_validation(step, lambda: run.load(str(weights)))

    def begin_validation(self, step: int, policy: Callable[[], Policy]) -> bool:
        """Begin one, once the one before it has ended; whether it has begun."""
        self.settle_validation(wait=True)
        self.state.best.pending = step
        with self._failure_reported():
            self.validation = self.run.begin_validation(policy(), phase=self.state.phase, step=step)
        return self.validation is not None

    def settle_validation(self, *, wait: bool = False) -> None:
        """Record what the open one has found, if it has ended; what fails is only reported."""
        run, state, future = self.run, self.state, self.validation
        if future is None:
            return
        on_rank0 = run.processes.on_rank0
        while not on_rank0(future.done):
            if not wait:
                return
            run.raise_if_stopped("waiting for the validation", together=True)
            futures.wait([future], timeout=0.1)
        self.validation = None
        with self._failure_reported():
            result = run.record(on_rank0(future.result))
            state.best.offer(result.step, result.accuracy, result.interval)
        state.best.pending = None
        tidy(run, state)

    @contextlib.contextmanager
    def _failure_reported(self) -> Iterator[None]:
        """Report what goes wrong with a validation, and go on training."""
        # Of several processes only Grouper's own errors are raised on all.
        reported = Exception if self.run.processes.size == 1 else GrouperError
        try:
            yield
        except reported as error:
            step, self.state.best.pending = self.state.best.pending, None
            what = error.paragraph() if isinstance(error, GrouperError) else repr(error)
            self.report(f"validation-failed: no validation at step {step}: {what}")

    def save_if_due(self, *, better: bool, last: bool) -> None:
        """Save what is due; a failure is reported, and retried when the next checkpoint is due.

        Enough steps have been taken since the last checkpoint, or enough time has passed, as rank 0
        sees it. Also after the last step of a phase, so that a finished run can be extended. The
        policy with the best evaluation so far is saved as well, without the optimizer state.
        """
        state, every, since = self.state, self.config.checkpoint_every, self.since
        due = state.step != self.saved and (
            last
            or "save" in state.asked
            or (every > 0 and state.step % every == 0)
            or self.run.processes.on_rank0(lambda: time.monotonic() - since >= SAVED_AFTER)
        )
        try:
            if due or better:
                self.save(resumable=due)
        except RunFolderError as error:
            self.report(f"save-failed: no checkpoint at step {state.step}: {error.paragraph()}")

    def save(self, *, resumable: bool) -> None:
        """Save a checkpoint of this step, or its weights alone."""
        run, state = self.run, self.state
        # The checkpoint that the run resumed from is never replaced by weights alone.
        if resumable or state.step != self.saved:
            tokenizer, mark = run.prepared.tokenizer, run.hash
            folder = save_checkpoint(
                run.path, state, tokenizer, recipe_hash=mark, resumable=resumable
            )
            for hook in self.hooks:
                hook.checkpoint_saved(run, state, folder)
        if resumable:
            self.saved, self.since = state.step, time.monotonic()
        tidy(run, state)


def tidy(run: Run, state: TrainState) -> None:
    """Remove the checkpoints of a phase that are no longer needed."""
    folder, keep = run.path / state.phase, state.config(run.recipe).keep_checkpoints
    run.processes.on_rank0(lambda: rotate(folder, step=state.step, keep=keep, best=state.best))


def _stop_broken(run: Run, state: TrainState) -> None:
    """Save the evidence of updates that were not finite, and raise."""
    folder, left = run.processes.on_rank0(
        lambda: (
            write_nan_dump(
                run.path,
                f"{state.phase}-{state.step:06d}",
                state.suspect,
                run.prepared.tokenizer,
            ),
            last_good(run.path / state.phase, state.step),
        )
    )
    raise ModelError(
        f"nothing finite came out of {state.skipped} updates in a row",
        where=f"{state.phase} step {state.step}",
        fix=f"The steps, texts and metrics are in {folder}. Lower "
        f"{state.phase}.optimizer.learning_rate or use model.compute_dtype: float32; {left}. Go on "
        "with --resume --allow-changes.",
    )


# --- hooks of users ---------------------------------------------------------------------


# --- the evidence of a step whose numbers are not finite ------------------------------------------
