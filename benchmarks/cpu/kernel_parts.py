"""What each part of the CPU kernels brings: a GRPO step with that part off, beside all on.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu.kernel_parts

Every variant is a process of its own over the same weights, prompts and lengths, and their steps
take turns. The ratio of a variant is the median over rounds of its seconds over those of "all on"
in the same round. The 25M cases run half of the prompts of `step.py`, which halves every
part of a step alike. Writes `results/kernel_parts.json`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS
from benchmarks.cpu.step import best_settings, keep
from benchmarks.machine import where
from benchmarks.workers import Worker
from benchmarks.workload import CASES, save_model

RESULT = RESULTS / "kernel_parts.json"
VARIANTS: dict[str, dict[str, str]] = {
    "all on": {},
    "recorded steps": {"PARTS_OFF": "recorded_steps"},
    "decode attention and recorded steps": {"PARTS_OFF": "recorded_steps,decode_attention"},
    "drawing": {"PARTS_OFF": "drawing"},
    "norms, rotary embedding, gates": {"PARTS_OFF": "layers"},
    "attention's backward": {"PARTS_OFF": "attention_backward"},
    "both of these": {"PARTS_OFF": "layers,attention_backward"},
    "everything": {"GROUPER_KERNELS": "0"},
}
ROUNDS = {"0.5M": 24, "25M bf16": 5, "ragged": 5, "25M float32": 3}
PROMPTS = {"0.5M": None, "25M bf16": 8, "ragged": 8, "25M float32": 8}


def measure(name: str, rounds: int, prompts: int | None) -> dict[str, Any]:
    settings = best_settings(name)["grouper"]
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as text, ExitStack() as stack:
        folder = Path(text)
        save_model(CASES[name], folder / "model")
        workers = {}
        for number, (variant, environment) in enumerate(VARIANTS.items()):
            worker = stack.enter_context(
                Worker(sys.executable, "benchmarks.cpu.parts_worker", environment)
            )
            place = str(folder / f"run-{number}")
            model = str(folder / "model")
            worker.ask("begin", case=name, model=model, folder=place, prompts=prompts, **settings)
            worker.ask("step")
            workers[variant] = worker
        for number in range(rounds):
            for variant in list(workers)[:: 1 if number % 2 else -1]:
                seconds[variant].append(round(workers[variant].ask("step")["seconds"], 4))
    base = seconds["all on"]
    return {
        "settings": settings,
        "prompts": prompts or CASES[name].prompts,
        "seconds": seconds,
        "off_over_on": {
            variant: round(statistics.median(a / b for a, b in zip(values, base, strict=True)), 3)
            for variant, values in seconds.items()
        },
        "machine": where(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(ROUNDS), default=list(ROUNDS))
    parser.add_argument("--small", action="store_true", help="little work, nothing written")
    options = parser.parse_args()
    for name in options.cases:
        if options.small:
            print(name, measure(name, 1, 1)["off_over_on"], flush=True)
            continue
        found = measure(name, ROUNDS[name], PROMPTS[name])
        keep(RESULT, name, found)
        print(name, found["off_over_on"], flush=True)


if __name__ == "__main__":
    main()
