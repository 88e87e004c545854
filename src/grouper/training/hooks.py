"""Hooks: functions that are called around the steps of a phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from grouper.errors import GrouperError
from grouper.models.policy import Policy
from grouper.rewards.calling import in_words, load_hook, shown
from grouper.training.run import Run
from grouper.training.state import TrainState
from grouper.types import StepReport

# What a hook may request: measure the policy, save a checkpoint, end the phase.
WORDS = ("evaluate", "save", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a hook requests after a step; the same on every process."""

    asks: Mapping[str, str] = field(default_factory=dict)
    """Some of `WORDS` -> the name of the hook."""
    events: tuple[str, ...] = ()
    """Texts for the step's metrics, also logged as warnings."""
    error: GrouperError | None = None
    """Ends the run at once: only the metrics of the step are saved."""


class Hook:
    """Called around the steps of a phase, on every process, in the order of the hooks."""

    def run_begins(self, run: Run, policy: Policy) -> None:
        """Before the base is measured, where that is still to be done; `policy` is the base."""

    def phase_begins(self, run: Run, state: TrainState) -> None:
        """Before the first step, also when a phase is resumed."""

    def after_step(self, run: Run, state: TrainState, report: StepReport) -> Asked:
        """After each step, before its metrics are written."""
        del run, state, report
        return Asked()

    def checkpoint_saved(self, run: Run, state: TrainState, folder: Path) -> None:
        """After a checkpoint, or the best policy so far, is whole on disk."""

    def phase_ends(self, run: Run, state: TrainState) -> None:
        """After the last step, before the final model is saved."""

    def run_ends(self, run: Run) -> None:
        """After every phase, when all else of the run is written."""


class UserHook(Hook):
    """Calls a user's function with the report of each step, on rank 0, for all processes.

    Args:
        name: `path/to/file.py:function`. It returns None, one of `WORDS`, or several of them.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._function = load_hook(name)

    def after_step(self, run: Run, state: TrainState, report: StepReport) -> Asked:
        del state
        return run.processes.on_rank0(lambda: self._answer(run, report))

    def _answer(self, run: Run, report: StepReport) -> Asked:
        """What the function requests. An exception becomes an event, and the run continues."""
        try:
            # A copy: changes to its metrics must not reach the record.
            returned = self._function(replace(report, tallies={**report.tallies}))
            several = isinstance(returned, list | tuple | set | frozenset)
            words = list(returned) if several else [returned]
            wrong = [shown(word) for word in words if word not in (None, *WORDS)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
            return Asked(events=(f"hook {self._name} raised {in_words(error)}",))
        if wrong:
            known = f"which is none of {', '.join(WORDS)}"
            return Asked(events=(f"hook {self._name} asks for {', '.join(wrong)}, {known}",))
        asks = {word: self._name for word in words if word is not None}
        in_vain = "evaluate" in asks and not run.prepared.validation
        text = f"hook {self._name} asks to evaluate, and there are no validation problems"
        return Asked(asks=asks, events=(text,) if in_vain else ())
