"""What a decoding step at the shape of Qwen2.5-1.5B costs on CUDA, as `auto` resolves the recipe.

16 prompts of 256 tokens, 128 rows, a ring of 512 columns, on tensors without memory: the kernels
of a step, and the bytes they move. What is read of the cache grows with the completions (28,672
bytes for each live token): it is counted for rows in the middle of their completions, and taken off
again before the rest is compared with its bound.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_costs import TensorCosts, costs_on_cuda
from torch import Tensor
from transformers import AutoConfig

from grouper.config.schema import LoraConfig, ModelConfig, SamplingConfig
from grouper.kernels.switch import planned
from grouper.kernels.triton.draw import BLOCK
from grouper.models.loading import weightless_policy
from grouper.models.policy import Policy
from grouper.sampling.engine import Engine, OpByOp
from grouper.sampling.kv_cache import CacheSize
from grouper.sampling.weights import SamplingWeights, copy_dtype

SHAPE: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
SIZE = CacheSize(slots=128, prompts=16, prompt=256, completion=512)
# Columns of the ring that each row has written.
WRITTEN = 256
# Bytes of the keys and values that the rows see: those of a prompt are read once for all its rows.
LIVE = (SIZE.prompts * SIZE.prompt + SIZE.slots * WRITTEN) * 28 * 2 * 2 * 128 * 2
GB = 10**9


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite without kernels runs this, too."""
    monkeypatch.delenv("GROUPER_KERNELS", raising=False)


MODELS = {
    "lora": {"dtype": "bfloat16", "lora": LoraConfig()},
    "float32 masters": {"dtype": "float32"},
}


def read(kernel: str, tensor: Tensor) -> float:
    """The part of a tensor that a kernel reads."""
    if kernel == "own_part" and tensor.dim() == 4 and tensor.shape[2] == SIZE.completion:
        return WRITTEN / SIZE.completion
    if kernel == "_pick" and tensor.shape == (SIZE.slots, SHAPE["vocab_size"]):
        return BLOCK / SHAPE["vocab_size"]  # the block that holds the token
    return 1.0


def sampled(model: dict[str, Any], shape: dict[str, Any] = SHAPE) -> Policy:
    """What samples on CUDA where a recipe leaves `sampling.dtype` at `auto`."""
    config = ModelConfig.model_validate({"path": "x", **model})
    policy = weightless_policy(config, AutoConfig.for_model(**shape), "cuda")
    return SamplingWeights(policy, copy_dtype(SamplingConfig(), config, "cuda")).current()


def step(policy: Policy) -> TensorCosts:
    engine = Engine(policy, SIZE, [], graphs=OpByOp())
    # What running and reading the prompts leaves behind, which needs numbers.
    engine._cache.make_places(SIZE.prompts)
    engine._prompts = {(place,) * SIZE.prompt: place for place in range(SIZE.prompts)}
    engine._owners = [row % SIZE.prompts for row in range(SIZE.slots)]
    engine._bucket = engine.rows.count = SIZE.slots
    engine.advance(1, WRITTEN)  # the cache is made by the first step
    with costs_on_cuda(read) as costs:
        engine.advance(1, WRITTEN)
    return costs


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_step_is_few_kernels_over_half_as_many_bytes(name: str) -> None:
    """G2, G3: with adapters 1,680 kernels and 7.1 GB, from float32 weights 952 and 13.6 GB.

    Adapters stay beside bfloat16 weights (a merge would round a small update away): two products
    more for each adapted layer, and what they read.
    """
    with planned("cuda"):
        policy = sampled(MODELS[name])
        costs = step(policy)
    adapted = sum("lora_A" in name for name, _ in policy.named_parameters())
    assert adapted == (7 * 28 if name == "lora" else 0)
    adapters = 2 * sum(p.numel() for name, p in policy.named_parameters() if "lora_" in name)
    assert sum(kernel.name == "own_part" for kernel in costs.kernels) == 28, costs.table()
    # A copy that shares nothing has joined products: three fewer for each layer.
    most = 421 + 2 * adapted if adapted else 337
    assert len(costs.kernels) <= most, costs.table()
    weights = 2 * 1_543_714_304 + adapters
    # The adapter's first product reads the layer's input once more, and the second reads and writes
    # what the layer's own product has written.
    inputs = sum(p.shape[1] for name, p in policy.named_parameters() if "lora_A" in name)
    outputs = sum(p.shape[0] for name, p in policy.named_parameters() if "lora_B" in name)
    beside = 2 * SIZE.slots * (inputs + 2 * outputs)
    assert weights + LIVE < costs.bytes <= 4.1 * GB + adapters + beside + LIVE, costs.table()


@torch.no_grad()
def test_a_step_at_half_a_billion_is_300_kernels() -> None:
    """437 before: joined products, sums with their norms, queries rotated together with keys."""
    shape = SHAPE | {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "intermediate_size": 4864,
    }
    with planned("cuda"):
        costs = step(sampled(MODELS["float32 masters"], shape))
    assert len(costs.kernels) <= 300, costs.table()
