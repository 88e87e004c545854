"""Optimizers and learning-rate schedules by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grouper.errors import ModelError, require_extra
from grouper.models.merging import own_shard
from grouper.models.policy import Policy

if TYPE_CHECKING:
    from grouper.config.schema import OptimizerConfig


class LossScale:
    """The factor of a loss whose gradients are computed in float16; a power of two.

    The smallest number of float16 is 6e-8, and many gradients of a token are smaller. Where a
    gradient overflows instead (65,504), the step is computed again with half of the factor. After
    `PATIENCE` steps without that, it is doubled.
    """

    FIRST = 2.0**16
    MOST = 2.0**24
    PATIENCE = 100

    def __init__(self) -> None:
        self.value = self.FIRST
        self.clean = 0
        """Steps since it was changed."""

    def halve(self) -> None:
        """A gradient has overflowed."""
        self.value /= 2
        self.clean = 0

    def worked(self) -> None:
        """A step was taken."""
        self.clean += 1
        if self.clean == self.PATIENCE:
            self.value = min(self.MOST, 2 * self.value)
            self.clean = 0


class Optimizer:
    """One or more torch optimizers that step together.

    The learning rate of every parameter group is its own highest rate times the scale given to
    `step`: the schedule is a function of the step number and has no state to save.

    Args:
        optimizers: the torch optimizers.
        masters: trained weights with the float32 copies that are stepped in their place.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        masters: Sequence[tuple[Tensor, nn.Parameter]] = (),
    ) -> None:
        self.parts = tuple(optimizers)
        """The torch optimizers."""
        self._masters = masters
        self.loss_scale: LossScale | None = None
        """Only where products are in float16."""
        self._highest_rates = [
            [group["lr"] for group in optimizer.param_groups] for optimizer in self.parts
        ]

    def step(self, scale: float) -> None:
        """Take one optimizer step at `scale` times the highest learning rates."""
        for weight, master in self._masters:
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
        for optimizer, rates in zip(self.parts, self._highest_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
            optimizer.step()
        with torch.no_grad():
            for weight, master in self._masters:
                weight.copy_(master)
                master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state between steps: `part.parameter.name` -> a tensor, or a number.

        `loss_scale`, where there is one, has its value and its clean steps. A master weight is the
        entry `master` of its parameter.
        """
        state: dict[str, Any] = {}
        if self.loss_scale is not None:
            state[_LOSS_SCALE] = [self.loss_scale.value, self.loss_scale.clean]
        masters = {id(master) for _, master in self._masters}
        for number, optimizer in enumerate(self.parts):
            for index, parameter in enumerate(_parameters(optimizer)):
                for name, value in optimizer.state.get(parameter, {}).items():
                    state[f"{number}.{index}.{name}"] = value
                if id(parameter) in masters:
                    state[f"{number}.{index}.{_MASTER}"] = parameter.detach()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`; settings stay those of the recipe.

        Args:
            state: of an optimizer with the same `describe`, split as the parameters are now.
        """
        for key, value in state.items():
            if key == _LOSS_SCALE:
                if self.loss_scale is not None:
                    self.loss_scale.value, self.loss_scale.clean = value
                continue
            number, _, name = key.split(".", 2)
            parameter = self.parameter(key)
            if name == _MASTER:
                parameter.detach().copy_(value)
                continue
            on_device = value.to(parameter.device) if isinstance(value, Tensor) else value
            self.parts[int(number)].state[parameter][name] = on_device

    def parameter(self, key: str) -> Tensor:
        """Return the parameter that an entry of the state belongs to."""
        number, index, _ = key.split(".", 2)
        return _parameters(self.parts[int(number)])[int(index)]

    def describe(self) -> list[Any]:
        """Return what a state has to fit: class and parameter shapes of each torch optimizer."""
        description: list[Any] = []
        for optimizer in self.parts:
            shapes = [list(parameter.shape) for parameter in _parameters(optimizer)]
            description.append([type(optimizer).__name__, shapes])
        if self._masters:
            description.append(["master weights", len(self._masters)])
        return description


# Keys in the state of an optimizer.
_LOSS_SCALE = "loss_scale"
_MASTER = "master"


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of a torch optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# One pass over each tensor, five times as fast; in bfloat16 it rounds once.
_FUSED_ADAMW = functools.partial(torch.optim.AdamW, fused=True)


def _adamw(
    parameters: Collection[Tensor],
    config: OptimizerConfig,
    constructor: Callable[..., torch.optim.Optimizer] = _FUSED_ADAMW,
) -> torch.optim.Optimizer:
    """Make an AdamW with weight decay on matrices alone.

    The best values of norms and biases are not near 0, so these do not decay.
    """
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return constructor(
        groups,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


Parts = list[torch.optim.Optimizer]

Trained = Mapping[str, nn.Parameter]
"""Name of a trained weight -> what is stepped: itself, or its master."""


def _only_adamw(trained: Trained, inner: Collection[str], config: OptimizerConfig) -> Parts:
    del inner
    return [_adamw(trained.values(), config)]


def _adamw_8bit(trained: Trained, inner: Collection[str], config: OptimizerConfig) -> Parts:
    """Make an AdamW whose two moments are kept in 8 bits, block by block (arXiv 2110.02861).

    The library keeps 32 bits for tensors of less than 4096 elements.
    """
    del inner
    require_extra("bitsandbytes", "quantized", where="optimizer.name")
    from bitsandbytes.optim import AdamW8bit

    return [_adamw(trained.values(), config, AdamW8bit)]


def _muon(trained: Trained, inner: Collection[str], config: OptimizerConfig) -> Parts:
    """Make a Muon for the 2-D weights between embedding and head, and an AdamW for all others.

    Orthogonalized momentum is meant for matrices that map hidden states to hidden states
    (Jordan et al., 2024); embeddings, heads, norms and biases keep AdamW.
    """
    muon_parameters = [parameter for name, parameter in trained.items() if name in inner]
    adamw_parameters = [parameter for name, parameter in trained.items() if name not in inner]
    optimizers: list[torch.optim.Optimizer] = []
    if muon_parameters:
        muon = torch.optim.Muon(
            muon_parameters, lr=config.muon_learning_rate, weight_decay=config.weight_decay
        )
        optimizers.append(muon)
    if adamw_parameters:
        optimizers.append(_adamw(adamw_parameters, config))
    return optimizers


def _inner_matrices(policy: Policy) -> set[str]:
    """Return the names of the trainable 2-D weights between embeddings and head.

    Position embeddings are excluded as well.
    """
    outer_modules = [policy.model.get_input_embeddings(), policy.model.get_output_embeddings()]
    outer_modules += [module for module in policy.modules() if isinstance(module, nn.Embedding)]
    outer_ids = {id(parameter) for module in outer_modules for parameter in module.parameters()}
    return {
        name
        for name, parameter in policy.trainable().items()
        if parameter.ndim == 2 and id(parameter) not in outer_ids
    }


# (what is stepped, names of inner matrices, settings) -> the torch optimizers
OPTIMIZERS: dict[str, Callable[[Trained, Collection[str], OptimizerConfig], Parts]] = {
    "adamw": _only_adamw,
    "adamw_8bit": _adamw_8bit,
    "muon": _muon,
}


def make_optimizer(policy: Policy, config: OptimizerConfig) -> Optimizer:
    """Make the optimizer of one phase over the policy's trainable weights.

    Its states are made by its first step; until then the policy says that their memory is reserved.

    Raises:
        ConfigError: the library it comes from is not installed.
        ModelError: the weights are stored quantized, so that they cannot be trained themselves.
    """
    smallest_element = min(parameter.element_size() for parameter in policy.parameters())
    if policy.adapter is None and smallest_element < 2:
        raise ModelError(
            "the weights of this model are stored quantized, and cannot be trained",
            where="model.path",
            fix="Name the model that they were made from, or train an adapter with model.lora.",
        )
    trained: dict[str, nn.Parameter] = dict(policy.trainable())
    masters = []
    if config.master_weights:
        for name, weight in trained.items():
            if weight.element_size() < 4:
                trained[name] = nn.Parameter(weight.detach().float())
                masters.append((weight, trained[name]))
    parts = OPTIMIZERS[config.name](trained, _inner_matrices(policy), config)
    optimizer = Optimizer(parts, masters)
    master_bytes = sum(own_shard(master).nbytes for _, master in masters)
    policy.reserved_bytes = state_bytes(config, policy, own=True) - master_bytes
    if policy.products_dtype is torch.float16:
        optimizer.loss_scale = LossScale()
    return optimizer


# Share of the decay done (0 to 1) -> learning rate, from 1 (the highest) to 0 (the last).
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: 0.5 * (1.0 + math.cos(math.pi * share)),
}


def schedule(config: OptimizerConfig, step: int, total: int) -> float:
    """Return the learning-rate scale of step `step` (from 0) of `total`.

    It rises linearly over the warm-up, whose first step is already above 0, then decays to
    `final_ratio`, which the step after the last one would reach: every step moves the weights.

    >>> from grouper.config.schema import OptimizerConfig
    >>> c = OptimizerConfig(schedule="linear", warmup_ratio=0.5, final_ratio=0.0)
    >>> [round(schedule(c, s, 4), 2) for s in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    warmup = config.warmup_steps
    if warmup is None:
        warmup = math.ceil(round(config.warmup_ratio * total, 6))  # 0.07 of 100 is 7
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, total - warmup)
    decayed = SCHEDULES[config.schedule](min(1.0, share))
    return config.final_ratio + (1.0 - config.final_ratio) * decayed


# Tensors with fewer elements keep 32-bit moments in bitsandbytes.
_SMALLEST_8BIT = 4096


def state_bytes(config: OptimizerConfig, policy: Policy, *, own: bool = False) -> int:
    """Return the bytes that the optimizer of this policy keeps between steps, masters included.

    Args:
        config: of the optimizer.
        policy: whose weights it steps.
        own: of weights that are split over processes, count the shards of this process alone.
    """
    inner = _inner_matrices(policy) if config.name == "muon" else set()
    total = 0.0
    for name, parameter in policy.trainable().items():
        counted = own_shard(parameter) if own else parameter
        elements = counted.numel()
        stepped = counted.nbytes
        if config.master_weights and parameter.element_size() < 4:
            stepped = 4 * elements
            total += stepped
        if config.name == "adamw_8bit" and elements >= _SMALLEST_8BIT:
            # Two moments of a byte, and for each 256 elements of both a float32 scale.
            total += elements * (2 + 8 / 256)
        elif config.name == "adamw_8bit":
            total += elements * 8  # two moments of float32
        elif name in inner:
            total += stepped  # one moment
        else:
            total += 2 * stepped
    return round(total)
