"""What an evaluation adds to sampling alone, and whether its memory is flat.

    OMP_NUM_THREADS=1 python -m benchmarks.grading.evaluation_speed outputs/demo [--problems 10000]

The last model of a finished run samples each of its test problems 8 times, at temperature 1: alone,
and in an evaluation with the recipe's rewards that is written to a temporary folder, in turns after
one turn that is not counted. Both sample the same tokens. Seconds are of the wall clock and of this
process's processor.

Memory is the resident set of this process, read ten times in each evaluation; flat means that it
grows little after the first tenth.

The demonstration's model is the worst case: with half a million parameters, sampling a completion
takes less than a millisecond. The result is written to benchmarks/results/evaluation_speed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS
from benchmarks.machine import machine
from grouper.config.loading import load_recipe
from grouper.evaluation.evaluate import measure
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.training.prepare import Prepared
from grouper.training.problem_sets import ProblemSets, require_part

SAMPLES = 8


def timed(work: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Return the seconds of a call, and what it returns."""
    started = time.perf_counter()
    processor_started = time.process_time()
    result = work()
    seconds = {
        "seconds": round(time.perf_counter() - started, 3),
        "processor_seconds": round(time.process_time() - processor_started, 3),
    }
    return seconds, result


def resident_megabytes() -> float:
    """Return the memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("there is no VmRSS in /proc/self/status")


def sample_alone(prepared: Prepared, sampler: Sampler) -> int:
    """Sample and do nothing else; return the number of tokens."""
    params = prepared.evaluation_params()
    requests = []
    for problem, prompt in prepared.test:
        for sample in range(SAMPLES):
            key = draw_seed(prepared.recipe.seed, "eval", problem.id, sample)
            requests.append(SampleRequest(prompt=prompt, params=params, key=key))
    return sum(len(completion.token_ids) for _, completion in sampler.sample(requests))


def evaluate(prepared: Prepared, sampler: Sampler) -> dict[str, Any]:
    """Evaluate; return tokens, accuracy and the memory after each tenth."""
    memory: list[float] = []

    def look(done: int, total: int) -> None:
        if done * 10 >= total * (len(memory) + 1):
            memory.append(round(resident_megabytes(), 1))

    measurement = prepared.measurement(name="speed", phase="grpo", step=0, split="test")
    with tempfile.TemporaryDirectory(prefix="grouper-eval-speed-") as folder:
        result = measure(measurement, sampler, prepared.grader, folder=Path(folder), progress=look)
        tokens = sum(item.tokens for item in result.slim)
    return {"tokens": tokens, "accuracy": result.accuracy, "memory_mb": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a finished run")
    parser.add_argument("--problems", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    recipe = load_recipe(options.run / "recipe.yaml").override(
        f"data.test.options.count={options.problems}",
        f"evaluation.samples={SAMPLES}",
        "evaluation.temperature=1.0",
    )
    model = str(options.run / "grpo" / "final")
    with Prepared(recipe, ProblemSets(test=require_part(recipe, "test")), model=model) as prepared:
        sampler = prepared.samplers.over(prepared.load(model))
        turns = []
        for _ in range(options.rounds + 1):
            alone, tokens = timed(lambda: sample_alone(prepared, sampler))
            evaluation_seconds, evaluation = timed(lambda: evaluate(prepared, sampler))
            assert evaluation.pop("tokens") == tokens, "both sample the same tokens"
            turn = {
                "alone": alone,
                "evaluation": {**evaluation_seconds, **evaluation},
                "tokens": tokens,
            }
            turns.append(turn)
            print(json.dumps(turn), flush=True)
    counted_turns = turns[1:]

    def ratio(clock: str) -> float:
        evaluation_median = statistics.median(turn["evaluation"][clock] for turn in counted_turns)
        alone_median = statistics.median(turn["alone"][clock] for turn in counted_turns)
        return float(round(evaluation_median / alone_median, 4))

    growth = []
    for turn in counted_turns:
        memory = turn["evaluation"]["memory_mb"]
        growth.append(round(max(memory) - memory[0], 1))
    record = {
        "machine": machine(),
        "other_work": f"load {os.getloadavg()[1]:.1f} of {os.cpu_count()} processors",
        "run": options.run.name,
        "completions": options.problems * SAMPLES,
        "ratio_of_seconds": ratio("seconds"),
        "ratio_of_processor_seconds": ratio("processor_seconds"),
        "grown_mb": growth,
        "turns": turns,
    }
    target = RESULTS / "evaluation_speed.json"
    target.write_text(json.dumps(record, indent=2) + "\n")
    print({name: value for name, value in record.items() if name != "turns"})


if __name__ == "__main__":
    main()
