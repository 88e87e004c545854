"""Gradient checkpointing and offloading: the same gradient, and nothing of it while sampling."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import LetterTokenizer, make_batch, make_prompt, tiny_model
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from grouper.config.schema import GRPOConfig, LoraConfig
from grouper.errors import ModelError
from grouper.models import attention, memory_savers
from grouper.models.loading import _new_adapter
from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import accumulate_gradient, grpo_objective, sft_objective
from grouper.types import Completion, SamplingParams


class Calls:
    """How often our attention ran for a whole step, and how often a decoder layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        honest = attention.SharedPrompts.attend

        def attend(*arguments: Any) -> Tensor:
            self.count += 1
            return honest(*arguments)

        monkeypatch.setattr(attention.SharedPrompts, "attend", attend)


def make_policy(family: str = "qwen3", *, lora: bool = False, **options: bool) -> Policy:
    model = tiny_model(family, dtype=torch.float64, scale=2.0)
    adapter = None
    if lora:
        settings = LoraConfig(rank=4, alpha=8, dropout=0.5)
        adapter = _new_adapter(model, settings, "base", seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    return Policy(model, adapter=adapter, **options)


def gradient(policy: Policy, *, dropout: bool = False) -> Tensor:
    accumulate_gradient(
        ParallelPolicy(policy),
        make_batch(dtype=torch.float64),
        sft_objective if dropout else grpo_objective(GRPOConfig()),
        token_budget=40,
        dropout_seed=(lambda number: number) if dropout else None,
    )
    return torch.cat([p.grad.flatten() for p in policy.trainable().values() if p.grad is not None])


@pytest.mark.parametrize("native", [True, False], ids=["shared-prompts", "padded"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "qwen2-sliding", "gpt2"])
def test_checkpointing_changes_no_gradient(family: str, native: bool) -> None:
    expected = gradient(make_policy(family, native=native))
    found = gradient(make_policy(family, native=native, gradient_checkpointing=True))
    assert float((found - expected).norm() / expected.norm()) < 1e-12


@pytest.mark.parametrize("dropout", [False, True])
def test_checkpointing_changes_no_gradient_of_lora(dropout: bool) -> None:
    """The base is frozen, so no input of the first layer has a gradient; dropout is repeated."""
    expected = gradient(make_policy(lora=True), dropout=dropout)
    found = gradient(make_policy(lora=True, gradient_checkpointing=True), dropout=dropout)
    assert float((found - expected).norm() / expected.norm()) < 1e-12


def test_layers_run_again_through_our_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    gradient(make_policy())
    once, calls.count = calls.count, 0
    policy = make_policy(gradient_checkpointing=True)
    gradient(policy)
    assert calls.count == 2 * once
    calls.count = 0
    with torch.no_grad():
        policy(make_batch(dtype=torch.float64))
    assert calls.count == 2  # one a layer
    assert policy.model.config._attn_implementation != attention.NAME


def saved_elements(policy: Policy) -> int:
    """Elements that the forward keeps for the backward, weights not counted."""
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = policy(make_batch(dtype=torch.float64))
    assert outputs.logprobs.requires_grad
    return sum(kept.values())


def test_checkpointing_keeps_little() -> None:
    assert saved_elements(make_policy(gradient_checkpointing=True)) < 0.2 * saved_elements(
        make_policy()
    )


def sampled(policy: Policy) -> list[Completion]:
    sampler = NativeSampler(
        SamplingWeights(policy), LetterTokenizer(), stop_token_ids=[2], max_slots=3
    )
    params = SamplingParams(temperature=0, max_new_tokens=12)
    requests = [
        SampleRequest(prompt=make_prompt(i, 3 + i), params=params, key=draw_seed(0, i))
        for i in range(5)
    ]
    return [completion for _, completion in sorted(sampler.sample(requests), key=lambda x: x[0])]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2"])
def test_sampling_is_the_same_with_checkpointing_on(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T32: checkpointing drops caches in some trainers and changes what is sampled."""
    expected = sampled(make_policy(family))
    policy = make_policy(family, gradient_checkpointing=True, activation_offload=True)
    gradient(policy)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("nothing is checkpointed without a gradient")

    monkeypatch.setattr(memory_savers, "checkpoint", never)
    assert sampled(policy) == expected


def test_a_copy_runs_its_own_layers() -> None:
    policy = make_policy(gradient_checkpointing=True)
    copied = copy.deepcopy(policy.model)
    layers = [m for m in copied.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert all(layer.forward.__self__ is layer for layer in layers)
    before = sampled(policy)
    weights = SamplingWeights(policy, torch.float32)
    with torch.no_grad():
        for parameter in weights.current().parameters():
            parameter.zero_()
    assert sampled(policy) == before


def test_a_model_without_layers_to_run_again_is_refused() -> None:
    class Odd(torch.nn.Module):
        pass

    with pytest.raises(ModelError, match="Odd does not support gradient checkpointing"):
        memory_savers.checkpoint_layers(Odd(), lambda: None)  # type: ignore[arg-type, return-value]  # it is refused


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_offloading_changes_no_gradient(checkpointing: bool, lora: bool) -> None:
    expected = gradient(make_policy(lora=lora))
    policy = make_policy(lora=lora, gradient_checkpointing=checkpointing, activation_offload=True)
    assert torch.equal(gradient(policy), expected)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_offloading_moves_everything_but_the_weights(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU nothing has to move; a host that copies shows what would."""
    moved: list[Tensor] = []

    class Host:
        def __init__(self, *, pin_memory: bool) -> None:
            assert not pin_memory

        def pack_hook(self, tensor: Tensor) -> tuple[str, Tensor]:
            moved.append(tensor)
            return ("moved", tensor.clone())

        def unpack_hook(self, packed: tuple[str, Tensor]) -> Tensor:
            return packed[1]

    monkeypatch.setattr(memory_savers, "save_on_cpu", Host)
    expected = gradient(make_policy())
    policy = make_policy(gradient_checkpointing=checkpointing, activation_offload=True)
    assert torch.equal(gradient(policy), expected)
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    assert len(moved) > 4
    assert not weights & {t.untyped_storage().data_ptr() for t in moved}
