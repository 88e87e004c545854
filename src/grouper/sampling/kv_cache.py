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

# Tensors [slots, V] of float32 that exist at once while tokens are drawn: logits old and new,
# scaled, log-softmax, probabilities, cumulative sums.
DRAW_COPIES = 6

# Prompt tokens per forward: with more, the activations between layers would take gigabytes.
PREFILL_TOKENS = 1 << 14

# Share of a device's free memory that is planned with; the rest is for what is not counted, and for
# what the allocator cannot use.
SHARE_OF_FREE = 0.8


class CacheSize(NamedTuple):
    """The capacity of a cache."""

    slots: int
    """Concurrent sequences."""
    prompts: int
    """Distinct prompts held at once."""
    prompt: int
    """Tokens of the longest prompt."""
    completion: int
    """Tokens of the longest completion."""

    @classmethod
    def of(cls, requests: Collection[SampleRequest], slots: int) -> CacheSize:
        """What these requests need with this number of slots."""
        prompts = {request.prompt.token_ids for request in requests}
        longest = max(request.params.max_new_tokens for request in requests)
        return cls(slots, min(slots, len(prompts)), max(map(len, prompts)), longest)


def prompts_at_once(longest: int) -> int:
    """Prompts per forward, where the longest has this many tokens."""
    return max(1, PREFILL_TOKENS // longest)


def cache_bytes(config: Any, dtype: torch.dtype, size: CacheSize) -> int:
    """Keys and values of all layers of a model with this text configuration."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    tokens = size.prompts * size.prompt + size.slots * size.completion
    return int(2 * config.num_hidden_layers * heads * width * dtype.itemsize * tokens)


def drawing_bytes(slots: int, vocabulary: int) -> int:
    """Bytes that drawing one token for every slot takes."""
    return DRAW_COPIES * slots * vocabulary * 4


def prefill_bytes(config: Any, dtype: torch.dtype, tokens: int) -> int:
    """Roughly what running prompts takes: hidden states, and the inside of an MLP."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return int(tokens * (4 * config.hidden_size + 3 * inner) * dtype.itemsize)


def slots_that_fit(policy: Policy, size: CacheSize, free: int) -> int:
    """The largest number of slots that fits, at most that of `size` and at least 1.

    Args:
        policy: the model.
        size: what is wanted.
        free: bytes, of which `SHARE_OF_FREE` is used.
    """
    config, dtype = policy.model.config.get_text_config(), policy.products_dtype
    for slots in range(size.slots, 1, -1):
        part = size._replace(slots=slots, prompts=min(slots, size.prompts))
        run = size.prompt * min(part.prompts, prompts_at_once(size.prompt))
        passing = max(drawing_bytes(slots, policy.vocabulary), prefill_bytes(config, dtype, run))
        if cache_bytes(config, dtype, part) + passing <= SHARE_OF_FREE * free:
            return slots
    return 1


def fitting_size(policy: Policy, size: CacheSize) -> CacheSize:
    """The same size with as many slots as a GPU's free memory allows."""
    if policy.device.type != "cuda":
        return size
    slots = slots_that_fit(policy, size, free_memory(policy.device))
    return size._replace(slots=slots, prompts=min(slots, size.prompts))


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
        """The cache of one layer, shaped after its keys and values [1, Hkv, _, D]."""
        if index not in self.layers:
            dtype, (slots, _, prompt, _) = heads_dtype(key), self._size
            # Zeros, not empty: a masked column still meets the softmax, and 0 * NaN is NaN.
            stores = [
                heads.new_zeros((rows, heads.shape[1], columns, heads.shape[3]), dtype=dtype)
                for rows, columns in ((self.places, prompt), (slots, self.width))
                for heads in (key, value)
            ]
            self.layers[index] = LayerCache((stores[0], stores[1]), (stores[2], stores[3]))
        return self.layers[index]

    def make_places(self, prompts: int) -> None:
        """Grow so that at least this many prompts fit."""
        if prompts <= self.places:
            return
        before, self.places = self.places, max(prompts, min(2 * self.places, self._size.prompts))
        for layer in self.layers.values():
            layer.prompts = _padded(layer.prompts, (0, 0, 0, 0, 0, 0, 0, self.places - before))

    def make_columns(self, longest: int) -> None:
        """Grow the ring so that sequences of this length fit."""
        wanted = min(longest, self._size.completion)  # a row writes no further than its budget
        if wanted <= self.width:
            return
        oldest_first = torch.arange(self.width, device=self.column.device) + self.column + 1
        oldest_first %= self.width
        self.column.fill_(self.width - 1)
        before, self.width = self.width, min(max(wanted, 2 * self.width), self._size.completion)
        for layer in self.layers.values():
            keys, values = (store.index_select(2, oldest_first) for store in layer.own)
            layer.own = _padded((keys, values), (0, 0, 0, self.width - before))

    def compact(self, slots: Sequence[int]) -> None:
        """Move the keys and values of these slots to the front, in order; drop the others'."""
        moves = [(place, slot) for place, slot in enumerate(slots) if place != slot]
        moved = torch.tensor(moves, dtype=torch.long, device=self.column.device).view(-1, 2)
        places, sources = moved.unbind(1)
        for layer in self.layers.values() if moves else ():
            for store in layer.own:
                store[places] = store[sources]


def _padded(pair: Pair, widths: tuple[int, ...]) -> Pair:
    """The pair padded with zeros; `widths` as in `torch.nn.functional.pad`."""
    return pad(pair[0], widths), pad(pair[1], widths)
