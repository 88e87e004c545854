"""The run folder as the processes see it that do not write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grouper.evaluation.result import EvaluationResult
from grouper.tracking.run_folder import RunFolder
from grouper.types import RolloutGroup, StepReport

__all__ = ["Onlooker"]


class Onlooker(RunFolder):
    """Reads like any other run folder, and leaves all writing to rank 0."""

    def record_resolved(self, numbers: Mapping[str, int]) -> None:
        pass

    def append_metrics(self, report: StepReport) -> None:
        pass

    def write_rollouts(
        self,
        phase: str,
        step: int,
        groups: Sequence[RolloutGroup],
        advantages: Sequence[float | None],
        *,
        with_ids: bool = False,
    ) -> None:
        pass

    def write_evaluation(self, result: EvaluationResult) -> None:
        pass

    def truncate_to(self, phase: str, step: int) -> None:
        pass

    def discard(self) -> None:
        pass
