"""Merging adapters into the weights that they belong to, and what rounding leaves of them.

A step of 5e-6 is far below the distance of two bfloat16 numbers of the size of a weight. Rounded to
the nearest one, most weights with an adapter merged become what they were before. Of an update of
five such steps of SmolLM2-135M, 9 % is left in the log-probs; all of it is left if weights are
rounded up or down at random (`benchmarks/sampling/lora_rounding.py`).
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
_NO_SUMS = (
    "use_dora",
    "use_bdlora",
    "kasa_config",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
)


def can_be_added(policy: Policy) -> bool:
    """Tell whether weights with adapters are a sum of weights and products, and nothing else."""
    return policy.adapter is None or _is_sum(policy.adapter)


def _is_sum(adapter: Any) -> bool:
    """Tell whether PEFT's adapter only adds products to weights."""
    for config in adapter.peft_config.values():
        if any(getattr(config, name, None) for name in _NO_SUMS):
            return False
    return True


def require_sums(policy: Policy) -> None:
    """Check that the adapters can be merged.

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
    """Tell whether LoRA must not be merged into weights of this dtype: it would be rounded away.

    Args:
        dtype: of the weights to sample from; None: those that are trained.
    """
    if dtype is None:
        return True
    return torch.finfo(dtype).eps > torch.finfo(torch.float32).eps


@torch.no_grad()
def whole_weights(policy: Policy, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a policy under the name that the plain model has for it.

    Tied weights come once. Weights that are split over processes are gathered one by one, so every
    process has to go through all of them.

    Args:
        policy: with or without an adapter.
        merged: add adapters to the weights; else they are left out.

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
    """Yield (name in the plain model, weight, the adapter's change of it or None).

    Tied weights come once.
    """
    for name, parameter, get_delta in _plain_parameters(model):
        delta = None
        if get_delta is not None:
            delta = unsharded(get_delta(ADAPTER))
        yield name, unsharded(parameter), delta


def weight_shapes(policy: Policy) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight that `whole_weights` yields, by name and in its order.

    Nothing is gathered: a weight that is split over processes has the shape of the whole.
    """
    shapes = {}
    for name, parameter, _ in _plain_parameters(policy.model):
        shapes[name] = tuple(parameter.shape)
    return shapes


def _plain_parameters(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Parameter, Callable[[str], Tensor] | None]]:
    """Yield (name in the plain model, parameter, the adapter's `get_delta_weight` or None).

    Tied parameters come once.
    """
    yielded = set[int]()
    for name, module in model.named_modules():
        # Modules inside a layer with an adapter are handled with that layer.
        if name.endswith(".base_layer") or ".lora_" in name:
            continue
        base = module
        deltas: dict[str, Callable[[str], Tensor]] = {}
        # A layer of experts has one adapter around the other, each for another parameter.
        while hasattr(base, "base_layer"):
            parameter_name = getattr(base, "parameter_name", "weight")
            deltas[parameter_name] = base.get_delta_weight
            base = base.base_layer
        for key, parameter in base.named_parameters(recurse=False):
            if id(parameter) in yielded:
                continue
            yielded.add(id(parameter))
            plain_name = f"{name}.{key}".replace(".base_layer", "").lstrip(".")
            yield plain_name, parameter, deltas.get(key)


class Rounding:
    """Merging of adapters into rounded weights, with a measure of how much of them survives.

    Args:
        dtype: to round to.
        seed: round up or down at random, in proportion to the distance, so that the mean of the
            rounded changes is the adapter's. The random numbers are addressed by this seed and the
            weight's name. None: round to the nearest number, which leaves most weights of a small
            update as they were.
    """

    def __init__(self, dtype: torch.dtype, seed: int | None = None) -> None:
        self._dtype = dtype
        self._seed = seed
        # Sums over all weights: of the rounded change times the exact one, and of the exact one
        # squared. Their quotient is the projection.
        self._added = 0.0
        self._exact = 0.0

    @property
    def share(self) -> float:
        """The projection of the rounded change on the exact one; 1 if the exact one is zero."""
        if not self._exact:
            return 1.0
        return self._added / self._exact

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
        rounded_delta = rounded.float() - base.float()
        self._added += float((rounded_delta * delta).sum())
        self._exact += float(delta.float().square().sum())
        return rounded


def round_at_random(values: Tensor, seed: int) -> Tensor:
    """Round float32 values to bfloat16, up or down in proportion to the neighbors' distance.

    A bfloat16 number is the upper half of a float32 one, so adding a random lower half and cutting
    it off rounds up with just that chance. Numbers that are bfloat16 already stay as they are.

    >>> round_at_random(torch.tensor([1.0, -2.5]), seed=0).tolist()
    [1.0, -2.5]
    """
    device = values.device
    generator = torch.Generator(device).manual_seed(seed)
    lower_half = 1 << 16
    noise = torch.randint(
        lower_half, values.shape, generator=generator, device=device, dtype=torch.int32
    )
    bits = values.float().contiguous().view(torch.int32)
    bits = (bits + noise) & -lower_half
    return bits.view(torch.float32).to(torch.bfloat16)


@torch.no_grad()
def merged(adapter: Any, model: nn.Module) -> Any:
    """Merge an adapter into its model in place; bfloat16 weights are rounded at random.

    Args:
        adapter: PEFT's wrapper.
        model: the model inside it, with PEFT's layers.

    Returns:
        The plain model.
    """
    coarse = any(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    if not coarse or not _is_sum(adapter):
        return adapter.merge_and_unload()
    for name, weight, delta in weights_and_deltas(model):
        if delta is not None:
            rounding = Rounding(weight.dtype, seed=0)
            weight.copy_(rounding.add(name, weight, delta))
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
        The copy, and the share of the adapter's change that is left in its weights after rounding
        (see `Rounding.share`).
    """
    memo: dict[int, nn.Parameter] = {}
    for parameter in policy.model.parameters():
        if parameter.is_floating_point():
            values = unsharded(parameter.detach()).to(dtype, copy=True)
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


def unsharded(tensor: Tensor) -> Tensor:
    """Gather a tensor that is split over processes; every process takes part."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def own_shard(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that is split over processes; else the tensor."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor
