"""Validation of a phase: inline between two steps, or on servers of its own while it trains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future

from grouper.errors import GrouperError
from grouper.evaluation.result import EvaluationResult
from grouper.models.policy import Policy
from grouper.training.curriculum import evaluation_is_due
from grouper.training.measure import (
    begin_validation,
    measure_policy,
    record_evaluation,
    validation_name,
)
from grouper.training.rotation import tidy
from grouper.training.run import Run
from grouper.training.state import TrainState


class Validation:
    """Measures the policy on the validation problems when it is due, and offers what it finds.

    On servers (`evaluation.servers`) one validation goes on at a time. The weights that are
    validated are saved, since they may be the best. A checkpoint says which validation was still
    going on, and a resumed run starts it again. What fails there is reported, and training goes on.

    Args:
        run: the open run.
        state: of the phase.
        report: called with an event where a validation has failed.
    """

    def __init__(self, run: Run, state: TrainState, report: Callable[[str], None]) -> None:
        self._run = run
        self.state = state
        self._report = report
        self._pending: Future[EvaluationResult] | None = None

    def measure_if_due(self) -> bool:
        """Measure the policy if that is due; return whether it may be the best so far."""
        run = self._run
        state = self.state
        if not run.prepared.validation or not self._is_due():
            return False
        result = run.folder.read_evaluation(validation_name(state.phase, state.step))
        if result is None and run.recipe.evaluation.servers:
            return self._begin(state.step, lambda: state.replica.policy)
        if result is None:
            result = measure_policy(
                run, state.replica.policy, phase=state.phase, step=state.step, split="validation"
            )
        return state.best.offer(state.step, result.accuracy, result.interval)

    def restart(self) -> None:
        """Start the validation again that was going on at the checkpoint, unless it is due now."""
        run = self._run
        state = self.state
        step = state.best.pending
        state.best.pending = None
        if step is None or step == state.step:
            return
        if run.recipe.evaluation.servers:
            weights = run.path / state.phase / f"checkpoint-{step}"
            self._begin(step, lambda: run.models.load(str(weights)))

    def settle(self, *, wait: bool = False) -> None:
        """Record what the pending validation has found, if it has ended.

        Args:
            wait: until it has ended.
        """
        run = self._run
        state = self.state
        pending = self._pending
        if pending is None:
            return
        on_rank0 = run.processes.on_rank0
        while not on_rank0(pending.done):
            if not wait:
                return
            run.stop.raise_if_requested("waiting for the validation", together=True)
            futures.wait([pending], timeout=0.1)
        self._pending = None
        with self._failure_reported():
            result = record_evaluation(run, on_rank0(pending.result))
            state.best.offer(result.step, result.accuracy, result.interval)
        state.best.pending = None
        tidy(run, state)

    def _is_due(self) -> bool:
        state = self.state
        config = state.config(self._run.recipe)
        # The end of a phase comes early where a hook has requested it.
        total = state.step if state.asked.get("stop") else state.total
        by_schedule = evaluation_is_due(
            config, state.step, total=total, epoch_ended=state.epoch_ended
        )
        return by_schedule or "evaluate" in state.asked

    def _begin(self, step: int, policy: Callable[[], Policy]) -> bool:
        """Begin a validation once the one before it has ended; return whether it has begun."""
        self.settle(wait=True)
        self.state.best.pending = step
        with self._failure_reported():
            self._pending = begin_validation(self._run, policy(), phase=self.state.phase, step=step)
        return self._pending is not None

    @contextlib.contextmanager
    def _failure_reported(self) -> Iterator[None]:
        """Report what goes wrong with a validation, and go on training."""
        # Of several processes only Grouper's own errors are raised on all.
        reported = Exception if self._run.processes.size == 1 else GrouperError
        try:
            yield
        except reported as error:
            step = self.state.best.pending
            self.state.best.pending = None
            what = error.paragraph() if isinstance(error, GrouperError) else repr(error)
            self._report(f"validation-failed: no validation at step {step}: {what}")
