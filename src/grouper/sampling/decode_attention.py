"""Attention over the key-value cache: storing prompts, and decoding one new token per row.

`Prefill` and `Decode` are layouts (`attention.Layout`) and travel through the model's own code.
Decoding is written once in PyTorch (`plain`) and once for each kind of kernel. Everything that
changes from step to step is read from tensors (the column that is written, how long each row is,
which prompt it continues), so that a step can be recorded and replayed.
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
        multiple: as of `SharedPrompts`.
    """

    def __init__(
        self, cache: KVCache, prompts: Sequence[Tokens], places: Tensor, *, multiple: int = 1
    ) -> None:
        # One completion of one token each: the last token of a completion is only predicted, so
        # nothing but the prompts is run.
        count = len(prompts)
        completions = [(0,)] * count
        batch = unweighted_rows(prompts, completions, range(count))
        super().__init__(batch.to(places.device), multiple=multiple)
        self._cache = cache
        self._cache_places = places

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Store the prompts' keys and values, and attend as in the update."""
        key_store, value_store = self._cache.layer(spec.layer, key, value).prompts
        self._store(key_store, key)
        self._store(value_store, value)
        return super().attend(query, key, value, spec)

    def _store(self, store: Tensor, heads: Tensor) -> None:
        """Write flat heads [1, Hkv, N, D] into rows of a store [places, Hkv, longest, D]."""
        # Not what was added at the end of the flat row.
        heads = heads[:, :, : self._prompt_places.numel()]
        rows = move_heads(heads, self._prompt_places, self._prompt_shape)
        longest = rows.shape[2]
        store[self._cache_places, :, :longest] = rows.to(store.dtype)


@dataclass(frozen=True, slots=True)
class DecodeState:
    """The position of each row; the tensors are updated in place from step to step.

    A row whose output is not needed may be left out of `members`; its output is then undefined.
    """

    column: Tensor
    """[1] int64: the column of the ring that this step writes."""
    lengths: Tensor
    """[rows] int64: tokens each row has in the ring, this step's included; 1 or more."""
    owners: Tensor
    """[rows] int64: the place of each row's prompt."""
    prompt_lengths: Tensor
    """[places] int64: tokens of each stored prompt."""
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
        """Attend with one token per row: [1, H, rows, D] of the model, [rows, H, D] inside."""
        layer = self._cache.layer(spec.layer, key, value)
        queries = query[0].transpose(0, 1)
        keys = key[0].transpose(0, 1)
        values = value[0].transpose(0, 1)
        out = decode_attention(queries, (keys, values), layer, self._state, spec)
        return out.transpose(0, 1)[None]


# A way to compute `decode_attention`, with the same arguments.
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
        # Refused: it cannot be built or started here, and PyTorch's operations take its place.
        with contextlib.suppress(Refused):
            return kernel(query, new, cache, state, spec)
    return plain(query, new, cache, state, spec)


def kernel_for(store: Tensor) -> Attend | None:
    """Return the kernel for caches of this device and dtype, or None."""
    if serves(store):
        return by_triton
    if store.is_cpu and store.dtype in DTYPES and library() is not None:
        return compiled
    return None


def has_kernel(policy: Policy) -> bool:
    """Tell whether this model's caches, in the dtype of its matrix products, have a kernel."""
    dtype = policy.products_dtype
    example = torch.empty(0, dtype=dtype, device=policy.device)
    return kernel_for(example) is not None


