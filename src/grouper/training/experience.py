"""Experience: what one rollout batch teaches, ready to be cut into optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from grouper.algorithms.batching import TrainBatch, rollout_batch, step_batches, with_gradient
from grouper.algorithms.losses import KL_ESTIMATORS
from grouper.algorithms.weighting import WEIGHTINGS
from grouper.config.schema import GRPOConfig
from grouper.training.group_signal import advantages_of
from grouper.types import RolloutGroup, Tally

__all__ = ["Experience", "make_experience", "top_entropy_selection"]


class _Scores(Protocol):
    def current(self, batch: TrainBatch) -> tuple[Tensor, Tensor]: ...

    def reference(self, batch: TrainBatch) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A rollout batch with its advantages."""

    advantages: tuple[tuple[float, ...], ...]
    """Per group, one for each scored rollout."""
    batch: TrainBatch | None
    """Every scored rollout; None when nothing could be scored."""
    config: GRPOConfig
    constant: float
    tallies: dict[str, Tally]

    def steps(self, order: Sequence[int] | None) -> list[TrainBatch]:
        """The optimizer steps of one pass; those whose gradient is zero by construction are out.

        Args:
            order: group numbers in the order in which they are dealt out to the steps.
        """
        if self.batch is None:
            return []
        broken = _broken(self.batch)
        if broken is not None:
            return [broken]
        parts = step_batches(
            self.batch,
            WEIGHTINGS[self.config.weighting],
            weighting_constant=self.constant,
            updates=self.config.updates_per_batch,
            order=order,
        )
        if self.config.flat_rows_matter:
            return [part for part in parts if part.weights.any()]
        return [live for part in parts if (live := with_gradient(part)) is not None]


def _broken(batch: TrainBatch) -> TrainBatch | None:
    """All tokens of all rows, where the sampler has found one whose log-prob is not finite.

    Then the model is broken, whether or not the rows have a signal: `update` has to see it.
    """
    if batch.sampler_logprobs is None:
        return None
    drawn = torch.arange(batch.mask.shape[1]) < batch.completion_lengths[:, None]
    if batch.sampler_logprobs[drawn].isfinite().all():
        return None
    return replace(batch, mask=drawn)


def make_experience(
    groups: Sequence[RolloutGroup], config: GRPOConfig, scores: _Scores, *, max_new_tokens: int
) -> Experience:
    """Advantages of a rollout batch, and the log-probs that its loss will need.

    Args:
        groups: everything that was sampled for it.
        config: the algorithm.
        scores: log-probs under the policy and the reference; asked only for what is needed.
        max_new_tokens: divisor of the constant weighting where the recipe names none.
    """
    constant = config.weighting_constant or float(max_new_tokens)
    batch = rollout_batch(
        groups,
        [[0.0] * len(group.scored) for group in groups],
        WEIGHTINGS[config.weighting],
        weighting_constant=constant,
        keep_flat=True,
        mask_truncated=config.overlong == "mask",
    )
    tallies: dict[str, Tally] = {}
    penalties = None
    if batch is not None and config.kl_in_reward:
        batch = _score(batch, torch.arange(batch.rows), config, scores)
        penalties = _penalties(batch, config, tallies)
    advantages = advantages_of(groups, config, penalties)
    if batch is not None:
        flat = torch.tensor([a for values in advantages for a in values], dtype=torch.float32)
        batch = replace(batch, advantages=flat)
        if not config.kl_in_reward:
            batch = _score(batch, _rows_that_matter(batch, config), config, scores)
        if not config.several_updates:
            # The old log-probs are the current ones, detached: the ratio is exactly 1.
            batch = replace(batch, old_logprobs=None)
    return Experience(
        advantages=advantages, batch=batch, config=config, constant=constant, tallies=tallies
    )


def _rows_that_matter(batch: TrainBatch, config: GRPOConfig) -> Tensor:
    """Row numbers with a gradient; the log-probs of the others are never looked at."""
    live = torch.ones(batch.rows, dtype=torch.bool)
    if not config.flat_rows_matter:
        live = batch.advantages != 0
    return live.nonzero().flatten()


def _score(batch: TrainBatch, rows: Tensor, config: GRPOConfig, scores: _Scores) -> TrainBatch:
    """The batch with old and reference log-probs and the token selection of `rows`."""
    if not rows.numel():
        return batch
    part = batch.select(rows)
    changes: dict[str, Tensor] = {}
    if config.several_updates or config.kl_in_reward or config.top_entropy < 1:
        old, entropies = scores.current(part)
        changes["old_logprobs"] = old
        if config.top_entropy < 1:
            changes["selection"] = top_entropy_selection(entropies, part.mask, config.top_entropy)
    if config.beta > 0:
        changes["reference_logprobs"] = scores.reference(part)
    whole = {name: _spread(values, rows, batch.mask.shape) for name, values in changes.items()}
    return replace(batch, **whole)  # type: ignore[arg-type]  # only tensor fields


def _spread(values: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """Grid [R, T], zero but for `values` at `rows`."""
    grid = values.new_zeros(shape)
    grid[rows, : values.shape[1]] = values
    return grid


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
    batch: TrainBatch, config: GRPOConfig, tallies: dict[str, Tally]
) -> tuple[float, ...]:
    """`beta * sum_t kl_t` of each row: what a KL in the reward takes off its total."""
    assert batch.old_logprobs is not None
    assert batch.reference_logprobs is not None
    kl = KL_ESTIMATORS[config.kl](batch.old_logprobs, batch.reference_logprobs)
    kl = torch.where(batch.mask, kl, 0.0).double()
    tallies["policy/kl"] = Tally.of(kl[batch.mask].tolist())
    return tuple((config.beta * kl.sum(1)).tolist())
