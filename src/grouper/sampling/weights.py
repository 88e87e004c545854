"""Sampling weights: the training weights themselves, or one refreshed copy in another dtype."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from grouper.models.device import on_device
from grouper.models.policy import Policy

if TYPE_CHECKING:  # the benchmarks for GPUs run where pydantic is missing
    from grouper.config.schema import ModelConfig, SamplingConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def copy_dtype(
    sampling: SamplingConfig, model: ModelConfig, device: str, *, lora: bool
) -> torch.dtype | None:
    """The dtype of the copy that samples; None: the weights that are trained.

    `auto` makes a copy where that is known to be faster: of a model with LoRA on the CPU, where
    adapters beside the weights took 1.2 to 2.7 times as long as merged ones
    (`benchmarks/lora_sampling.py`). Quantised weights cannot be merged without loss.

    Args:
        sampling: names the dtype.
        model: says what the weights are like.
        device: its type.
        lora: whether the model has adapters.
    """
    if sampling.dtype in DTYPES:
        return DTYPES[sampling.dtype]
    mergeable = lora and model.quantization is None
    if sampling.dtype == "auto" and mergeable and device == "cpu":
        return DTYPES[on_device(model, device).compute_dtype]
    return None


class SamplingWeights:
    """The policy to sample from, always at the trainer's version.

    Args:
        policy: the policy being trained. It is never changed here: nothing is merged in place.
        dtype: None samples the training weights themselves (LoRA runs side by side); otherwise a
            full copy in this dtype, with LoRA merged into the copy, refreshed after each update.
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

    def _make(self) -> Policy:
        if self._policy.adapter is None:
            model = copy.deepcopy(self._policy.model)
        else:
            model = copy.deepcopy(self._policy.adapter).merge_and_unload()
        model = model if self._dtype is None else model.to(self._dtype)
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

    @torch.no_grad()
    def _refresh(self, target: Policy) -> None:
        """Copy every weight, LoRA deltas added in the training dtype before rounding."""
        sources = dict(self._policy.model.named_modules())
        for name, module in target.model.named_modules():
            source = sources[name]
            delta = _lora_delta(source)
            base = getattr(source, "base_layer", source)
            for key, parameter in module.named_parameters(recurse=False):
                value = _whole(getattr(base, key))
                parameter.copy_(value + delta if key == "weight" and delta is not None else value)


def _lora_delta(module: nn.Module) -> torch.Tensor | None:
    """What the active adapters of a LoRA layer add to its weight, or None."""
    get_delta = getattr(module, "get_delta_weight", None)
    if get_delta is None:
        return None
    # Linear layers keep their adapters in lora_A, embeddings in lora_embedding_A.
    held = {
        name
        for kind in ("lora_A", "lora_embedding_A")
        for name in (getattr(module, kind, None) or ())
    }
    deltas: list[torch.Tensor] = [
        get_delta(name)
        for name in module.active_adapters  # type: ignore[union-attr]  # PEFT layers are untyped
        if name in held
    ]
    return _whole(sum(deltas[1:], deltas[0])) if deltas else None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is split over processes (a DTensor) in one piece; every process takes part."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
