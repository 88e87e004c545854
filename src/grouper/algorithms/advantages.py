"""Advantages: how much better a rollout did than it was expected to.

Every function takes the total rewards `[rows]` and a group id per row `[rows]` and returns the
advantages `[rows]` in float64. Rows of a group need not be adjacent. Where there is a baseline,
rewards that are all exactly equal over what it averages (a group, or the whole batch) get exactly
0, whatever the epsilon: float noise in a mean must not become a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# (rewards [rows], group_ids [rows]) -> advantages [rows]; those with a standard deviation also
# take `eps`, that of pass@k takes `k`.
AdvantageFunction = Callable[..., Tensor]

# Added to the standard deviation, as TRL does.
STD_EPS = 1e-4


class _GroupStatistics(NamedTuple):
    """What the rewards of each row's group are like, a value for each row."""

    rewards: Tensor
    """[rows], in float64."""
    mean: Tensor
    """[rows]"""
    size: Tensor
    """[rows]"""
    is_flat: Tensor
    """[rows] bool: all rewards of the group are exactly equal."""
    number: Tensor
    """[rows]: which group it is, from 0 without gaps."""


def _group_statistics(rewards: Tensor, group_ids: Tensor) -> _GroupStatistics:
    """Compute the statistics of each row's group.

    Raises:
        ValueError: the two are not [rows] each.
    """
    if rewards.shape != group_ids.shape or rewards.ndim != 1:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be "
            "[rows]"
        )
    values = rewards.double()
    _, index = torch.unique(group_ids, return_inverse=True)
    group_count = int(index.max()) + 1 if index.numel() else 0
    zeros = torch.zeros(group_count, dtype=values.dtype, device=values.device)
    size = zeros.scatter_add(0, index, torch.ones_like(values))
    mean = zeros.scatter_add(0, index, values) / size
    lowest = zeros.scatter_reduce(0, index, values, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, index, values, "amax", include_self=False)
    is_flat = lowest == highest
    return _GroupStatistics(
        rewards=values,
        mean=mean[index],
        size=size[index],
        is_flat=is_flat[index],
        number=index,
    )


def mean_baseline(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`A = r - mean(group)`: GRPO without the standard deviation (Dr. GRPO, arXiv 2503.20783).

    >>> mean_baseline(torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])).tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    group = _group_statistics(rewards, group_ids)
    return torch.where(group.is_flat, 0.0, group.rewards - group.mean)


def standardised(rewards: Tensor, group_ids: Tensor, eps: float = STD_EPS) -> Tensor:
    """`A = (r - mean(group)) / (std(group) + eps)`: GRPO (arXiv 2402.03300, eq. 3).

    The standard deviation divides by n - 1 (the sample estimate); `eps` is 1e-4 by default.

    >>> a = standardised(torch.tensor([1.0, 0.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1]))
    >>> [round(v, 4) for v in a.tolist()]      # std of (1, 0) is 0.7071
    [0.707, -0.707, 0.0, 0.0]
    """
    group = _group_statistics(rewards, group_ids)
    centered = group.rewards - group.mean
    sums = torch.zeros_like(centered).scatter_add(0, group.number, centered**2)
    variance = sums[group.number] / (group.size - 1).clamp(min=1)
    # PyTorch leaves square roots to MKL, whose last bit depends on the processor; NumPy's does not.
    std = torch.from_numpy(np.sqrt(variance.cpu().numpy())).to(centered.device)
    return torch.where(group.is_flat, 0.0, centered / (std + eps))


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`A_i = r_i - mean(r_j, j != i)` = `n / (n - 1) * (r_i - mean)`: RLOO (arXiv 2402.14740).

    >>> leave_one_out(torch.tensor([3.0, 0.0, 0.0]), torch.tensor([7, 7, 7])).tolist()
    [3.0, -1.5, -1.5]
    """
    group = _group_statistics(rewards, group_ids)
    scale = group.size / (group.size - 1).clamp(min=1)
    return torch.where(group.is_flat, 0.0, scale * (group.rewards - group.mean))


def no_baseline(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`A = r`: no baseline (REINFORCE, Williams, 1992).

    Equal rewards do not cancel: every rewarded rollout is pushed, however many there are.

    >>> no_baseline(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])).tolist()
    [1.0, 0.0]
    """
    del group_ids
    return rewards.double()


def batch_standardised(rewards: Tensor, group_ids: Tensor, eps: float = STD_EPS) -> Tensor:
    """`A = (r - mean(batch)) / (std(batch) + eps)`: REINFORCE++ (arXiv 2501.03262).

    Over all rollouts of the step at once; a group's size does not matter. The standard deviation
    divides by n - 1.

    >>> a = batch_standardised(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 2]))
    >>> [round(v, 3) for v in a.tolist()]      # std of (1, 0, 0, 1) is 0.577
    [0.866, -0.866, -0.866, 0.866]
    """
    return standardised(rewards, torch.zeros_like(group_ids), eps)


