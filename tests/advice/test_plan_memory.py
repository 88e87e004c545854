"""Bytes by hand and against the real thing: states, caches, weights, what a trace counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import make_batch, make_prompt, tiny_model
from transformers import AutoConfig

from grouper.advice.plan import FOUR_BITS, ModelMemory
from grouper.advice.tracing import Live, Tracer
from grouper.algorithms.batching import Rows
from grouper.config.schema import ModelConfig, OptimizerConfig
from grouper.kernels.cpu import ops
from grouper.kernels.cpu.graph import packable
from grouper.kernels.cpu.library import library
from grouper.models import token_scores
from grouper.models.attention import RaggedRows
from grouper.models.loading import weightless_policy
from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest
from grouper.sampling.engine import Engine
from grouper.sampling.kv_cache import CacheSize
from grouper.training.optimizers import make_optimizer, state_bytes
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import sft_objective, update
from grouper.types import SamplingParams

SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 500,
}
ROWS = Rows(prompt=12, completion=20, count=8, per_prompt=4)


def model_memory(
    device: str = "cpu", copy: torch.dtype | None = None, **changes: Any
) -> ModelMemory:
    config = ModelConfig(path="x", **changes)
    policy = weightless_policy(config, AutoConfig.for_model(**SHAPE))
    return ModelMemory(config, policy, device, copy)


def test_parameters_are_counted_by_hand() -> None:
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 16
    layer = attention + 3 * 64 * 128 + 2 * 64
    memory = model_memory()
    assert memory.parameters == memory.trainable == 2 * 500 * 64 + 3 * layer + 64
    lora = model_memory(lora={"rank": 4})
    # q, k, v, o, gate, up, down: rank times the sum of both sides.
    sides = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    assert lora.trainable == 3 * 4 * sum(a + b for a, b in sides)
    assert lora.parameters == memory.parameters + lora.trainable


@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        pytest.param(
            "adamw_8bit",
            marks=pytest.mark.needs_package("bitsandbytes", extra="quantized"),
        ),
        "muon",
    ],
)
@pytest.mark.parametrize("masters", [False, True])
def test_optimizer_states_are_those_that_are_made(name: Any, masters: bool) -> None:
    model = tiny_model(hidden_size=64, intermediate_size=256, head_dim=16)
    policy = Policy(model.to(torch.bfloat16) if masters else model)
    config = OptimizerConfig(name=name, master_weights=masters)
    optimizer = make_optimizer(policy, config)
    assert policy.reserved_bytes + sum(m.nbytes for _, m in optimizer._masters) == state_bytes(
        config, policy
    )
    arguments: dict[str, Any] = {"scale": 1.0, "max_grad_norm": 1.0, "token_budget": 999}
    update(ParallelPolicy(policy), make_batch(), sft_objective, optimizer, **arguments)
    made = sum(
        value.numel() * value.element_size()
        for part in optimizer.parts
        for state in part.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step" and not key.startswith("qmap")
    )
    made += sum(master.nbytes for _, master in optimizer._masters)
    assert state_bytes(config, policy) == pytest.approx(made, rel=1e-3)


@pytest.mark.parametrize("compute", ["auto", "bfloat16"])
@torch.no_grad()
def test_the_cache_is_the_one_that_is_made(compute: Any) -> None:
    model = tiny_model("qwen3", num_key_value_heads=2, head_dim=8)
    dtype = None if compute == "auto" else torch.bfloat16
    engine = Engine(Policy(model, compute_dtype=dtype), CacheSize(3, 2, 7, 10), [2])
    params = SamplingParams(max_new_tokens=10)
    asked = [SampleRequest(prompt=make_prompt(i // 2), params=params, key=i) for i in range(3)]
    engine.begin(asked)
    engine.admit(asked, [0, 1, 2])
    engine.advance(1, 1)
    made = sum(
        store.numel() * store.element_size()
        for layer in engine._cache.layers.values()
        for store in (*layer.prompts, *layer.own)
    )
    config = ModelConfig(path="x", compute_dtype=compute)
    memory = ModelMemory(config, weightless_policy(config, model.config), "cpu")
    part = memory.sampling("sample", CacheSize(3, 2, 7, 10), together=2)
    assert part.cache == made


def test_the_parts_add_up() -> None:
    config = OptimizerConfig()
    memory = model_memory()
    part = memory.update("step", ROWS, config, accumulated=False, reference=True)
    size = 4 * memory.parameters
    assert (part.reference, part.gradients, part.optimizer) == (size, size, 2 * size)
    assert part.peak == part.weights + 4 * size + part.activations
    assert part.logits_chunk == 160 * 500 * 4
    assert part.activations >= part.logits_chunk


@pytest.mark.slow
def test_what_should_save_memory_does() -> None:
    config = OptimizerConfig()

    def peak(accumulated: bool = True, **changes: Any) -> int:
        # Wide rows: activations outweigh the weights.
        rows = Rows(prompt=100, completion=100, count=16, per_prompt=8)
        return model_memory(**changes).update("x", rows, config, accumulated=accumulated).peak

    plain = peak()
    # On the CPU fused kernels keep less of each layer: there is less to save by running it again.
    assert peak(gradient_checkpointing=True) < 0.75 * plain
    assert peak(device="cuda", gradient_checkpointing=True) < 0.6 * peak(device="cuda")
    assert peak(lora={"rank": 4}) < plain
    assert peak(device="cuda", activation_offload=True) < 0.6 * peak(device="cuda")
    assert peak(activation_offload=True) == plain


def test_four_bits_shrink_the_linear_layers_and_nothing_else() -> None:
    plain = model_memory(lora={"rank": 4})
    four = model_memory(lora={"rank": 4}, quantization="4bit")
    linear = 3 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
    # Each of 3 x 7 tensors is rounded to whole bytes.
    assert plain.weights - four.weights == pytest.approx(linear * (4 - FOUR_BITS), abs=21)


def test_a_copy_is_counted_as_it_will_be() -> None:
    """G3: on CUDA float32 weights sample from a bfloat16 copy, whose prefill and cache are half."""
    numbers: dict[str, Any] = {"size": CacheSize(4, 2, 100, 50), "together": 2}
    how: dict[str, Any] = {"device": "cuda", "compute_dtype": "bfloat16", "lora": {"rank": 4}}
    memory = model_memory(**how)
    beside = memory.sampling("sample", **numbers)
    copied = model_memory(**how, copy=torch.bfloat16).sampling("sample", **numbers)
    adapters = memory.trainable
    assert beside.sampling_copy == 0
    # A bfloat16 copy has the adapters beside its weights, a float32 copy has them merged.
    assert copied.sampling_copy == 2 * memory.parameters
    assert copied.cache == beside.cache
    assert copied.activations < beside.activations
    whole = model_memory(**how, copy=torch.float32).sampling("sample", **numbers)
    assert whole.sampling_copy == 4 * (memory.parameters - adapters)
    assert whole.cache == 2 * copied.cache


def test_frozen_weights_of_the_copys_dtype_are_counted_once() -> None:
    """M10, V5: LoRA over bfloat16 weights needs no second copy of them to sample from."""
    how: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "lora": {"rank": 4}}
    memory = model_memory(**how, copy=torch.bfloat16)
    numbers: dict[str, Any] = {"size": CacheSize(4, 2, 100, 50), "together": 2}
    assert memory.sampling("sample", **numbers).sampling_copy == 2 * memory.trainable


@pytest.mark.skipif(library() is None, reason="no C++ compiler, or kernels are off")
@pytest.mark.skipif(
    not packable([torch.empty(1, 1, dtype=torch.bfloat16)]),
    reason="oneDNN has no products in bfloat16 for this processor",
)
def test_weights_that_a_cpu_packs_are_counted() -> None:
    def packed(tokens: int = 50, **changes: Any) -> int:
        size = CacheSize(4, 2, 100, tokens)
        return model_memory(**changes).sampling("sample", size, together=2).sampling_copy

    linear = 3 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
    memory = model_memory(dtype="bfloat16")
    head = memory._policy.model.get_output_embeddings().weight.numel()
    assert packed(dtype="bfloat16") == 2 * (linear + head)
    assert packed() == packed(dtype="bfloat16", tokens=4) == 0
    assert packed(dtype="bfloat16", device="cuda") == 0


@pytest.mark.parametrize("window", [None, 32])
def test_on_cuda_the_ragged_rows_are_traced(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G11: a plan for CUDA traced rows with their padding, and came out 10 % too high."""
    shape = {**SHAPE, "sliding_window": window, "use_sliding_window": window is not None}
    config = ModelConfig(path="x", dtype="bfloat16")

    def peak() -> int:
        policy = weightless_policy(config, AutoConfig.for_model(**shape, max_window_layers=0))
        return Tracer(policy, "cuda").update(ROWS, accumulated=False)[1]

    ragged = peak()
    monkeypatch.setattr(RaggedRows, "serves", lambda *_: False)
    assert ragged < 0.95 * peak()


