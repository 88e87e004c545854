"""Attention over the key-value cache: what a prompt leaves there, and one new token per row.

Both are layouts (`attention.Layout`) and travel through the model's own code. Decoding has one
plain version and a twin for each kind of kernels. Everything that changes from step to step is read
from tensors (the column that is written, how long each row is, which prompt it continues), so that
a step can be recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grouper.algorithms.batching import unweighted_rows
from grouper.kernels.cpu import ops
from grouper.kernels.cpu.library import DTYPES, library
from grouper.kernels.triton import decode as triton
from grouper.kernels.triton.language import Refused, serves
from grouper.models.attention import AttentionSpec, SharedPrompts, move_heads
from grouper.models.policy import Policy
from grouper.sampling.kv_cache import KVCache, LayerCache, Pair, Tokens


class Prefill(SharedPrompts):
    """P prompts as one flat row, whose keys and values are kept for the slots that continue them.

    `sources` [P] are the flat indices of their last tokens.

    Args:
        cache: where to write.
        prompts: the token ids of each prompt.
        places: [P] the place of each in the cache.
    """

    def __init__(self, cache: KVCache, prompts: Sequence[Tokens], places: Tensor) -> None:
        # One completion each, of a token that is predicted and not run.
        batch = unweighted_rows(prompts, [(0,)] * len(prompts), range(len(prompts)))
        super().__init__(batch.to(places.device))
        self._cache = cache
        self._kept_at = places

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        stores = self._cache.layer(spec.layer, key, value).prompts
        for store, heads in zip(stores, (key, value), strict=True):
            rows = move_heads(heads, self._prompt_places, self._prompt_shape)
            store[self._kept_at, :, : rows.shape[2]] = rows.to(store.dtype)
        return super().attend(query, key, value, spec)


@dataclass(frozen=True, slots=True)
class DecodeState:
    """Where each row is; the tensors are updated in place from step to step.

    A row whose output is not needed may be left out of `members`; its output is then undefined.
    """

    column: Tensor
    """[1] int64: the column of the ring that this step writes."""
    lengths: Tensor
    """[rows] int64: tokens each row has in the ring, this step's included; 1 or more."""
    owners: Tensor
    """[rows] int64: the place of each row's prompt."""
    prompt_lengths: Tensor
    """[places] int64."""
    members: Tensor
    """[places, size] int64: the rows that continue each prompt, -1 after them."""


class Decode:
    """One new token in each of the first rows.

    Args:
        cache: where to read and write.
        state: where each row is.
    """

    def __init__(self, cache: KVCache, state: DecodeState) -> None:
        self._cache = cache
        self._state = state

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        layer = self._cache.layer(spec.layer, key, value)
        query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
        out = decode_attention(query, (key, value), layer, self._state, spec)
        return out.transpose(0, 1)[None]


Attend = Callable[[Tensor, Pair, LayerCache, DecodeState, AttentionSpec], Tensor]


def decode_attention(
    query: Tensor, new: Pair, cache: LayerCache, state: DecodeState, spec: AttentionSpec
) -> Tensor:
    """Write the new keys and values into the ring, then attend to prompt and ring.

    Args:
        query: [rows, Hq, D].
        new: keys and values [rows, Hkv, D] of this step's tokens.
        cache: prompts and the ring, of which the first rows are used.
        state: where each row is.
        spec: scaling, window and cap of the layer.

    Returns:
        [rows, Hq, D] in the ring's dtype.
    """
    kernel = kernel_for(cache.own[0])
    if kernel is not None:
        with contextlib.suppress(Refused):
            return kernel(query, new, cache, state, spec)
    return plain(query, new, cache, state, spec)


def kernel_for(store: Tensor) -> Attend | None:
    """The kernel for caches of this device and dtype, or None."""
    if serves(store):
        return by_triton
    if store.is_cpu and store.dtype in DTYPES and library() is not None:
        return compiled
    return None


def has_kernel(policy: Policy) -> bool:
    """Whether this model's caches have a kernel, in the dtype of its matrix products."""
    like = torch.empty(0, dtype=policy.products_dtype, device=policy.device)
    return kernel_for(like) is not None


