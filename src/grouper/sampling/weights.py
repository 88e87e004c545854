"""Sampling weights: the training weights themselves, or one refreshed copy in another dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from grouper.errors import ModelError
from grouper.models.device import DTYPES, has_bfloat16, on_device
from grouper.models.policy import ADAPTER, Policy

if TYPE_CHECKING:  # the benchmarks for GPUs run where pydantic is missing
    from grouper.config.schema import ModelConfig, SamplingConfig


def copy_dtype(sampling: SamplingConfig, model: ModelConfig, device: str) -> torch.dtype | None:
    """The dtype of the copy that samples; None: the weights that are trained.

    `auto` makes a copy where that is known to be faster: of a model with LoRA, whose adapters cost
    more than its own products where they run beside them (on the CPU 1.2 to 2.7 times the time,
    `benchmarks/lora_sampling.py`), and on CUDA of weights that are not in the dtype of the
    products, for they would be read and rounded again for every token. Quantised weights cannot be
    merged without loss.

    Args:
        sampling: names the dtype.
        model: says what the weights are like.
        device: its type.
    """
    if sampling.dtype in DTYPES:
        return DTYPES[sampling.dtype]
    compute = on_device(model, device).compute_dtype
    merged = model.lora is not None and device in {"cpu", "cuda"}
    rounded = device == "cuda" and compute != model.dtype
    wanted = sampling.dtype == "auto" and model.quantization is None and (merged or rounded)
    return DTYPES[compute] if wanted else None


def describe_dtypes(sampling: SamplingConfig, model: ModelConfig) -> str:
    """In a sentence or two: the dtypes of weights, matrix products and samples on CUDA."""
    compute = on_device(model, "cuda").compute_dtype
    weights = "NF4" if model.quantization else model.dtype
    made = copy_dtype(sampling, model, "cuda")
    adapters = " with float32 adapters" if model.lora else ""
    source = "the weights themselves"
    if made is not None:
        merged = " with the adapters merged" if model.lora else ""
        source = f"a {str(made).removeprefix('torch.')} copy{merged}"
    text = f"On CUDA: {weights} weights{adapters}, products in {compute}, samples from {source}."
    if has_bfloat16():
        return text
    if compute == "bfloat16":
        return f"{text} This card has no bfloat16 and emulates it: set model.dtype=float32."
    return f"{text} This card has no bfloat16, so nothing is computed in it."


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
        _require_sums(self._policy)
        # Weights are rounded before they are copied, one by one; buffers (the frequencies of rotary
        # embeddings) stay as they are, for they are never as coarse as a dtype of weights.
        memo = {
            id(p): nn.Parameter(whole(p.detach()).to(self._dtype or p.dtype, copy=True), False)
            for p in self._policy.model.parameters()
            if p.is_floating_point()
        }
        model = copy.deepcopy(self._policy.adapter or self._policy.model, memo)
        model = model if self._policy.adapter is None else model.unload()
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
        held = dict(target.model.named_parameters())
        for name, value in whole_weights(self._policy):
            held[name].copy_(value)


# Settings of PEFT with which an adapter is more than products that are added.
_NO_SUMS = {"use_dora", "use_bdlora", "kasa_config", "lora_bias"}
_NO_SUMS |= {"modules_to_save", "trainable_token_indices"}


def can_be_added(policy: Policy) -> bool:
    """Whether a sum of weights and products is all that adapters do."""
    made = () if policy.adapter is None else policy.adapter.peft_config.values()
    return not any(getattr(config, name, None) for config in made for name in _NO_SUMS)


def _require_sums(policy: Policy) -> None:
    if not can_be_added(policy):
        raise ModelError(
            "an adapter with modules or tokens of its own, DoRA or biases is more than a sum, and "
            "cannot be merged into weights to sample from",
            where="sampling.dtype",
            fix="Sample with sampling.engine=native, sampling.dtype=same and parallel=ddp.",
        )


@torch.no_grad()
def whole_weights(policy: Policy, *, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of a policy under the name that the plain model has for it.

    With `merged`, adapters are added; else they are left out.

    Tied weights come once. Weights that are split over processes are gathered one by one, so every
    process has to go through all of them.

    Raises:
        ModelError: the adapters are of a kind that cannot be added.
    """
    if merged:
        _require_sums(policy)
    seen = set[int]()
    for name, module in policy.model.named_modules():
        if name.endswith(".base_layer") or ".lora_" in name:
            continue  # part of the layer around it
        base, deltas = module, dict[str, Callable[[str], torch.Tensor]]()
        while hasattr(base, "base_layer"):  # experts have one adapter around the other
            deltas[getattr(base, "parameter_name", "weight")] = base.get_delta_weight
            base = base.base_layer
        for key, parameter in base.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                value = whole(parameter)
                if merged and key in deltas:
                    value = value + whole(deltas[key](ADAPTER))
                yield f"{name}.{key}".replace(".base_layer", "").lstrip("."), value


def adapter_saver(policy: Policy) -> Callable[[str], None]:
    """What writes a policy's adapter to a folder, as PEFT does; every process has to call this."""
    assert policy.adapter is not None
    names = {name: p for name, p in policy.model.named_parameters() if ".lora_" in name}
    # PEFT's names: it wraps the model in two layers.
    pieces = {f"base_model.model.{name}": whole(p.detach()) for name, p in names.items()}
    return partial(policy.adapter.save_pretrained, state_dict=pieces)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is split over processes in one piece; every process takes part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