@pytest.mark.parametrize("family", ["gemma2", "cohere", "gpt2"])
@pytest.mark.parametrize("attention", ["native", "sdpa"])
def test_every_family_can_be_traced(family: str, attention: Any) -> None:
    shape = tiny_model(family).config
    config = ModelConfig(path="x", attention=attention)
    memory = ModelMemory(config, weightless_policy(config, shape), "cpu")
    part = memory.update("step", ROWS, OptimizerConfig(), accumulated=False)
    assert part.activations > part.logits_chunk > 0


@pytest.mark.slow
def test_parts_of_a_loop_that_are_alike_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for the CPU ran every block of heads and every chunk of logits without content."""
    monkeypatch.setattr(ops, "ROOM", 1 << 12)
    monkeypatch.setattr(token_scores, "CHUNK_ELEMENTS", 16 * SHAPE["vocab_size"])
    monkeypatch.setattr(token_scores, "CPU_ROWS", 1)
    shape = AutoConfig.for_model(**{**SHAPE, "num_hidden_layers": 1})
    tracer = Tracer(weightless_policy(ModelConfig(path="x"), shape), "cpu")
    counted, count_one = list[int](), Live.count

    def count_and_note(live: Live, tensor: torch.Tensor) -> None:
        counted.append(id(tensor))
        count_one(live, tensor)

    monkeypatch.setattr(Live, "count", count_and_note)

    def traced(count: int) -> tuple[tuple[int, int], int]:
        counted.clear()
        return tracer.update(replace(ROWS, count=count), accumulated=False), len(counted)

    _, few = traced(64)
    longer, many = traced(128)
    assert many == few
    for module in (ops, token_scores):
        monkeypatch.setattr(module, "representative", lambda parts, _: parts)
    everything, all_parts = traced(128)
    assert everything == longer
    assert all_parts > 1.5 * many


@pytest.mark.slow
def test_checkpoints_keep_one_hidden_state_a_layer() -> None:
    """What is kept between forward and backward, by hand."""
    config = ModelConfig(path="x", gradient_checkpointing=True)
    kept = []
    for layers in (3, 7):
        shape = AutoConfig.for_model(**{**SHAPE, "num_hidden_layers": layers})
        tracer = Tracer(weightless_policy(config, shape), "cpu")
        kept.append(tracer.update(ROWS, accumulated=False)[0])
    tokens = 2 * 12 + 8 * 19  # the last token of a completion is no input
    assert kept[1] - kept[0] == pytest.approx(4 * tokens * 64 * 4, rel=0.02)
