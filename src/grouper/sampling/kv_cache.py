"""The sampler's key-value cache: prompts stored once, completions in a ring buffer; and its size.

A prompt's keys and values are stored once, however many slots continue it. Completions are stored
in columns that all slots share: a decode step writes one column, whatever position each slot has
reached, since rotary embeddings have already put the positions into keys and queries. Columns older
than the longest live sequence are overwritten; if there are none, the ring grows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from grouper.models.attention import heads_dtype
from grouper.models.device import free_memory
from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest

Tokens = tuple[int, ...]
"""The token ids of a prompt."""

Pair = tuple[Tensor, Tensor]
"""Keys and values."""

# Tensors [slots, V] of float32 that exist at once while tokens are sampled: logits old and new,
# scaled, log-softmax, probabilities, cumulative sums.
DRAW_COPIES = 6

_FLOAT32_BYTES = 4

# Prompt tokens per forward: with more, the activations between layers would take gigabytes.
PREFILL_TOKENS = 1 << 14

# Share of a device's free memory that the estimates may use; the rest is for what they do not
# count, and for what the allocator cannot use.
SHARE_OF_FREE = 0.8


class CacheSize(NamedTuple):
    """The capacity of a cache."""

    slots: int
    """Concurrent sequences."""
    prompts: int
    """Distinct prompts stored at once."""
    prompt: int
    """Tokens of the longest prompt."""
    completion: int
    """Tokens of the longest completion."""

    @classmethod
    def of(cls, requests: Collection[SampleRequest], slots: int) -> CacheSize:
        """Return the capacity that these requests need with this number of slots."""
        distinct = {request.context for request in requests}
        return cls(
            slots=slots,
            prompts=min(slots, len(distinct)),
            prompt=max(len(prompt) for prompt in distinct),
            completion=max(request.remaining.max_new_tokens for request in requests),
        )


def _with_slots(size: CacheSize, slots: int) -> CacheSize:
    """Return the same size with another number of slots, which have at most one prompt each."""
    prompts = min(slots, size.prompts)
    return size._replace(slots=slots, prompts=prompts)


def slots_for(admitted: int, in_all: int) -> int:
    """Return the slots for requests that are admitted at the beginning, of which more may come.

    >>> [slots_for(96, in_all) for in_all in (96, 100, 400)]
    [96, 100, 128]
    """
    # A power of two: an engine that is kept serves the next call, which begins with a few more.
    return min(in_all, 1 << (admitted - 1).bit_length())


def prompts_at_once(longest: int) -> int:
    """Return the number of prompts per forward, where the longest has this many tokens."""
    return max(1, PREFILL_TOKENS // longest)


def cache_bytes(config: Any, dtype: torch.dtype, size: CacheSize) -> int:
    """Return the bytes of keys and values in all layers of a model.

    Args:
        config: the model's text configuration.
        dtype: of keys and values.
        size: the capacity.
    """
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    numbers_per_token = 2 * config.num_hidden_layers * kv_heads * head_dim
    prompt_tokens = size.prompts * size.prompt
    completion_tokens = size.slots * size.completion
    tokens = prompt_tokens + completion_tokens
    return int(numbers_per_token * dtype.itemsize * tokens)


def drawing_bytes(slots: int, vocabulary: int) -> int:
    """Return the bytes that sampling one token for every slot takes."""
    return DRAW_COPIES * slots * vocabulary * _FLOAT32_BYTES


def prefill_bytes(config: Any, dtype: torch.dtype, tokens: int) -> int:
    """Estimate the bytes that running prompts takes: hidden states, and the inside of an MLP."""
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    numbers_per_token = 4 * hidden + 3 * inner
    return int(tokens * numbers_per_token * dtype.itemsize)


def slots_that_fit(policy: Policy, size: CacheSize, free: int) -> int:
    """Return the largest number of slots that fits, at most that of `size` and at least 1.

    Args:
        policy: the model.
        size: the capacity to aim at.
        free: bytes, of which `SHARE_OF_FREE` is used.
    """
    config = policy.model.config.get_text_config()
    dtype = policy.products_dtype
    for slots in range(size.slots, 1, -1):
        candidate = _with_slots(size, slots)
        prompts = min(candidate.prompts, prompts_at_once(size.prompt))
        prefill = prefill_bytes(config, dtype, size.prompt * prompts)
        drawing = drawing_bytes(slots, policy.vocabulary)
        # Prompts are run and tokens are sampled one after the other, never together.
        temporary = max(drawing, prefill)
        needed = cache_bytes(config, dtype, candidate) + temporary
        if needed <= SHARE_OF_FREE * free:
            return slots
    return 1


def fitting_size(policy: Policy, size: CacheSize) -> CacheSize:
    """Return the same size with as many slots as a GPU's free memory allows."""
    if policy.device.type != "cuda":
        return size
    free = max(0, free_memory(policy.device) - policy.reserved_bytes)
    slots = slots_that_fit(policy, size, free)
    return _with_slots(size, slots)


