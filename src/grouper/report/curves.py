"""The pictures of a run: `curves.png`, whether it learned and what changed, and `times.png`.

Both are pages of panels. A panel is drawn where the run has something to show in it.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from grouper.evaluation.compare import label
from grouper.evaluation.result import EvaluationResult
from grouper.files import write_atomic
from grouper.runs.folder import RunFolder
from grouper.runs.progress import TIME_PARTS
from grouper.types import StepReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]
Reports = Sequence[StepReport]

# Okabe and Ito's palette, distinguishable with every common kind of colour blindness.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#6B6B6B"
_STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9A9A9A",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
}
# Distances between ticks, times a power of ten.
NICE = [1, 2, 5, 10]


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one phase: its mean in every step that has it."""

    steps: Array
    values: Array

    @classmethod
    def of(cls, reports: Reports, name: str, scale: float = 1.0) -> Series:
        found = [
            (report.step, scale * report.tallies[name].mean)
            for report in reports
            if name in report.tallies and math.isfinite(report.tallies[name].mean)
        ]
        table = np.asarray(found, dtype=np.float64).reshape(-1, 2)
        return cls(table[:, 0], table[:, 1])

    def __bool__(self) -> bool:
        return len(self.steps) > 0

    @property
    def smooth(self) -> Array:
        """Running mean over about a tenth of the steps, narrower at both ends."""
        half = len(self.values) // 20
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        index = np.arange(len(self.values))
        low, high = np.maximum(0, index - half), np.minimum(len(self.values), index + half + 1)
        means: Array = (sums[high] - sums[low]) / (high - low)
        return means


def draw_line(axes: Axes, series: Series, color: str, name: str | None = None) -> None:
    """Every step faintly, their running mean clearly."""
    axes.plot(series.steps, series.values, color=color, alpha=0.25, linewidth=1)
    marker = "o" if len(series.steps) == 1 else None
    axes.plot(series.steps, series.smooth, color=color, label=name, marker=marker)


def draw_areas(axes: Axes, parts: Sequence[tuple[str, Series, str]], **legend: Any) -> None:
    """Running means on top of each other.

    Args:
        axes: where.
        parts: (name, series, colour) from the lowest to the highest, all of the same steps.
        legend: its place, as matplotlib takes it.
    """
    axes.stackplot(
        parts[0][1].steps,
        *(series.smooth for _, series, _ in parts),
        labels=[name for name, _, _ in parts],
        colors=[color for _, _, color in parts],
        alpha=0.8,
        linewidth=0,
    )
    axes.margins(x=0)
    axes.legend(**legend, ncols=3, handlelength=1, handleheight=1, columnspacing=1.2)


def count_steps(axes: Axes, phase: str) -> None:
    """Name and tick the horizontal axis in whole steps of a phase."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=NICE))
    axes.set_xlabel(f"{label(phase)} step")
    axes.margins(x=0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A panel of metrics, as lines over the steps of a phase."""

    title: str
    unit: str
    metrics: Sequence[tuple[str, str, str | None]]
    """(metric, colour, name in the legend), as far as the steps have them."""
    phase: str = "grpo"
    scale: float = 1.0
    pad: float | None = None
    """Points above the panel; left out: as always."""

    def draw(self, axes: Axes, reports: Reports) -> None:
        for metric, color, name in self.metrics:
            if found := Series.of(reports, metric, self.scale):
                draw_line(axes, found, color, name)
        count_steps(axes, self.phase)
        if not axes.lines:
            axes.set_ylim(0, 1)
        elif axes.dataLim.y0 >= 0:
            axes.set_ylim(bottom=0)
        axes.set_ylabel(self.unit)
        axes.set_title(self.title, pad=self.pad)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")


def compose(panels: Sequence[Callable[[Axes], None]], headline: str) -> Figure:
    """A page of panels, at most three in a row, or a note that there are none."""
    # Half a second of imports that only a picture needs; no pyplot, so no global state.
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(3, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    with mpl.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.04)
        figure = Figure(figsize=(4.6 * columns + 0.4, 3.3 * rows + 0.7), layout=layout)
        FigureCanvasAgg(figure)
        for place, panel in enumerate(panels, start=1):
            panel(figure.add_subplot(rows, columns, place))
        if not panels:
            figure.text(0.5, 0.4, "Nothing has been recorded yet.", ha="center")
        figure.suptitle(headline, x=0.012, ha="left", fontsize=13, fontweight="bold")
    return figure


