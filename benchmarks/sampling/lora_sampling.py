"""LoRA while sampling: from the trained weights, from the copy that is made, and merged.

    OMP_NUM_THREADS=2 python -m benchmarks.sampling.lora_sampling

The 25 M shape of the tiny pipeline with adapters of rank 32 on all linear layers, 16 prompts of 64
tokens x 8 completions of 128, on an otherwise idle machine, in turns. Before every draw the policy
is one step further, so that the merged copy is made anew, as in training. Written to
benchmarks/results/lora_sampling.json: seconds of every try, their ratio, and how far the sampler's
log-probs are from the trainer's for the same tokens. `trained` runs the trained weights with PEFT's
float32 adapters, `copy` what `sampling.dtype: auto` makes (in bfloat16 the adapters beside shared
weights, in float32 merged), and `merged` one plain copy, made once before the clock starts: what
sampling would take without adapters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.checkout import RESULTS
from benchmarks.cpu.sampler import Native, gap
from benchmarks.machine import where
from benchmarks.workload import CASES, save_model
from grouper.config.schema import LoraConfig, ModelConfig
from grouper.models.loading import load_policy
from grouper.models.merging import merged_copy
from grouper.models.policy import Policy

SPREAD = 0.02
"""Of the adapters' second factors, which a fresh adapter has at zero."""


def adapted(folder: Path, dtype: Any) -> Policy:
    """A policy with adapters that change what it says."""
    config = ModelConfig(path=str(folder), dtype=dtype, lora=LoraConfig())
    policy = load_policy(config, str(folder), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(SPREAD * noise)
    return policy


def measured(name: str, tries: int) -> dict[str, Any]:
    """One case: both ways in turns."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        save_model(case, Path(folder))
        policy = adapted(Path(folder), case.dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = getattr(torch, case.dtype)
    plain, _ = merged_copy(policy, dtype)
    sides = {
        "trained": Native(policy, tokenizer, case, None),
        "copy": Native(policy, tokenizer, case, dtype),
        "merged": Native(plain, tokenizer, case, None),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(tries + 1):
        for side, sampler in sides.items():
            policy.version += 1
            seconds[side].append(sampler()[0])
    medians = {side: statistics.median(found[1:]) for side, found in seconds.items()}
    gaps = {
        side: gap(policy, case, [(list(c.token_ids), list(c.logprobs)) for c in sampler.draw()])
        for side, sampler in sides.items()
    }
    return {
        "seconds": {side: found[1:] for side, found in seconds.items()},
        "ratio": medians["trained"] / medians["copy"],
        "price": medians["copy"] / medians["merged"],
        "logprob_gap": gaps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=3)
    options = parser.parse_args()
    record = {
        "machine": where(),
        "cases": {name: measured(name, options.tries) for name in ("25M bf16", "25M float32")},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "lora_sampling.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, case in record["cases"].items():
        print(
            f"{name}: the copy is {case['ratio']:.2f} times as fast as the trained weights and "
            f"takes {case['price']:.2f} times a plain model's time; {case['logprob_gap']}"
        )


if __name__ == "__main__":
    main()
