"""The order in which problems are met: a function of (run seed, phase, epoch), without state."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from grouper.config.schema import PhaseConfig
from grouper.sampling.base import address

__all__ = ["ProblemStream", "evaluation_is_due", "first_met", "total_steps"]


class ProblemStream:
    """Endless passes over `size` items, each in its own order.

    Args:
        size: items in one epoch.
        per_step: items taken by one step; a step at the edge of an epoch goes on into the next.
        seed: the run's seed.
        phase: `sft` or `grpo`; the two see different orders.

    >>> stream = ProblemStream(size=3, per_step=2, seed=0, phase="grpo")
    >>> sorted(stream.at(0) + stream.at(1)[:1])
    [0, 1, 2]
    """

    def __init__(self, *, size: int, per_step: int, seed: int, phase: str) -> None:
        assert size > 0
        self._size = size
        self._per_step = per_step
        self._seed = seed
        self._phase = phase
        self._orders: dict[int, list[int]] = {}

    def at(self, step: int) -> list[int]:
        """Indices of the items of step `step`, counted from 0."""
        first = step * self._per_step
        return [self._item(position) for position in range(first, first + self._per_step)]

    def take(
        self, position: int, count: int, wanted: Callable[[int, int], bool] | None = None
    ) -> tuple[list[int], int]:
        """The next `count` items from a position on.

        Args:
            position: items met so far, those passed over among them.
            count: how many to take.
            wanted: (index, epoch) -> whether to take it. After a whole epoch in which nothing
                was wanted, everything is taken: a stream never ends.

        Returns:
            Their indices, and the position after the last of them.

        >>> stream = ProblemStream(size=4, per_step=2, seed=0, phase="grpo")
        >>> taken, position = stream.take(0, 3, lambda index, epoch: index != 2)
        >>> sorted(taken)
        [0, 1, 3]
        """
        taken: list[int] = []
        passed_over = 0
        while len(taken) < count:
            index, epoch = self._item(position), self.epoch(position)
            position += 1
            if wanted is None or wanted(index, epoch):
                passed_over = 0
            elif passed_over < self._size:
                passed_over += 1
                continue
            taken.append(index)
        return taken, position

    def epoch(self, position: int) -> int:
        """The epoch of a position, counted from 0."""
        return position // self._size

    def epoch_after(self, step: int) -> int:
        """The epoch that the item after step `step`, counted from 0, belongs to.

        >>> stream = ProblemStream(size=10, per_step=4, seed=0, phase="sft")
        >>> [stream.epoch_after(step) for step in range(-1, 5)]
        [0, 0, 0, 1, 1, 2]
        """
        return self.epoch((step + 1) * self._per_step)

    def _item(self, position: int) -> int:
        epoch, place = divmod(position, self._size)
        if epoch not in self._orders:
            key = address(self._seed, "order", self._phase, epoch)
            # A step touches at most neighbouring epochs when they are longer than it.
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) <= 1}
            self._orders[epoch] = np.random.default_rng(key).permutation(self._size).tolist()
        return self._orders[epoch][place]


def first_met(size: int, count: int, *, seed: int) -> list[int]:
    """Indices of the problems that GRPO meets first, each once: a fair sample of all of them.

    The first of a file are not: many sets are sorted by subject or by level.

    >>> sorted(first_met(3, 5, seed=0))
    [0, 1, 2]
    """
    return ProblemStream(size=size, per_step=min(count, size), seed=seed, phase="grpo").at(0)


def total_steps(config: PhaseConfig, *, size: int, per_step: int) -> int:
    """Optimizer steps of a phase: as set, or as many as the epochs need.

    >>> from grouper.config.schema import SFTConfig
    >>> total_steps(SFTConfig(epochs=2.0), size=100, per_step=32)
    7
    """
    if config.steps is not None:
        return config.steps
    return max(1, -(-int(config.epochs * size) // per_step))


def evaluation_is_due(config: PhaseConfig, step: int, *, total: int, epoch_ended: bool) -> bool:
    """Whether the validation problems are looked at after `step` steps: also at 0 and `total`.

    By epoch: after each step that finishes one.

    >>> from grouper.config.schema import SFTConfig
    >>> config = SFTConfig(evaluate_every=3)
    >>> [s for s in range(9) if evaluation_is_due(config, s, total=8, epoch_ended=False)]
    [0, 3, 6, 8]
    """
    every = config.evaluate_every
    if every == 0:
        return False
    if step in (0, total):
        return True
    if every == "epoch":
        return epoch_ended
    return step % every == 0
