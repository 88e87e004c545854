"""How much of a LoRA update the sampler sees: beside the weights, or merged and rounded.

    OMP_NUM_THREADS=2 python -m benchmarks.sampling.lora_rounding MODEL ../shared/data/gsm8k

MODEL is real-models/smollm2, SmolLM2-135M. In bfloat16, with adapters of rank 16 and alpha 64, it
is fine-tuned on worked solutions of GSM8K with Adam at 5e-6. After 5, 20, 50, 100 and 200 steps the
log-probs of fixed completions are taken from the trainer and from

  beside    the sampling copy as Grouper makes it: the adapter in bfloat16 beside the weights
  nearest   weights with the adapter merged, rounded to the nearest bfloat16 number
  random    the same, rounded up or down at random in proportion to the distance

and completions are sampled with the native sampler. Written to benchmarks/results/
lora_rounding.json: `share` is the part of the trainer's change in log-probs since step 0 that a
copy repeats (a projection), `gap` the mean absolute difference in nats. `exact_share` and
`exact_gap` are the same with every product in float32, which leaves the rounding of weights alone;
`weight_share` is the projection of what was added to the weights. `sampler_gap` is the difference
for sampled completions; at step 0 it is the same model's without an update.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkout import RESULTS
from benchmarks.machine import where
from grouper.algorithms.batching import TrainBatch, unweighted_rows
from grouper.config.schema import LoraConfig, ModelConfig
from grouper.models.loading import load_policy, load_tokenizer
from grouper.models.merging import merged_copy
from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.types import Prompt, SamplingParams

LEARNING_RATE = 5e-6
ROWS_PER_STEP = 2
LONGEST = 120
"""Tokens of a question or of a solution; longer ones are left out."""
FIXED_ROWS = 16
SAMPLED_ROWS = 16
SAMPLED_TOKENS = 48


def rows_of(folder: Path, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Token ids of questions and their worked solutions."""
    rows = []
    for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        question = tokenizer(f"Question: {row['question']}\nAnswer:")["input_ids"]
        solution = tokenizer(f" {row['answer']}")["input_ids"]
        if len(question) <= LONGEST and len(solution) <= LONGEST:
            rows.append((question, solution))
    return rows


def batch_of(rows: list[tuple[list[int], list[int]]]) -> TrainBatch:
    prompts = [question for question, _ in rows]
    completions = [solution for _, solution in rows]
    return unweighted_rows(prompts, completions, range(len(rows)))


@torch.no_grad()
def logprobs_of(policy: Policy, batch: TrainBatch) -> torch.Tensor:
    """Log-probs of all completion tokens, flat, in float64."""
    logprobs: torch.Tensor = policy(batch).logprobs[batch.mask].double()
    return logprobs


def compared(base: torch.Tensor, trained: torch.Tensor, copied: torch.Tensor) -> dict[str, float]:
    change = trained - base
    share = float(((copied - base) * change).sum() / change.square().sum())
    return {"share": share, "gap": float((copied - trained).abs().mean())}


def sampler_gap(policy: Policy, weights: SamplingWeights, prompts: list[Prompt], eos: int) -> float:
    """Mean difference of the log-probs of sampled tokens, sampler against trainer."""
    tokenizer = load_tokenizer(policy.model.config.name_or_path)
    sampler = NativeSampler(weights, tokenizer, stop_token_ids=[eos])
    params = SamplingParams(max_new_tokens=SAMPLED_TOKENS, temperature=1.0)
    requests = [
        SampleRequest(prompt=prompt, params=params, key=draw_seed(0, "rounding", number))
        for number, prompt in enumerate(prompts)
    ]
    sampled = dict(sampler.sample(requests))
    sampler.release()
    completions = [sampled[number] for number in range(len(requests))]
    batch = unweighted_rows(
        [prompt.token_ids for prompt in prompts],
        [completion.token_ids for completion in completions],
        range(len(prompts)),
    )
    ours = logprobs_of(policy, batch)
    theirs = torch.tensor([value for one in completions for value in one.logprobs])
    return float((ours - theirs.double()).abs().mean())


class Comparison:
    """The three copies beside the trainer, on fixed rows.

    Args:
        policy: before its first update.
        fixed: the rows.
    """

    def __init__(self, policy: Policy, fixed: TrainBatch) -> None:
        self._policy = policy
        self._fixed = fixed
        self._base = logprobs_of(policy, fixed)
        self._exact_base = logprobs_of(merged_copy(policy, torch.float32)[0], fixed)

    def __call__(self) -> dict[str, Any]:
        policy, fixed = self._policy, self._fixed
        trained = logprobs_of(policy, fixed)
        exact = logprobs_of(merged_copy(policy, torch.float32)[0], fixed)
        row: dict[str, Any] = {
            "change": float((trained - self._base).abs().mean()),
            "exact_change": float((exact - self._exact_base).abs().mean()),
        }
        beside = SamplingWeights(policy, torch.bfloat16).current()
        row["beside"] = compared(self._base, trained, logprobs_of(beside, fixed))
        for name, seed in (("nearest", None), ("random", 0)):
            copy, weight_share = merged_copy(policy, torch.bfloat16, seed=seed)
            row[name] = compared(self._base, trained, logprobs_of(copy, fixed))
            row[name]["weight_share"] = weight_share
            copy.model.float()
            in_float32 = compared(self._exact_base, exact, logprobs_of(copy, fixed))
            row[name] |= {f"exact_{key}": value for key, value in in_float32.items()}
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 20, 50, 100, 200])
    options = parser.parse_args()
    lora = LoraConfig(rank=16, alpha=64.0)
    config = ModelConfig(path=str(options.model), dtype="bfloat16", lora=lora)
    policy = load_policy(config, str(options.model), seed=0)
    tokenizer = load_tokenizer(str(options.model))
    rows = rows_of(options.data, tokenizer)
    fixed = batch_of(rows[:FIXED_ROWS])
    prompts = [
        Prompt(problem_id=str(number), text="", token_ids=tuple(question))
        for number, (question, _) in enumerate(rows[:SAMPLED_ROWS])
    ]
    weights = SamplingWeights(policy, torch.bfloat16)
    comparison = Comparison(policy, fixed)
    eos = int(tokenizer.eos_token_id)
    results = {"0": {"sampler_gap": sampler_gap(policy, weights, prompts, eos)}}
    print("step 0", results["0"], flush=True)
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for step in range(1, max(options.steps) + 1):
        first = FIXED_ROWS + (step - 1) * ROWS_PER_STEP
        batch = batch_of(rows[first : first + ROWS_PER_STEP])
        loss = -policy(batch).logprobs[batch.mask].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        policy.version += 1
        losses.append(loss.item())
        if step in options.steps:
            row = comparison()
            row["sampler_gap"] = sampler_gap(policy, weights, prompts, eos)
            row["loss"] = statistics.mean(losses[-5:])
            results[str(step)] = row
            print(f"step {step}", json.dumps(row), flush=True)
            record = {
                "machine": where(),
                "model": options.model.name,
                "lora": {"rank": lora.rank, "alpha": lora.alpha},
                "learning_rate": LEARNING_RATE,
                "rows_per_step": ROWS_PER_STEP,
                "steps": results,
            }
            RESULTS.mkdir(exist_ok=True)
            file = RESULTS / "lora_rounding.json"
            file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
