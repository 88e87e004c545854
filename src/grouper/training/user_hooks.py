"""Functions of the user's that see each step and may ask the run for something."""

from __future__ import annotations

from dataclasses import replace

from grouper.rewards.calling import line_of_users, load_hook, shown
from grouper.training.checkpoint import TrainState
from grouper.training.loop import WORDS, Asked, Hook
from grouper.training.run import Run
from grouper.types import StepReport


class UserHook(Hook):
    """Calls a function with the report of each step, on rank 0; every process hears the answer.

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
        """What the function asks for. What it raises is an event, and the run goes on."""
        try:
            # A copy: what it changes in its metrics is in no record.
            returned = self._function(replace(report, tallies={**report.tallies}))
            several = isinstance(returned, list | tuple | set | frozenset)
            words = list(returned) if several else [returned]
            wrong = [shown(word) for word in words if word not in (None, *WORDS)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
            what = f"raised {type(error).__name__}: {error}{line_of_users(error)}"
            return Asked(events=(f"hook {self._name} {what}",))
        if wrong:
            known = f"which is none of {', '.join(WORDS)}"
            return Asked(events=(f"hook {self._name} asks for {', '.join(wrong)}, {known}",))
        asks = {word: self._name for word in words if word is not None}
        if "evaluate" in asks and not run.prepared.validation:
            text = f"hook {self._name} asks to evaluate, and there are no validation problems"
            return Asked(asks=asks, events=(text,))
        return Asked(asks=asks)