def plain(
    query: Tensor, new: Pair, cache: LayerCache, state: DecodeState, spec: AttentionSpec
) -> Tensor:
    """Compute the same as `decode_attention`, in PyTorch operations over all columns."""
    new_keys, new_values = new
    rows, heads = new_keys.shape[:2]
    ring_keys, ring_values = (store[:rows] for store in cache.own)
    _write_column(ring_keys, new_keys, state.column)
    _write_column(ring_values, new_values, state.column)
    prompt_keys, prompt_values = cache.prompts
    prompt_width = prompt_keys.shape[2]
    ring_width = ring_keys.shape[2]
    visible = _visible(state, prompt_width, ring_width, spec.window)

    # [rows, Hkv, Hq / Hkv, D]: the query heads that share a head of keys stand together, so the
    # keys are never repeated.
    folded = query.to(ring_keys.dtype)
    folded = folded.reshape(rows, heads, -1, query.shape[2])
    # A prompt's keys meet the queries of all rows that continue it: nothing is copied row by row.
    members = state.members
    prompt_scores = _by_prompt(folded, members) @ prompt_keys.transpose(2, 3)
    prompt_scores = _by_row(prompt_scores, members, rows)
    ring_scores = folded @ ring_keys.transpose(2, 3)
    # Scores of the prompt's columns, then of the ring's: the order of `visible`.
    scores = torch.cat([prompt_scores, ring_scores], 3)
    # The softmax is never computed in a half-precision dtype.
    if scores.dtype != torch.float64:
        scores = scores.float()
    scores = scores * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    hidden = ~visible[:, None, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    shares = scores.softmax(-1).to(ring_values.dtype)

    prompt_shares = shares[..., :prompt_width]
    ring_shares = shares[..., prompt_width:]
    prompt_out = _by_prompt(prompt_shares, members) @ prompt_values
    prompt_out = _by_row(prompt_out, members, rows)
    out = prompt_out + ring_shares @ ring_values
    return out.reshape(rows, query.shape[1], -1)


def _write_column(ring: Tensor, heads: Tensor, column: Tensor) -> None:
    """Write heads [rows, Hkv, D] into one column of a ring [rows, Hkv, width, D]."""
    values = heads[:, :, None].to(ring.dtype)
    ring.index_copy_(2, column, values)


def _visible(state: DecodeState, prompt_width: int, width: int, window: int | None) -> Tensor:
    """Return which columns each row attends to.

    Args:
        state: where each row is.
        prompt_width: columns of the stored prompts.
        width: columns of the ring.
        window: tokens that a sliding window holds, or None.

    Returns:
        [rows, prompt_width + width] bool.
    """
    device = state.column.device
    lengths = state.lengths[:, None]
    prompt_lengths = state.prompt_lengths[state.owners][:, None]
    columns = torch.arange(prompt_width, device=device)
    in_prompt = columns < prompt_lengths
    # How many steps ago each column of the ring was written. A row has written in every step since
    # it started, so its tokens are the newest `lengths` columns.
    ring_columns = torch.arange(width, device=device)
    ages = (state.column - ring_columns) % width
    in_ring = ages < lengths
    visible = torch.cat([in_prompt, in_ring], 1)
    if window is not None:
        # Tokens between the new one and each column.
        position = prompt_lengths + lengths - 1
        ring_distance = ages.expand(len(lengths), -1)
        distance = torch.cat([position - columns, ring_distance], 1)
        visible &= distance < window
    return visible


def _by_prompt(rows: Tensor, members: Tensor) -> Tensor:
    """Gather the rows that continue each prompt.

    Args:
        rows: [rows, H, Q, X].
        members: [places, size], as in `DecodeState`.

    Returns:
        [places, H, size * Q, X]; an entry of -1 repeats the first row, whose result is dropped.
    """
    places, size = members.shape
    _, heads, _, width = rows.shape
    sources = members.clamp(min=0).flatten()
    picked = rows.index_select(0, sources)
    blocks = picked.view(places, size, *rows.shape[1:])
    blocks = blocks.transpose(1, 2)
    return blocks.reshape(places, heads, -1, width)


def _by_row(blocks: Tensor, members: Tensor, rows: int) -> Tensor:
    """Undo `_by_prompt`.

    Args:
        blocks: [places, H, size * Q, X].
        members: [places, size], as in `DecodeState`.
        rows: number of rows.

    Returns:
        [rows, H, Q, X]; zeros for rows that are no members.
    """
    places, size = members.shape
    _, heads, queries, width = blocks.shape
    per_member = blocks.view(places, heads, size, queries // size, width)
    per_member = per_member.transpose(1, 2).flatten(0, 1)
    # Entries of -1 go to an extra row, which is dropped.
    targets = members.masked_fill(members < 0, rows).flatten()
    out = blocks.new_zeros(rows + 1, *per_member.shape[1:])
    return out.index_copy_(0, targets, per_member)[:rows]


def compiled(
    query: Tensor, new: Pair, cache: LayerCache, state: DecodeState, spec: AttentionSpec
) -> Tensor:
    """Compute the same as `decode_attention`, by the C++ kernel if it takes these shapes."""
    ring = cache.own
    prompts = cache.prompts
    dtype = ring[0].dtype
    key, value = (heads.to(dtype).contiguous() for heads in new)
    rows, heads, dim = key.shape
    folded = query.to(dtype).reshape(rows, heads, -1, dim)
    folded = folded.contiguous()
    if not ops.decode_serves(folded, (key, value), ring, prompts):
        return plain(query, new, cache, state, spec)
    out = ops.decode(
        folded,
        (key, value),
        ring,
        prompts,
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
    """Compute the same as `decode_attention`, by the Triton kernel."""
    return triton.decode(
        query,
        new,
        cache.own,
        cache.prompts,
        (state.lengths, state.prompt_lengths),
        column=state.column,
        members=state.members,
        window=spec.window,
        scaling=spec.scaling,
        softcap=spec.softcap,
    )