def plain(
    query: Tensor, new: Pair, cache: LayerCache, state: DecodeState, spec: AttentionSpec
) -> Tensor:
    """As `decode_attention`, in PyTorch operations over all columns."""
    rows, heads = new[0].shape[:2]
    keys, values = (store[:rows] for store in cache.own)
    for ring, fresh in zip((keys, values), new, strict=True):
        ring.index_copy_(2, state.column, fresh[:, :, None].to(ring.dtype))
    prompt_keys, prompt_values = cache.prompts
    shared = prompt_keys.shape[2]
    seen = _seen(state, shared, keys.shape[2], spec.window)
    folded = query.to(keys.dtype).reshape(rows, heads, -1, query.shape[2])
    # A prompt's keys meet the queries of all rows that continue it: nothing is copied row by row.
    over_prompts = _by_prompt(folded, state.members) @ prompt_keys.transpose(2, 3)
    over_own = folded @ keys.transpose(2, 3)
    scores = torch.cat([_by_row(over_prompts, state.members, rows), over_own], 3)
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    shares = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1).to(values.dtype)
    mixed = _by_prompt(shares[..., :shared], state.members) @ prompt_values
    out = _by_row(mixed, state.members, rows) + shares[..., shared:] @ values
    return out.reshape(rows, query.shape[1], -1)


def _seen(state: DecodeState, prompt_width: int, width: int, window: int | None) -> Tensor:
    """[rows, prompt_width + width]: whether a row sees a column of its prompt, or of the ring."""
    device = state.column.device
    ages = (state.column - torch.arange(width, device=device)) % width
    columns = torch.arange(prompt_width, device=device)
    before = state.prompt_lengths[state.owners][:, None]
    lengths = state.lengths[:, None]
    seen = torch.cat([columns < before, ages < lengths], 1)
    if window is not None:
        distance = torch.cat([before + lengths - 1 - columns, ages.expand(len(lengths), -1)], 1)
        seen &= distance < window
    return seen


def _by_prompt(rows: Tensor, members: Tensor) -> Tensor:
    """[rows, H, Q, X] -> [places, H, size * Q, X], those that continue a prompt together."""
    places, size = members.shape
    picked = rows.index_select(0, members.clamp(min=0).flatten())
    blocks = picked.view(places, size, *rows.shape[1:]).transpose(1, 2)
    return blocks.reshape(places, rows.shape[1], -1, rows.shape[3])


def _by_row(blocks: Tensor, members: Tensor, rows: int) -> Tensor:
    """[places, H, size * Q, X] -> [rows, H, Q, X]; zeros for rows that are no members."""
    places, size = members.shape
    _, heads, queries, width = blocks.shape
    apart = blocks.view(places, heads, size, queries // size, width).transpose(1, 2).flatten(0, 1)
    # Entries of -1 go to an extra row, which is dropped.
    where = members.masked_fill(members < 0, rows).flatten()
    out = blocks.new_zeros(rows + 1, *apart.shape[1:])
    return out.index_copy_(0, where, apart)[:rows]


def compiled(
    query: Tensor, new: Pair, cache: LayerCache, state: DecodeState, spec: AttentionSpec
) -> Tensor:
    """As `decode_attention`, by the C++ kernel where it takes tensors of these shapes."""
    own, prompts = cache.own, cache.prompts
    key, value = (fresh.to(own[0].dtype).contiguous() for fresh in new)
    rows, heads, dim = key.shape
    folded = query.to(own[0].dtype).reshape(rows, heads, -1, dim).contiguous()
    if not ops.decode_serves(folded, (key, value), own, prompts):
        return plain(query, new, cache, state, spec)
    out = ops.decode(
        *(folded, (key, value), own, prompts),
        (state.lengths, state.owners, state.prompt_lengths),
        column=state.column,
        window=spec.window,
        scaling=spec.scaling,
        softcap=spec.softcap,
    )
    return out.view(query.shape)


def by_triton(
    query: Tensor, new: Pair, cache: LayerCache, state: DecodeState, spec: AttentionSpec
) -> Tensor:
    """As `decode_attention`, by Triton."""
    return triton.decode(
        *(query, new, cache.own, cache.prompts, (state.lengths, state.prompt_lengths)),
        column=state.column,
        members=state.members,
        window=spec.window,
        scaling=spec.scaling,
        softcap=spec.softcap,
    )
