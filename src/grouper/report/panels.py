"""Panels of curves in the pictures of a run, whatever draws them.

`curves` draws them as PNG, `charts` as SVG for the HTML report. A run has only the panels for which
it has values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from grouper.advice.checks import Finding, Record, find
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.errors import ConfigError, RunFolderError
from grouper.evaluation.compare import label
from grouper.evaluation.result import EvaluationResult
from grouper.evaluation.statistics import CONFIDENCE
from grouper.files import load_table
from grouper.rewards.call import reward_label
from grouper.runs.folder import PHASES, RunFolder
from grouper.types import StepReport

Array = npt.NDArray[np.float64]

STYLES: dict[str, dict[str, Any]] = load_table("grouper.report", "style.yaml")
COLORS = STYLES["colors"]
# Up to this many measurements get an error bar each; more of them share a band.
FEW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The records of a run folder, read once for all pictures of it."""

    folder: RunFolder
    reports: Sequence[StepReport]
    evaluations: Sequence[EvaluationResult]
    """Evaluations of the run itself, by phase and step."""
    later: Mapping[str, Sequence[EvaluationResult]]
    """Problems and settings -> the results of `grouper eval`, each named by its model."""
    recipe: Recipe | None
    trouble: str = ""
    """Reason why there is no recipe."""

    @classmethod
    def of(cls, folder: RunFolder) -> RunView:
        """Read a run, finished or not.

        Raises:
            RunFolderError: it is damaged.
        """
        recipe = None
        trouble = ""
        try:
            recipe = load_recipe(folder.path / "recipe.yaml")
        except ConfigError as error:
            trouble = f"The recipe cannot be read by this version of Grouper ({error.what})."
        later: dict[str, list[EvaluationResult]] = {}
        for path in sorted((folder.path / "eval_runs").glob("*")):
            for result in _measured(RunFolder(path)):
                later.setdefault(result.name, []).append(replace(result, name=path.name))
        for results in later.values():
            results.sort(key=lambda result: (PHASES.index(result.phase), result.step))
        return cls(
            folder=folder,
            reports=folder.read_metrics(),
            evaluations=_measured(folder),
            later=later,
            recipe=recipe,
            trouble=trouble,
        )

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    def of_phase(self, phase: str) -> list[StepReport]:
        """Return the steps of a phase."""
        return [report for report in self.reports if report.phase == phase]

    def findings(self) -> tuple[list[Finding], list[RunFolderError]]:
        """Return the findings of `grouper diagnose`, and the rollouts that it could not read."""
        if self.recipe is None or not self.reports:
            return [], []
        record = Record(
            folder=self.folder,
            recipe=self.recipe,
            sft=self.of_phase("sft"),
            grpo=self.of_phase("grpo"),
            evaluations=self.evaluations,
        )
        return find(record), record.damaged


