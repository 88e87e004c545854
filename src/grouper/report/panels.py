"""What the pictures of a run show: panels of curves, whatever draws them.

`curves` draws them as PNG, `charts` as SVG for the HTML report. A panel is there where the run has
something to show in it.
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
from grouper.files import table
from grouper.rewards.calling import reward_label
from grouper.runs.folder import PHASES, RunFolder
from grouper.types import StepReport

Array = npt.NDArray[np.float64]

STYLES: dict[str, dict[str, Any]] = table("grouper.report", "style.yaml")
COLORS = STYLES["colors"]
# With so few measurements each gets an error bar; more of them share a band.
FEW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What a run folder holds, read once for everything that is drawn of it."""

    folder: RunFolder
    reports: Sequence[StepReport]
    evaluations: Sequence[EvaluationResult]
    """Of the run itself, by phase and step."""
    later: Mapping[str, Sequence[EvaluationResult]]
    """Problems and settings -> what `grouper eval` measured with them, each named by its model."""
    recipe: Recipe | None
    trouble: str = ""
    """Why there is no recipe."""

    @classmethod
    def of(cls, folder: RunFolder) -> RunView:
        """Read a run, finished or not.

        Raises:
            RunFolderError: it is damaged.
        """
        recipe, trouble = None, ""
        try:
            recipe = load_recipe(folder.path / "recipe.yaml")
        except ConfigError as error:
            trouble = f"The recipe cannot be read by this version of Grouper ({error.what})."
        later: dict[str, list[EvaluationResult]] = {}
        for place in sorted((folder.path / "eval_runs").glob("*")):
            for found in _measured(RunFolder(place)):
                later.setdefault(found.name, []).append(replace(found, name=place.name))
        return cls(
            folder=folder,
            reports=folder.read_metrics(),
            evaluations=_measured(folder),
            later={
                name: sorted(results, key=lambda r: (PHASES.index(r.phase), r.step))
                for name, results in later.items()
            },
            recipe=recipe,
            trouble=trouble,
        )

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    def of_phase(self, phase: str) -> list[StepReport]:
        """The steps of a phase."""
        return [report for report in self.reports if report.phase == phase]

    def findings(self) -> tuple[list[Finding], list[RunFolderError]]:
        """What `grouper diagnose` finds, and the rollouts that it could not read."""
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
    """The evaluations of a folder in which something could be scored."""
    return [result for result in folder.read_evaluations() if math.isfinite(result.accuracy)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values over the steps of a phase, NaN nowhere."""

    name: str
    """In the legend; empty: none is needed."""
    color: str
    """One of `COLORS`."""
    steps: Array
    values: Array
    bounds: tuple[Array, Array] | None = None
    """The interval of each value. Such values were measured one by one; others are noisy, and drawn
    with their running mean."""
    exact: bool = False
    """Set, not measured: there is nothing to smooth."""

    @classmethod
    def of(
        cls, reports: Sequence[StepReport], metric: str, name: str, color: str, scale: float = 1.0
    ) -> Series:
        """The mean of a metric in every step that has it."""
        found = [
            (report.step, scale * report.tallies[metric].mean)
            for report in reports
            if metric in report.tallies and math.isfinite(report.tallies[metric].mean)
        ]
        table = np.asarray(found, dtype=np.float64).reshape(-1, 2)
        return cls(name=name, color=color, steps=table[:, 0], values=table[:, 1])

    def __bool__(self) -> bool:
        return len(self.steps) > 0

    @property
    def smooth(self) -> Array:
        """Running mean over about a tenth of the steps, narrower at both ends."""
        half = 0 if self.exact else len(self.values) // 20
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        index = np.arange(len(self.values))
        low, high = np.maximum(0, index - half), np.minimum(len(self.values), index + half + 1)
        means: Array = (sums[high] - sums[low]) / (high - low)
        return means

    def thinned(self, most: int) -> Series:
        """At most so many points: each the mean of neighbouring steps, at the last one of them."""
        size = -(-len(self.steps) // most)
        if size <= 1 or self.bounds is not None:
            return self
        starts = np.arange(0, len(self.steps), size)
        counts = np.diff([*starts, len(self.steps)])
        values = np.add.reduceat(self.values, starts) / counts
        return replace(self, steps=self.steps[starts + counts - 1], values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves over the steps of one phase, in one unit."""

    title: str
    unit: str
    phase: str
    series: tuple[Series, ...]
    stacked: bool = False
    """Drawn on top of each other, from the lowest to the highest, all of the same steps."""
    costs: bool = False
    """About time and memory, not about what was learned."""


_ROWS: list[dict[str, Any]] = table("grouper.report", "panels.yaml")


def panels_of(run: RunView) -> list[Panel]:
    """All panels of a run: accuracy and reward first, those about time last."""
    found = [panel for phase in ("sft", "grpo") for panel in _accuracy(run, phase)]
    if rewards := tuple(_rewards(run)):
        title, unit = "Reward by weighted component", "mean reward of a completion"
        found.append(Panel(title=title, unit=unit, phase="grpo", series=rewards))
    for row in _ROWS:
        phases, stacked = row.get("phases", ["grpo"]), row.get("stacked", False)
        for phase in phases:
            series = _lines(run.of_phase(phase), row)
            series = _stack(series) if stacked else series
            title = row["title"] if len(phases) == 1 else f"{row['title']}, {label(phase)}"
            if series:
                found.append(
                    Panel(
                        title=title,
                        unit=row["unit"],
                        phase=phase,
                        series=series,
                        stacked=stacked,
                        costs=row.get("costs", False),
                    )
                )
    return found


def _lines(reports: Sequence[StepReport], row: Mapping[str, Any]) -> tuple[Series, ...]:
    scale = float(row.get("scale", 1))
    found = (
        Series.of(reports, metric, named[0], named[1], scale)
        for metric, named in row["curves"].items()
    )
    exact = row.get("exact", False)
    return tuple(replace(series, exact=exact) for series in found if series)


def _stack(lines: Sequence[Series]) -> tuple[Series, ...]:
    """All of the same steps; a part that a step did not have is 0 there. Names have its share."""
    if len(lines) < 2:
        return ()
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    filled = []
    for line in lines:
        values = np.zeros(len(steps))
        values[np.searchsorted(steps, line.steps)] = line.values
        filled.append(replace(line, steps=steps, values=values))
    whole = sum(float(line.values.sum()) for line in filled) or 1.0
    return tuple(
        replace(line, name=f"{line.name} {100 * line.values.sum() / whole:.0f}%") for line in filled
    )


def _rewards(run: RunView) -> Iterator[Series]:
    """Each component times its weight and, drawn last, their sum."""
    reports = run.of_phase("grpo")
    rewards = () if run.recipe is None else run.recipe.rewards
    weights = {reward_label(reward.name): reward.weight for reward in rewards}
    metrics = {name for report in reports for name in report.tallies if name[:7] == "reward/"}
    known = {"correctness": "green", "format": "orange"}
    others = itertools.cycle(["blue", "purple", "sky", "red"])
    for name in sorted(metric[7:] for metric in metrics - {"reward/total"}):
        weight = weights.get(name, 1.0)
        shown = name if weight == 1 else f"{weight:g} x {name}"
        color = known.get(name) or next(others)
        if weight and (series := Series.of(reports, f"reward/{name}", shown, color, weight)):
            yield series
    if total := Series.of(reports, "reward/total", "total", "ink"):
        yield total


def _accuracy(run: RunView, phase: str) -> Iterator[Panel]:
    """Every set of problems that was measured in a phase, with what the phase started from."""
    results = [r for r in run.evaluations if r.phase == phase]
    earlier = [r for r in run.evaluations if PHASES.index(r.phase) < PHASES.index(phase)]
    others = itertools.cycle(["purple", "orange", "sky", "green"])
    series = []
    for split in sorted({r.split for r in results}):
        start = [(0, r) for r in earlier if r.split == split and r.name in PHASES][-1:]
        points = [*start, *((r.step, r) for r in results if r.split == split)]
        color = {"validation": "blue", "test": "red"}.get(split) or next(others)
        intervals = np.array([[r.interval.low, r.interval.high] for _, r in points]) * 100
        series.append(
            Series(
                name=f"{split} ({100 * CONFIDENCE:g}% interval)",
                color=color,
                steps=np.array([step for step, _ in points], dtype=np.float64),
                values=np.array([100 * r.accuracy for _, r in points]),
                bounds=(intervals[:, 0], intervals[:, 1]),
            )
        )
    if series:
        yield Panel(
            title=f"Held-out accuracy, {label(phase)}",
            unit="problems solved (%)",
            phase=phase,
            series=tuple(series),
        )


def overlaid(runs: Mapping[str, Sequence[Panel]]) -> list[Panel]:
    """The panels of several runs as one: a panel of each curve, with a colour per run."""
    lines: dict[tuple[str, str], tuple[Panel, list[Series]]] = {}
    colors = dict(zip(runs, itertools.cycle(COLORS), strict=False))
    for run, panels in runs.items():
        for panel in panels:
            for series in panel.series:
                # Without the share that a stacked series has in its name.
                curve = series.name.rpartition(" ")[0] if panel.stacked else series.name
                title = f"{panel.title}: {curve}" if curve else panel.title
                mine = replace(series, name=run, color=colors[run])
                lines.setdefault((title, panel.phase), (panel, []))[1].append(mine)
    return [
        replace(panel, title=title, series=tuple(found), stacked=False)
        for (title, _), (panel, found) in lines.items()
    ]
