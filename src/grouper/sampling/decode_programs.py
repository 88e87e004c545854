"""The programs of `decode_kernel`, in Triton: parts of a row's attention, and their sum.

Lines are the queries that one program holds: the query heads of a key head, of one row or of all
rows that continue a prompt. Names in capitals are compile-time constants.
"""

# ruff: noqa: N803, PLR0917 - Triton's own style: constants in capitals, pointers one by one
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from grouper.kernels.language import AVAILABLE, jit, tl

__all__ = ["AVAILABLE", "merge", "own_part", "prompt_part"]


@jit
def _fold(
    queries, keys, values, seen, total, top, mixed,
    scaling, softcap, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Take a block of keys [N, D] into the running softmax of queries [M, D]."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
    if HAS_SOFTCAP:
        # tanh x = 2 sigmoid(2 x) - 1
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    # A line that has seen nothing yet: -infinity less itself is no number.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shares = tl.exp(scores - base[:, None])
    keep = tl.exp(top - base)
    mixed = mixed * keep[:, None]
    mixed += tl.dot(shares.to(values.dtype), values, input_precision="ieee")
    return total * keep + tl.sum(shares, 1), highest, mixed


@jit
def _put(
    partial, weight, rows, heads, valid, split, query_heads, total, top, mixed,
    SPLITS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the softmax of a part and its log-sum-exp."""
    dims = tl.arange(0, BLOCK_D)
    places = (rows * query_heads + heads) * SPLITS + split
    filled = tl.where(total > 0, total, 1.0)
    tl.store(
        partial + places[:, None] * DIM + dims[None, :],
        mixed / filled[:, None],
        mask=valid[:, None] & (dims < DIM)[None, :],
    )
    tl.store(weight + places, tl.where(total > 0, top + tl.log(filled), float("-inf")), mask=valid)


@jit
def _share(low, live, part, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a part of the keys from `low` to `live` begins and ends, in whole blocks."""
    chunk = tl.cdiv(tl.cdiv(live - low, PARTS), BLOCK_N) * BLOCK_N
    start = low + part * chunk
    return start, tl.minimum(start + chunk, live)


@jit
def _queries(
    query, rows, heads, valid, query_row, query_head, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The queries [M, D] of a program's lines."""
    dims = tl.arange(0, BLOCK_D)
    return tl.load(
        query + rows[:, None] * query_row + heads[:, None] * query_head + dims[None, :],
        mask=valid[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )


@jit
def _block(keys, values, base, columns, there, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys and values [N, D] of some columns of the cache; 0 where nothing is `there`."""
    dims = tl.arange(0, BLOCK_D)
    where = base + columns[:, None] * DIM + dims[None, :]
    mask = there[:, None] & (dims < DIM)[None, :]
    block_keys = tl.load(keys + where, mask=mask, other=0.0)
    block_values = tl.load(values + where, mask=mask, other=0.0)
    return block_keys, block_values


@jit
def own_part(
    query, key, value, keys, values, lengths, column_at, partial, weight,
    query_row, query_head, key_row, key_head, value_row, value_head, ring_row, ring_head, width,
    scaling, softcap, window,
    FIRST: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, SHARE: tl.constexpr,
    SPLITS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row's own tokens, youngest first, for one key head; part 0 writes the new one."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    dims = tl.arange(0, BLOCK_D)
    real = dims < DIM
    lines = tl.arange(0, BLOCK_M)
    valid = lines < SHARE
    heads = head * SHARE + lines
    column = tl.load(column_at)
    element = keys.dtype.element_ty

    fresh_key = tl.load(key + row * key_row + head * key_head + dims, mask=real, other=0.0)
    fresh_value = tl.load(value + row * value_row + head * value_head + dims, mask=real, other=0.0)
    fresh_key = fresh_key.to(element)
    fresh_value = fresh_value.to(element)
    base = row * ring_row + head * ring_head
    here = base + column * DIM + dims
    if part == 0:
        tl.store(keys + here, fresh_key, mask=real)
        tl.store(values + here, fresh_value, mask=real)

    rows = row + lines * 0
    queries = _queries(query, rows, heads, valid, query_row, query_head, DIM, BLOCK_D).to(element)
    live = tl.minimum(tl.load(lengths + row), width)
    if HAS_WINDOW:
        live = tl.minimum(live, window)
    start, end = _share(0, live, part, PARTS, BLOCK_N)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in range(start, end, BLOCK_N):
        ages = first + tl.arange(0, BLOCK_N)
        seen = ages < end
        columns = column - ages
        columns = tl.where(columns < 0, columns + width, columns)
        # What this step writes comes from the registers: no program waits for another's store.
        block_keys, block_values = _block(
            keys, values, base, columns, seen & (ages > 0), DIM, BLOCK_D
        )
        new = (ages == 0)[:, None]
        block_keys = tl.where(new, fresh_key[None, :], block_keys)
        block_values = tl.where(new, fresh_value[None, :], block_values)
        total, top, mixed = _fold(
            queries, block_keys, block_values, seen[None, :], total, top, mixed,
            scaling, softcap, HAS_SOFTCAP,
        )  # fmt: skip
    _put(
        partial, weight, rows, heads, valid, FIRST + part,
        tl.num_programs(1) * SHARE, total, top, mixed, SPLITS, DIM, BLOCK_D,
    )  # fmt: skip


@jit
def prompt_part(
    query, keys, values, members, prompt_lengths, lengths, partial, weight,
    query_row, query_head, shared_row, shared_head,
    scaling, softcap, window,
    SIZE: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, SHARE: tl.constexpr,
    SPLITS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One prompt for the rows that continue it, all query heads of one key head together."""
    place = (tl.program_id(0) // TILES).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    lines = (tl.program_id(0) % TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    member = lines // SHARE
    heads = head * SHARE + lines % SHARE
    rows = tl.load(members + place * SIZE + member, mask=member < SIZE, other=-1)
    valid = rows >= 0
    rows = tl.where(valid, rows, 0)

    element = keys.dtype.element_ty
    queries = _queries(query, rows, heads, valid, query_row, query_head, DIM, BLOCK_D).to(element)
    live = tl.load(prompt_lengths + place)
    at = live + tl.load(lengths + rows, mask=valid, other=0) - 1
    low = live * 0
    if HAS_WINDOW:
        nearest = tl.min(tl.where(valid, at, live + window), 0)
        low = tl.minimum(tl.maximum(nearest - window + 1, 0), live)
    live = tl.where(tl.max(valid.to(tl.int32), 0) > 0, live, low)
    start, end = _share(low, live, part, PARTS, BLOCK_N)
    base = place * shared_row + head * shared_head
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in range(start, end, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        there = columns < end
        block_keys, block_values = _block(keys, values, base, columns, there, DIM, BLOCK_D)
        seen = there[None, :] & valid[:, None]
        if HAS_WINDOW:
            seen = seen & (at[:, None] - columns[None, :] < window)
        total, top, mixed = _fold(
            queries, block_keys, block_values, seen, total, top, mixed,
            scaling, softcap, HAS_SOFTCAP,
        )  # fmt: skip
    _put(
        partial, weight, rows, heads, valid, part,
        tl.num_programs(1) * SHARE, total, top, mixed, SPLITS, DIM, BLOCK_D,
    )  # fmt: skip


@jit
def merge(
    partial, weight, out,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The parts of one row and query head, weighted by their sums of exponentials."""
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    parts = tl.arange(0, BLOCK_S)
    dims = tl.arange(0, BLOCK_D)
    there = parts < SPLITS
    weights = tl.load(weight + place * SPLITS + parts, mask=there, other=float("-inf"))
    # Every row has seen its own new token, so that one of them is finite.
    shares = tl.exp(weights - tl.max(weights, 0))
    mixed = tl.load(
        partial + (place * SPLITS + parts)[:, None] * DIM + dims[None, :],
        mask=there[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(mixed * shares[:, None], 0) / tl.sum(shares, 0)
    tl.store(out + place * DIM + dims, merged.to(out.dtype.element_ty), mask=dims < DIM)