def relative_to_mean(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`A = (r - mean(group)) / mean(group)`: MaxRL (arXiv 2602.02710).

    With rewards of 0 and 1 its expectation is the gradient of a truncated series of the
    log-likelihood of being right: a problem that is rarely solved counts more than in GRPO. Groups
    whose mean is not positive get 0.

    >>> relative_to_mean(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4)).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    group = _group_statistics(rewards, group_ids)
    is_usable = ~group.is_flat & (group.mean > 0)
    return torch.where(is_usable, (group.rewards - group.mean) / group.mean, 0.0)


def pass_at_k(rewards: Tensor, group_ids: Tensor, k: int = 4) -> Tensor:
    """The advantage for the reward "any of k draws is right", in closed form (arXiv 2508.10751).

    With n rollouts of a group, w of them wrong, and P = 1 - C(w, k) / C(n, k) the expected reward
    of k of them, whose standard deviation is s = sqrt(P (1 - P)):

        right:  A = (1 - P) / s
        wrong:  A = (1 - P - C(w - 1, k - 1) / C(n - 1, k - 1)) / s

    A rollout counts as right where its reward is above the middle of its group's rewards. Where
    s is 0 (all equal, or too few wrong ones to fill k draws) nothing is learned.

    Args:
        rewards: [rows].
        group_ids: [rows].
        k: draws; a smaller group takes all of its rollouts.

    >>> rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])    # k = 2: P = 1/2, s = 1/2
    >>> [round(a, 3) for a in pass_at_k(rewards, torch.zeros(4), k=2).tolist()]
    [1.0, -0.333, -0.333, -0.333]
    """
    group = _group_statistics(rewards, group_ids)
    advantages = torch.zeros_like(group.rewards)
    for number in torch.unique(group.number).tolist():
        rows = (group.number == number).nonzero().flatten()
        values = group.rewards[rows]
        middle = (values.min() + values.max()) / 2
        is_right = values > middle
        size = len(rows)
        wrong = size - int(is_right.sum())
        draws = min(k, size)
        all_wrong = math.comb(wrong, draws) / math.comb(size, draws)
        deviation = math.sqrt(all_wrong * (1 - all_wrong))
        if deviation == 0 or bool(group.is_flat[rows[0]]):
            continue
        of_right = all_wrong / deviation
        others_wrong = math.comb(wrong - 1, draws - 1) / math.comb(size - 1, draws - 1)
        of_wrong = (all_wrong - others_wrong) / deviation
        advantages[rows] = of_wrong
        advantages[rows[is_right]] = of_right
    return advantages


def only_best(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`A = 1` where the reward is the highest of its group and positive, else 0: RAFT.

    Rejection sampling within the run: with `policy_gradient` as the surrogate, the loss is the
    likelihood of the best answers (arXiv 2304.06767; positive ones only: arXiv 2504.11343).

    >>> only_best(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])).tolist()
    [1.0, 1.0, 0.0, 0.0, 0.0]
    """
    group = _group_statistics(rewards, group_ids)
    best = torch.full_like(group.rewards, -torch.inf)
    best = best.scatter_reduce(0, group.number, group.rewards, "amax")[group.number]
    return ((group.rewards == best) & (group.rewards > 0)).double()


def zero(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`A = 0`: rewards are measured and teach nothing; for distillation alone.

    >>> zero(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])).tolist()
    [0.0, 0.0]
    """
    del group_ids
    return torch.zeros_like(rewards, dtype=torch.float64)


def decoupled(
    components: Tensor, weights: Tensor, group_ids: Tensor, function: AdvantageFunction
) -> Tensor:
    """`A = S / (std(S) + eps)` with `S = sum_c w_c * f(r_c)`: a baseline for each component.

    Two rewards of different spread then count alike, where in a plain sum the wider one hides the
    other. Dividing by the standard deviation over the whole batch keeps the advantages at the same
    size however many rewards there are (GDPO, arXiv 2601.05242).

    Args:
        components: [rows, components], the rewards before weighting.
        weights: [components].
        group_ids: [rows].
        function: the advantage of one component.

    >>> parts = torch.tensor([[1.0, 8.0], [0.0, 8.0], [0.0, 32.0]])
    >>> ids = torch.zeros(3, dtype=torch.int64)
    >>> apart = decoupled(parts, torch.tensor([3.0, 0.125]), ids, mean_baseline)
    >>> [round(v, 3) for v in apart.tolist()]      # (1, -2, 1), whose std is 1.732
    [0.577, -1.155, 0.577]
    """
    columns = [function(column, group_ids) for column in components.unbind(1)]
    total = torch.stack(columns, dim=1) @ weights.double()
    # The sample estimate; a single row has none.
    std = float(np.std(total.cpu().numpy(), ddof=min(1, len(total) - 1)))
    return total / (std + STD_EPS)


ADVANTAGES: dict[str, AdvantageFunction] = {
    "standardised": standardised,
    "mean": mean_baseline,
    "leave_one_out": leave_one_out,
    "none": no_baseline,
    "batch_standardised": batch_standardised,
    "relative": relative_to_mean,
    "pass_at_k": pass_at_k,
    "only_best": only_best,
    "zero": zero,
}
