"""What grading adds to a GRPO step at the 25 M size, where nearly all of the step is the model.

    OMP_NUM_THREADS=2 python -m benchmarks.grading.step --data ../shared/data

A random model of the shape in the tiny pipeline (8 layers, 512 wide, bfloat16) samples 16 prompts
x 8 completions of 128 tokens and is updated on them. It cannot write math, so each completion is
graded as if its text were a worked MATH solution of the data set, symbolic answers among them, as
it comes out of the sampler. Written to benchmarks/results/grading_step.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.checkout import RESULTS
from benchmarks.machine import machine
from grouper.algorithms.batching import rollout_rows, step_batches
from grouper.algorithms.weighting import token_mean
from grouper.config.schema import (
    GradingConfig,
    GRPOConfig,
    OptimizerConfig,
    PromptConfig,
    RewardConfig,
)
from grouper.grading import Grader
from grouper.models.policy import Policy
from grouper.prompts import make_format
from grouper.rewards import RewardStack, build_rewards
from grouper.sampling.base import SampleRequest
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.training.assemble import advantages_of
from grouper.training.collect import collect
from grouper.training.optimizers import make_optimizer
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import grpo_objective, update
from grouper.types import Completion, Grade, Problem, Prompt, SamplingParams, Verdict

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS, STEPS = 16, 8, 64, 128, 5


class Letters:
    """A tokenizer of the benchmark's vocabulary; the texts are replaced anyway."""

    def decode(self, token_ids: Sequence[int], **_: bool) -> str:
        return "x" * len(token_ids)

    def __len__(self) -> int:
        return 512


class WithTexts:
    """A sampler whose completions carry the texts of worked solutions, in turn."""

    def __init__(self, sampler: NativeSampler, texts: list[str]) -> None:
        self._sampler = sampler
        self._texts = texts

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        for index, completion in self._sampler.sample(requests):
            yield index, replace(completion, text=self._texts[index % len(self._texts)])


class NoGrader:
    """The same step without any grading: what the time is compared with."""

    def submit(self, text: str, reference: str) -> Any:
        del reference
        future: Future[Grade] = Future()
        verdict = Verdict.CORRECT if len(text) % 2 else Verdict.INCORRECT
        future.set_result(Grade(verdict=verdict, extracted="", stage="text", reason=""))
        return future


def make_policy() -> Policy:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
    )
    return Policy(Qwen3ForCausalLM(config).to(torch.bfloat16))


class Steps:
    """The model and the rows that its steps are taken with."""

    def __init__(self, rows: Sequence[dict[str, Any]], rewards: RewardStack) -> None:
        self._rows = rows
        self._rewards = rewards
        self._policy = make_policy()
        self._sampler = NativeSampler(SamplingWeights(self._policy), Letters(), stop_token_ids=[2])
        self._optimizer = make_optimizer(self._policy, OptimizerConfig(learning_rate=1e-6))
        self._params = SamplingParams(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
        self._config = GRPOConfig(require_correct_in_group=False)
        self._ids = torch.randint(6, 500, (PROMPTS, PROMPT_TOKENS))

    def take(self, number: int, grader: Any) -> tuple[float, float]:
        """(seconds of the whole step, seconds waited for grades and rewards after sampling)."""
        chosen = self._rows[number * PROMPTS * GROUP :][: PROMPTS * GROUP]
        items = [
            (
                Problem(
                    id=str(i), question="q", answer=chosen[i * GROUP]["ground_truth"], source="b"
                ),
                Prompt(problem_id=str(i), text="q", token_ids=tuple(self._ids[i].tolist())),
            )
            for i in range(PROMPTS)
        ]
        started = time.perf_counter()
        collected = collect(
            items,
            sampler=WithTexts(self._sampler, [row["response"] for row in chosen]),
            grader=grader,
            rewards=self._rewards,
            params=self._params,
            group_size=GROUP,
            key=(0, "benchmark", number),
        )
        advantages = advantages_of(collected.groups, self._config)
        rows = rollout_rows(collected.groups)
        assert rows is not None
        flat = torch.tensor([a for part in advantages for a in part])
        (batch,) = step_batches(replace(rows, advantages=flat), token_mean)
        update(
            ParallelPolicy(self._policy),
            batch,
            grpo_objective(self._config),
            self._optimizer,
            scale=1.0,
            max_grad_norm=1.0,
            token_budget=4096,
        )
        return time.perf_counter() - started, collected.grade_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    rows = [
        json.loads(line)
        for line in (parser.parse_args().data / "math" / "sft.jsonl").read_text().splitlines()
    ]
    fmt = make_format(PromptConfig(format="r1-zero"))
    steps = Steps(rows, build_rewards([RewardConfig(name="correctness")], fmt))
    with Grader(fmt.contract, GradingConfig()) as grader:
        grader.start()
        steps.take(0, NoGrader())
        pairs = [(steps.take(n, grader), steps.take(n, NoGrader())) for n in range(1, STEPS + 1)]
    record = {
        "machine": machine(),
        "step_seconds": [round(graded[0], 3) for graded, _ in pairs],
        "step_seconds_without_grading": [round(plain[0], 3) for _, plain in pairs],
        "waited_for_grades_seconds": [round(graded[1], 4) for graded, _ in pairs],
        "share_waited": sum(g[1] for g, _ in pairs) / sum(g[0] for g, _ in pairs),
    }
    target = RESULTS / "grading_step.json"
    target.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
