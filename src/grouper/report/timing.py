"""`times.png`: where the seconds of a run went, and how much of the machine they used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grouper.evaluation.compare import label
from grouper.report.drawing import (
    BLUE,
    GREEN,
    GREY,
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
from grouper.runs.live import TIME_PARTS
from grouper.runs.run_folder import RunFolder
from grouper.types import StepReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEWEST_STEPS = 5
"""Fewer say nothing: in the first ones allocators and kernels settle."""
_COLORS = dict(zip(TIME_PARTS, (PURPLE, SKY, RED, ORANGE, GREY), strict=True))
_SPEEDS = (
    ("sampled", "time.sampled_tokens_per_second", SKY),
    ("trained", "time.trained_tokens_per_second", ORANGE),
)
_UTILISATIONS = (
    ("whole step", "time.mfu", BLUE),
    ("sampling", "time.mfu_sample", GREEN),
    ("update", "time.mfu_update", ORANGE),
)

Reports = Sequence[StepReport]


def draw_times(run: RunFolder, path: Path | None = None) -> Path | None:
    """Draw the split of the steps, their tokens a second and their model FLOP utilisation.

    It is about GRPO; a run without any shows its SFT, which is an update and little else.

    Args:
        run: a run, finished or not.
        path: the PNG to write; `times.png` in the run folder by default.

    Returns:
        The path written; None with fewer than five steps of a phase.

    Raises:
        RunFolderError: the run cannot be read or the picture not written.
    """
    figure = _figure(run.read_metrics(), run.path.resolve().name)
    return None if figure is None else save(figure, path or run.path / "times.png")


def _figure(reports: Reports, name: str) -> Figure | None:
    for phase in ("grpo", "sft"):
        mine = [r for r in reports if r.phase == phase and "time.other" in r.tallies]
        if len(mine) >= FEWEST_STEPS:
            panels: list[Callable[[Axes], None]] = [
                partial(panel, reports=mine, phase=phase) for panel in (_split, _speed, _used)
            ]
            return compose(panels, f"{name}: {_duration(mine)} of {label(phase)} steps")
    return None


def _duration(reports: Reports) -> str:
    seconds = sum(report.tallies["time.step"].mean for report in reports)
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _split(axes: Axes, reports: Reports, phase: str) -> None:
    """Seconds of each part, on top of each other."""
    parts = [part for part in TIME_PARTS if any(f"time.{part}" in r.tallies for r in reports)]
    # A step without an update has none to show, and the areas need one value a step each.
    seconds = {
        part: np.array([_mean(report, f"time.{part}") for report in reports]) for part in parts
    }
    steps = np.array([report.step for report in reports], dtype=np.float64)
    whole = sum(float(values.sum()) for values in seconds.values())
    axes.stackplot(
        steps,
        *(Series(steps, values).smooth for values in seconds.values()),
        labels=[f"{p} {100 * values.sum() / whole:.0f}%" for p, values in seconds.items()],
        colors=[_COLORS[part] for part in parts],
        alpha=0.8,
        linewidth=0,
    )
    count_steps(axes, phase)
    axes.margins(x=0)
    axes.set_ylim(bottom=0, top=1.3 * float(axes.dataLim.y1))
    axes.set_ylabel("seconds")
    axes.set_title(f"Where the seconds of {label(phase)} go")
    axes.legend(loc="upper left", ncols=3, handlelength=1, handleheight=1, columnspacing=1.2)


def _mean(report: StepReport, name: str) -> float:
    return report.tallies[name].mean if name in report.tallies else 0.0


def _lines(
    axes: Axes, reports: Reports, phase: str, names: Sequence[tuple[str, str, str]], scale: float
) -> None:
    drawn = 0
    for name, metric, color in names:
        found = Series.of(reports, metric)
        if found:
            draw_line(axes, Series(found.steps, scale * found.values), color, name)
            drawn += 1
    count_steps(axes, phase)
    axes.set_ylim(bottom=0, top=1.3 * float(axes.dataLim.y1) if drawn else 1)
    if drawn:
        axes.legend(loc="upper left", ncols=3)


def _speed(axes: Axes, reports: Reports, phase: str) -> None:
    _lines(axes, reports, phase, _SPEEDS, 1.0)
    axes.set_ylabel("tokens per second of that part")
    axes.set_title("Speed")


def _used(axes: Axes, reports: Reports, phase: str) -> None:
    _lines(axes, reports, phase, _UTILISATIONS, 100.0)
    axes.set_ylabel("% of the device's matrix rate")
    axes.set_title("Model FLOP utilisation")
