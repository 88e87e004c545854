"""What a measurement is told to try, and that a good one is left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grouper.benching.measuring import Bench
from grouper.benching.suggesting import suggestions
from grouper.recipe import load_recipe
from grouper.types import StepReport, Tally

RECIPE = load_recipe("demo", ["threads=null"])


def report(**seconds: float) -> StepReport:
    parts = {"prefill": 0.1, "decode": 0.6, "grade": 0.02, "update": 0.25, "other": 0.03, **seconds}
    parts["step"] = sum(parts.values())
    tallies = {f"time.{name}": Tally.of([value]) for name, value in parts.items()}
    return StepReport(phase="grpo", step=1, tallies=tallies, status="learning")


GOOD = Bench(
    recipe=RECIPE,
    parameters=100_000_000,
    device="cpu",
    dtype="float32",
    threads=4,
    matrix_rate=1e11,
    bfloat16_rate=1e11,
    warmup=1,
    reports=(report(), report(decode=0.62)),
    completion_tokens=None,
    peak_bytes=2**30,
    memory_bytes=None,
    token_limit=None,
    other_cores=0.05,
    cores=4,
    recipe_steps=60,
)
GPU = replace(GOOD, device="NVIDIA H200", memory_bytes=100 * 2**30, dtype="bfloat16")


def changed(base: Bench, **settings: Any) -> Bench:
    grpo = settings.pop("grpo", {})
    sampling = settings.pop("sampling", {})
    return replace(base, recipe=RECIPE.override(grpo=grpo, sampling=sampling), **settings)


def test_what_is_good_is_left_alone() -> None:
    assert suggestions(GOOD) == ()


@pytest.mark.parametrize(
    ("seen", "texts"),
    [
        (replace(GOOD, other_cores=1.5), ["1.5 of 4 cores"]),
        (replace(GOOD, reports=(report(), report(decode=2.0))), ["2.4 times", "--completion"]),
        (
            replace(GOOD, reports=(report(), report(decode=2.0)), completion_tokens=9),
            ["more steps (--steps)"],
        ),
        (replace(GOOD, token_limit=700), ["grpo.tokens_per_micro_batch=700"]),
        (replace(GOOD, reports=(report(grade=0.3),)), ["waiting", "grading.workers=2"]),
        (replace(GOOD, reports=(report(other=0.5),)), ["neither"]),
        (replace(GOOD, bfloat16_rate=6e11), ["6.0 times", "model.compute_dtype=bfloat16"]),
        (replace(GOOD, threads=1), ["1 of 4 cores", "threads=4"]),
        (
            changed(GPU, grpo={"tokens_per_micro_batch": 2048}),
            ["2,048 tokens while 99%", "grpo.tokens_per_micro_batch=8192"],
        ),
        (
            changed(GPU, grpo={"tokens_per_micro_batch": 16384}, sampling={"max_slots": 64}),
            ["64 sequences", "sampling.max_slots=128"],
        ),
    ],
)
def test_what_is_off_is_named_with_what_to_try(seen: Bench, texts: list[str]) -> None:
    told = suggestions(seen)
    assert len(told) == 1, told
    for text in texts:
        assert text in told[0]


@pytest.mark.parametrize(
    "seen",
    [
        replace(GOOD, other_cores=None),
        replace(GOOD, bfloat16_rate=6e11, parameters=10_000),
        replace(GOOD, threads=1, parameters=10_000),
        replace(GOOD, other_cores=2.5, threads=1, cores=4, device="GPU"),
        replace(GPU, dtype="bfloat16", bfloat16_rate=9e14),
        changed(GPU, grpo={"tokens_per_micro_batch": 2048}, peak_bytes=80 * 2**30),
        changed(GPU, grpo={"tokens_per_micro_batch": 8192}),
    ],
)
def test_no_advice_where_it_would_not_help(seen: Bench) -> None:
    assert suggestions(seen) == ()
