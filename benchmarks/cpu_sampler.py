"""The native sampler beside `generate` of transformers: the same work for both, in turns.

    OMP_NUM_THREADS=2 python benchmarks/cpu_sampler.py --tries 5

The 25 M shape of the tiny pipeline (8 layers, 512 wide, vocabulary 512), random weights, 16
prompts of 64 tokens x 8 completions, on an otherwise idle machine. `fixed`: every completion has
128 tokens. `ragged`: the lengths in `ragged_lengths.json` (geometric, mean 48, at most 128), forced
on both. Written to benchmarks/results/cpu_sampler.json: seconds of every try and the ratio of the
medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from demo_seeds import machine
from grading_step import GROUP, NEW_TOKENS, PROMPT_TOKENS, PROMPTS, Letters, make_policy
from transformers import GenerationConfig, StoppingCriteria

from grouper.policy import Policy
from grouper.sampling.base import SampleRequest
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.types import Prompt, SamplingParams

HERE = Path(__file__).parent
LENGTHS = HERE / "ragged_lengths.json"
STOP = 2
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write_lengths(count: int = PROMPTS * GROUP, mean: int = 48, cap: int = NEW_TOKENS) -> None:
    """The committed file, from seed 0: lengths one by one with chance 1/mean to stop."""
    chance = random.Random(0)

    def one() -> int:
        length = 1
        while length < cap and chance.random() >= 1 / mean:
            length += 1
        return length

    LENGTHS.write_text(json.dumps([one() for _ in range(count)]) + "\n")


class AtLengths(StoppingCriteria):  # type: ignore[misc]  # transformers is untyped here
    """Ends each row of `generate` at a length of its own."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._ends = torch.tensor(lengths) + PROMPT_TOKENS

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        return self._ends <= input_ids.shape[1]


def ours(policy: Policy, prompts: torch.Tensor, lengths: Sequence[int]) -> Callable[[], int]:
    sampler = NativeSampler(SamplingWeights(policy), Letters(), stop_token_ids=[STOP])
    requests = [
        SampleRequest(
            prompt=Prompt(
                problem_id=str(i // GROUP), text="", token_ids=tuple(prompts[i // GROUP].tolist())
            ),
            params=SamplingParams(max_new_tokens=length, min_new_tokens=length),
            key=i,
        )
        for i, length in enumerate(lengths)
    ]
    return lambda: sum(len(drawn.token_ids) for _, drawn in sampler.sample(requests))


def theirs(policy: Policy, prompts: torch.Tensor, lengths: Sequence[int]) -> Callable[[], int]:
    ids = prompts.repeat_interleave(GROUP, 0)
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=max(lengths),
        min_new_tokens=max(lengths),
        pad_token_id=0,
        eos_token_id=STOP,
    )

    @torch.no_grad()
    def run() -> int:
        policy.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            stopping_criteria=[AtLengths(lengths)],
        )
        return sum(lengths)

    return run


def compare(policy: Policy, lengths: Sequence[int], tries: int) -> dict[str, Any]:
    prompts = torch.randint(6, 500, (PROMPTS, PROMPT_TOKENS))
    engines = {"grouper": ours, "generate": theirs}
    runs = {name: make(policy, prompts, lengths) for name, make in engines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for attempt in range(tries + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            assert run() == sum(lengths)
            if attempt:  # the first one warms up
                seconds[name].append(round(time.perf_counter() - started, 3))
    median = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "tokens": sum(lengths),
        "seconds": seconds,
        "ratio": round(median["generate"] / median["grouper"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=5)
    tries = parser.parse_args().tries
    if not LENGTHS.exists():
        write_lengths()
    ragged = json.loads(LENGTHS.read_text())
    record: dict[str, Any] = {"machine": machine()}
    for name, dtype in DTYPES.items():
        policy = Policy(make_policy().model.to(dtype))
        record[name] = {
            "fixed": compare(policy, [NEW_TOKENS] * (PROMPTS * GROUP), tries),
            "ragged": compare(policy, ragged, tries),
        }
        print(name, {case: found["ratio"] for case, found in record[name].items()}, flush=True)
    target = HERE / "results" / "cpu_sampler.json"
    target.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
