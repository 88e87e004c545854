"""What a teacher adds to the update of a pretrained model: seconds of one accumulated gradient.

    make real-models
    OMP_NUM_THREADS=2 python -m benchmarks.cpu.teacher

SmolLM2-135M learns from itself and from no teacher, in turns, on random tokens: the seconds are
those of the update alone. A teacher of the same size adds a forward, and the divergence a second
and third product with the head. Writes `results/teacher.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.checkout import REAL_MODELS, RESULTS
from benchmarks.machine import where
from grouper.algorithms.batching import Rows
from grouper.config.schema import GRPOConfig, ModelConfig, TeacherConfig
from grouper.models.loading import load_policy
from grouper.training.parallel import ParallelPolicy
from grouper.training.teachers import Teachers
from grouper.training.update import accumulate_gradient, grpo_objective

RESULT = RESULTS / "teacher.json"
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "sampled": {"kl": "sampled"},
    "top 32": {"kl": "reverse", "top_k": 32},
    "whole vocabulary": {"kl": "reverse"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="its folder in real-models/")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", nargs=3, type=int, default=[96, 96, 16], help=Rows.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    path = str(REAL_MODELS / options.model)
    config = ModelConfig(path=path, dtype=options.dtype)
    policy = load_policy(config, path, seed=0)
    teacher = load_policy(config, path, seed=0).requires_grad_(False)
    prompt, completion, count = options.rows
    rows = Rows(prompt=prompt, completion=completion, count=count, per_prompt=8)
    plain = rows.batch(policy.vocabulary)
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    for number in range(options.rounds + 1):
        for name, settings in KINDS.items():
            guide = None
            batch = plain
            if settings:
                guide = Teachers([teacher], TeacherConfig(path=path, **settings)).guide
                batch = replace(plain, teacher_weights=plain.weights)
            objective = grpo_objective(GRPOConfig(), guide=guide)
            started = time.perf_counter()
            accumulate_gradient(ParallelPolicy(policy), batch, objective, token_budget=4096)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    found = {
        "machine": {**where(), "threads": torch.get_num_threads()},
        "model": options.model,
        "dtype": options.dtype,
        "rows": options.rows,
        "seconds": {name: [round(value, 2) for value in times] for name, times in seconds.items()},
        "ratio": {name: round(value / medians["none"], 2) for name, value in medians.items()},
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(found["ratio"])


if __name__ == "__main__":
    main()
