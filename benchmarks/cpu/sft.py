"""An SFT step of Grouper beside TRL's SFTTrainer: the same rows for both, in turns.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu.sft --trl-python PATH

PATH is the interpreter of an environment with TRL. The models, prompts and lengths are those of
`step.py`; every step is one optimizer step over all 128 rows, the loss a mean over completion
tokens with the stop token. Each side first tries the sizes of a micro-batch in `SIZES` for one step
after a warm-up, and runs with its fastest. Peak memory is the process's own high-water mark
(`VmHWM`), libraries included. Writes `results/cpu_sft.json`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS
from benchmarks.cpu.step import keep, rounded
from benchmarks.machine import where
from benchmarks.workers import Worker
from benchmarks.workload import (
    ALL_CASES,
    CASES,
    Case,
    lengths_of,
    prompts_of,
    random_tokens,
    save_model,
    stop_of,
    text_of,
)

RESULT = RESULTS / "cpu_sft.json"
# Rows of TRL's micro-batches, and tokens of ours.
SIZES = {"trl": [8, 16, 32], "grouper": [2048, 4096, 8192]}


def rows_of(case: Case) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and completions as token ids, a row each; the stop token is not among them."""
    prompts = [ids for ids in prompts_of(case) for _ in range(case.group)]
    lengths = [max(1, length - 1) for length in lengths_of(case)]
    completions = random_tokens(case, lengths, seed=2)
    return prompts, completions


class Sides:
    """Both trainers over one saved model, each in a process of its own.

    Args:
        case: what to run.
        trl_python: interpreter of TRL's environment.
        folder: for the model and the runs.
    """

    def __init__(self, case: Case, trl_python: str, folder: Path) -> None:
        self._case = case
        self._trl_python = trl_python
        self._folder = folder
        self._prompts, self._completions = rows_of(case)
        self._runs = 0
        save_model(case, folder / "model")

    @contextmanager
    def opened(self, side: str, size: int) -> Iterator[Worker]:
        """A fresh process of one side, so that its memory is that of these settings."""
        common: dict[str, Any] = {
            "model": str(self._folder / "model"),
            "dtype": self._case.dtype,
            "threads": 2,
        }
        if side == "trl":
            with Worker(self._trl_python, "benchmarks.cpu.trl_sft_worker") as worker:
                worker.ask(
                    "open",
                    prompts=[text_of(self._case, ids) for ids in self._prompts],
                    completions=[self._completion_text(ids) for ids in self._completions],
                    micro_batch=size,
                    **common,
                )
                yield worker
            return
        self._runs += 1
        with Worker(sys.executable, "benchmarks.cpu.sft_worker") as worker:
            worker.ask(
                "begin",
                prompts=self._prompts,
                completions=[[*ids, stop_of(self._case)] for ids in self._completions],
                folder=str(self._folder / f"run-{self._runs}"),
                budget=size,
                **common,
            )
            yield worker

    def _completion_text(self, ids: list[int]) -> str:
        """Text that follows a prompt; words of a pretrained model begin with a space."""
        text = text_of(self._case, ids)
        return text if self._case.model else f" {text}"

    def fastest(self, side: str) -> tuple[int, dict[int, float]]:
        """The best size of a micro-batch, and the seconds of a step with each."""
        seconds = {}
        for size in SIZES[side]:
            with self.opened(side, size) as worker:
                worker.ask("step")
                seconds[size] = round(worker.ask("step")["seconds"], 3)
        return min(seconds, key=seconds.__getitem__), seconds


def compare(sides: Sides, count: int) -> dict[str, Any]:
    best, tries = {}, {}
    for side in SIZES:
        best[side], tries[side] = sides.fastest(side)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIZES}
    with ExitStack() as stack:
        workers = {s: stack.enter_context(sides.opened(s, size)) for s, size in best.items()}
        first = {side: worker.ask("step") for side, worker in workers.items()}
        for number in range(count):
            for side in list(workers)[:: 1 if number % 2 else -1]:
                found[side].append(workers[side].ask("step"))
    ratios = [
        a["seconds"] / b["seconds"] for a, b in zip(found["trl"], found["grouper"], strict=True)
    ]
    return {
        "micro_batch": best,
        "tries": tries,
        "tokens": found["grouper"][0]["tokens"],
        "seconds": {side: rounded(steps, "seconds") for side, steps in found.items()},
        "ratio": round(statistics.median(ratios), 2),
        "first_step": {
            name: {side: round(step[name], 5) for side, step in first.items()}
            for name in ("loss", "grad_norm")
        },
        "peak_bytes": {side: steps[-1]["peak_bytes"] for side, steps in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", required=True, help="interpreter of TRL's environment")
    parser.add_argument("--cases", nargs="+", choices=ALL_CASES, default=list(CASES)[:4])
    parser.add_argument("--steps", type=int, default=5, help="of each side, after one to warm up")
    parser.add_argument("--dtype", help="of the weights and products, instead of the case's own")
    parser.add_argument("--small", action="store_true", help="little work, nothing written")
    options = parser.parse_args()
    with Worker(options.trl_python, "benchmarks.cpu.trl_worker") as trl:
        versions = {k: v for k, v in trl.ask("versions").items() if k != "torch"}
    for name in options.cases:
        case = ALL_CASES[name].smaller(4, 8, 16) if options.small else ALL_CASES[name]
        case = replace(case, dtype=options.dtype or case.dtype)
        with tempfile.TemporaryDirectory() as folder:
            result = compare(Sides(case, options.trl_python, Path(folder)), options.steps)
        result |= {"dtype": case.dtype, "machine": where(**versions)}
        if not options.small:
            keep(RESULT, name, result)
        print(name, result, flush=True)


if __name__ == "__main__":
    main()
