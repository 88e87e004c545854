"""Hooks: functions that are called around the steps of a phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from grouper.errors import GrouperError
from grouper.models.policy import Policy
from grouper.rewards.user_code import describe_exception, load_hook, shown
from grouper.training.run import Run
from grouper.training.state import TrainState
from grouper.types import StepReport

# Requests of a hook: measure the policy, save a checkpoint, end the phase.
REQUESTS = ("evaluate", "save", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class HookReply:
    """Reply of a hook after a step; the same on every process."""

    requests: Mapping[str, str] = field(default_factory=dict)
    """Some of `REQUESTS` -> the name of the hook."""
    events: tuple[str, ...] = ()
    """Texts for the step's metrics, also logged as warnings."""
    error: GrouperError | None = None
    """Ends the run at once: only the metrics of the step are saved."""


class Hook:
    """Base class of hooks, whose methods do nothing.

    They are called around the steps of a phase, on every process, in their order.
    """

    def run_begins(self, run: Run, policy: Policy) -> None:
        """Handle the start of a run, before the base model is measured.

        A run that has measured it already does not call this; `policy` is the base model.
        """

    def phase_begins(self, run: Run, state: TrainState) -> None:
        """Handle the start of a phase, before its first step; also when it is resumed."""

    def after_step(self, run: Run, state: TrainState, report: StepReport) -> HookReply:
        """Handle a finished step, before its metrics are written."""
        del run, state, report
        return HookReply()

    def checkpoint_saved(self, run: Run, state: TrainState, folder: Path) -> None:
        """Handle a checkpoint, or the best policy so far, that is complete on disk."""

    def phase_ends(self, run: Run, state: TrainState) -> None:
        """Handle the end of a phase, after its last step, before the final model is saved."""

    def run_ends(self, run: Run) -> None:
        """Handle the end of a run, after everything else of it has been written."""


class UserHook(Hook):
    """Calls a user's function with the report of each step, on rank 0, for all processes.

    Args:
        name: `path/to/file.py:function`. The function returns None, one of `REQUESTS`, or several
            of them.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._function = load_hook(name)

    def after_step(self, run: Run, state: TrainState, report: StepReport) -> HookReply:
        del state
        return run.processes.on_rank0(lambda: self._answer(run, report))

    def _answer(self, run: Run, report: StepReport) -> HookReply:
        """Return the requests of the function; an exception becomes an event of the step."""
        try:
            # A copy: changes to its metrics must not reach the record.
            returned = self._function(replace(report, tallies={**report.tallies}))
            values = [returned]
            if isinstance(returned, list | tuple | set | frozenset):
                values = list(returned)
            # Inside `try`: a user's object may raise when it is compared or printed.
            unknown = [shown(value) for value in values if value not in (None, *REQUESTS)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
            return HookReply(events=(f"hook {self._name} raised {describe_exception(error)}",))
        if unknown:
            event = (
                f"hook {self._name} requests {', '.join(unknown)}, which is none of "
                f"{', '.join(REQUESTS)}"
            )
            return HookReply(events=(event,))
        requests = {value: self._name for value in values if value is not None}
        if "evaluate" in requests and not run.prepared.validation:
            event = (
                f"hook {self._name} requests an evaluation, but there are no validation problems"
            )
            return HookReply(requests=requests, events=(event,))
        return HookReply(requests=requests)
