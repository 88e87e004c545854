"""What an evaluation adds to sampling alone, and whether its memory is flat.

    OMP_NUM_THREADS=1 python -m benchmarks.grading.evaluation_speed outputs/demo [--problems 10000]

The last model of a demonstration run samples each of 10,000 word problems 8 times, at temperature
1: alone, and in an evaluation with the recipe's rewards that is written to a temporary folder, in
turns after one turn that is not counted. Both draw the same tokens. Seconds are of the wall clock
and of this process's processor; the second leave out what other programs take, and the helpers.

Memory is the resident set of this process and, for its helpers, what they do not share, read ten
times in each evaluation; flat means that it grows little after the first tenth.

Repeat it on an idle machine with two processors or more: with other work on all of them the helpers
take the sampler's time. Written to benchmarks/results/evaluation_speed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS
from benchmarks.machine import machine
from grouper.config.loading import load_recipe
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.training.prepare import Prepared
from grouper.training.problem_sets import ProblemSets, require_part

SAMPLES = 8


def timed(work: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    started, busy = time.perf_counter(), time.process_time()
    found = work()
    seconds = {
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - busy,
    }
    return {name: round(value, 3) for name, value in seconds.items()}, found


def memory() -> tuple[float, float]:
    """Megabytes of this process, and of its helpers those that they do not share with it."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    own = 0.0
    for child in children:
        with suppress(OSError):  # it has ended
            own += _kilobytes(f"/proc/{child}/smaps_rollup", "Private_Clean:", "Private_Dirty:")
    return _kilobytes("/proc/self/status", "VmRSS:") / 1024, own / 1024


def _kilobytes(path: str, *names: str) -> int:
    lines = Path(path).read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))


def alone(prepared: Prepared, sampler: Sampler) -> int:
    """Sampling and nothing else; the number of tokens."""
    params, seed = prepared.evaluation_params(), prepared.recipe.seed
    requests = [
        SampleRequest(prompt=prompt, params=params, key=draw_seed(seed, "eval", problem.id, sample))
        for problem, prompt in prepared.test
        for sample in range(SAMPLES)
    ]
    return sum(len(completion.token_ids) for _, completion in sampler.sample(requests))


def evaluated(prepared: Prepared, sampler: Sampler) -> dict[str, Any]:
    """An evaluation: its tokens, and the memory after each tenth."""
    seen: list[tuple[float, float]] = []

    def look(done: int, total: int) -> None:
        if done * 10 >= total * (len(seen) + 1):
            seen.append(memory())

    with tempfile.TemporaryDirectory(prefix="grouper-eval-speed-") as folder:
        result = prepared.evaluate(
            sampler,
            items=prepared.test,
            name="speed",
            phase="grpo",
            step=0,
            split="test",
            folder=Path(folder),
            progress=look,
        )
        tokens = sum(item.tokens for item in result.slim)
    own, helpers = ([round(mb, 1) for mb in column] for column in zip(*seen, strict=True))
    return {"tokens": tokens, "accuracy": result.accuracy, "memory_mb": own, "helpers_mb": helpers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a finished run of the recipe `demo`")
    parser.add_argument("--problems", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    recipe = load_recipe(given.run / "recipe.yaml").override(
        f"data.test.options.count={given.problems}",
        f"evaluation.samples={SAMPLES}",
        "evaluation.temperature=1.0",
    )
    model = str(given.run / "grpo" / "final")
    with Prepared(recipe, ProblemSets(test=require_part(recipe, "test")), model=model) as prepared:
        sampler = prepared.samplers.over(prepared.load(model))
        turns = []
        for _ in range(given.rounds + 1):
            plain, tokens = timed(lambda: alone(prepared, sampler))
            whole, found = timed(lambda: evaluated(prepared, sampler))
            assert found.pop("tokens") == tokens, "both draw the same"
            turns.append({"alone": plain, "evaluation": {**whole, **found}, "tokens": tokens})
            print(json.dumps(turns[-1]), flush=True)
    counted = turns[1:]

    def ratio(what: str) -> float:
        sides = [statistics.median(t[n][what] for t in counted) for n in ("evaluation", "alone")]
        return float(round(sides[0] / sides[1], 4))

    record = {
        "machine": machine(),
        "other_work": f"load {os.getloadavg()[1]:.1f} of {os.cpu_count()} processors",
        "completions": given.problems * SAMPLES,
        "ratio_of_seconds": ratio("seconds"),
        "ratio_of_processor_seconds": ratio("processor_seconds"),
        "grown_mb": [round(max(t["evaluation"]["memory_mb"]) - t["evaluation"]["memory_mb"][0], 1)
                     for t in counted],
        "turns": turns,
    }  # fmt: skip
    target = RESULTS / "evaluation_speed.json"
    target.write_text(json.dumps(record, indent=2) + "\n")
    print({name: value for name, value in record.items() if name != "turns"})


if __name__ == "__main__":
    main()
