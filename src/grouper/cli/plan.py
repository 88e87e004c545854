"""`grouper plan`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from grouper.cli.options import open_recipe, output_console, recipe_arguments

if TYPE_CHECKING:
    from rich.table import Table

    from grouper.advice.run_plan import PhasePlan, RunPlan

EXAMPLES = """\b
Examples:
  grouper plan demo
  grouper plan ./mine.yaml --device cuda model.gradient_checkpointing=true
  grouper plan ./mine.yaml --tokens-per-second 9000 --json
  grouper plan ./mine.yaml --like outputs/earlier       times as measured there
"""


@click.command("plan", epilog=EXAMPLES)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda", "mps"]), help="Plan for this, not for this one."
)
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(min=0, min_open=True),
    help="Measured speed, for the times.",
)
@click.option("--like", metavar="RUN", help="A run folder whose steps took as long.")
@click.option("--json", "as_json", is_flag=True, help="Bytes, tokens and seconds as JSON.")
@recipe_arguments
def plan_command(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    device: str | None,
    tokens_per_second: float | None,
    like: str | None,
    as_json: bool,
) -> None:
    """Say what RECIPE takes: memory of every part, what fits on which card, steps and time.

    Loads no weights and uses no network: shapes come from the model's config.json, which must be
    in a local folder or in the Hub cache; a new model is planned as well.
    """
    # Read by the libraries when they are imported.
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    opened = open_recipe(recipe, overrides, runs_here=False)
    from grouper.advice.run_plan import plan_run

    seconds = None if like is None else _measured(like)
    speed = tokens_per_second if like is None else None
    plan = plan_run(opened, device=device, tokens_per_second=speed, seconds_per_step=seconds)
    if as_json:
        click.echo(json.dumps(plan.as_dict(), indent=2))
    else:
        _show(plan)


def _measured(run: str) -> dict[str, float]:
    """Seconds of one step of each phase of a run.

    Raises:
        RunFolderError: it is none, or has not finished a step.
    """
    from grouper.errors import RunFolderError
    from grouper.tracking.run_folder import RunFolder

    folder = RunFolder(Path(run).expanduser())
    folder.read_info()
    reports = folder.read_metrics()
    if not reports:
        raise RunFolderError(
            "there is nothing to take times from: the run has not finished a step",
            where=run,
            fix="Name another run, or give --tokens-per-second.",
        )
    seconds: dict[str, list[float]] = {}
    for report in reports:
        seconds.setdefault(report.phase, []).append(report.mean("time.step"))
    return {phase: sum(values) / len(values) for phase, values in seconds.items()}


COLUMNS = (
    "weights",
    "reference",
    "gradients",
    "optimizer",
    "activations",
    "logits_chunk",
    "cache",
    "sampling_copy",
)


def _show(plan: RunPlan) -> None:
    console = output_console()
    console.print(
        f"{plan.parameters:,} parameters, {plan.trainable:,} of them trained, on {plan.device}"
    )
    console.print()
    console.print(_memory_table(plan))
    peak = "The peak is the sum of its row; a chunk of logits is a part of the activations."
    if plan.device == "cpu":
        peak += " The process may hold up to half as much again: glibc keeps freed memory."
    console.print(peak, highlight=False, soft_wrap=True)
    console.print()
    console.print(_card_table(plan))
    console.print()
    for phase in plan.phases:
        console.print(_phase_line(phase), highlight=False)
    for note in plan.notes:
        console.print(f"Note: {note}", highlight=False)


def _memory_table(plan: RunPlan) -> Table:
    from rich.table import Table

    size, unit = (2**30, "GiB") if plan.peak >= 2**30 else (2**20, "MiB")
    table = Table(title=f"{unit} at the worst moment")
    table.add_column("part")
    # A column without anything in it says nothing.
    shown = [name for name in COLUMNS if any(getattr(part, name) for part in plan.memory)]
    for name in (*shown, "peak"):
        table.add_column(name.replace("_", " "), justify="right")
    for part in plan.memory:
        values = [getattr(part, name) for name in (*shown, "peak")]
        table.add_row(part.name, *(f"{value / size:.2f}" for value in values))
    return table


def _card_table(plan: RunPlan) -> Table:
    from rich.table import Table

    phases = list(plan.cards[0].tokens_per_micro_batch)
    table = Table(title="What fits, and the largest settings that would")
    for name in ("card", "fits", *(f"{p}.tokens_per_micro_batch" for p in phases)):
        table.add_column(name, justify="right")
    table.add_column("sampling.max_slots", justify="right")
    for card in plan.cards:
        fits = "yes" if card.fits else "no"
        settings = (*card.tokens_per_micro_batch.values(), card.max_slots)
        table.add_row(f"{card.gib} GB", fits, *map(_number, settings))
    return table


def _number(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def _phase_line(phase: PhasePlan) -> str:
    bound = "at most " if phase.name == "grpo" else ""
    line = f"{phase.name}: {bound}{phase.tokens_per_step:,} tokens a step"
    if phase.steps is not None:
        line = f"{line}, {phase.steps:,} steps, {bound}{phase.tokens:,} tokens"
    if phase.seconds is not None:
        line = f"{line}, about {_duration(phase.seconds)}"
    return line


def _duration(seconds: float) -> str:
    """For people.

    >>> [_duration(s) for s in (42, 600, 7200, 200_000)]
    ['42 s', '10 min', '2.0 h', '2.3 days']
    """
    for size, unit in ((86_400, "days"), (3600, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
