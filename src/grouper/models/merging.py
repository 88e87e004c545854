"""Adapters added to the weights that they belong to, and what rounding leaves of them.

A step of 5e-6 is far below the distance of two bfloat16 numbers of the size of a weight. Rounded to
the nearest one, most weights with an adapter merged become what they were before: of an update of
five such steps of SmolLM2-135M 9 % is left in the log-probs, and all of it where weights are
rounded up or down at random (`benchmarks/lora_rounding.py`).
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grouper.errors import ModelError
from grouper.models.policy import ADAPTER, Policy

# Settings of PEFT with which an adapter is more than products that are added.
_NO_SUMS = {"use_dora", "use_bdlora", "kasa_config", "lora_bias"}
_NO_SUMS |= {"modules_to_save", "trainable_token_indices"}


def can_be_added(policy: Policy) -> bool:
    """Whether a sum of weights and products is all that adapters do."""
    return policy.adapter is None or _is_sum(policy.adapter)


def _is_sum(adapter: Any) -> bool:
    for config in adapter.peft_config.values():
        if any(getattr(config, name, None) for name in _NO_SUMS):
            return False
    return True


def require_sums(policy: Policy) -> None:
    """Refuse adapters that cannot be merged.

    Raises:
        ModelError: they are more than products that are added.
    """
    if not can_be_added(policy):
        raise ModelError(
            "an adapter with modules or tokens of its own, DoRA or biases is more than a sum, and "
            "cannot be merged into weights to sample from",
            where="sampling.dtype",
            fix="Sample with sampling.engine=native, sampling.dtype=same and parallel=ddp.",
        )


def keeps_adapter(dtype: torch.dtype | None) -> bool:
    """Whether weights of this dtype want LoRA beside them: a plain merge would round it away.

    Args:
        dtype: of the weights to sample from; None: those that are trained.
    """
    return dtype is None or torch.finfo(dtype).eps > torch.finfo(torch.float32).eps


@torch.no_grad()
def whole_weights(policy: Policy, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a policy under the name that the plain model has for it.

    With `merged`, adapters are added; else they are left out.

    Tied weights come once. Weights that are split over processes are gathered one by one, so every
    process has to go through all of them.

    Raises:
        ModelError: the adapters are of a kind that cannot be added.
    """
    if merged:
        require_sums(policy)
    for name, weight, delta in weights_and_deltas(policy.model):
        if merged and delta is not None:
            yield name, weight + delta
        else:
            yield name, weight


def weights_and_deltas(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield (name in the plain model, weight, what an adapter adds to it or None).

    Tied weights come once.
    """
    seen = set[int]()
    for name, module in model.named_modules():
        if name.endswith(".base_layer") or ".lora_" in name:
            continue  # part of the layer around it
        base = module
        deltas: dict[str, Callable[[str], Tensor]] = {}
        while hasattr(base, "base_layer"):  # experts have one adapter around the other
            deltas[getattr(base, "parameter_name", "weight")] = base.get_delta_weight
            base = base.base_layer
        for key, parameter in base.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            plain_name = f"{name}.{key}".replace(".base_layer", "").lstrip(".")
            delta = None
            if key in deltas:
                delta = whole(deltas[key](ADAPTER))
            yield plain_name, whole(parameter), delta


class Rounding:
    """Merges adapters into rounded weights, and measures how much of them survives.

    Args:
        dtype: to round to.
        seed: round up or down at random, in proportion to the distance, so that the mean of what
            is added is the adapter's; addressed by this and the weight's name. None: to the nearest
            number, which leaves most weights of a small update as they were.
    """

    def __init__(self, dtype: torch.dtype, seed: int | None = None) -> None:
        self._dtype = dtype
        self._seed = seed
        self._added = 0.0
        self._wanted = 0.0

    @property
    def share(self) -> float:
        """The projection of what was added on what should have been; 1 where that is nothing."""
        if not self._wanted:
            return 1.0
        return self._added / self._wanted

    def weights(self, policy: Policy) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight as `whole_weights` does, in this dtype.

        Raises:
            ModelError: the adapters are of a kind that cannot be added.
        """
        require_sums(policy)
        for name, weight, delta in weights_and_deltas(policy.model):
            rounded = weight.to(self._dtype)
            if delta is not None:
                rounded = self.add(name, rounded, delta)
            yield name, rounded

    def add(self, name: str, base: Tensor, delta: Tensor) -> Tensor:
        """Return the sum of a weight of this dtype and of a delta, rounded.

        Args:
            name: of the weight, which addresses the rounding.
            base: of the dtype to round to.
            delta: of the same shape, in any dtype.
        """
        total = base.float() + delta.float()
        if self._seed is None or self._dtype is not torch.bfloat16:
            rounded = total.to(self._dtype)
        else:
            rounded = round_at_random(total, self._seed ^ zlib.crc32(name.encode()))
        added = rounded.float() - base.float()
        self._added += float((added * delta).sum())
        self._wanted += float(delta.float().square().sum())
        return rounded


def round_at_random(values: Tensor, seed: int) -> Tensor:
    """Round float32 values to bfloat16, up or down in proportion to the neighbors' distance.

    A bfloat16 number is the upper half of a float32 one, so adding a random lower half and cutting
    it off rounds up with just that chance. Numbers that are bfloat16 already stay as they are.

    >>> round_at_random(torch.tensor([1.0, -2.5]), seed=0).tolist()
    [1.0, -2.5]
    """
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(
        1 << 16, values.shape, generator=generator, device=values.device, dtype=torch.int32
    )
    bits = values.float().contiguous().view(torch.int32)
    cut = (bits + noise) & -(1 << 16)
    return cut.view(torch.float32).to(torch.bfloat16)


@torch.no_grad()
def merged(adapter: Any, model: nn.Module) -> Any:
    """Merge an adapter into its model in place; coarse weights are rounded at random.

    Args:
        adapter: PEFT's wrapper.
        model: what it wraps, with its layers inside.
    """
    coarse = any(p.dtype is torch.bfloat16 for p in model.parameters())
    if not coarse or not _is_sum(adapter):
        return adapter.merge_and_unload()
    for name, weight, delta in weights_and_deltas(model):
        if delta is not None:
            weight.copy_(Rounding(weight.dtype, seed=0).add(name, weight, delta))
    return adapter.unload()


@torch.no_grad()
def merged_copy(
    policy: Policy, dtype: torch.dtype, *, seed: int | None = None
) -> tuple[Policy, float]:
    """Make a plain policy in another dtype with the adapter merged.

    Args:
        policy: with or without an adapter; not changed.
        dtype: of the copy's weights.
        seed: round at random, addressed by it and the weight's name; None: to the nearest.

    Returns:
        The copy, and the part of the adapter's change that its weights repeat after rounding: the
        projection of what was added on what should have been; 1 where nothing was to be added.
    """
    memo: dict[int, nn.Parameter] = {}
    for parameter in policy.model.parameters():
        if parameter.is_floating_point():
            values = whole(parameter.detach()).to(dtype, copy=True)
            memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
    model: Any
    if policy.adapter is None:
        model = copy.deepcopy(policy.model, memo)
    else:
        model = copy.deepcopy(policy.adapter, memo).unload()
    plain = Policy(model.requires_grad_(False), native=policy.native)
    plain.version = policy.version
    weights = dict(plain.model.named_parameters())
    rounding = Rounding(dtype, seed)
    for name, value in rounding.weights(policy):
        weights[name].copy_(value)
    return plain, rounding.share


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that is split over processes; every process takes part."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor
