"""What an update at the shape of Qwen2.5-0.5B moves on CUDA, counted on tensors without memory.

16 prompts of 256 tokens, 8 completions of 512 each: 65,536 targets. Products of matrices and
attention are what a card computes; all else only moves bytes, and is what these bounds are about.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_costs import PRODUCTS, TensorCosts, costs_on_cuda
from transformers import AutoConfig

from grouper.advice.tracing import Tracer
from grouper.algorithms.batching import Rows
from grouper.config.schema import ModelConfig
from grouper.models.attention import SharedPrompts
from grouper.models.loading import weightless_policy
from grouper.models.policy import Policy

SHAPE: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
ROWS = Rows(prompt=256, completion=512, count=128, per_prompt=8)
GB = 10**9


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite without kernels runs this, too."""
    monkeypatch.delenv("GROUPER_KERNELS", raising=False)


@pytest.fixture(scope="module")
def traced() -> Tracer:
    """What makes tensors without memory; its policy is in bfloat16."""
    config = ModelConfig(path="x", dtype="bfloat16")
    return Tracer(weightless_policy(config, AutoConfig.for_model(**SHAPE), "cuda"), "cuda")


def body(policy: Policy, tracer: Tracer) -> TensorCosts:
    layout = SharedPrompts(ROWS.batch(SHAPE["vocab_size"]))
    layout.ragged()
    layout.convert(tracer.mode.from_tensor)
    with tracer.mode, costs_on_cuda() as costs:
        hidden = policy.hidden_states(layout, layout.token_ids, layout.position_ids)
        hidden.backward(torch.empty_like(hidden))
    return costs


def head(policy: Policy, tracer: Tracer) -> TensorCosts:
    targets = ROWS.count * ROWS.completion
    with tracer.mode:
        size = (targets, SHAPE["hidden_size"])
        hidden = torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.empty(targets, dtype=torch.int64)
        with costs_on_cuda() as costs:
            logprobs, _ = policy.score(hidden, ids, 1.0, entropy_gradient=False)
            logprobs.backward(torch.empty_like(logprobs))
    return costs


def test_the_head(traced: Tracer) -> None:
    """G4: 1,669 GB in chunks of 220 tokens."""
    costs = head(traced.policy, traced)
    products = costs.bytes_of(lambda name: name in PRODUCTS)
    # The matrix is read in forward and backward, and its gradient is written.
    assert products > 3 * 2 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
    assert costs.bytes <= 450 * GB, costs.table()


def test_the_body_between_its_products(traced: Tracer) -> None:
    """G8: 827 GB op by op."""
    costs = body(traced.policy, traced)
    layers = SHAPE["num_hidden_layers"]
    attended = [k.name for k in costs.kernels if "attn" in k.name]
    assert attended == ["_varlen_attn"] * layers + ["_varlen_attn_backward"] * layers
    # Seven matrices per layer, each multiplied once forward and twice backward. `bmm` is not
    # theirs: transformers 5.17 multiplies positions and frequencies with it, once for all layers.
    products = sum(k.name in PRODUCTS - {"bmm"} for k in costs.kernels)
    assert products == 3 * 7 * layers
    between = costs.bytes_of(lambda name: name not in PRODUCTS and "attn" not in name)
    assert between <= 300 * GB, costs.table()
