"""A tracker of the user's own: a function or a class, named like a reward of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from grouper.evaluation.result import EvaluationResult
from grouper.runs.sinks.base import Step, TrackedRun, frozen


class UsersSink:
    """Calls what the user named with each `StepReport` and `EvaluationResult`.

    A function is called with the record and `params`. A class is made once with the `TrackedRun`
    and `params`; of its methods `step`, `evaluation` and `close`, those that exist are called.

    Args:
        run: for the class.
        function: what the user named.
        params: of the recipe.
    """

    def __init__(
        self, run: TrackedRun, *, function: Callable[..., Any], params: dict[str, Any]
    ) -> None:
        is_class = inspect.isclass(function)  # which mypy would take for a class without arguments
        if is_class:
            made = function(run, **params)
            self._step = getattr(made, "step", _ignore)
            self._evaluation = getattr(made, "evaluation", _ignore)
            self._close = getattr(made, "close", _ignore)
        else:
            self._step = self._evaluation = lambda record: function(record, **params)
            self._close = _ignore

    def step(self, step: Step) -> None:
        self._step(replace(step.report, tallies=frozen(step.report.tallies)))

    def evaluation(self, result: EvaluationResult) -> None:
        self._evaluation(replace(result, card=frozen(result.card)))

    def close(self) -> None:
        self._close()


def _ignore(*_: object) -> None:
    """Instead of a method that the user's class does not have."""
