"""What takes the most memory when a single row does not fit, and what would help how much."""

from __future__ import annotations

from typing import Any

import torch

from grouper.config import LoraConfig, ModelConfig
from grouper.model_files import weightless_policy
from grouper.planning.memory import FOUR_BITS, GIB
from grouper.planning.rows import Rows
from grouper.planning.tracing import Tracer
from grouper.policy import Policy

__all__ = ["memory_advice"]

OPTIONS = 3
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def memory_advice(policy: Policy, rows: Rows) -> tuple[str, str]:
    """Two sentences on an update of these rows: what takes how much, and what would save most.

    Args:
        policy: the policy that ran out of memory.
        rows: the rows, usually one.
    """
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    trained = sum(p.numel() * p.element_size() for p in policy.trainable().values())
    activations = _activations(policy, rows)
    # AdamW has two numbers for each trained one; the other optimizers have fewer.
    parts = {
        "activations": activations,
        "weights": weights,
        "optimizer states": 2 * trained,
        "gradients": trained,
    }
    largest = sorted(parts.items(), key=lambda part: -part[1])
    told = ", ".join(f"{name} {_gib(size)}" for name, size in largest)
    half = Rows(prompt=-(-rows.prompt // 2), completion=-(-rows.completion // 2), count=rows.count)
    options = {
        "rows of half the length (sampling.max_new_tokens, prompt.max_prompt_tokens)": activations
        - _activations(policy, half)
    }
    if not policy.gradient_checkpointing:
        options["model.gradient_checkpointing: true"] = activations - _activations(
            policy, rows, gradient_checkpointing=True
        )
    if policy.adapter is None:
        options["model.lora"] = round(2.9 * trained)
        options["optimizer.name: adamw_8bit"] = round(1.5 * trained)
    else:
        options["model.quantization: 4bit"] = round(weights * (1 - FOUR_BITS / 4))
    if policy.compute_dtype is None and policy.model.dtype == torch.float32:
        options["model.compute_dtype: bfloat16"] = round(0.3 * activations)
    best = sorted(options.items(), key=lambda option: -option[1])[:OPTIONS]
    return (
        f"It takes about: {told}.",
        "What would save most: " + "; ".join(f"{name} (about {_gib(s)})" for name, s in best) + ".",
    )


def _activations(policy: Policy, rows: Rows, **changes: bool) -> int:
    """The traced peak beside weights, gradients and optimizer, of a policy like this one."""
    lora: Any = None
    if policy.adapter is not None:
        lora = LoraConfig(rank=policy.adapter.peft_config["default"].r)
    settings: dict[str, Any] = {
        "dtype": NAMES.get(policy.model.dtype, "float32"),
        "compute_dtype": None if policy.compute_dtype is None else NAMES[policy.compute_dtype],
        "attention": "native" if policy.native else "sdpa",
        "gradient_checkpointing": policy.gradient_checkpointing,
        "lora": lora,
        **changes,
    }
    twin = weightless_policy(ModelConfig(path="twin", **settings), policy.model.config)
    return Tracer(twin, policy.device.type).update(rows, accumulated=True).peak


def _gib(size: int) -> str:
    return f"{max(0, size) / GIB:.2f} GiB"
