"""Which model families run natively, and whether they compute there what transformers computes.

    OMP_NUM_THREADS=1 python -m benchmarks.sampling.families [NAME ...]

Two layers of each model at its true widths, heads and kinds of attention, random weights in float32
and a vocabulary of 4,096, one model at a time (up to 5 GB). Sliding windows are made shorter than
the texts. Four things are looked at: whether the start-up check lets the model run natively, or the
sentence it refuses it with; whether greedy tokens are those of `generate`; how far the sampler's
log-probs are from the trainer's on tokens that were drawn; whether all gradients are finite.
Written to benchmarks/results/families.json.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.checkout import RESULTS
from benchmarks.machine import where
from grouper.algorithms.batching import unweighted_rows
from grouper.errors import ModelError
from grouper.models.attention_check import check_native_attention
from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.types import Completion, Prompt, SamplingParams

__all__ = ["FAMILIES", "look_at"]

STOP = 2
WINDOW = 16
PROMPTS = (30, 7)
"""Tokens of each; the first is longer than the window."""
NEW = 24
SAMPLES = 2

LLAMA_3_2_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# What matters is that there are 48 factors that differ: 96 of 128 dimensions of a head turn.
PHI_4_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.01 * i for i in range(48)],
    "long_factor": [1.0 + 0.5 * i for i in range(48)],
    "original_max_position_embeddings": 4096,
}
SLIDING = ["sliding_attention", "full_attention"]


def gemma_3(factor: float | None = None) -> dict[str, Any]:
    """Gemma 3's kinds of layers; the larger models stretch the positions of whole attention."""
    whole: dict[str, Any] = {"rope_type": "default", "rope_theta": 1_000_000.0}
    if factor is not None:
        whole |= {"rope_type": "linear", "factor": factor}
    near = {"rope_type": "default", "rope_theta": 10_000.0}
    return {
        "layer_types": SLIDING,
        "sliding_window": WINDOW,
        "rope_parameters": {"full_attention": whole, "sliding_attention": near},
    }


def shape(kind: str, sizes: Sequence[int], *, tied: bool = True, **others: Any) -> dict[str, Any]:
    """A configuration; sizes: hidden, intermediate, heads, key heads, dimensions of a head."""
    hidden, intermediate, heads, key_heads, dim = sizes
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": dim,
        "tie_word_embeddings": tied,
        "num_hidden_layers": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 32_768,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": STOP,
        **others,
    }


LLAMA: dict[str, Any] = {"rope_parameters": LLAMA_3_2_ROPE}
PHI: dict[str, Any] = {
    "rope_parameters": PHI_4_ROPE,
    "max_position_embeddings": 131_072,
    "sliding_window": 262_144,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2.5 0.5B": shape("qwen2", (896, 4864, 14, 2, 64)),
    "Qwen2.5 1.5B": shape("qwen2", (1536, 8960, 12, 2, 128)),
    "Qwen2.5 3B": shape("qwen2", (2048, 11_008, 16, 2, 128)),
    "Qwen2.5 7B": shape("qwen2", (3584, 18_944, 28, 4, 128), tied=False),
    "Qwen3 0.6B": shape("qwen3", (1024, 3072, 16, 8, 128)),
    "Qwen3 1.7B": shape("qwen3", (2048, 6144, 16, 8, 128)),
    "Qwen3 4B": shape("qwen3", (2560, 9728, 32, 8, 128)),
    "Llama 3.2 1B": shape("llama", (2048, 8192, 32, 8, 64), **LLAMA),
    "Llama 3.2 3B": shape("llama", (3072, 8192, 24, 8, 128), **LLAMA),
    "Gemma 2 2B": shape(
        "gemma2", (2304, 9216, 8, 4, 256), layer_types=SLIDING, sliding_window=WINDOW
    ),
    "Gemma 3 1B": shape("gemma3_text", (1152, 6912, 4, 1, 256), **gemma_3()),
    "Gemma 3 4B": shape("gemma3_text", (2560, 10_240, 8, 4, 256), **gemma_3(factor=8.0)),
    "SmolLM2 135M": shape("llama", (576, 1536, 9, 3, 64)),
    "SmolLM2 360M": shape("llama", (960, 2560, 15, 5, 64)),
    "SmolLM2 1.7B": shape("llama", (2048, 8192, 32, 32, 64)),
    "SmolLM3 3B": shape("smollm3", (2048, 11_008, 16, 4, 128), no_rope_layers=[1, 0]),
    "Phi-4-mini": shape("phi3", (3072, 8192, 24, 8, 128), **PHI),
    "OLMo 2 1B": shape("olmo2", (2048, 8192, 16, 16, 128), tied=False),
    "OLMo 2 7B": shape("olmo2", (4096, 11_008, 32, 32, 128), tied=False),
    "Mistral 7B": shape("mistral", (4096, 14_336, 32, 8, 128), tied=False, sliding_window=WINDOW),
}


