"""The demonstration with rollouts of vLLM and of the native sampler, on seeds 0-2.

    make test-vllm                              # makes the environment
    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.learning.vllm_demo

Evaluations, too, are sampled by the engine of the run. Writes benchmarks/results/vllm_demo.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from typing import Any

from benchmarks.checkout import RESULTS
from benchmarks.learning.demo_seeds import one_run
from benchmarks.machine import machine
from grouper.runs.folder import RunFolder

RESULT = RESULTS / "vllm_demo.json"
SEEDS = (0, 1, 2)
ENGINES = ("native", "vllm")


def measured(seed: int, engine: str, more: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result, seconds = one_run(folder, seed, f"sampling.engine={engine}", *more)
        steps = [r for r in RunFolder(result.path).read_metrics() if r.phase == "grpo"]
        names = ("sampler_logprob_diff", "sampler_kl", "sampler_push_gap")
        found = {n: [r.tallies[n] for r in steps if n in r.tallies] for n in names}
        base, sft, grpo = (r.accuracy for r in result.results)
        return {
            "seed": seed,
            "engine": engine,
            "base": base,
            "sft": sft,
            "grpo": grpo,
            "seconds": round(seconds, 1),
            "steps": len(steps),
            "highest_mean": {n: max((t.mean for t in f), default=None) for n, f in found.items()},
            "highest": max((t.max for t in found["sampler_logprob_diff"]), default=None),
            "push_seconds": sum(
                r.tallies["time.push"].sum for r in steps if "time.push" in r.tallies
            ),
        }


def main() -> None:
    more = sys.argv[1:]
    rows = [measured(seed, engine, more) for seed in SEEDS for engine in ENGINES]
    mean = {e: statistics.fmean(r["grpo"] for r in rows if r["engine"] == e) for e in ENGINES}
    record = {"machine": machine(), "settings": more, "mean accuracy": mean, "runs": rows}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(mean))


if __name__ == "__main__":
    main()
