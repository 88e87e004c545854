"""Advantages: how much better a rollout did than the others of its group.

Every function takes the total rewards `[rows]` and a group id per row `[rows]` and returns the
advantages `[rows]` in float64. Rows of a group need not be adjacent. A group whose rewards are
all exactly equal (a group of one among them) gets exactly 0, whatever the epsilon: float noise
in a mean must not become a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["ADVANTAGES", "AdvantageFunction", "centred", "leave_one_out", "standardised"]

AdvantageFunction = Callable[[Tensor, Tensor], Tensor]

STD_EPS = 1e-4
"""Added to the standard deviation, as TRL does."""


def _group_statistics(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards in float64, and per row: the group's mean, its size, whether it is flat."""
    if rewards.shape != group_ids.shape or rewards.ndim != 1:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be "
            "[rows]"
        )
    values = rewards.double()
    _, index = torch.unique(group_ids, return_inverse=True)
    groups = int(index.max()) + 1 if index.numel() else 0
    zeros = torch.zeros(groups, dtype=values.dtype, device=values.device)
    size = zeros.scatter_add(0, index, torch.ones_like(values))
    mean = zeros.scatter_add(0, index, values) / size
    low = zeros.scatter_reduce(0, index, values, "amin", include_self=False)
    high = zeros.scatter_reduce(0, index, values, "amax", include_self=False)
    return values, mean[index], size[index], (low == high)[index]


def centred(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`A = r - mean(group)`: GRPO without the standard deviation (Dr. GRPO, arXiv 2503.20783).

    >>> centred(torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])).tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    values, mean, _, flat = _group_statistics(rewards, group_ids)
    return torch.where(flat, 0.0, values - mean)


def standardised(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`A = (r - mean(group)) / (std(group) + 1e-4)`: GRPO (arXiv 2402.03300, eq. 3).

    The standard deviation divides by n - 1 (the sample estimate).

    >>> a = standardised(torch.tensor([1.0, 0.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1]))
    >>> [round(v, 4) for v in a.tolist()]      # std of (1, 0) is 0.7071
    [0.707, -0.707, 0.0, 0.0]
    """
    values, mean, size, flat = _group_statistics(rewards, group_ids)
    _, index = torch.unique(group_ids, return_inverse=True)
    squares = torch.zeros_like(values).scatter_add(0, index, (values - mean) ** 2)[index]
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return torch.where(flat, 0.0, (values - mean) / (std + STD_EPS))


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`A_i = r_i - mean(r_j, j != i)` = `n / (n - 1) * (r_i - mean)`: RLOO (arXiv 2402.14740).

    >>> leave_one_out(torch.tensor([3.0, 0.0, 0.0]), torch.tensor([7, 7, 7])).tolist()
    [3.0, -1.5, -1.5]
    """
    values, mean, size, flat = _group_statistics(rewards, group_ids)
    scale = size / (size - 1).clamp(min=1)
    return torch.where(flat, 0.0, scale * (values - mean))


ADVANTAGES: dict[str, AdvantageFunction] = {
    "standardised": standardised,
    "centred": centred,
    "leave_one_out": leave_one_out,
}
