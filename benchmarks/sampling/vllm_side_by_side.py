"""GRPO steps with the native sampler and with vLLM, in turns, and what a push of weights takes.

    make test-vllm                              # makes the environment
    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.sampling.vllm_side_by_side
    .venv-vllm/bin/python -m benchmarks.sampling.vllm_side_by_side --sizes 0.5M --tries 1

Each size takes the same steps with each engine (`colocate` and `server`), completions of one
length. The largest size is pushed only. On a machine with one GPU `colocate` is measured there,
with two `server` on the second one; what is missing is `not measured`. Written to
benchmarks/results/vllm_side_by_side.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.checkout import RESULTS
from benchmarks.machine import where
from grouper.advice.bench import bench
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.sampling.base import SampleRequest
from grouper.training.prepare import Prepared
from grouper.training.problem_sets import load_problem_sets

RESULT = RESULTS / "vllm_side_by_side.json"

SIZES = {
    "0.5M": [],
    "25M": [
        "model.new={hidden_size: 512, layers: 8, intermediate_size: 1536}",
        "grpo.prompts_per_step=4",
    ],
    "0.5B": [
        "model.new={hidden_size: 1024, layers: 28, intermediate_size: 5120}",
        "model.dtype=bfloat16",
        "sampling.vllm.tolerance=0.1",
    ],
}
PUSHED_ONLY = ("0.5B",)
TOKENS = 48

ENGINES = {
    "native": ["sampling.engine=native"],
    "colocate": ["sampling.engine=vllm"],
    "server": ["sampling.engine=vllm", "sampling.vllm.mode=server"],
}


def recipe_of(size: str, engine: str) -> Recipe:
    settings = [*SIZES[size], *ENGINES[engine], "sampling.max_slots=128"]
    if engine == "server" and torch.cuda.device_count() > 1:
        settings.append("sampling.vllm.servers=[cuda:1]")
    return load_recipe("demo", ["prompt.system=''", *settings])


def steps(size: str, engine: str, count: int) -> dict[str, Any]:
    """Medians over a few steps."""
    seen = bench(
        recipe_of(size, engine), warmup=2, steps=count, completion_tokens=TOKENS, plain=False
    )
    names = ("step", "prefill", "decode", "push", "update", "sampled_tokens_per_second")
    found = {name: seen.spread(f"time.{name}") for name in names}
    gaps = [r.tallies["sampler_logprob_diff"].max for r in seen.reports]
    return {
        "parameters": seen.parameters,
        **{name: round(values["median"], 4) for name, values in found.items() if values},
        "push_share": round(seen.share("push"), 4),
        "largest_gap": max(gaps),
    }


def push(size: str, engine: str, count: int) -> dict[str, Any]:
    """Seconds of a push with its proof, after the first, which starts the engine."""
    recipe = recipe_of(size, engine)
    with Prepared(recipe, load_problem_sets(recipe), quiet=True) as prepared:
        policy = prepared.model
        sampler = prepared.samplers.over(policy)
        params = prepared.training_params(max_new_tokens=4)
        asked = [SampleRequest(prompt=prepared.prompt, params=params, key=1)]
        seconds = []
        for _ in range(count + 1):
            policy.version += 1
            before = sampler.seconds["push"]
            list(sampler.sample(asked))
            seconds.append(sampler.seconds["push"] - before)
        return {
            "parameters": sum(p.numel() for p in policy.parameters()),
            "push": round(statistics.median(seconds[1:]), 3),
            "gap": sampler.gap,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--tries", type=int, default=3, help="turns of every engine")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for size in given.sizes:
        rows: dict[str, Any] = {}
        if size in PUSHED_ONLY:
            for engine in [e for e in given.engines if e != "native"]:
                rows[engine] = push(size, engine, given.steps)
        else:
            turns: dict[str, list[dict[str, Any]]] = {e: [] for e in given.engines}
            for _ in range(given.tries):
                for engine, taken in turns.items():
                    taken.append(steps(size, engine, given.steps))
                    time.sleep(0.5)
            rows = {
                engine: {name: statistics.median(turn[name] for turn in taken) for name in taken[0]}
                for engine, taken in turns.items()
            }
        found[size] = rows
        print(size, json.dumps(rows))
    gpus = torch.cuda.device_count()
    record = {
        "machine": where(),
        "tokens": TOKENS,
        "cpu" if gpus == 0 else "gpu": found,
        **({"gpu": "not measured: no GPU here"} if gpus == 0 else {}),
    }
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
