"""Scoring: log-probs of a batch under the policy as it is, or under the reference, no gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grouper.algorithms.batching import TrainBatch
from grouper.training.memory import with_enough_memory
from grouper.training.parallel import Replica

__all__ = ["Scorer"]

Score = Callable[[TrainBatch], tuple[Tensor, ...]]


class Scorer:
    """Scores batches in the update's own slices.

    Args:
        replica: the policy being trained, as this process runs it.
        token_budget: tokens in one forward.
        reference: the weights a KL term holds on to, as the replica holds its own; or None.
        told: called with each batch that is scored.
    """

    def __init__(
        self,
        replica: Replica,
        token_budget: int,
        reference: dict[str, Tensor] | None = None,
        *,
        told: Callable[[TrainBatch], None] | None = None,
    ) -> None:
        self._replica = replica
        self._budget = token_budget
        self._reference = reference
        self._told = told

    def current(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [R, T] of the policy as it is now."""

        def score(part: TrainBatch) -> tuple[Tensor, ...]:
            outputs = self._replica.score(part)
            return outputs.logprobs, outputs.entropies

        logprobs, entropies = self._grids(batch, score, 2)
        return logprobs, entropies

    def reference(self, batch: TrainBatch) -> Tensor:
        """Log-probs [R, T] of the reference."""
        weights = self._reference
        assert weights is not None, "a KL term needs its reference"
        return self._grids(
            batch, lambda part: (self._replica.reference_logprobs(weights, part),), 1
        )[0]

    def _grids(self, batch: TrainBatch, score: Score, count: int) -> tuple[Tensor, ...]:
        """`count` grids [R, T], filled slice by slice; rows are found by their sequence id."""
        replica, policy = self._replica, self._replica.policy
        if self._told is not None:
            self._told(batch)
        place = torch.zeros(int(batch.sequence_ids.max()) + 1, dtype=torch.int64)
        place[batch.sequence_ids] = torch.arange(batch.rows)

        def whole(parts: Sequence[TrainBatch], meet: Callable[[], None]) -> tuple[Tensor, ...]:
            grids = tuple(batch.weights.new_zeros(batch.mask.shape) for _ in range(count))
            for part in replica.share(parts):
                scores = score(part.batch.to(policy.device))
                rows = place[part.batch.sequence_ids]
                for grid, values in zip(grids, scores, strict=True):
                    if part.own:
                        grid[rows, : values.shape[1]] = values.to(grid)
            meet()
            return grids

        grids = with_enough_memory(replica, batch, replica.token_budget(batch, self._budget), whole)
        # What one process has scored is zero on the others.
        return tuple(replica.team.sum_(grid) for grid in grids)
