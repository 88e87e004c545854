"""Assemble rollout groups into the batches of optimizer steps: advantages, log-probs, weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from grouper.algorithms.advantages import ADVANTAGES, decoupled
from grouper.algorithms.batching import TrainBatch, rollout_rows, step_batches, with_gradient
from grouper.algorithms.losses import kl_k1
from grouper.algorithms.weighting import WEIGHTINGS
from grouper.config.schema import GRPOConfig
from grouper.training.update import Scorer
from grouper.types import (
    RolloutGroup,
    Tally,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """What rollout groups teach: advantages, and the batches of the optimizer steps."""

    advantages: tuple[tuple[float, ...], ...]
    """Per group, one for each scored rollout."""
    batches: tuple[TrainBatch, ...]
    """One per optimizer step; those whose gradient is zero by construction are left out."""
    tallies: dict[str, Tally]


def assemble(
    groups: Sequence[RolloutGroup],
    config: GRPOConfig,
    scores: Scorer,
    *,
    max_new_tokens: int,
    orders: Sequence[Sequence[int] | None] = (None,),
) -> Assembled:
    """Advantages of rollout groups, and optimizer steps with the log-probs that the loss needs.

    Old log-probs are taken once, before the first update, and shared by all of them.

    Args:
        groups: those that take part in the step.
        config: the algorithm.
        scores: log-probs under the policy and the reference; only those needed are computed.
        max_new_tokens: divisor of the constant weighting where the recipe names none.
        orders: one per pass: the order in which groups are assigned to its optimizer steps; None:
            as they are.
    """
    several = len(orders) * config.updates_per_batch > 1
    rows = rollout_rows(groups, mask_truncated=config.overlong == "mask")
    tallies: dict[str, Tally] = {}
    penalties = None
    if rows is not None and config.kl_in_reward:
        rows = _scored(rows, torch.arange(rows.rows), config, scores, old=True)
        penalties = _penalties(rows, config, tallies)
    advantages = advantages_of(groups, config, penalties)
    if rows is None:
        return Assembled(advantages=advantages, batches=(), tallies=tallies)
    flat = torch.tensor([a for values in advantages for a in values], dtype=torch.float32)
    rows = replace(rows, advantages=flat)
    if not config.kl_in_reward:
        needed = torch.ones_like(flat) if config.flat_rows_matter else flat
        rows = _scored(rows, needed.nonzero().flatten(), config, scores, old=several)
    if not several:
        # The old log-probs are the current ones, detached: the ratio is exactly 1.
        rows = replace(rows, old_logprobs=None)
    drawn = torch.arange(rows.mask.shape[1]) < rows.completion_lengths[:, None]
    assert rows.sampler_logprobs is not None
    if not rows.sampler_logprobs[drawn].isfinite().all():
        # The model is broken, whether or not rows have a signal: `update` has to see it.
        broken = (replace(rows, mask=drawn),) * len(orders)
        return Assembled(advantages=advantages, batches=broken, tallies=tallies)
    batches: list[TrainBatch] = []
    for order in orders:
        parts = step_batches(
            rows,
            WEIGHTINGS[config.weighting],
            weighting_constant=config.weighting_constant or float(max_new_tokens),
            updates=config.updates_per_batch,
            order=order,
        )
        if not config.flat_rows_matter:
            parts = [live for part in parts if (live := with_gradient(part)) is not None]
        batches += [part for part in parts if part.weights.any()]
    return Assembled(advantages=advantages, batches=tuple(batches), tallies=tallies)


def advantages_of(
    groups: Sequence[RolloutGroup],
    config: GRPOConfig,
    penalties: Sequence[float] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """Per group, the advantage of each scored rollout; rollouts without a reward are left out.

    With `require_correct_in_group`, a group without a correct answer gets zeros: nothing is learned
    from wrong answers in a nicer format.

    Args:
        groups: all groups of a rollout batch.
        config: names the advantage.
        penalties: subtracted from the total of each scored rollout, in order (a KL in the reward).
    """
    scored = [r for group in groups for r in group.scored]
    if not scored:
        return tuple(() for _ in groups)
    ids = torch.tensor([g for g, group in enumerate(groups) for _ in group.scored])
    function = ADVANTAGES[config.advantage]
    if config.advantage_eps is not None:  # the configuration allows it where there is one
        function = partial(function, eps=config.advantage_eps)
    if config.decouple_rewards:
        # What weighs nothing is left out.
        weights = {name: w for name, w in scored[0].reward.weights.items() if w != 0}
        rows = [[r.reward.components[name] for name in weights] for r in scored]
        parts = torch.tensor(rows, dtype=torch.float64)
        shares = torch.tensor([*weights.values()], dtype=torch.float64)
        values = decoupled(parts, shares, ids, function)
    else:
        rewards = torch.tensor([r.reward.total for r in scored], dtype=torch.float64)
        if penalties is not None:
            rewards = rewards - torch.tensor(penalties, dtype=torch.float64)
        values = function(rewards, ids)
    flat = iter(values.tolist())
    found = [tuple(next(flat) for _ in group.scored) for group in groups]
    if config.require_correct_in_group:
        pairs = zip(groups, found, strict=True)
        found = [part if group.solved else (0.0,) * len(part) for group, part in pairs]
    return tuple(found)


def _scored(
    rows: TrainBatch, index: Tensor, config: GRPOConfig, scores: Scorer, *, old: bool
) -> TrainBatch:
    """The rows with reference log-probs, token selection and, if `old`, old log-probs.

    Only of those at `index`: the other rows have no gradient.
    """
    if not index.numel():
        return rows
    part = rows.select(index)
    changes: dict[str, Tensor] = {}
    if old or config.top_entropy < 1:
        now = scores.current(part)
        if old:
            changes["old_logprobs"] = now.logprobs
        if config.top_entropy < 1:
            share = config.top_entropy
            changes["selection"] = top_entropy_selection(now.entropies, part.mask, share)
    if config.beta > 0:
        changes["reference_logprobs"] = scores.reference(part)
    for name, values in changes.items():
        grid = values.new_zeros(rows.mask.shape)
        grid[index, : values.shape[1]] = values
        changes[name] = grid
    return replace(rows, **changes)  # type: ignore[arg-type]  # only tensor fields


def top_entropy_selection(entropies: Tensor, mask: Tensor, share: float) -> Tensor:
    """The target tokens [R, T] whose entropy is among the highest `share` of all of them.

    Forking tokens carry most of what reinforcement learning changes (arXiv 2506.01939). Tokens
    at the border that tie are all selected.

    >>> entropies = torch.tensor([[0.1, 0.9, 0.5, 7.0]])
    >>> mask = torch.tensor([[True, True, True, False]])
    >>> top_entropy_selection(entropies, mask, 0.34).tolist()
    [[False, True, True, False]]
    """
    values = entropies[mask]
    if not values.numel():
        return mask
    count = max(1, math.ceil(share * values.numel()))
    threshold = values.topk(count).values[-1]
    return mask & (entropies >= threshold)


def _penalties(
    rows: TrainBatch, config: GRPOConfig, tallies: dict[str, Tally]
) -> tuple[float, ...]:
    """`beta * sum_t kl_t` of each row: what a KL in the reward takes off its total."""
    assert rows.old_logprobs is not None
    assert rows.reference_logprobs is not None
    kl = kl_k1(rows.old_logprobs, rows.reference_logprobs)
    kl = torch.where(rows.mask, kl, 0.0).double()
    tallies["policy/kl"] = Tally.of(kl[rows.mask].tolist())
    return tuple((config.beta * kl.sum(1)).tolist())
