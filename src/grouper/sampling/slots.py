"""The key-value cache of the native sampler: a fixed number of slots, one sequence each.

Slot s holds the keys and values of its sequence at columns 0, 1, ..., without padding, so a
finished slot is refilled by overwriting it. `Prefill` runs each prompt once and copies its keys
and values to every slot that continues it; `Decode` appends one token to the first `rows` slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grouper.attention import AttentionSpec, attend, gather_heads

__all__ = ["Decode", "Prefill", "SlotCache"]


class SlotCache:
    """Keys and values [slots, Hkv, capacity, D] per layer, allocated when a layer is first run.

    Args:
        slots: sequences held at the same time.
        capacity: the longest sequence in tokens, prompt included.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The cache of one layer, shaped after its keys and values [_, Hkv, _, D].

        Under autocast the two differ in dtype: rotary embeddings leave keys in float32.
        """
        if index not in self.layers:
            # Zeros, not empty: a masked column still meets the softmax, and 0 * NaN is NaN.
            def empty(like: Tensor) -> Tensor:
                return like.new_zeros(self.slots, like.shape[1], self.capacity, like.shape[3])

            self.layers[index] = (empty(key), empty(value))
        return self.layers[index]

    def keep(self, slots: Tensor, columns: int) -> None:
        """Move `slots` [n] to the front, in order, with their first `columns` columns."""
        count = slots.shape[0]
        for key, value in self.layers.values():
            key[:count, :, :columns] = key[slots, :, :columns]
            value[:count, :, :columns] = value[slots, :, :columns]


class Prefill:
    """P prompts as one flat row; their keys and values are copied to the slots that continue them.

    Args:
        cache: where to write.
        prompts: the token ids of each prompt.
        slots: [n] the slots to fill.
        owners: [n] the prompt of each slot.
    """

    def __init__(
        self, cache: SlotCache, prompts: list[tuple[int, ...]], slots: Tensor, owners: Tensor
    ) -> None:
        device = slots.device
        self._cache = cache
        self._slots = slots
        self._owners = owners
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        columns = torch.arange(int(lengths.max()), device=device)
        live = columns < lengths[:, None]
        start = lengths.cumsum(0) - lengths
        self.token_ids = torch.tensor([[t for p in prompts for t in p]], device=device)
        """[1, N]."""
        self.position_ids = columns.expand_as(live)[live][None]
        """[1, N]."""
        self.last = start + lengths - 1
        """[P]: the flat index of each prompt's last token."""
        self._gather = start[:, None] + columns * live
        self._scatter = live.reshape(-1).nonzero().flatten()
        self._columns = columns

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        queries, keys, values = (gather_heads(t, self._gather) for t in (query, key, value))
        cached_keys, cached_values = self._cache.layer(spec.layer, keys, values)
        width = keys.shape[2]
        cached_keys[self._slots, :, :width] = keys[self._owners]
        cached_values[self._slots, :, :width] = values[self._owners]
        mask = None
        if spec.window is not None:
            distance = self._columns[:, None] - self._columns
            mask = ((distance >= 0) & (distance < spec.window))[None, None]
        blocks = attend(queries, keys, values, mask, spec)
        heads, dim = blocks.shape[1], blocks.shape[3]
        flat = blocks.transpose(0, 1).reshape(heads, -1, dim)
        return flat.index_select(1, self._scatter)[None]


class Decode:
    """One new token in each of the first `rows` slots.

    Args:
        cache: where to read and append.
        positions: [rows] the column each new token is written to: its sequence's length so far.
    """

    def __init__(self, cache: SlotCache, positions: Tensor) -> None:
        self._cache = cache
        self._positions = positions
        self._rows = torch.arange(positions.shape[0], device=positions.device)
        self._width = int(positions.max()) + 1
        columns = torch.arange(self._width, device=positions.device)
        self._age = positions[:, None] - columns
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """As `Layout.attend`, the N flat tokens being one per slot."""
        keys, values = self._cache.layer(spec.layer, key, value)
        rows, width = self._rows.shape[0], self._width
        keys[self._rows, :, self._positions] = key[0].transpose(0, 1)
        values[self._rows, :, self._positions] = value[0].transpose(0, 1)
        # Grouped query heads are folded into the query length: keys are read once per key head.
        heads, dim = key.shape[1], query.shape[3]
        folded = query[0].transpose(0, 1).reshape(rows, heads, -1, dim)
        mask = self._mask(spec.window)
        out = attend(folded, keys[:rows, :, :width], values[:rows, :, :width], mask, spec)
        return out.reshape(rows, -1, values.shape[3]).transpose(0, 1)[None]

    def _mask(self, window: int | None) -> Tensor:
        """[rows, 1, 1, width]: the live columns of each slot."""
        if window not in self._masks:
            live = self._age >= 0
            if window is not None:
                live = live & (self._age < window)
            self._masks[window] = live[:, None, None]
        return self._masks[window]
