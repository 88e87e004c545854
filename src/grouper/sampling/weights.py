"""Sampling weights: the training weights themselves, or one refreshed copy in another dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from grouper.kernels.joined import join_products
from grouper.kernels.switch import device_type
from grouper.models.device import DTYPES, PRODUCT_DTYPES, has_bfloat16, on_device
from grouper.models.merging import keeps_adapter, require_sums, unsharded, whole_weights
from grouper.models.policy import Policy

if TYPE_CHECKING:  # the benchmarks for GPUs run where pydantic is missing
    from grouper.config.schema import ModelConfig, SamplingConfig


def copy_dtype(sampling: SamplingConfig, model: ModelConfig, device: str) -> torch.dtype | None:
    """Return the dtype of the copy to sample from; None: sample from the trained weights.

    `auto` copies a model with LoRA: in float32 the adapters are merged, which is faster; in
    bfloat16 they are rounded once instead of for every token, and the weights are shared
    (`benchmarks/sampling/lora_sampling.py`). On CUDA it also copies weights that are not in the
    dtype of the products, which would be rounded for every token. Quantized weights are never
    copied.

    Args:
        sampling: names the dtype.
        model: the dtypes and adapters of the trained model.
        device: `cpu`, `cuda` or `mps`.
    """
    if sampling.dtype in DTYPES:
        return DTYPES[sampling.dtype]
    compute = on_device(model, device).compute_dtype
    adapted = model.lora is not None and device in {"cpu", "cuda"}
    rounded = device == "cuda" and compute != model.dtype
    if sampling.dtype != "auto" or model.quantization is not None:
        return None
    if not adapted and not rounded:
        return None
    return PRODUCT_DTYPES[compute]


def describe_dtypes(sampling: SamplingConfig, model: ModelConfig) -> str:
    """Describe in a sentence or two the dtypes of weights, matrix products and samples on CUDA.

    Args:
        sampling: names the dtype of the samples.
        model: with the dtype of the products on CUDA.
    """
    compute = on_device(model, "cuda").compute_dtype
    weights = "NF4" if model.quantization else model.dtype
    dtype = copy_dtype(sampling, model, "cuda")
    adapters = " with float32 adapters" if model.lora else ""
    source = "the weights themselves"
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        source = f"a {name} copy"
        if model.lora and not keeps_adapter(dtype):
            source += " with the adapters merged"
        elif model.lora and name == model.dtype:
            source = f"the weights themselves with {name} adapters"
        elif model.lora:
            source += " with the adapters kept separate"
    text = f"On CUDA: {weights} weights{adapters}, products in {compute}, samples from {source}."
    if has_bfloat16():
        return text
    if compute == "bfloat16":
        return f"{text} This GPU has no bfloat16 and emulates it: set model.dtype=float32."
    if compute == "float32":
        return f"{text} This GPU has no bfloat16."
    return f"{text} This GPU has no bfloat16, so products are in float16, and the loss is scaled."


class SamplingWeights:
    """The policy to sample from, always at the trainer's version.

    A copy in float32 has LoRA merged into it: the rounding error of the sum is negligible, and one
    product is faster than three. In a coarser dtype a merge would lose the update: a step of 5e-6
    is far below the distance of two bfloat16 numbers of the size of a weight, so most weights would
    round back to their old value. In these dtypes the adapter stays separate, rounded as the
    trainer's autocast rounds it, and frozen weights of the dtype are shared, not copied.

    Without a dtype, the training weights themselves are sampled from. If autocast rounds them on a
    CPU, it would do so again for every token, which takes a third of the sampler's time; the
    weights of linear layers are then rounded once after each update. The numbers are the same.

    Args:
        policy: the policy being trained. It is never changed here: nothing is merged in place.
        dtype: None samples from the training weights themselves, with LoRA layers that are not
            merged; otherwise from a copy in this dtype, refreshed after each update.
        copy_now: copy at once, in the training dtype if `dtype` is None. For weights that are
            about to be split over processes: afterwards they cannot be copied.
        device: the type of the device that samples; None: that of the policy.
    """

    def __init__(
        self,
        policy: Policy,
        dtype: torch.dtype | None = None,
        *,
        copy_now: bool = False,
        device: str | None = None,
    ) -> None:
        self._policy = policy
        self._dtype = dtype
        self._copy: Policy | None = None
        self._rounded: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Weights of the policy, and the same rounded to the dtype of its products."""
        self._rounds = (
            dtype is None and not copy_now and rounds_weights(policy, device or policy.device.type)
        )
        if copy_now:
            self._copy = self._make()

    def current(self) -> Policy:
        """Return the policy to run, refreshed if the trainer has a newer version."""
        if self._dtype is None and self._copy is None and not self._rounds:
            return self._policy
        if self._copy is None:
            self._copy = self._make()
        self._copy.reserved_bytes = self._policy.reserved_bytes
        if self._copy.version != self._policy.version:
            self._refresh(self._copy)
            self._copy.version = self._policy.version
        return self._copy

    @property
    def _merges(self) -> bool:
        """Whether adapters are added to the weights of the copy."""
        return self._policy.adapter is not None and not keeps_adapter(self._dtype)

    def copied(self) -> list[nn.Parameter]:
        """Return the parameters that exist beside those of the training policy."""
        if self._rounds:
            self.current()
            return [rounded for _, rounded in self._rounded]
        current = self.current()
        if current is self._policy:
            return []
        shared = set()
        for name, parameter in self._policy.named_parameters():
            if is_shared(parameter, self._dtype):
                shared.add(name)
        return [value for name, value in current.named_parameters() if name not in shared]

    def _make(self) -> Policy:
        if self._rounds:
            return self._make_rounded()
        if self._merges:
            require_sums(self._policy)
        # `deepcopy` takes the parameters from here, so it copies only buffers and settings.
        memo = {}
        shared = []
        for parameter in self._policy.model.parameters():
            copied = self._copied(parameter)
            memo[id(parameter)] = copied
            if is_shared(parameter, self._dtype):
                shared.append(copied)
        model: Any
        if self._merges:
            model = copy.deepcopy(self._policy.adapter, memo).unload()
        else:
            model = copy.deepcopy(self._policy.model, memo)
        # With a dtype of its own, the copy computes its products in that dtype, too.
        compute_dtype = None
        if self._dtype is None:
            compute_dtype = self._policy.compute_dtype
        model.requires_grad_(False)
        if device_type(next(model.parameters())) == "cuda":
            join_products(model, shared)
        policy = Policy(model, native=self._policy.native, compute_dtype=compute_dtype)
        policy.version = self._policy.version
        # Merged by the same code as after an update, so that a resumed run samples from the same
        # numbers.
        self._refresh(policy)
        return policy

    def _make_rounded(self) -> Policy:
        """Make the policy that reads the training weights, but for those of linear layers.

        An embedding that is also the head stays as it is for looking tokens up.
        """
        compute_dtype = self._policy.compute_dtype
        memo = {}
        for parameter in self._policy.model.parameters():
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
        model = copy.deepcopy(self._policy.model, memo)
        for original, module in zip(self._policy.model.modules(), model.modules(), strict=True):
            if type(module) is nn.Linear:
                rounded = original.weight.detach().to(compute_dtype, copy=True)
                module.weight = nn.Parameter(rounded, requires_grad=False)
                self._rounded.append((original.weight, module.weight))
        policy = Policy(model, native=self._policy.native, compute_dtype=compute_dtype)
        policy.version = self._policy.version
        return policy

    def _copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the copy's parameter: the policy's own one if `is_shared`, else a rounded copy.

        Weights are rounded one by one, before they are copied. Buffers (the frequencies of rotary
        embeddings) keep their dtype: that of the weights would be too coarse for them.
        """
        if not parameter.is_floating_point():
            return parameter
        values = unsharded(parameter.detach())
        if not is_shared(parameter, self._dtype):
            dtype = self._dtype or values.dtype
            values = values.to(dtype, copy=True)
        return nn.Parameter(values, requires_grad=False)

    @torch.no_grad()
    def _refresh(self, target: Policy) -> None:
        """Copy every weight that may have changed, LoRA deltas added before rounding."""
        for weight, rounded in self._rounded:
            rounded.copy_(weight)
        if self._rounds:
            return
        targets = dict(target.model.named_parameters())
        if self._merges:
            for name, value in whole_weights(self._policy):
                targets[name].copy_(value)
            return
        # Tied weights come once; split ones are gathered, so that each process goes through all.
        for name, parameter in self._policy.model.named_parameters():
            if parameter.requires_grad:
                targets[name].copy_(unsharded(parameter))


def rounds_weights(policy: Policy, device: str) -> bool:
    """Tell whether autocast rounds this policy's weights each time, on a CPU.

    Adapters have a copy of their own (`copy_dtype`), and weights that are split over processes are
    gathered by their own modules.
    """
    if device != "cpu" or policy.adapter is not None:
        return False
    if policy.compute_dtype in {None, policy.model.dtype}:
        return False
    return not any(isinstance(parameter, DTensor) for parameter in policy.model.parameters())


def is_shared(parameter: nn.Parameter, dtype: torch.dtype | None) -> bool:
    """Tell whether a sampling copy in this dtype reads the policy's own parameter.

    It does if nothing changes the parameter: it is frozen, and no adapter is merged into it.

    Args:
        parameter: of the policy being trained.
        dtype: of the copy; None: that of the weights.
    """
    same_dtype = dtype in {None, parameter.dtype}
    return same_dtype and keeps_adapter(dtype) and not parameter.requires_grad


def adapter_saver(policy: Policy) -> Callable[[str], None]:
    """Return a function that writes a policy's adapter to a folder, as PEFT does.

    Every process has to call this, since split weights are gathered; one of them may then write.
    """
    assert policy.adapter is not None
    state = {}
    for name, parameter in policy.model.named_parameters():
        if ".lora_" in name:
            # PEFT wraps the model in two layers, which its names begin with.
            state[f"base_model.model.{name}"] = unsharded(parameter.detach())
    return partial(policy.adapter.save_pretrained, state_dict=state)
