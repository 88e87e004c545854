"""Rows of a set larger than memory: read one after the other, drawn from a buffer, and no further
than needed.

Exact: the ids (row numbers of the whole set), every problem that is kept, their fingerprint, and
that equal settings choose equal rows. Not exact: the shuffle. A row can be drawn as soon as it is
in the buffer, so only the first `offset + limit + SHUFFLE_BUFFER` rows have a chance, and rows
stay roughly where they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")

# Rows of a stream that are held in memory to draw from when shuffling.
SHUFFLE_BUFFER = 10_000


def window(
    items: Iterable[Item], *, offset: int, limit: int, shuffle: int | None, buffer: int
) -> list[Item]:
    """`limit` items after the first `offset`; with `shuffle`, in the order of a buffer's draws.

    >>> window(range(10**9), offset=2, limit=3, shuffle=None, buffer=10)
    [2, 3, 4]
    """
    drawn = iter(items) if shuffle is None else shuffled(items, seed=shuffle, buffer=buffer)
    return list(islice(drawn, offset, offset + limit))


def shuffled(items: Iterable[Item], *, seed: int, buffer: int) -> Iterator[Item]:
    """Every item once, each drawn at random from the `buffer` that were read before it left.

    >>> sorted(shuffled(range(20), seed=0, buffer=4)) == list(range(20))
    True
    """
    draw = np.random.default_rng(seed)
    held: list[Item] = []
    for item in items:
        if len(held) < buffer:
            held.append(item)
            continue
        place = int(draw.integers(buffer))
        yield held[place]
        held[place] = item
    yield from (held[place] for place in draw.permutation(len(held)).tolist())
