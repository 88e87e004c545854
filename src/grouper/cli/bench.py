"""`grouper bench`: the speed of GRPO steps on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import progress, show, show_json, table
from grouper.errors import ConfigError, duration, plural

if TYPE_CHECKING:
    from grouper.advice.bench import Bench

EXAMPLES = """
grouper bench demo
grouper bench ./mine.yaml --completion-tokens 256     numbers that do not depend on the model
grouper bench outputs/demo sampling.max_slots=32      the model its GRPO starts from
grouper bench ./mine.yaml --json > before.json        to compare with another machine
"""

# The rows of the table: name, metric, format.
TIMES = (
    ("prefill, s", "time.prefill", "{:.3f}"),
    ("decode, s", "time.decode", "{:.3f}"),
    ("grade, s", "time.grade", "{:.3f}"),
    ("update, s", "time.update", "{:.3f}"),
    ("other, s", "time.other", "{:.3f}"),
    ("step, s", "time.step", "{:.3f}"),
    ("sampled tok/s", "time.sampled_tokens_per_second", "{:,.0f}"),
    ("trained tok/s", "time.trained_tokens_per_second", "{:,.0f}"),
    ("MFU of sampling", "time.mfu_sample", "{:.1%}"),
    ("MFU of the update", "time.mfu_update", "{:.1%}"),
    ("MFU of the step", "time.mfu", "{:.1%}"),
)


@click.command("bench", cls=Command, examples=EXAMPLES)
@options.recipe
@click.option(
    "--completion-tokens",
    metavar="N",
    type=options.WholeNumber(1),
    help="Make every completion N tokens long.  [default: as long as the model makes it]",
)
@click.option(
    "--steps",
    metavar="N",
    type=options.WholeNumber(1),
    default=5,
    show_default=True,
    help="Number of steps to measure.",
)
@options.model
@options.as_json
@click.option(
    "--warmup",
    metavar="N",
    type=options.WholeNumber(0),
    default=2,
    show_default=True,
    help="Number of steps before them that are not measured.",
)
@click.option(
    "--plain/--no-plain",
    default=True,
    show_default=True,
    help="Measure the same number of steps without Grouper's kernels, as another column.",
)
@options.quiet
def bench(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    as_json: bool,
    quiet: bool,
    completion_tokens: int | None,
    steps: int,
    warmup: int,
    plain: bool,
) -> None:
    """Measure the speed of GRPO steps on this machine.

    Runs a few GRPO steps of RECIPE (a recipe or a run folder), and prints time per part, tokens
    per second, utilization, peak memory, and the hours that the recipe would take.

    The steps run in a temporary folder, which is deleted afterwards. Every group is given a
    signal, so that the update has all its rows even if the model is untrained; weights do not
    change. An untrained model rarely stops by itself: to compare machines or settings, give all
    completions the same length with --completion-tokens.

    In the table, prefill is the forward pass over the prompts, and decode is everything after it;
    grade is the wait for grades and rewards after the last completion; update is forward,
    backward and optimizer; other is choosing problems and writing rollouts. tok/s is sampled
    tokens over prefill and decode, and trained tokens over update. MFU is model FLOPs over the
    FLOP/s of large matrix products on this device. no kernels is the median without Grouper's own
    kernels.
    """
    from grouper.cli.recipe_args import chosen_model, open_recipe, run_of

    opened = open_recipe(recipe, overrides)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "bench measures one process",
            where="torchrun",
            fix="Call it without torchrun; a run of several processes has the same figures in "
            "metrics.jsonl, under time.*.",
        )
    subject = chosen_model(model, opened, run_of(recipe, opened))

    from grouper.advice.bench import bench as measure_steps

    report = measure_steps(
        opened,
        model=subject,
        progress=progress(quiet=quiet),
        completion_tokens=completion_tokens,
        steps=steps,
        warmup=warmup,
        plain=plain,
    )
    if as_json:
        show_json(report.as_dict())
    else:
        _show_bench(report)


def _show_bench(report: Bench) -> None:
    grpo = report.recipe.grpo
    tokens = report.spread("completion/tokens")
    length = f" of {tokens['median']:.0f} tokens" if tokens else ""
    forced = "" if report.completion_tokens is None else " (made so)"
    size, unit = (1e12, "TFLOP/s") if report.matrix_rate >= 1e12 else (1e9, "GFLOP/s")
    show(
        f"{report.model}: {report.parameters:,} parameters on {report.device}, "
        f"{plural(report.threads, 'thread')}; "
        f"large {report.dtype} products run at {report.matrix_rate / size:.3g} {unit}",
        f"{plural(len(report.reports), 'step')} after {report.warmup} to warm up, each "
        f"{plural(grpo.prompts_per_step, 'prompt')} x {grpo.group_size} completions{length}"
        f"{forced}, all of them trained on",
        "",
    )
    _show_times(report)
    of_what = "in the whole process"
    if report.memory_bytes is not None:
        of_what = f"of {report.memory_bytes / 2**30:.0f} GiB on the GPU"
    show(f"Peak memory: {report.peak_bytes / 2**30:.2f} GiB {of_what}")
    if report.token_limit is not None:
        show(
            f"Memory ran out: slices have had at most {report.token_limit:,} tokens since. Set "
            f"grpo.tokens_per_micro_batch={report.token_limit} to begin there."
        )
    show(
        f"The recipe's {report.recipe_steps:,} GRPO steps: {duration(3600 * report.hours)}, "
        "evaluations and checkpoints not counted"
    )


def _show_times(report: Bench) -> None:
    columns = ["", "min", "median", "max", "share"]
    if report.plain_reports:
        columns.append("no kernels")
    rows = []
    for name, metric, number_format in TIMES:
        spread = report.spread(metric)
        if not spread:
            continue
        row = [name]
        row += [number_format.format(value) for value in spread.values()]
        row.append(f"{report.share(metric[5:]):.0%}" if name.endswith(", s") else "")
        if report.plain_reports:
            plain_spread = report.spread(metric, plain=True)
            row.append(number_format.format(plain_spread["median"]))
        rows.append(row)
    table(columns, rows, lines=True)
