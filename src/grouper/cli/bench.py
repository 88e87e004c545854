"""`grouper bench`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

from grouper.cli.options import (
    chosen_model,
    dry_run_option,
    model_option,
    models_not_here,
    open_recipe,
    output_console,
    quiet_option,
    recipe_arguments,
    run_of,
    show_plan,
)
from grouper.config.schema import Recipe
from grouper.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from grouper.advice.measuring import Bench

EXAMPLES = """\b
Examples:
  grouper bench demo
  grouper bench ./mine.yaml --completion-tokens 256     figures that do not depend on the model
  grouper bench outputs/demo --steps 20 threads=2       the model its GRPO starts from
  grouper bench ./mine.yaml --json > before.json        to compare with another machine or setting

\b
Reading the table:
  prefill, decode   the prompts go through the model; then a token at a time
  grade             waiting for grades and rewards after the last completion
  update            forward, backward and optimizer
  other             drawing problems, writing rollouts
  tok/s             of that part: sampled tokens over prefill and decode, trained over update
  MFU               model FLOPs over what the device does in large matrix products
  no kernels        the median without Grouper's own kernels
"""


@click.command("bench", epilog=EXAMPLES)
@model_option
@click.option(
    "--completion-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Make every completion N tokens long. Left out: as long as the model makes them.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Steps to measure."
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Steps before them that do not count.",
)
@click.option(
    "--plain/--no-plain",
    default=True,
    show_default=True,
    help="Measure as many steps without Grouper's kernels, for a column of their own.",
)
@click.option("--json", "as_json", is_flag=True, help="All figures as JSON.")
@dry_run_option
@quiet_option
@recipe_arguments
def bench_command(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    completion_tokens: int | None,
    steps: int,
    warmup: int,
    plain: bool,
    as_json: bool,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Measure GRPO steps of RECIPE (a recipe or a run folder) on this machine: where the seconds
    go, tokens per second, utilisation, peak memory, and the hours that the recipe would take.

    Nothing is left behind: the steps are taken in a temporary folder. Every group is given a
    signal, so that the update has all its rows even where the model is untrained; weights stay
    what they are.

    An untrained model rarely stops by itself. To compare machines or settings, give all
    completions one length with --completion-tokens.
    """
    opened = open_recipe(recipe, overrides)
    _check_alone()
    subject = chosen_model(model, opened, run_of(recipe, opened))
    if dry_run:
        _dry_run(opened, subject, warmup, steps)
        return
    from grouper.advice.measuring import bench
    from grouper.tracking.live import Progress, setup_logging

    progress = Progress(quiet=quiet)
    setup_logging(None, console=progress.console)
    seen = bench(
        opened,
        model=subject,
        warmup=warmup,
        steps=steps,
        completion_tokens=completion_tokens,
        plain=plain,
        progress=progress,
    )
    if as_json:
        click.echo(json.dumps(seen.as_dict(), indent=2))
    else:
        _show(seen)


def _check_alone() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "bench measures one process",
            where="torchrun",
            fix="Call it without torchrun; a run of several processes has the same figures in "
            "metrics.jsonl, under time.*.",
        )


def _dry_run(recipe: Recipe, model: str | None, warmup: int, steps: int) -> None:
    samples = recipe.grpo.prompts_per_step * recipe.grpo.group_size
    subject = model or "a new random model"
    unchecked = [
        *([] if model is None else models_not_here(recipe, model)),
        "the data and the rewards",
    ]
    sizes = [f"{subject}: {warmup} + {steps} steps of {samples} completions"]
    show_plan(recipe, sizes, unchecked=unchecked)


def _show(seen: Bench) -> None:
    console = output_console()
    console.print(
        f"{seen.model}: {seen.parameters:,} parameters on {seen.device}, "
        f"{_count(seen.threads, 'thread')}; "
        f"large {seen.dtype} products run at {_flops(seen.matrix_rate)}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_workload(seen), highlight=False, soft_wrap=True)
    console.print()
    console.print(_table(seen))
    of_what = "in the whole process"
    if seen.memory_bytes is not None:
        of_what = f"of {seen.memory_bytes / 2**30:.0f} GiB on the GPU"
    console.print(f"Peak memory: {seen.peak_bytes / 2**30:.2f} GiB {of_what}", highlight=False)
    if seen.token_limit is not None:
        console.print(
            f"Memory ran out: slices have had at most {seen.token_limit:,} tokens since. Set "
            f"grpo.tokens_per_micro_batch={seen.token_limit} to begin there.",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"The recipe's {seen.recipe_steps:,} GRPO steps: {_duration(seen.hours)}, evaluations and "
        "checkpoints not counted",
        highlight=False,
        soft_wrap=True,
    )


def _workload(seen: Bench) -> str:
    grpo, tokens = seen.recipe.grpo, seen.spread("completion/tokens")
    length = f" of {tokens['median']:.0f} tokens" if tokens else ""
    forced = "" if seen.completion_tokens is None else " (made so)"
    return (
        f"{_count(len(seen.reports), 'step')} after {seen.warmup} to warm up, each "
        f"{_count(grpo.prompts_per_step, 'prompt')} x {grpo.group_size} completions{length}"
        f"{forced}, all of them trained on"
    )


_PARTS = ("prefill", "decode", "grade", "update", "other", "step")
_SPEEDS = (
    ("sampled tok/s", "time.sampled_tokens_per_second", "{:,.0f}"),
    ("trained tok/s", "time.trained_tokens_per_second", "{:,.0f}"),
    ("MFU of sampling", "time.mfu_sample", "{:.1%}"),
    ("MFU of the update", "time.mfu_update", "{:.1%}"),
    ("MFU of the step", "time.mfu", "{:.1%}"),
)


def _table(seen: Bench) -> Table:
    from rich.table import Table

    table = Table()
    last = ["no kernels"] if seen.plain_reports else []
    for name in ("", "min", "median", "max", "share", *last):
        table.add_column(name, justify="left" if name == "" else "right")

    def add(name: str, metric: str, form: str, share: str) -> None:
        spread = seen.spread(metric)
        if spread:
            shown = [form.format(value) for value in spread.values()]
            plain = [form.format(seen.spread(metric, plain=True)["median"]) for _ in last]
            table.add_row(name, *shown, share, *plain)

    for part in _PARTS:
        add(f"{part}, s", f"time.{part}", "{:.3f}", f"{seen.share(part):.0%}")
    table.add_section()
    for name, metric, form in _SPEEDS:
        add(name, metric, form, "")
    return table


def _count(number: int, what: str) -> str:
    """For people.

    >>> _count(1, "thread"), _count(2, "thread")
    ('1 thread', '2 threads')
    """
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _flops(rate: float) -> str:
    """For people.

    >>> _flops(1.5e11), _flops(9.1e14)
    ('150 GFLOP/s', '910 TFLOP/s')
    """
    size, unit = (1e12, "TFLOP/s") if rate >= 1e12 else (1e9, "GFLOP/s")
    return f"{rate / size:.3g} {unit}"


def _duration(hours: float) -> str:
    """For people.

    >>> _duration(0.02), _duration(0.5), _duration(7)
    ('72 s', '30 min', '7.0 h')
    """
    if hours >= 2:
        return f"{hours:.1f} h"
    return f"{60 * hours:.0f} min" if hours >= 2 / 60 else f"{3600 * hours:.0f} s"
