"""How the time of a step grows: one factor at a time from a small base.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu.scaling

Real steps of the trainer (`grouper_step.py`), random weights, fixed lengths. For every factor the
seconds of sampling, of the update and of the whole step at four or five sizes, and their exponents:
the slope of log seconds over log size in the upper half of the sizes. Beside them the exponents of
the arithmetic itself (`model_flops.py`: shared prompts once, attention by the pairs
that are seen). Time may grow more slowly than the arithmetic, where fixed costs still show; not
faster.
Written to benchmarks/results/scaling.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS
from benchmarks.cpu.grouper_step import GrouperSteps
from benchmarks.machine import where
from benchmarks.planning.model_flops import ModelShape, sampling_flops, update_flops
from benchmarks.workload import Case, lengths_of, save_model, shape_of

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
BASE = Case(
    "base", SHAPE, "float32", prompts=8, group=4, prompt_tokens=64, new_tokens=64, vocabulary=2048
)
FACTORS: dict[str, list[int]] = {
    "group": [4, 8, 16, 32, 64],
    "prompts": [4, 8, 16, 32, 64],
    "new_tokens": [32, 64, 128, 256],
    "prompt_tokens": [64, 128, 256, 512, 1024],
    "vocabulary": [2048, 4096, 8192, 16384, 32768],
    "layers": [2, 4, 8, 16],
}
PARTS = ("sample", "update", "step")
LONG_SECONDS = 1.5
"""Steps that take as long are done twice, shorter ones `--steps` times."""


def sized(factor: str, size: int) -> Case:
    """The base with one factor changed."""
    changes: dict[str, Any] = {factor: size}
    if factor == "layers":
        changes = {"shape": {**SHAPE, "num_hidden_layers": size}}
    return replace(BASE, **changes)


def work(case: Case) -> dict[str, int]:
    """Floating-point operations of a step's parts."""
    s = shape_of(case)
    queries, keys = (
        s[name] * s["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    layer = s["hidden_size"] * (2 * queries + 2 * keys + 3 * s["intermediate_size"])
    body, head = layer * s["num_hidden_layers"], s["hidden_size"] * case.vocabulary
    shape = ModelShape(
        body=body,
        trained_body=body,
        head=head,
        trained_head=head,
        attention=queries,
        windows=(None,) * s["num_hidden_layers"],
    )
    lengths = lengths_of(case)
    rows = [
        (case.prompt_tokens, lengths[first : first + case.group])
        for first in range(0, case.rows, case.group)
    ]
    sample, update = sampling_flops(shape, rows), update_flops(shape, rows)
    return {"sample": sample, "update": update, "step": sample + update}


def seconds(case: Case, steps: int, threads: int) -> dict[str, float]:
    """The median of each part over some steps (two long ones), after one to warm up."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_model(case, model)
        with GrouperSteps(
            case, model, Path(folder) / "run", budget=4096, threads=threads
        ) as trainer:
            trainer.step()
            found: list[dict[str, float]] = []
            while len(found) < 2 or (len(found) < steps and found[0]["step"] < LONG_SECONDS):
                found.append(trainer.step()["split"])
    return {part: round(statistics.median(split[part] for split in found), 4) for part in PARTS}


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Least-squares slope of log value over log size, over the upper half of the sizes."""
    half = min(len(sizes) // 2, len(sizes) - 2)
    x = [math.log(size) for size in sizes[half:]]
    y = [math.log(value) for value in values[half:]]
    slope = statistics.linear_regression(x, y).slope
    return round(slope, 2)


def one_factor(
    factor: str, sizes: Sequence[int], steps: int, threads: int, measured: dict[str, Any]
) -> dict[str, Any]:
    cases = [sized(factor, size) for size in sizes]
    rows = []
    for case in cases:
        key = repr(case)  # the base belongs to every factor and is measured once
        if key not in measured:
            measured[key] = seconds(case, steps, threads)
        rows.append(measured[key])
    operations = [work(case) for case in cases]
    return {
        "sizes": list(sizes),
        "seconds": {part: [row[part] for row in rows] for part in PARTS},
        "exponent": {part: exponent(sizes, [row[part] for row in rows]) for part in PARTS},
        "exponent_of_the_arithmetic": {
            part: exponent(sizes, [row[part] for row in operations]) for part in PARTS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="of each size, after one to warm up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--factors", nargs="+", choices=FACTORS, default=list(FACTORS))
    parser.add_argument("--small", action="store_true", help="two sizes each, nothing written")
    options = parser.parse_args()
    measured: dict[str, Any] = {}
    factors = {}
    for factor in options.factors:
        sizes = FACTORS[factor][:2] if options.small else FACTORS[factor]
        factors[factor] = one_factor(factor, sizes, options.steps, options.threads, measured)
        print(factor, json.dumps(factors[factor]), flush=True)
    base = {k: v for k, v in vars(BASE).items() if k != "name"}
    record = {"machine": where(), "base": base, "factors": factors}
    if not options.small:
        (RESULTS / "scaling.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