@dataclass(slots=True)
class LayerCache:
    """One layer's keys and values."""

    prompts: Pair
    """[places, Hkv, longest prompt, D]."""
    own: Pair
    """The ring [slots, Hkv, width, D]."""


class KVCache:
    """Keys and values of every layer, allocated when a layer is first run.

    Args:
        size: its largest capacity.
        width: initial number of columns of the ring.
        device: of the model.
    """

    def __init__(self, size: CacheSize, width: int, device: torch.device) -> None:
        self.layers: dict[int, LayerCache] = {}
        self.places = 0
        """Number of prompts that fit now."""
        self.width = min(width, size.completion)
        """Columns of the ring."""
        self.column = torch.full((1,), -1, device=device)
        """[1] int64: the column that was written last."""
        self._size = size

    def layer(self, index: int, key: Tensor, value: Tensor) -> LayerCache:
        """Return the cache of one layer, allocated at its first use.

        Args:
            index: of the layer.
            key: [1, Hkv, _, D], whose heads and dimensions the cache takes over.
            value: [1, Hkv, _, D], where D may be another than that of the keys.
        """
        if index not in self.layers:
            heads = (key, value)
            prompts = _zeros(heads, self.places, self._size.prompt)
            ring = _zeros(heads, self._size.slots, self.width)
            self.layers[index] = LayerCache(prompts, ring)
        return self.layers[index]

    def make_places(self, prompts: int) -> None:
        """Grow so that at least this many prompts fit."""
        if prompts <= self.places:
            return
        # Doubled, so that a stream of new prompts does not copy the cache for each of them.
        doubled = min(2 * self.places, self._size.prompts)
        places = max(prompts, doubled)
        added = places - self.places
        self.places = places
        for layer in self.layers.values():
            layer.prompts = _grown(layer.prompts, dim=0, added=added)

    def make_columns(self, longest: int) -> None:
        """Grow the ring so that sequences of this length fit."""
        # A row writes no further than its budget.
        needed = min(longest, self._size.completion)
        if needed <= self.width:
            return
        # New columns have to come after the newest one, so the ring is unrolled: afterwards the
        # oldest column is the first, and the one that was written last is the last.
        columns = torch.arange(self.width, device=self.column.device)
        oldest = self.column + 1
        oldest_first = (columns + oldest) % self.width
        self.column.fill_(self.width - 1)
        doubled = max(needed, 2 * self.width)
        width = min(doubled, self._size.completion)
        added = width - self.width
        self.width = width
        for layer in self.layers.values():
            keys, values = layer.own
            keys = keys.index_select(2, oldest_first)
            values = values.index_select(2, oldest_first)
            layer.own = _grown((keys, values), dim=2, added=added)

    def compact(self, slots: Sequence[int]) -> None:
        """Move the keys and values of these slots to the front, in order; drop the others'."""
        moves = [(place, slot) for place, slot in enumerate(slots) if place != slot]
        if not moves:
            return
        indices = torch.tensor(moves, device=self.column.device)
        places, sources = indices.unbind(1)
        for layer in self.layers.values():
            for store in layer.own:
                store[places] = store[sources]


def _zeros(heads: Pair, rows: int, columns: int) -> Pair:
    """Return stores [rows, Hkv, columns, D] for keys and values like these [1, Hkv, _, D].

    Zeros, not empty: a masked column still meets the softmax, and 0 * NaN is NaN.
    """
    key, value = heads
    dtype = heads_dtype(key)
    key_shape = (rows, key.shape[1], columns, key.shape[3])
    value_shape = (rows, value.shape[1], columns, value.shape[3])
    keys = key.new_zeros(key_shape, dtype=dtype)
    values = value.new_zeros(value_shape, dtype=dtype)
    return keys, values


def _grown(pair: Pair, *, dim: int, added: int) -> Pair:
    """Return the pair [_, Hkv, _, D] with this many zeros added at the end of a dimension."""
    # `pad` takes (before, after) of each dimension, the last one first.
    widths = [0, 0] * (4 - dim)
    widths[-1] = added
    keys, values = pair
    return pad(keys, widths), pad(values, widths)
