"""One process or many, behind one door. A run on one device uses no distributed code at all.

The loop asks its `Team` to share work out and to bring results together; alone, both are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

__all__ = ["Solo", "Team"]

Item = TypeVar("Item")


class Team(Protocol):
    """The processes that train one model together."""

    rank: int
    """0 to `size - 1`; rank 0 writes files and talks."""
    size: int

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and talks."""
        ...

    def share(self, items: Sequence[Item]) -> list[Item]:
        """The items this process works on; every item is somebody's, and nobody else's."""
        ...

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all processes, in place, on every process alike."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes by rank, on every process alike."""
        ...


class Solo:
    """A team of one."""

    rank = 0
    size = 1
    first = True

    def share(self, items: Sequence[Item]) -> list[Item]:
        return list(items)

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, value: Any) -> list[Any]:
        return [value]
