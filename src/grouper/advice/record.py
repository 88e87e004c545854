"""What a run has written down, and the curves that the checks look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.errors import RunFolderError
from grouper.evaluation.result import EvaluationResult
from grouper.tracking.run_folder import RunFolder
from grouper.types import StepReport

__all__ = ["Finding", "Record", "curve", "ends", "mean", "read_record", "span"]

WINDOW = 10
"""Steps at the beginning and the end of a run that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that went wrong."""

    name: str
    phase: str
    what: str
    """One sentence."""
    steps: tuple[int, int]
    """First and last step of the evidence."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers it rests on."""
    fix: str
    """The settings to change."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "steps": list(self.steps), "evidence": dict(self.evidence)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a run has written down."""

    folder: RunFolder
    recipe: Recipe
    sft: Sequence[StepReport]
    grpo: Sequence[StepReport]
    evaluations: Sequence[EvaluationResult]


def read_record(path: Path) -> Record:
    """Read a run folder.

    Raises:
        RunFolderError: it is none, it is damaged, or no step has been done.
        ConfigError: its recipe cannot be read.
    """
    folder = RunFolder(path)
    folder.read_info()
    reports = folder.read_metrics()
    if not reports:
        raise RunFolderError(
            "there is nothing to diagnose: the run has not finished a step",
            where=str(path),
            fix="Continue it with --resume; training.log says how it ended.",
        )
    return Record(
        folder=folder,
        recipe=load_recipe(path / "recipe.yaml"),
        sft=[r for r in reports if r.phase == "sft"],
        grpo=[r for r in reports if r.phase == "grpo"],
        evaluations=folder.read_evaluations(),
    )


def curve(reports: Sequence[StepReport], name: str) -> list[float]:
    """The means of a metric in the steps that had it."""
    found = (r.tallies[name] for r in reports if name in r.tallies)
    return [t.mean for t in found if t.count and math.isfinite(t.mean)]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last steps, which do not overlap."""
    size = max(1, min(WINDOW, len(values) // 2))
    return fmean(values[:size]), fmean(values[-size:])


def span(reports: Sequence[StepReport]) -> tuple[int, int]:
    """First and last step."""
    return reports[0].step, reports[-1].step


def mean(values: Sequence[float]) -> float:
    """The mean, or NaN of nothing."""
    return fmean(values) if values else math.nan
