"""What a step of GRPO says about the tokens of a few rollouts, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from grouper.models.process_group import ProcessGroup
from grouper.runs.records import TokenRecord
from grouper.types import RolloutGroup

if TYPE_CHECKING:  # reading the record of a run loads no torch
    from torch import Tensor

    from grouper.algorithms.batching import TrainBatch


class TokenLog:
    """Collects what the updates of a step say about the tokens of a few rollouts.

    Args:
        groups: of the step.
        advantages: per group, one for each scored rollout.
        count: groups whose tokens are recorded; those with a signal come first.
    """

    def __init__(
        self, groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float]], count: int
    ) -> None:
        chosen = sorted(range(len(groups)), key=lambda g: not any(advantages[g]))[:count]
        self._groups = {g: groups[g] for g in sorted(chosen)}
        # Rows of a batch are numbered as the scored rollouts are.
        scored = [
            (g, sample)
            for g, group in enumerate(groups)
            for sample, rollout in enumerate(group.rollouts)
            if rollout.reward.total is not None
        ]
        self._places = {n: place for n, place in enumerate(scored) if place[0] in self._groups}
        self._logprobs: dict[tuple[int, int], list[float]] = {}
        self._clipped: dict[tuple[int, int], set[int]] = {}

    def see(self, batch: TrainBatch, logprobs: Tensor, clipped: Tensor | None) -> None:
        """Keep what belongs to these rollouts, of a slice of an update.

        Args:
            batch: the slice.
            logprobs: [R, T], of the policy before the first update.
            clipped: [R, T] bool; None: nothing can be.
        """
        for row, number in enumerate(batch.sequence_ids.tolist()):
            if place := self._places.get(number):
                length = int(batch.completion_lengths[row])
                self._logprobs.setdefault(place, logprobs[row, :length].tolist())
                if clipped is not None:
                    places = clipped[row, :length].nonzero().flatten().tolist()
                    self._clipped.setdefault(place, set()).update(places)

    def records(
        self, processes: ProcessGroup, text_of: Callable[[int], str]
    ) -> dict[tuple[int, int], TokenRecord]:
        """(group, sample) -> the record of its tokens; every process calls this.

        Args:
            processes: each has seen other rows.
            text_of: the text of a token id.
        """
        for logprobs, clipped in processes.gather((self._logprobs, self._clipped)):
            self._logprobs = {**logprobs, **self._logprobs}
            for place, tokens in clipped.items():
                self._clipped.setdefault(place, set()).update(tokens)
        return {
            (g, sample): TokenRecord(
                texts=[text_of(token) for token in rollout.completion.token_ids],
                trainer_logprobs=self._logprobs.get((g, sample)),
                clipped=sorted(self._clipped.get((g, sample), ())),
            )
            for g, group in self._groups.items()
            for sample, rollout in enumerate(group.rollouts)
        }
