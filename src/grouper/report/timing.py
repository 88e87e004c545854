"""`times.png`: where the seconds of a run went, and how much of the machine they used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    Lines,
    Reports,
    Series,
    compose,
    count_steps,
    draw_areas,
    save,
)
from grouper.runs.folder import RunFolder
from grouper.runs.progress import TIME_PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Fewer say nothing: in the first ones allocators and kernels settle.
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
    # A step without an update has none to show, and the areas need one value a step each.
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
