"""One process or many behind one interface. A run on one device uses no distributed code at all.

Code that has work to share asks a `ProcessGroup`; a group of one shares and gathers at no cost.
The group of several processes is in `training/parallel.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # a dry run loads no torch
    from torch import Tensor

Value = TypeVar("Value")


class ProcessGroup:
    """The processes that train one model together; this class itself is a group of one.

    Every process calls the same methods in the same order. An error on one of them ends the others:
    the launcher (torchrun) does that within seconds.
    """

    rank = 0
    """0 to `size - 1`; rank 0 writes files and messages."""
    size = 1

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over all processes, in place; every process gets the sum."""

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes by rank, on every process."""
        return [value]

    def on_rank0(self, work: Callable[[], Value]) -> Value:
        """Call `work` on rank 0 only, and return its result on every process."""
        return work()


def share_of(items: Sequence[Any], rank: int, size: int) -> range:
    """Return the positions that this process works on: neighbors, so that groups stay together.

    Every position is in exactly one process's share, and shares differ by one at most.

    >>> [list(share_of("abcde", rank, 2)) for rank in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    count = len(items)
    return range(count * rank // size, count * (rank + 1) // size)