def _measured(folder: RunFolder) -> list[EvaluationResult]:
    """Return the evaluations of a folder in which at least one problem could be scored."""
    results = folder.read_evaluations()
    return [result for result in results if math.isfinite(result.accuracy)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values over the steps of a phase, without NaN."""

    name: str
    """Name in the legend; empty: the legend needs none."""
    color: str
    """Key of `COLORS`."""
    steps: Array
    values: Array
    bounds: tuple[Array, Array] | None = None
    """Interval of each value. Such values were measured one by one; others are noisy, and drawn
    with their running mean."""
    exact: bool = False
    """True if the values were set, not measured: they need no smoothing."""

    @classmethod
    def of(
        cls, reports: Sequence[StepReport], metric: str, name: str, color: str, scale: float = 1.0
    ) -> Series:
        """Return the mean of a metric, times `scale`, in every step that has it."""
        points = []
        for report in reports:
            if metric not in report.tallies:
                continue
            mean = report.tallies[metric].mean
            if math.isfinite(mean):
                points.append((report.step, scale * mean))
        array = np.asarray(points, dtype=np.float64).reshape(-1, 2)
        return cls(name=name, color=color, steps=array[:, 0], values=array[:, 1])

    def __bool__(self) -> bool:
        return len(self.steps) > 0

    @property
    def smooth(self) -> Array:
        """The running mean over about a tenth of the steps, narrower at both ends."""
        count = len(self.values)
        half_width = 0 if self.exact else count // 20
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        index = np.arange(count)
        start = np.maximum(0, index - half_width)
        end = np.minimum(count, index + half_width + 1)
        means: Array = (sums[end] - sums[start]) / (end - start)
        return means

    def thinned(self, most: int) -> Series:
        """Return at most `most` points, each the mean of some steps at the last one of them."""
        steps_per_point = math.ceil(len(self.steps) / most)
        if steps_per_point <= 1 or self.bounds is not None:
            return self
        starts = np.arange(0, len(self.steps), steps_per_point)
        counts = np.diff([*starts, len(self.steps)])
        values = np.add.reduceat(self.values, starts) / counts
        last_steps = self.steps[starts + counts - 1]
        return replace(self, steps=last_steps, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves over the steps of one phase, in one unit."""

    title: str
    unit: str
    phase: str
    series: tuple[Series, ...]
    stacked: bool = False
    """True if the series lie on top of each other, the first lowest, all of the same steps."""
    costs: bool = False
    """True if the panel is about time and memory, not about learning."""


_ROWS: list[dict[str, Any]] = load_table("grouper.report", "panels.yaml")
# Colors of the rewards and sets of problems that most runs have.
_REWARD_COLORS = {"correctness": "green", "format": "orange"}
_SPLIT_COLORS = {"validation": "blue", "test": "red"}


def panels_of(run: RunView) -> list[Panel]:
    """Return all panels of a run: accuracy and reward first, those about time last."""
    panels: list[Panel] = []
    for phase in ("sft", "grpo"):
        panels += _accuracy(run, phase)
    rewards = tuple(_rewards(run))
    if rewards:
        title = "Reward by weighted component"
        unit = "mean reward of a completion"
        panels.append(Panel(title=title, unit=unit, phase="grpo", series=rewards))
    for row in _ROWS:
        for phase in _phases_of(row):
            panel = _panel(run, phase, row)
            if panel is not None:
                panels.append(panel)
    return panels


def _phases_of(row: Mapping[str, Any]) -> Sequence[str]:
    phases: Sequence[str] = row.get("phases", ["grpo"])
    return phases


def _panel(run: RunView, phase: str, row: Mapping[str, Any]) -> Panel | None:
    """Return the panel of a row of `panels.yaml`, or None if the run has no values for it."""
    series = _lines(run.of_phase(phase), row)
    stacked = row.get("stacked", False)
    if stacked:
        series = _stack(series)
    if not series:
        return None
    title = row["title"]
    if len(_phases_of(row)) > 1:
        title = f"{title}, {label(phase)}"
    return Panel(
        title=title,
        unit=row["unit"],
        phase=phase,
        series=series,
        stacked=stacked,
        costs=row.get("costs", False),
    )


def _lines(reports: Sequence[StepReport], row: Mapping[str, Any]) -> tuple[Series, ...]:
    scale = float(row.get("scale", 1))
    exact = row.get("exact", False)
    lines = []
    for metric, (name, color) in row["curves"].items():
        line = Series.of(reports, metric, name, color, scale)
        if line:
            lines.append(replace(line, exact=exact))
    return tuple(lines)


def _stack(lines: Sequence[Series]) -> tuple[Series, ...]:
    """Extend series to the same steps, with 0 for a missing value, and add shares to the names."""
    if len(lines) < 2:
        return ()
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    filled = []
    for line in lines:
        values = np.zeros(len(steps))
        values[np.searchsorted(steps, line.steps)] = line.values
        filled.append(replace(line, steps=steps, values=values))
    total = sum(float(line.values.sum()) for line in filled) or 1.0
    stacked = []
    for line in filled:
        share = 100 * line.values.sum() / total
        stacked.append(replace(line, name=f"{line.name} {share:.0f}%"))
    return tuple(stacked)


def _rewards(run: RunView) -> Iterator[Series]:
    """Yield each component times its weight and, to be drawn last, their sum."""
    reports = run.of_phase("grpo")
    weights: dict[str, float] = {}
    if run.recipe is not None:
        weights = {reward_label(reward.name): reward.weight for reward in run.recipe.rewards}
    metrics = {name for report in reports for name in report.tallies}
    components = [name.removeprefix("reward/") for name in metrics if name.startswith("reward/")]
    other_colors = itertools.cycle(["blue", "purple", "sky", "red"])
    for name in sorted(components):
        if name == "total":
            continue
        weight = weights.get(name, 1.0)
        curve = name if weight == 1 else f"{weight:g} x {name}"
        color = _REWARD_COLORS.get(name) or next(other_colors)
        series = Series.of(reports, f"reward/{name}", curve, color, weight)
        if weight and series:
            yield series
    total = Series.of(reports, "reward/total", "total", "ink")
    if total:
        yield total


def _accuracy(run: RunView, phase: str) -> Iterator[Panel]:
    """Yield the accuracy on every set of problems in a phase, with the model it started from."""
    results = [result for result in run.evaluations if result.phase == phase]
    other_colors = itertools.cycle(["purple", "orange", "sky", "green"])
    series = []
    for split in sorted({result.split for result in results}):
        color = _SPLIT_COLORS.get(split) or next(other_colors)
        split_results = [result for result in results if result.split == split]
        steps = [result.step for result in split_results]
        start = _start_of(run, phase, split)
        if start is not None:
            split_results.insert(0, start)
            steps.insert(0, 0)
        intervals = [[result.interval.low, result.interval.high] for result in split_results]
        bounds = np.array(intervals) * 100
        line = Series(
            name=f"{split} ({100 * CONFIDENCE:g}% interval)",
            color=color,
            steps=np.array(steps, dtype=np.float64),
            values=np.array([100 * result.accuracy for result in split_results]),
            bounds=(bounds[:, 0], bounds[:, 1]),
        )
        series.append(line)
    if series:
        yield Panel(
            title=f"Held-out accuracy, {label(phase)}",
            unit="problems solved (%)",
            phase=phase,
            series=tuple(series),
        )


def _start_of(run: RunView, phase: str, split: str) -> EvaluationResult | None:
    """Return the last result of an earlier phase on a set of problems, or None."""
    start = None
    for result in run.evaluations:
        is_earlier = PHASES.index(result.phase) < PHASES.index(phase)
        if is_earlier and result.split == split and result.name in PHASES:
            start = result
    return start


def overlaid(runs: Mapping[str, Sequence[Panel]]) -> list[Panel]:
    """Lay the panels of several runs over each other: a panel per curve, a color per run."""
    # (title, phase) -> the panel of the first run, and the curve of each run.
    curves: dict[tuple[str, str], tuple[Panel, list[Series]]] = {}
    for (name, panels), color in zip(runs.items(), itertools.cycle(COLORS), strict=False):
        for panel in panels:
            for series in panel.series:
                curve = series.name
                if panel.stacked:
                    # A stacked series has its share in its name.
                    curve = curve.rpartition(" ")[0]
                title = f"{panel.title}: {curve}" if curve else panel.title
                _, lines = curves.setdefault((title, panel.phase), (panel, []))
                lines.append(replace(series, name=name, color=color))
    overlays = []
    for (title, _), (panel, lines) in curves.items():
        overlays.append(replace(panel, title=title, series=tuple(lines), stacked=False))
    return overlays
