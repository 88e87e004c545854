"""A run folder that tells the trackers of what it has written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from grouper.config.schema import Recipe
from grouper.evaluation.result import EvaluationResult
from grouper.tracking.run_folder import RunFolder
from grouper.tracking.sinks.background import Background, close_all
from grouper.tracking.sinks.base import Step
from grouper.tracking.sinks.registry import find_trackers
from grouper.types import Rollout, RolloutGroup, StepReport

__all__ = ["TrackedFolder"]


class TrackedFolder(RunFolder):
    """Writes like any other run folder; each record goes to the trackers once it is written.

    They are opened by the first record: a run that is refused at its start leaves none behind.

    Args:
        path: of a run folder that has been created.
        recipe: names the trackers.

    Raises:
        ConfigError: a tracker of the user's own that is not there.
    """

    def __init__(self, path: Path | str, recipe: Recipe) -> None:
        super().__init__(path)
        started = str(self.read_info()["host"]["started"])
        self._builders = find_trackers(recipe, self.path, started=started)
        self._open: list[Background] | None = None
        self._rewards: tuple[int, Mapping[str, tuple[float, ...]]] = (0, {})

    def append_metrics(self, report: StepReport) -> None:
        super().append_metrics(report)
        step, rewards = self._rewards
        for tracker in self._trackers():
            tracker.put(Step(report=report, rewards=rewards if step == report.step else {}))

    def write_rollouts(
        self,
        phase: str,
        step: int,
        groups: Sequence[RolloutGroup],
        advantages: Sequence[float | None],
        *,
        with_ids: bool = False,
    ) -> None:
        super().write_rollouts(phase, step, groups, advantages, with_ids=with_ids)
        if self._builders:
            rollouts = (rollout for group in groups for rollout in group.rollouts)
            self._rewards = step, _rewards(rollouts, advantages)

    def write_evaluation(self, result: EvaluationResult) -> None:
        super().write_evaluation(result)
        for tracker in self._trackers():
            tracker.put(result)

    def close(self) -> None:
        """End the trackers, which may take `CLOSING_SECONDS`; the next record opens them again."""
        close_all(self._open or [])
        self._open = None

    def _trackers(self) -> list[Background]:
        if self._open is None:
            self._open = [Background(name, build) for name, build in self._builders.items()]
        return self._open


def _rewards(
    rollouts: Iterable[Rollout], advantages: Sequence[float | None]
) -> dict[str, tuple[float, ...]]:
    """Of the rollouts that took part: the total, then each component that was scored."""
    values: dict[str, list[float]] = {"total": []}
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        if advantage is None:
            continue
        known = {"total": rollout.reward.total, **rollout.reward.components}
        for name, value in known.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: tuple(found) for name, found in values.items() if found}
