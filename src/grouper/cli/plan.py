"""`grouper plan`: memory and steps of a recipe, and its time if the speed is known."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import progress, show, show_json, table
from grouper.errors import ConfigError, duration, plural

if TYPE_CHECKING:
    from grouper.advice.plan import PhasePlan, RunPlan

EXAMPLES = """
grouper plan demo
grouper plan ./mine.yaml --device cuda model.gradient_checkpointing=true
grouper plan ./mine.yaml --device cuda --nproc 4 parallel=fsdp
grouper plan ./mine.yaml --tokens-per-second 9000 --json
"""


@click.command("plan", cls=Command, examples=EXAMPLES)
@options.recipe
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda", "mps"]),
    help="Device to plan for.  [default: this machine's]",
)
@click.option(
    "--nproc",
    metavar="N",
    type=options.WholeNumber(1),
    help="Number of processes to plan for, one per GPU; memory is that of each.  [default: 1]",
)
@click.option(
    "--tokens-per-second",
    metavar="X",
    type=options.Number(1e-9),
    help="Measured speed, used to estimate times.",
)
@options.as_json
def plan(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    device: str | None,
    nproc: int | None,
    tokens_per_second: float | None,
    as_json: bool,
) -> None:
    """Plan memory and steps without loading weights.

    Prints the memory of every part, the GPUs that RECIPE fits on, and steps; with
    --tokens-per-second also time.

    The network is not used either: shapes come from the model's config.json, which must be in a
    local folder or in the Hub cache. A recipe that makes a new model can be planned as well.
    """
    from grouper.cli.recipe_args import open_recipe

    # Read by the libraries when they are imported.
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    opened = open_recipe(recipe, overrides, runs_here=False)
    if nproc == 1 and opened.parallel == "fsdp":
        raise ConfigError(
            "fsdp splits the weights over several processes, and one was requested",
            where="--nproc",
            fix="Use --nproc 2 or more, or parallel=ddp.",
        )

    with progress().track("planning"):  # importing torch takes as long as the plan
        from grouper.advice.plan import plan_run

        run_plan = plan_run(
            opened, device=device, tokens_per_second=tokens_per_second, processes=nproc or 1
        )
    if as_json:
        show_json(run_plan.as_dict())
    else:
        _show_plan(run_plan, nproc or 1)


def _show_plan(run_plan: RunPlan, processes: int) -> None:
    size, unit = (2**30, "GiB") if run_plan.peak >= 2**30 else (2**20, "MiB")
    # Columns of zeros are left out.
    names = [field.name for field in dataclasses.fields(run_plan.memory[0]) if field.name != "name"]
    used_names = [name for name in names if any(getattr(row, name) for row in run_plan.memory)]
    rows = []
    for memory in run_plan.memory:
        values = [getattr(memory, name) / size for name in (*used_names, "peak")]
        rows.append((memory.name, *(f"{value:.2f}" for value in values)))
    parameters = f"{run_plan.parameters:,} parameters, {run_plan.trainable:,} of them trained"
    place = f"on {run_plan.device}"
    if processes > 1:
        place = f"{place}, in {processes} processes"
    show(f"{parameters}, {place}")
    show("")
    columns = ("part", *(name.replace("_", " ") for name in used_names), "peak")
    title = f"{unit} at the peak"
    if processes > 1:
        title = f"{title} of each process"
    table(columns, rows, title=title, lines=True)
    peak = "The peak is the sum of its row; a chunk of logits is a part of the activations."
    if run_plan.device == "cpu":
        peak += " The process may hold up to half as much again: glibc keeps freed memory."
        peak += f" This machine has {_machine_gib():.1f} GiB."
    show(peak, "")
    first_card = run_plan.cards[0]
    phases = [f"{phase}.tokens_per_micro_batch" for phase in first_card.tokens_per_micro_batch]
    cards = []
    for card in run_plan.cards:
        settings = (*card.tokens_per_micro_batch.values(), card.max_slots)
        largest = ("none" if value is None else f"{value:,}" for value in settings)
        cards.append((f"{card.gib} GB", "yes" if card.fits else "no", *largest))
    columns = ("card", "fits", *phases, "sampling.max_slots")
    table(columns, cards, title="What fits, and the largest settings that do", lines=True)
    show("A setting is never larger than one step can use.")
    show("", *map(_phase_line, run_plan.phases), *(f"Note: {note}" for note in run_plan.notes))


def _machine_gib() -> float:
    from grouper.models.device import machine_memory

    return machine_memory() / 2**30


def _phase_line(phase: PhasePlan) -> str:
    bound = "at most " if phase.name == "grpo" else ""
    line = f"{phase.name}: {bound}{phase.tokens_per_step:,} tokens a step"
    if phase.steps is not None:
        line = f"{line}, {plural(phase.steps, 'step')}, {bound}{phase.tokens:,} tokens"
    if phase.seconds is not None:
        line = f"{line}, about {duration(phase.seconds)}"
    return line
