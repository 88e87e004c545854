"""The key-value cache of the native sampler: prompts once, completions in a ring of columns.

A prompt's keys and values are held once, however many slots continue it, and read once a step for
all of them. What the slots write themselves lies in columns that all slots share: a decode step
writes one column, whatever position each slot has reached, since rotary embeddings have put the
positions into keys and queries already. Columns older than the longest live sequence are written
again; where there are none the ring grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROWTH = 32
"""The width of a ring is a multiple of this, and an eighth more than is needed."""


class _Store:
    """Keys or values of one layer for a number of rows.

    Args:
        like: heads [_, Hkv, _, D] of the dtype to hold.
        rows: sequences or prompts.
        columns: tokens of each.
    """

    __slots__ = ("data",)

    def __init__(self, like: Tensor, rows: int, columns: int) -> None:
        self.data = self._blank(like, rows, columns)
        """[rows, Hkv, columns, D]."""

    @staticmethod
    def _blank(like: Tensor, rows: int, columns: int) -> Tensor:
        # Zeros, not empty: a masked column still meets the softmax, and 0 * NaN is NaN.
        return like.new_zeros(rows, like.shape[1], columns, like.shape[3])

    def resize(
        self,
        *,
        rows: int | None = None,
        width: int | None = None,
        keep: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> None:
        """Take another size; these rows and columns, or else all there are, come first."""
        held = self.data
        if keep is not None:
            held = held.index_select(0, _index(keep, held))
        if columns is not None:
            held = held.index_select(2, _index(columns, held))
        there = (held.shape[0], held.shape[2])
        self.data = self._blank(
            held, there[0] if rows is None else rows, there[1] if width is None else width
        )
        self.data[: there[0], :, : there[1]] = held


def _index(places: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(places, dtype=torch.long, device=like.device)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's share of the cache."""

    prompts: tuple[_Store, _Store]
    """Keys and values."""
    own: tuple[_Store, _Store]


class SlotCache:
    """Keys and values of every layer, allocated when a layer is first run.

    Args:
        slots: sequences held at the same time.
        prompt: tokens of the longest prompt.
        completion: tokens of the longest completion.
    """

    def __init__(self, slots: int, prompt: int, completion: int) -> None:
        self.layers: dict[int, Layer] = {}
        self.rows = slots
        self.prompts = 0
        """Prompts there is room for."""
        self.prompt_columns = prompt
        self.width = 0
        """Columns of the ring."""
        self.column = -1
        """The one that was written last."""
        self._longest = completion

    def layer(self, index: int, key: Tensor, value: Tensor) -> Layer:
        """The cache of one layer, shaped after its keys and values [1, Hkv, _, D]."""
        if index not in self.layers:
            dtype = _matrix_dtype(key)
            key, value = key.to(dtype), value.to(dtype)
            prompts, own = (self.prompts, self.prompt_columns), (self.rows, self.width)
            self.layers[index] = Layer(
                (_Store(key, *prompts), _Store(value, *prompts)),
                (_Store(key, *own), _Store(value, *own)),
            )
        return self.layers[index]

    def make_room(self, prompts: int) -> None:
        """Let at least this many prompts fit."""
        if prompts <= self.prompts:
            return
        self.prompts = max(prompts, min(2 * self.prompts, self.rows))
        for layer in self.layers.values():
            for store in layer.prompts:
                store.resize(rows=self.prompts)

    def turn(self, longest: int) -> None:
        """Go on to the column of the next step.

        Args:
            longest: completion tokens that the longest live sequence has written before it.
        """
        if longest < self.width:
            self.column = (self.column + 1) % self.width
            return
        columns = None if self.column == self.width - 1 else self._by_age(self.width)
        self.column = self.width
        wanted = _bucket(self.width + 1 + self.width // 8)
        self.width = max(self.width + 1, min(wanted, self._longest))
        for layer in self.layers.values():
            for store in layer.own:
                store.resize(width=self.width, columns=columns)

    def keep(self, slots: Sequence[int], prompts: Sequence[int], longest: int) -> None:
        """Keep only these slots and prompts, in order, and of the ring what they need.

        Args:
            slots: rows that stay.
            prompts: prompts that stay.
            longest: completion tokens that the longest of the slots has written.
        """
        columns = self._by_age(min(self.width, _bucket(longest)))
        self.rows, self.prompts, self.width = len(slots), len(prompts), len(columns)
        self.column = self.width - 1
        for layer in self.layers.values():
            for store in layer.prompts:
                store.resize(keep=prompts)
            for store in layer.own:
                store.resize(keep=slots, columns=columns)

    def _by_age(self, count: int) -> list[int]:
        """The `count` columns that were written last, the oldest of them first."""
        return [(self.column + 1 - count + i) % self.width for i in range(count)]

    def ages(self, device: torch.device) -> Tensor:
        """[width]: how many steps ago each column was written; 0 is this step's."""
        return (self.column - torch.arange(self.width, device=device)) % self.width


def _bucket(columns: int) -> int:
    return -(-columns // GROWTH) * GROWTH


def _matrix_dtype(key: Tensor) -> torch.dtype:
    """Under autocast rotary embeddings leave keys in float32, and products round them anyway."""
    if torch.is_autocast_enabled(key.device.type):
        return torch.get_autocast_dtype(key.device.type)
    return key.dtype
