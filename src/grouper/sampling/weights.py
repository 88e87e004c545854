"""Sampling weights: the training weights themselves, or one refreshed copy in another dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grouper.models.device import DTYPES, has_bfloat16, on_device
from grouper.models.merging import keeps_adapter, require_sums, whole, whole_weights
from grouper.models.policy import Policy

if TYPE_CHECKING:  # the benchmarks for GPUs run where pydantic is missing
    from grouper.config.schema import ModelConfig, SamplingConfig


def copy_dtype(sampling: SamplingConfig, model: ModelConfig, device: str) -> torch.dtype | None:
    """The dtype of the copy that samples; None: the weights that are trained.

    `auto` makes a copy of a model with LoRA: in float32 it is merged, which is faster; in bfloat16
    the adapters are rounded once instead of for every token, and the weights are shared
    (`benchmarks/lora_sampling.py`). On CUDA it also makes one of weights that are not in the dtype
    of the products, which would be rounded for every token. Quantized weights are never copied.

    Args:
        sampling: names the dtype.
        model: says what the weights are like.
        device: its type.
    """
    if sampling.dtype in DTYPES:
        return DTYPES[sampling.dtype]
    compute = on_device(model, device).compute_dtype
    adapted = model.lora is not None and device in {"cpu", "cuda"}
    rounded = device == "cuda" and compute != model.dtype
    wanted = sampling.dtype == "auto" and model.quantization is None and (adapted or rounded)
    return DTYPES[compute] if wanted else None


def describe_dtypes(sampling: SamplingConfig, model: ModelConfig) -> str:
    """In a sentence or two: the dtypes of weights, matrix products and samples on CUDA."""
    compute = on_device(model, "cuda").compute_dtype
    weights = "NF4" if model.quantization else model.dtype
    made = copy_dtype(sampling, model, "cuda")
    adapters = " with float32 adapters" if model.lora else ""
    source = "the weights themselves"
    if made is not None:
        name = str(made).removeprefix("torch.")
        source = f"a {name} copy"
        if model.lora and not keeps_adapter(made):
            source += " with the adapters merged"
        elif model.lora and name == model.dtype:
            source = f"the weights themselves with {name} adapters"
        elif model.lora:
            source += " with the adapters beside it"
    text = f"On CUDA: {weights} weights{adapters}, products in {compute}, samples from {source}."
    if has_bfloat16():
        return text
    if compute == "bfloat16":
        return f"{text} This card has no bfloat16 and emulates it: set model.dtype=float32."
    return f"{text} This card has no bfloat16, so nothing is computed in it."


class SamplingWeights:
    """The policy to sample from, always at the trainer's version.

    A copy in float32 has LoRA merged into it: the sum loses nothing that could be seen, and one
    product is faster than three. In a coarser dtype a merge would lose the update: a step of 5e-6
    is far below the distance of two bfloat16 numbers of the size of a weight, so most weights would
    round back to what they were. There the adapter stays beside the weights, rounded for itself, as
    the trainer's autocast rounds it, and frozen weights of that dtype are shared, not copied.

    Args:
        policy: the policy being trained. It is never changed here: nothing is merged in place.
        dtype: None samples the training weights themselves (LoRA runs side by side); otherwise a
            copy in this dtype, refreshed after each update.
        copy_now: make a copy at once, in the training dtype where `dtype` is None. For weights
            that are about to be split over processes: afterwards they cannot be copied.
    """

    def __init__(
        self, policy: Policy, dtype: torch.dtype | None = None, *, copy_now: bool = False
    ) -> None:
        self._policy = policy
        self._dtype = dtype
        self._copy: Policy | None = self._make() if copy_now else None

    def current(self) -> Policy:
        """The policy to run, refreshed if the trainer has moved on."""
        if self._dtype is None and self._copy is None:
            return self._policy
        if self._copy is None:
            self._copy = self._make()
        if self._copy.version != self._policy.version:
            self._refresh(self._copy)
            self._copy.version = self._policy.version
        return self._copy

    @property
    def _merges(self) -> bool:
        """Whether adapters are added to the weights of the copy."""
        return self._policy.adapter is not None and not keeps_adapter(self._dtype)

    def _make(self) -> Policy:
        if self._merges:
            require_sums(self._policy)
        memo = {id(p): self._copied(p) for p in self._policy.model.parameters()}
        model: Any
        if self._merges:
            model = copy.deepcopy(self._policy.adapter, memo).unload()
        else:
            model = copy.deepcopy(self._policy.model, memo)
        made = Policy(
            model.requires_grad_(False),
            native=self._policy.native,
            # A dtype that was asked for is the one of the products, too.
            compute_dtype=self._policy.compute_dtype if self._dtype is None else None,
        )
        made.version = self._policy.version
        # Merged in the one way, so that a resumed run samples from the same numbers.
        self._refresh(made)
        return made

    def _copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """The copy's parameter: one that nothing changes is shared where its dtype allows.

        Weights are rounded before they are copied, one by one; buffers (the frequencies of rotary
        embeddings) stay as they are, for they are never as coarse as a dtype of weights.
        """
        if not parameter.is_floating_point():
            return parameter
        values = whole(parameter.detach())
        if is_shared(parameter, self._dtype):
            return nn.Parameter(values, False)
        return nn.Parameter(values.to(self._dtype or values.dtype, copy=True), False)

    @torch.no_grad()
    def _refresh(self, target: Policy) -> None:
        """Copy every weight that may have changed, LoRA deltas added before rounding."""
        held = dict(target.model.named_parameters())
        if self._merges:
            for name, value in whole_weights(self._policy):
                held[name].copy_(value)
            return
        # Tied weights come once; split ones are gathered, so that each process goes through all.
        for name, parameter in self._policy.model.named_parameters():
            if parameter.requires_grad:
                held[name].copy_(whole(parameter))


def is_shared(parameter: nn.Parameter, dtype: torch.dtype | None) -> bool:
    """Whether a sampling copy in this dtype reads the policy's own parameter: nothing changes it.

    Args:
        parameter: of the policy being trained.
        dtype: of the copy; None: that of the weights.
    """
    same = dtype in {None, parameter.dtype}
    return same and keeps_adapter(dtype) and not parameter.requires_grad


def adapter_saver(policy: Policy) -> Callable[[str], None]:
    """What writes a policy's adapter to a folder, as PEFT does; every process has to call this."""
    assert policy.adapter is not None
    names = {name: p for name, p in policy.model.named_parameters() if ".lora_" in name}
    # PEFT's names: it wraps the model in two layers.
    pieces = {f"base_model.model.{name}": whole(p.detach()) for name, p in names.items()}
    return partial(policy.adapter.save_pretrained, state_dict=pieces)