def _save(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG and return its path.

    Raises:
        RunFolderError: it cannot be written.
    """
    picture = io.BytesIO()
    # Without the version of matplotlib inside, equal runs give equal pictures.
    figure.savefig(picture, format="png", dpi=130, metadata={"Software": None})
    write_atomic(path, picture.getvalue())
    return path


# --- curves.png -----------------------------------------------------------------------------------

# Points above the panels of the first row, where some have a line of words under the title.
_HIGH = 22
# Width of the SFT part of the accuracy panel: its steps are many and there is little to see.
SFT_SHARE = 0.36


@dataclass(frozen=True, slots=True)
class _Story:
    """What a run folder holds, sorted for drawing."""

    name: str
    sft: Sequence[StepReport]
    grpo: Sequence[StepReport]
    evaluations: Sequence[EvaluationResult]


def draw_curves(run: RunFolder, path: Path | None = None) -> Path:
    """Draw what the run folder holds so far; parts that are missing are left out.

    Args:
        run: a run, finished or not.
        path: the PNG to write; `curves.png` in the run folder by default.

    Returns:
        The path written.

    Raises:
        RunFolderError: the run cannot be read or the picture not written.
    """
    return _save(_curves(_read(run)), path or run.path / "curves.png")


def _read(run: RunFolder) -> _Story:
    reports = run.read_metrics()
    return _Story(
        name=run.path.resolve().name,
        sft=[report for report in reports if report.phase == "sft"],
        grpo=[report for report in reports if report.phase == "grpo"],
        evaluations=[r for r in run.read_evaluations() if math.isfinite(r.accuracy)],
    )


def _curves(story: _Story) -> Figure:
    return compose(list(_panels(story)), _headline(story))


def _headline(story: _Story) -> str:
    test = _of_split(story, "test")
    if not test:
        return story.name
    path = " → ".join(f"{label(r.name)} {100 * r.accuracy:.0f}%" for r in test)
    return f"{story.name}: {path} of {test[-1].overall.problems} test problems solved"


def _of_split(story: _Story, split: str) -> list[EvaluationResult]:
    return [result for result in story.evaluations if result.split == split]


class _Timeline:
    """Both phases on one axis, each stretched to a readable width and ticked in its own steps."""

    def __init__(self, story: _Story) -> None:
        self.last = {
            phase: max(
                [report.step for report in reports]
                + [r.step for r in story.evaluations if r.phase == phase],
                default=0,
            )
            for phase, reports in (("sft", story.sft), ("grpo", story.grpo))
        }
        both = all(self.last.values())
        self.border = SFT_SHARE if both else float(self.last["sft"] > 0)

    def x(self, phase: str, step: int) -> float:
        if phase == "base":
            return 0.0
        low, high = self.span(phase)
        return low + (high - low) * step / max(1, self.last[phase])

    def span(self, phase: str) -> tuple[float, float]:
        return (0.0, self.border) if phase == "sft" else (self.border, 1.0)

    def dress(self, axes: Axes) -> None:
        """Ticks, names and the border of the phases."""
        from matplotlib.ticker import MaxNLocator

        ticks: list[tuple[float, str]] = []
        for phase, last in self.last.items():
            if not last:
                continue
            low, high = self.span(phase)
            locator = MaxNLocator(nbins=3 if high - low < 0.5 else 6, integer=True, steps=NICE)
            inside = [int(t) for t in locator.tick_values(0, last) if 0 <= t <= last]
            ticks += [(self.x(phase, t), str(t)) for t in inside if t > 0 or low == 0]
            axes.text(
                (low + high) / 2,
                1.0,
                f"{label(phase)} steps",
                ha="center",
                va="bottom",
                color=GREY,
                transform=axes.get_xaxis_transform(),
            )
        if 0 < self.border < 1:
            axes.axvspan(0, self.border, color="#F5F5F5", zorder=0)
            axes.axvline(self.border, color="#BBBBBB", linewidth=1, zorder=1)
        axes.set_xticks([t for t, _ in ticks], [text for _, text in ticks])
        axes.set_xlim(-0.03, 1.07)
        axes.grid(axis="x", visible=False)


def _accuracy(axes: Axes, story: _Story) -> None:
    timeline = _Timeline(story)
    confidence = f"{100 * story.evaluations[0].confidence:g}%"
    drawn = False
    for phase in ("sft", "grpo"):
        points = [r for r in _of_split(story, "validation") if r.phase == phase]
        if not points:
            continue
        x = [timeline.x(r.phase, r.step) for r in points]
        low = [100 * r.interval.low for r in points]
        high = [100 * r.interval.high for r in points]
        axes.fill_between(x, low, high, color=BLUE, alpha=0.18, linewidth=0)
        name = None if drawn else f"validation ({confidence} band)"
        axes.plot(x, [100 * r.accuracy for r in points], color=BLUE, marker="o", ms=3, label=name)
        drawn = True
    test = _of_split(story, "test")
    if test:
        x = [timeline.x(r.phase, r.step) for r in test]
        y = [100 * r.accuracy for r in test]
        errors = [
            [100 * (r.accuracy - r.interval.low) for r in test],
            [100 * (r.interval.high - r.accuracy) for r in test],
        ]
        axes.errorbar(
            x,
            y,
            yerr=errors,
            fmt="D",
            ms=6,
            color=RED,
            capsize=3,
            clip_on=False,
            zorder=5,
            label=f"test ({confidence})",
        )
        if not drawn:
            axes.plot(x, y, color=RED, linewidth=1, linestyle=":", zorder=1)
        for result, at in zip(test, x, strict=True):
            _name_point(axes, result, at)
    timeline.dress(axes)
    axes.set_ylim(0, 104)
    axes.set_ylabel("problems solved (%)")
    axes.set_title("Held-out accuracy", pad=_HIGH)
    axes.legend(loc="lower right")


def _name_point(axes: Axes, result: EvaluationResult, x: float) -> None:
    """The test result in words, beside its point and off the curve, which mostly rises."""
    y = 100 * result.accuracy
    below = y > 85
    edge = 100 * (result.interval.low if below else result.interval.high)
    axes.annotate(
        f"{label(result.name)} {y:.0f}%",
        (x, edge),
        xytext=(0 if x < 0.1 or x > 0.9 else -6, -5 if below else 5),
        textcoords="offset points",
        ha="left" if x < 0.1 else "right",
        va="top" if below else "bottom",
        fontweight="bold",
        color=RED,
    )


def _rewards(story: _Story) -> Lines:
    """The components and, drawn last, their weighted sum."""
    names = sorted({name for report in story.grpo for name in report.tallies if "reward/" in name})
    names.sort(key="reward/total".__eq__)
    colors = {"reward/total": "#222222", "reward/correctness": GREEN, "reward/format": ORANGE}
    others = itertools.cycle([BLUE, PURPLE, SKY, RED])
    return Lines(
        title="Reward by component",
        unit="mean reward of a completion",
        metrics=[
            (
                name,
                colors.get(name) or next(others),
                "total (weighted)" if name == "reward/total" else name.removeprefix("reward/"),
            )
            for name in names
        ],
        pad=_HIGH,
    )


_GROUPS = (
    ("all wrong", "groups/all_wrong", RED),
    ("mixed: can teach", "groups/mixed", SKY),
    ("all right", "groups/all_right", GREEN),
)


def _groups(axes: Axes, story: _Story) -> None:
    parts = [(name, Series.of(story.grpo, metric, 100), color) for name, metric, color in _GROUPS]
    count_steps(axes, "grpo")
    draw_areas(axes, parts, loc="lower left", bbox_to_anchor=(-0.02, 0.98))
    axes.set_ylim(0, 100)
    axes.set_ylabel("prompts of a step (%)")
    axes.set_title("Groups: how many samples are right", pad=_HIGH)


def _lengths(axes: Axes, story: _Story) -> None:
    cut = Series.of(story.grpo, "completion/truncated", 100)
    some = bool(cut) and float(np.max(cut.values)) > 0
    title = "Completion length" + (" (none was cut off)" if cut else "")
    Lines(
        title="Completion length and cut-off share" if some else title,
        unit="tokens, mean",
        metrics=[("completion/tokens", PURPLE, None)],
    ).draw(axes, story.grpo)
    if some:
        axes.yaxis.label.set_color(PURPLE)
        right = axes.twinx()
        draw_line(right, cut, RED)
        right.set_ylim(0, max(10.0, 1.12 * float(np.max(cut.values))))
        right.set_ylabel("cut off (%)", color=RED)
        right.grid(visible=False)


_ENTROPY = Lines(
    title="Policy entropy (0: always the same answer)",
    unit="nats per token",
    metrics=[("policy/entropy", BLUE, None)],
)
_SFT_LOSS = Lines(
    title="SFT loss", unit="nats per trained token", metrics=[("loss", ORANGE, None)], phase="sft"
)


def _panels(story: _Story) -> Iterator[Callable[[Axes], None]]:
    """Those for which there is something to draw."""
    if story.evaluations:
        yield partial(_accuracy, story=story)
    if Series.of(story.grpo, "reward/total"):
        yield partial(_rewards(story).draw, reports=story.grpo)
    lengths = {len(Series.of(story.grpo, metric).steps) for _, metric, _ in _GROUPS}
    if len(lengths) == 1 and lengths != {0}:
        yield partial(_groups, story=story)
    if Series.of(story.grpo, "completion/tokens"):
        yield partial(_lengths, story=story)
    for panel, reports in ((_ENTROPY, story.grpo), (_SFT_LOSS, story.sft)):
        if Series.of(reports, panel.metrics[0][0]):
            yield partial(panel.draw, reports=reports)


# --- times.png ------------------------------------------------------------------------------------

# Fewer steps mean little: in the first ones allocators and kernels settle.
FEWEST_STEPS = 5
_COLORS = dict(zip(TIME_PARTS, (PURPLE, SKY, RED, ORANGE, GREY), strict=True))
_SPEED = Lines(
    title="Speed",
    unit="tokens per second of that part",
    metrics=(
        ("time.sampled_tokens_per_second", SKY, "sampled"),
        ("time.trained_tokens_per_second", ORANGE, "trained"),
    ),
)
_USED = Lines(
    title="Model FLOP utilisation",
    unit="% of the device's matrix rate",
    metrics=(
        ("time.mfu", BLUE, "whole step"),
        ("time.mfu_sample", GREEN, "sampling"),
        ("time.mfu_update", ORANGE, "update"),
    ),
    scale=100.0,
)


def draw_times(run: RunFolder, path: Path | None = None) -> Path | None:
    """Draw the split of the steps, their tokens per second and their model FLOP utilisation.

    It is about GRPO; a run without any shows its SFT, which is an update and little else.

    Args:
        run: a run, finished or not.
        path: the PNG to write; `times.png` in the run folder by default.

    Returns:
        The path written; None with fewer than five steps of a phase.

    Raises:
        RunFolderError: the run cannot be read or the picture not written.
    """
    figure = _times(run.read_metrics(), run.path.resolve().name)
    return None if figure is None else _save(figure, path or run.path / "times.png")


def _times(reports: Reports, name: str) -> Figure | None:
    for phase in ("grpo", "sft"):
        mine = [r for r in reports if r.phase == phase and "time.other" in r.tallies]
        if len(mine) >= FEWEST_STEPS:
            lines = (replace(panel, phase=phase) for panel in (_SPEED, _USED))
            panels: list[Callable[[Axes], None]] = [
                partial(_split, reports=mine, phase=phase),
                *(partial(panel.draw, reports=mine) for panel in lines),
            ]
            return compose(panels, f"{name}: {_duration(mine)} of {label(phase)} steps")
    return None


def _duration(reports: Reports) -> str:
    seconds = sum(report.mean("time.step") for report in reports)
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _split(axes: Axes, reports: Reports, phase: str) -> None:
    """Seconds of each part, on top of each other."""
    steps = np.array([report.step for report in reports], dtype=np.float64)
    # A step without an update has no time of it, but areas need one value per step.
    seconds = {
        part: np.array([r.mean(name) if name in r.tallies else 0.0 for r in reports])
        for part, name in ((part, f"time.{part}") for part in TIME_PARTS)
        if any(name in r.tallies for r in reports)
    }
    whole = sum(float(values.sum()) for values in seconds.values())
    count_steps(axes, phase)
    parts = [
        (f"{part} {100 * values.sum() / whole:.0f}%", Series(steps, values), _COLORS[part])
        for part, values in seconds.items()
    ]
    draw_areas(axes, parts, loc="upper left")
    axes.set_ylim(bottom=0, top=1.3 * float(axes.dataLim.y1))
    axes.set_ylabel("seconds")
    axes.set_title(f"Where the seconds of {label(phase)} go")
