"""`curves.png`: one picture that tells a colleague whether a run learned, and what changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grouper.evaluation.compare import label
from grouper.evaluation.evaluate import EvaluationResult
from grouper.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    NICE,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Series,
    compose,
    count_steps,
    draw_line,
    save,
)
from grouper.runs.run_folder import RunFolder
from grouper.types import StepReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HIGH = 22
"""Points above the panels of the first row, where some have a line of words under the title."""
SFT_SHARE = 0.36
"""Width of the SFT part of the accuracy panel: its steps are many and its story is short."""


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
    return save(_figure(_read(run)), path or run.path / "curves.png")


def _read(run: RunFolder) -> _Story:
    reports = run.read_metrics()
    return _Story(
        name=run.path.resolve().name,
        sft=[report for report in reports if report.phase == "sft"],
        grpo=[report for report in reports if report.phase == "grpo"],
        evaluations=[r for r in run.read_evaluations() if math.isfinite(r.accuracy)],
    )


def _figure(story: _Story) -> Figure:
    panels = [_of(panel, story) for has, panel in _PANELS if has(story)]
    return compose(panels, _headline(story))


def _of(panel: Callable[[Axes, _Story], None], story: _Story) -> Callable[[Axes], None]:
    return lambda axes: panel(axes, story)


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


def _rewards(axes: Axes, story: _Story) -> None:
    names = sorted({name for report in story.grpo for name in report.tallies if "reward/" in name})
    colors = {"reward/total": "#222222", "reward/correctness": GREEN, "reward/format": ORANGE}
    others = iter([BLUE, PURPLE, SKY, RED] * (1 + len(names) // 4))
    for name in sorted(names, key=lambda n: (n == "reward/total", n)):
        series = Series.of(story.grpo, name)
        if series:
            color = colors.get(name) or next(others)
            shown = "total (weighted)" if name == "reward/total" else name.removeprefix("reward/")
            draw_line(axes, series, color, shown)
    count_steps(axes, "grpo")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if axes.dataLim.y0 < 0 else 0.0)
    axes.set_ylabel("mean reward of a completion")
    axes.set_title("Reward by component", pad=_HIGH)
    axes.legend(loc="best")


def _groups(axes: Axes, story: _Story) -> None:
    parts = [
        ("all wrong", "groups/all_wrong", RED),
        ("mixed: can teach", "groups/mixed", SKY),
        ("all right", "groups/all_right", GREEN),
    ]
    found = [(name, Series.of(story.grpo, key), color) for name, key, color in parts]
    axes.stackplot(
        found[0][1].steps,
        *(100 * series.smooth for _, series, _ in found),
        labels=[name for name, _, _ in found],
        colors=[color for _, _, color in found],
        alpha=0.75,
        linewidth=0,
    )
    count_steps(axes, "grpo")
    axes.margins(x=0)
    axes.set_ylim(0, 100)
    axes.set_ylabel("prompts of a step (%)")
    axes.set_title("Groups: how many samples are right", pad=_HIGH)
    above = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.98), "ncols": 3}
    axes.legend(**above, handlelength=1, handleheight=1, columnspacing=1.2)


def _lengths(axes: Axes, story: _Story) -> None:
    lengths = Series.of(story.grpo, "completion/tokens")
    cut = Series.of(story.grpo, "completion/truncated")
    draw_line(axes, lengths, PURPLE)
    count_steps(axes, "grpo")
    axes.set_ylim(bottom=0, top=1.12 * float(np.max(lengths.values)))
    axes.set_ylabel("tokens, mean", color=PURPLE)
    if cut and float(np.max(cut.values)) > 0:
        right = axes.twinx()
        draw_line(right, Series(cut.steps, 100 * cut.values), RED)
        right.set_ylim(0, max(10.0, 112 * float(np.max(cut.values))))
        right.set_ylabel("cut off (%)", color=RED)
        right.grid(visible=False)
        axes.set_title("Completion length and cut-off share")
    else:
        axes.set_title("Completion length" + (" (none was cut off)" if cut else ""))


def _entropy(axes: Axes, story: _Story) -> None:
    series = Series.of(story.grpo, "policy/entropy")
    draw_line(axes, series, BLUE)
    count_steps(axes, "grpo")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("nats per token")
    axes.set_title("Policy entropy (0: always the same answer)")


def _sft_loss(axes: Axes, story: _Story) -> None:
    draw_line(axes, Series.of(story.sft, "loss"), ORANGE)
    count_steps(axes, "sft")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("nats per trained token")
    axes.set_title("SFT loss")


def _has_group_mix(story: _Story) -> bool:
    names = ("groups/all_wrong", "groups/mixed", "groups/all_right")
    lengths = {len(Series.of(story.grpo, name).steps) for name in names}
    return len(lengths) == 1 and lengths != {0}


def _has(name: str) -> Callable[[_Story], bool]:
    return lambda story: bool(Series.of(story.grpo, name))


_PANELS: tuple[tuple[Callable[[_Story], bool], Callable[[Axes, _Story], None]], ...] = (
    (lambda story: bool(story.evaluations), _accuracy),
    (_has("reward/total"), _rewards),
    (_has_group_mix, _groups),
    (_has("completion/tokens"), _lengths),
    (_has("policy/entropy"), _entropy),
    (lambda story: bool(Series.of(story.sft, "loss")), _sft_loss),
)