class Numbers:
    """A tokenizer whose text is the ids."""

    def decode(self, token_ids: Sequence[int], **_: bool) -> str:
        return " ".join(map(str, token_ids))


def look_at(config: dict[str, Any]) -> dict[str, Any]:
    """What is found out about one model.

    Returns:
        `refused` (a sentence, or None where it runs natively) and, where it does, `same_greedy`,
        `logprob_gap` (the largest, in nats) and `finite_gradients`.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=torch.float32, attn_implementation="eager"
    )
    policy = Policy(model.eval())
    if not policy.native:
        return {"refused": f"{type(model).__name__} has no interface for attention."}
    try:
        check_native_attention(policy)
    except ModelError as error:
        return {"refused": error.paragraph()}
    greedy, drawn = list(sampled(policy, 0.0)), list(sampled(policy, 1.0))
    sames = [
        list(found.token_ids) == generated(policy, prompt)
        for prompt, found in zip(prompts(), greedy[::SAMPLES], strict=True)
    ]
    owners = [owner for owner in range(len(PROMPTS)) for _ in range(SAMPLES)]
    batch = unweighted_rows(prompts(), [list(c.token_ids) for c in drawn], owners)
    trained = policy(batch).logprobs
    theirs = torch.tensor([c.logprobs for c in drawn])
    gap = float((trained - theirs).detach().abs().max())
    trained.sum().backward()
    gradients = [p.grad for p in policy.trainable().values()]
    finite = all(g is not None and bool(g.isfinite().all()) for g in gradients)
    return {
        "refused": None,
        "same_greedy": all(sames),
        "logprob_gap": gap,
        "finite_gradients": finite,
    }


def prompts() -> list[list[int]]:
    return [[10 + (31 * i + 7 * n) % 4000 for i in range(n)] for n in PROMPTS]


def sampled(policy: Policy, temperature: float) -> Iterator[Completion]:
    """`SAMPLES` completions of each prompt, all of `NEW` tokens."""
    params = SamplingParams(temperature=temperature, max_new_tokens=NEW, min_new_tokens=NEW)
    requests = [
        SampleRequest(
            prompt=Prompt(problem_id=str(number), text="", token_ids=tuple(ids)),
            params=params,
            key=draw_seed(0, number, sample),
        )
        for number, ids in enumerate(prompts())
        for sample in range(SAMPLES)
    ]
    sampler = NativeSampler(SamplingWeights(policy), Numbers(), stop_token_ids=[STOP])
    found = dict(sampler.sample(requests))
    return (found[i] for i in range(len(requests)))


@torch.no_grad()
def generated(policy: Policy, prompt: list[int]) -> list[int]:
    """What transformers makes of a prompt, greedily."""
    out = policy.model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW
    )
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="left out: all of them")
    wanted = parser.parse_args().names or list(FAMILIES)
    path = RESULTS / "families.json"
    known: dict[str, Any] = json.loads(path.read_text())["models"] if path.exists() else {}
    for name in wanted:
        config = FAMILIES[name]
        known[name] = {"shape": config, **look_at(config)}
        print(name, {k: v for k, v in known[name].items() if k != "shape"}, flush=True)
        gc.collect()
    record = {"machine": where(), "models": {n: known[n] for n in FAMILIES if n in known}}
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
