"""`grouper plan` and `grouper bench`: the cost of a run, estimated and measured."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from grouper.cli.measure import progress
from grouper.cli.opening import chosen_model, open_recipe, run_of
from grouper.cli.text import counted, duration, show, table
from grouper.errors import ConfigError

if TYPE_CHECKING:
    from grouper.advice.measuring import Bench
    from grouper.advice.run_plan import PhasePlan, RunPlan


def plan(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    device: str | None,
    tokens_per_second: float | None,
    as_json: bool,
) -> None:
    """Print memory, cards and times of a run."""
    # Read by the libraries when they are imported.
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    opened = open_recipe(recipe, overrides, runs_here=False)

    from grouper.advice.run_plan import plan_run

    found = plan_run(opened, device=device, tokens_per_second=tokens_per_second)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _show_plan(found)


def _show_plan(found: RunPlan) -> None:
    size, unit = (2**30, "GiB") if found.peak >= 2**30 else (2**20, "MiB")
    # Columns of zeros are left out.
    names = [field.name for field in fields(found.memory[0]) if field.name != "name"]
    shown = [name for name in names if any(getattr(part, name) for part in found.memory)]
    rows = [
        (part.name, *(f"{getattr(part, name) / size:.2f}" for name in (*shown, "peak")))
        for part in found.memory
    ]
    show(f"{found.parameters:,} parameters, {found.trainable:,} of them trained, on {found.device}")
    show("")
    columns = ("part", *(name.replace("_", " ") for name in shown), "peak")
    table(columns, rows, title=f"{unit} at the worst moment")
    peak = "The peak is the sum of its row; a chunk of logits is a part of the activations."
    if found.device == "cpu":
        peak += " The process may hold up to half as much again: glibc keeps freed memory."
    show(peak, "")
    phases = [f"{phase}.tokens_per_micro_batch" for phase in found.cards[0].tokens_per_micro_batch]
    cards = []
    for card in found.cards:
        settings = (*card.tokens_per_micro_batch.values(), card.max_slots)
        largest = ("none" if value is None else f"{value:,}" for value in settings)
        cards.append((f"{card.gib} GB", "yes" if card.fits else "no", *largest))
    columns = ("card", "fits", *phases, "sampling.max_slots")
    table(columns, cards, title="What fits, and the largest settings that would")
    show("", *map(_phase_line, found.phases), *(f"Note: {note}" for note in found.notes))


def _phase_line(phase: PhasePlan) -> str:
    bound = "at most " if phase.name == "grpo" else ""
    line = f"{phase.name}: {bound}{phase.tokens_per_step:,} tokens a step"
    if phase.steps is not None:
        line = f"{line}, {phase.steps:,} steps, {bound}{phase.tokens:,} tokens"
    if phase.seconds is not None:
        line = f"{line}, about {duration(phase.seconds)}"
    return line


# --- grouper bench -------------------------------------------------------------------------------


def bench(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    as_json: bool,
    quiet: bool,
    **measured: Any,
) -> None:
    """Take steps, and print where their seconds went."""
    opened = open_recipe(recipe, overrides)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "bench measures one process",
            where="torchrun",
            fix="Call it without torchrun; a run of several processes has the same figures in "
            "metrics.jsonl, under time.*.",
        )
    subject = chosen_model(model, opened, run_of(recipe, opened))

    from grouper.advice import measuring

    seen = measuring.bench(opened, model=subject, progress=progress(quiet=quiet), **measured)
    if as_json:
        click.echo(json.dumps(seen.as_dict(), indent=2))
    else:
        _show_bench(seen)


def _show_bench(seen: Bench) -> None:
    grpo, tokens = seen.recipe.grpo, seen.spread("completion/tokens")
    length = f" of {tokens['median']:.0f} tokens" if tokens else ""
    forced = "" if seen.completion_tokens is None else " (made so)"
    size, unit = (1e12, "TFLOP/s") if seen.matrix_rate >= 1e12 else (1e9, "GFLOP/s")
    show(
        f"{seen.model}: {seen.parameters:,} parameters on {seen.device}, "
        f"{counted(seen.threads, 'thread')}; "
        f"large {seen.dtype} products run at {seen.matrix_rate / size:.3g} {unit}",
        f"{counted(len(seen.reports), 'step')} after {seen.warmup} to warm up, each "
        f"{counted(grpo.prompts_per_step, 'prompt')} x {grpo.group_size} completions{length}"
        f"{forced}, all of them trained on",
        "",
    )
    _show_times(seen)
    of_what = "in the whole process"
    if seen.memory_bytes is not None:
        of_what = f"of {seen.memory_bytes / 2**30:.0f} GiB on the GPU"
    show(f"Peak memory: {seen.peak_bytes / 2**30:.2f} GiB {of_what}")
    if seen.token_limit is not None:
        show(
            f"Memory ran out: slices have had at most {seen.token_limit:,} tokens since. Set "
            f"grpo.tokens_per_micro_batch={seen.token_limit} to begin there."
        )
    show(
        f"The recipe's {seen.recipe_steps:,} GRPO steps: {duration(3600 * seen.hours)}, "
        "evaluations and checkpoints not counted"
    )


_ROWS = (
    *((f"{part}, s", f"time.{part}", "{:.3f}")
      for part in ("prefill", "decode", "grade", "update", "other", "step")),
    ("sampled tok/s", "time.sampled_tokens_per_second", "{:,.0f}"),
    ("trained tok/s", "time.trained_tokens_per_second", "{:,.0f}"),
    ("MFU of sampling", "time.mfu_sample", "{:.1%}"),
    ("MFU of the update", "time.mfu_update", "{:.1%}"),
    ("MFU of the step", "time.mfu", "{:.1%}"),
)  # fmt: skip


def _show_times(seen: Bench) -> None:
    last = ["no kernels"] if seen.plain_reports else []
    rows = []
    for name, metric, form in _ROWS:
        spread = seen.spread(metric)
        if spread:
            share = f"{seen.share(metric[5:]):.0%}" if name.endswith(", s") else ""
            plain = [form.format(seen.spread(metric, plain=True)["median"]) for _ in last]
            rows.append((name, *map(form.format, spread.values()), share, *plain))
    table(("", "min", "median", "max", "share", *last), rows)
