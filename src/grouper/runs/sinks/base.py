"""What a tracker is told, and the numbers in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from grouper.evaluation.metrics import metrics_of
from grouper.evaluation.result import EvaluationResult
from grouper.types import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run, as a tracker sees it."""

    name: str
    """How the tracker lists it."""
    project: str
    entity: str | None
    tags: tuple[str, ...]
    online: bool
    """Whether the user asked to send while the run goes on."""
    path: Path
    """The run folder; a tracker keeps what it writes below `<path>/trackers/`."""
    mark: str
    """8 hex digits that are the same when the run is resumed, and of no other run."""
    recipe: Mapping[str, Any]
    """The resolved recipe, as it would be written in YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step and, in GRPO, the rewards behind it."""

    report: StepReport
    rewards: Mapping[str, tuple[float, ...]]
    """`total` and each component: one value a rollout that took part. Empty in SFT."""


class Sink(Protocol):
    """Somewhere to send what happens. All calls come from one thread, in the order of the run."""

    def step(self, step: Step) -> None: ...

    def evaluation(self, result: EvaluationResult) -> None: ...

    def close(self) -> None: ...


class LoggedRun:
    """A tracker that takes mappings: metrics as `<phase>/<metric>`, rewards as histograms.

    Args:
        log: takes one mapping.
        histogram: makes a value of that tracker from a list of numbers.
    """

    def __init__(
        self,
        log: Callable[[dict[str, Any]], Any],
        histogram: Callable[[list[float]], Any],
    ) -> None:
        self._log = log
        self._histogram = histogram

    def step(self, step: Step) -> None:
        histograms = {
            f"rewards/{name}": self._histogram(list(values))
            for name, values in step.rewards.items()
            if values
        }
        values = {**step_numbers(step.report), **histograms}
        self._log(_placed(step.report.phase, step.report.step, values))

    def evaluation(self, result: EvaluationResult) -> None:
        self._log(_placed(result.phase, result.step, evaluation_numbers(result)))


def step_numbers(report: StepReport) -> dict[str, float]:
    """The mean of each metric that has one.

    >>> from grouper.types import Tally
    >>> tallies = {"loss": Tally.of([1.0, 2.0]), "completion/unique": Tally.of([])}
    >>> step_numbers(StepReport(phase="sft", step=1, tallies=tallies, status="learning"))
    {'loss': 1.5}
    """
    return {name: tally.mean for name, tally in report.tallies.items() if tally.count}


def evaluation_numbers(result: EvaluationResult) -> dict[str, float]:
    """Accuracy with its interval, lengths, format, reasoning and reward, under the split's name."""
    numbers = {
        "accuracy": result.accuracy,
        "accuracy_low": result.interval.low,
        "accuracy_high": result.interval.high,
        "cut_off": result.cut_off,
        "tokens": result.mean_tokens,
        **{f"pass@{k}": value for k, value in result.pass_at_k.items() if k > 1},
    }
    behaviour = metrics_of(result)
    if behaviour is not None:
        numbers |= {
            "format": behaviour.format_accuracy,
            "with_reasoning": behaviour.with_reasoning,
            "reasoning_length": behaviour.reasoning_length,
            "reward": behaviour.reward,
        }
    return {f"{result.split}/{name}": value for name, value in numbers.items()}


def frozen(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy that cannot be changed."""
    return MappingProxyType(dict(values))


def _placed(phase: str, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values under their phase, with the step that they belong to.

    >>> _placed("sft", 3, {"loss": 0.5})
    {'sft/step': 3, 'sft/loss': 0.5}
    """
    return {f"{phase}/{name}": value for name, value in {"step": step, **values}.items()}
