"""Panels of curves in the pictures of a run, whatever draws them.

`curves` draws them as PNG, the script of the HTML report as SVG. A run has only the panels for
which it has values.
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
from grouper.runs.records import report_of
from grouper.types import StepReport

Array = npt.NDArray[np.float64]

STYLES: dict[str, dict[str, Any]] = load_table("grouper.report", "style.yaml")
COLORS = STYLES["colors"]
# Up to this many measurements stand alone; more of them are joined by a line.
FEW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The records of a run folder, read once for all pictures of it."""

    folder: RunFolder
    reports: Sequence[StepReport]
    seconds: Sequence[float]
    """Seconds that the run had been running after each of these steps."""
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
        rows = folder.read_metrics_rows()
        for results in later.values():
            results.sort(key=lambda result: (PHASES.index(result.phase), result.step))
        return cls(
            folder=folder,
            reports=[report_of(row) for row in rows],
            seconds=[row.elapsed_s for row in rows],
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

    def clock(self, phase: str) -> Clock:
        """Return the time and the tokens of the steps of a phase."""
        steps = [0]
        seconds = [0.0]
        tokens = [0.0]
        start = 0.0
        for report, elapsed in zip(self.reports, self.seconds, strict=True):
            if report.phase != phase:
                if len(steps) == 1:
                    start = elapsed
                continue
            steps.append(report.step)
            seconds.append(max(seconds[-1], elapsed - start))
            tokens.append(tokens[-1] + tokens_of(report))
        return Clock(steps=steps, seconds=seconds, tokens=tokens)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Time and tokens of a phase at each of its steps, from its beginning, which is step 0."""

    steps: Sequence[int]
    seconds: Sequence[float]
    tokens: Sequence[float]
    """Tokens that SFT trained on, or that GRPO sampled."""

    def thinned(self, most: int) -> dict[str, list[float]]:
        """Return the values at about `most` evenly spaced steps, the last one among them."""
        every = math.ceil(len(self.steps) / most)
        last = len(self.steps) - 1
        places = [*range(0, last, every), last]
        return {
            "steps": [self.steps[place] for place in places],
            "seconds": [round(self.seconds[place], 2) for place in places],
            "tokens": [round(self.tokens[place]) for place in places],
        }


def tokens_of(report: StepReport) -> float:
    """Return the tokens that a step of SFT trained on, or that a step of GRPO sampled.

    0 if that was not recorded.
    """
    for metric in ("completion/tokens", "tokens"):
        tally = report.tallies.get(metric)
        if tally is not None and tally.count:
            total = tally.mean * tally.count
            return total if math.isfinite(total) else 0.0
    return 0.0


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
    joined: bool = False
    """True if a line joins values with intervals: they are measurements of one training, often
    enough to show its course."""
    labels: tuple[str, ...] = ()
    """Name of each value, if it has one."""
    run: str = ""
    """Name of the run, if there are several."""
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
        is_test = split != "validation"
        line = Series(
            name=f"{split} ({100 * CONFIDENCE:g}% interval)",
            color=color,
            steps=np.array(steps, dtype=np.float64),
            values=np.array([100 * result.accuracy for result in split_results]),
            bounds=(bounds[:, 0], bounds[:, 1]),
            joined=not is_test and len(steps) > FEW,
            labels=tuple(label(result.name) for result in split_results) if is_test else (),
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
                line = replace(series, name=name, run=name, color=color, labels=())
                lines.append(line)
    overlays = []
    for (title, _), (panel, lines) in curves.items():
        overlays.append(replace(panel, title=title, series=tuple(lines), stacked=False))
    return overlays


# --- the overview --------------------------------------------------------------------------------

# What the overview shows of a run without held-out problems, by the titles of panels.
_WITHOUT_TEST = ("Loss", "Reward by weighted component")


def overview(runs: Mapping[str, RunView]) -> list[Panel]:
    """Return the panels of the wide chart at the top, one per phase, on one scale.

    They show the accuracy on held-out problems and that of the rollouts; of several runs the
    first alone. Without held-out problems they show the reward, or the loss of SFT.
    """
    panels: list[Panel] = []
    for phase in ("sft", "grpo"):
        lines: list[Series] = []
        for (name, run), color in zip(runs.items(), itertools.cycle(COLORS), strict=False):
            own_lines = _overview_lines(run, phase, is_first=not panels)
            if len(runs) > 1:
                own_lines = own_lines[:1]
                own_lines = [
                    replace(line, name=name, run=name, color=color, labels=()) for line in own_lines
                ]
            lines += own_lines
        if any(line.bounds is not None for line in lines):
            panels.append(
                Panel(
                    title="Accuracy over the run",
                    unit="problems solved (%)",
                    phase=phase,
                    series=tuple(lines),
                )
            )
    if panels:
        return panels
    first = next(iter(runs.values()))
    by_title = {panel.title: panel for panel in panels_of(first)}
    others = [by_title[title] for title in _WITHOUT_TEST if title in by_title]
    return others[-1:]


def _overview_lines(run: RunView, phase: str, *, is_first: bool) -> list[Series]:
    """Return the accuracy on each set of problems, and that of the rollouts.

    The model that a phase started from is left out where the panel of the phase before shows it.
    """
    lines: list[Series] = []
    for panel in _accuracy(run, phase):
        for line in panel.series:
            shown = line if is_first else _without_start(line)
            if shown:
                lines.append(shown)
    lines.sort(key=lambda line: line.joined)
    solved = Series.of(run.of_phase(phase), "solve_rate", "rollouts in training", "gray", 100)
    if solved:
        lines.append(solved)
    return lines


def _without_start(line: Series) -> Series:
    """Leave out the value at step 0."""
    later = line.steps > 0
    bounds = line.bounds
    if bounds is not None:
        bounds = (bounds[0][later], bounds[1][later])
    labels = tuple(name for name, is_kept in zip(line.labels, later, strict=False) if is_kept)
    steps = line.steps[later]
    return replace(line, steps=steps, values=line.values[later], bounds=bounds, labels=labels)
