"""`curves.png`: one picture that tells a colleague whether a run learned, and what changed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grouper.evaluation.compare import label
from grouper.evaluation.result import EvaluationResult
from grouper.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    NICE,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Lines,
    Series,
    compose,
    count_steps,
    draw_areas,
    draw_line,
    save,
)
from grouper.runs.folder import RunFolder
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
