"""Optimizers and learning-rate schedules by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grouper.errors import ModelError, require_extra
from grouper.models.policy import Policy

if TYPE_CHECKING:
    from grouper.config.schema import OptimizerConfig


class Optimizer:
    """One or more torch optimizers that step together.

    The learning rate of every parameter group is its own highest rate times the scale given to
    `step`: the schedule is a function of the step number and has no state to save.
    """

    def __init__(self, parts: Iterable[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        self._rates = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def step(self, scale: float) -> None:
        """One optimizer step at `scale` times the highest learning rates."""
        for part, rates in zip(self.parts, self._rates, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * scale
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """What is kept between steps: `part.parameter.name` -> a tensor, or a number."""
        return {
            f"{number}.{index}.{name}": value
            for number, part in enumerate(self.parts)
            for index, parameter in enumerate(_parameters(part))
            for name, value in part.state.get(parameter, {}).items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; settings stay those of the recipe.

        Args:
            state: of an optimizer with the same `describe`, split as the parameters are now.
        """
        for key, value in state.items():
            number, _, name = key.split(".", 2)
            parameter = self.parameter(key)
            held = value.to(parameter.device) if isinstance(value, Tensor) else value
            self.parts[int(number)].state[parameter][name] = held

    def parameter(self, key: str) -> Tensor:
        """The parameter that an entry of the state belongs to."""
        number, index, _ = key.split(".", 2)
        return _parameters(self.parts[int(number)])[int(index)]

    def describe(self) -> list[Any]:
        """What a state has to fit: the kind of each part and the shapes of its parameters."""
        return [
            [type(part).__name__, [list(parameter.shape) for parameter in _parameters(part)]]
            for part in self.parts
        ]


def _parameters(part: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in part.param_groups for parameter in group["params"]]


# One pass over each tensor, five times as fast; in bfloat16 it rounds once.
_FUSED_ADAMW = functools.partial(torch.optim.AdamW, fused=True)


def _adamw(
    parameters: Collection[Tensor],
    config: OptimizerConfig,
    kind: Callable[..., torch.optim.Optimizer] = _FUSED_ADAMW,
) -> torch.optim.Optimizer:
    """Matrices decay; norms and biases, whose best values are not near 0, do not."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return kind(
        groups,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def _only_adamw(policy: Policy, config: OptimizerConfig) -> Optimizer:
    return Optimizer([_adamw(policy.trainable().values(), config)])


def _adamw_8bit(policy: Policy, config: OptimizerConfig) -> Optimizer:
    """AdamW whose two moments are kept in 8 bits, block by block (arXiv 2110.02861).

    Tensors of less than 4096 elements keep 32 bits, as the library has it.
    """
    require_extra("bitsandbytes", "quantized", where="optimizer.name")
    from bitsandbytes.optim import AdamW8bit

    return Optimizer([_adamw(policy.trainable().values(), config, AdamW8bit)])


def _muon(policy: Policy, config: OptimizerConfig) -> Optimizer:
    """Muon on the 2-D weights between embedding and head, AdamW on everything else.

    Orthogonalised momentum is meant for matrices that map hidden states to hidden states
    (Jordan et al., 2024); embeddings, heads, norms and biases keep AdamW.
    """
    inner = _inner_matrices(policy)
    matrices = [p for p in policy.trainable().values() if id(p) in inner]
    others = [p for p in policy.trainable().values() if id(p) not in inner]
    rate, decay = config.muon_learning_rate, config.weight_decay
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        parts.append(torch.optim.Muon(matrices, lr=rate, weight_decay=decay))
    if others:
        parts.append(_adamw(others, config))
    return Optimizer(parts)


def _inner_matrices(policy: Policy) -> set[int]:
    """Ids of the trainable 2-D weights between embeddings (of positions, too) and head."""
    heads = [policy.model.get_input_embeddings(), policy.model.get_output_embeddings()]
    heads += [module for module in policy.modules() if isinstance(module, nn.Embedding)]
    ends = {id(parameter) for head in heads for parameter in head.parameters()}
    return {id(p) for p in policy.trainable().values() if p.ndim == 2 and id(p) not in ends}


OPTIMIZERS: dict[str, Callable[[Policy, OptimizerConfig], Optimizer]] = {
    "adamw": _only_adamw,
    "adamw_8bit": _adamw_8bit,
    "muon": _muon,
}


def make_optimizer(policy: Policy, config: OptimizerConfig) -> Optimizer:
    """The optimizer of one phase over the policy's trainable weights.

    Raises:
        ConfigError: the library it comes from is not installed.
        ModelError: the weights are stored quantised, so that they cannot be trained themselves.
    """
    if policy.adapter is None and min(p.element_size() for p in policy.parameters()) < 2:
        what = "the weights of this model are stored quantised, and cannot be trained"
        fix = "Name the model that they were made from, or train an adapter with model.lora."
        raise ModelError(what, where="model.path", fix=fix)
    return OPTIMIZERS[config.name](policy, config)


# Share of the decay done (0 to 1) -> share of the way that is left between last and highest.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: 0.5 * (1.0 + math.cos(math.pi * share)),
}


def schedule(config: OptimizerConfig, step: int, total: int) -> float:
    """The learning-rate scale of step `step` (from 0) of `total`.

    Rises linearly over the warm-up, whose first step is already above 0, then decays to
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
    left = SCHEDULES[config.schedule](min(1.0, share))
    return config.final_ratio + (1.0 - config.final_ratio) * left


# Tensors with fewer elements keep 32-bit moments in bitsandbytes.
_SMALLEST_8BIT = 4096


def state_bytes(config: OptimizerConfig, policy: Policy) -> int:
    """Bytes that the optimizer of this policy keeps between steps, all parameters together."""
    matrices = _inner_matrices(policy) if config.name == "muon" else set()
    total = 0.0
    for parameter in policy.trainable().values():
        elements, moment = parameter.numel(), parameter.nbytes
        if config.name == "adamw_8bit":
            # Two moments of a byte and a float32 scale for each 256 of them, or two of float32.
            total += elements * (2 + 8 / 256 if elements >= _SMALLEST_8BIT else 8)
        else:
            total += moment if id(parameter) in matrices else 2 * moment
    return round(total)
