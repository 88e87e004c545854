"""Scoring: log-probs of a batch under the policy as it is, or under the reference, no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from grouper.batching import TrainBatch
from grouper.policy import Policy
from grouper.training.memory import with_enough_memory

__all__ = ["Scorer"]

Score = Callable[[TrainBatch], tuple[Tensor, ...]]


class Scorer:
    """Scores batches in the update's own slices.

    Args:
        policy: the policy being trained.
        token_budget: tokens in one forward.
        reference: the weights a KL term holds on to, or None.
    """

    def __init__(
        self, policy: Policy, token_budget: int, reference: dict[str, Tensor] | None = None
    ) -> None:
        self._policy = policy
        self._budget = token_budget
        self._reference = reference

    def current(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [R, T] of the policy as it is now."""

        def score(part: TrainBatch) -> tuple[Tensor, ...]:
            outputs = self._policy(part)
            return outputs.logprobs, outputs.entropies

        logprobs, entropies = self._grids(batch, score, 2)
        return logprobs, entropies

    def reference(self, batch: TrainBatch) -> Tensor:
        """Log-probs [R, T] of the reference."""
        weights = self._reference
        assert weights is not None, "a KL term needs its reference"
        return self._grids(batch, lambda part: (self._policy.logprobs_with(weights, part),), 1)[0]

    @torch.no_grad()
    def _grids(self, batch: TrainBatch, score: Score, count: int) -> tuple[Tensor, ...]:
        """`count` grids [R, T], filled slice by slice; rows are found by their sequence id."""
        place = torch.zeros(int(batch.sequence_ids.max()) + 1, dtype=torch.int64)
        place[batch.sequence_ids] = torch.arange(batch.rows)

        def whole(parts: Iterable[TrainBatch]) -> tuple[Tensor, ...]:
            grids = tuple(batch.weights.new_zeros(batch.mask.shape) for _ in range(count))
            for part in parts:
                for grid, values in zip(grids, score(part.to(self._policy.device)), strict=True):
                    grid[place[part.sequence_ids], : values.shape[1]] = values.to(grid)
            return grids

        return with_enough_memory(self._policy, batch, self._budget, whole)
