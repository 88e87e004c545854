"""Attention of one new token per row over the slot cache, in Triton.

It reads only live tokens: a prompt once for all rows that continue it, a key head once for all its
query heads. Where there are few rows, a row's keys are split over several programs, as in
Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023), and the parts are merged by their log-sum-exp.
Everything that changes from step to step is read from tensors, so that a step can be captured.

Lines are the queries that one program holds: the query heads of a key head, for one row or for all
rows that continue a prompt. Names in capitals are compile-time constants.
"""

# ruff: noqa: N803, PLR0917 - Triton's own style: constants in capitals, pointers one by one
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grouper.kernels.triton.language import jit, launch, limits, power_of_two, tanh, tl

# Keys are split until there are this many programs per multiprocessor; an estimate, not measured.
PROGRAMS_PER_PROCESSOR = 4
# Keys per block, and blocks in flight at a time; the best first.
STAGES = ((64, 3), (64, 2), (32, 3), (32, 2), (32, 1), (16, 1))

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


def decode(
    query: Tensor,
    new: Pair,
    own: Pair,
    prompts: Pair,
    lengths: tuple[Tensor, Tensor],
    *,
    column: Tensor,
    members: Tensor,
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attention of one new token per row over its prompt and its own columns of the ring.

    The new key and value are written first.

    Args:
        query: [rows, Hq, D].
        new: key and value of this step [rows, Hkv, D], which are written into `own`.
        own: keys and values [at least rows, Hkv, width, D].
        prompts: keys and values [P, Hkv, columns, D].
        lengths: [rows] number of its own columns that each row sees, this step's included; [P]
            tokens of each prompt; both int64.
        column: [1] int64, this step's column; a row's earlier ones precede it around the ring.
        members: [P, size] int64, the rows that continue each prompt, padded with -1. The result of
            a row that is not among them is undefined.
        window: maximum number of tokens that a query sees, itself included; None: no limit.
        scaling: factor of the scores.
        softcap: cap of the scores; None: none.

    Returns:
        [rows, Hq, D] in the dtype of the ring.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, *new))
    (rows, query_heads, dim), (places, size) = query.shape, members.shape
    heads, ring, shared = key.shape[1], own[0], prompts[0]
    share = query_heads // heads
    processors, room = limits(ring.device)
    block_d = max(16, power_of_two(dim))  # a power of two, as all blocks
    width = block_d * ring.element_size()
    # Lines per program over a prompt's keys, and programs that a prompt's lines are split over.
    lines = min(64 if width <= 256 else 32, max(16, power_of_two(size * share)))
    tiles = -(-size * share // lines)
    # Keys and values of every stage, and the queries; if nothing fits, the launch refuses.
    fitting = (shape for shape in STAGES if (2 * shape[0] * shape[1] + lines) * width <= room)
    block_n, stages = next(fitting, STAGES[-1])
    # Programs that a row's own keys are split over, and those for a prompt's keys.
    wanted = PROGRAMS_PER_PROCESSOR * processors
    own_splits = _splits(wanted, rows * heads, ring.shape[2], 2 * block_n)
    # Each part of a prompt writes 8 bytes per line and dimension, which has to pay off.
    prompt_splits = _splits(wanted, places * tiles * heads, shared.shape[2], 4 * lines)
    splits = own_splits + prompt_splits
    partial = query.new_empty((rows, query_heads, splits, dim), dtype=torch.float32)
    weight = query.new_empty((rows, query_heads, splits), dtype=torch.float32)
    of_heads = {"SPLITS": splits, "DIM": dim, "BLOCK_D": block_d}
    numbers: dict[str, Any] = {
        **of_heads,
        "BLOCK_N": block_n,
        "num_warps": 4 if block_d <= 128 else 8,
        "num_stages": stages,
        "SHARE": share,
        "scaling": scaling,
        "softcap": softcap or 0.0,
        "window": window or 0,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_WINDOW": window is not None,
    }
    steps = [stride for t in (query, key, value) for stride in t.stride()[:2]]
    launch(
        *(own_part, (rows, heads, own_splits)),
        *(query, key, value, *own, lengths[0], column, partial, weight),
        *(*steps, *ring.stride()[:2], ring.shape[2]),
        FIRST=prompt_splits,
        PARTS=own_splits,
        BLOCK_M=max(16, power_of_two(share)),
        **numbers,
    )
    launch(
        *(prompt_part, (places * tiles, heads, prompt_splits)),
        *(query, *prompts, members, lengths[1], lengths[0], partial, weight),
        *(*steps[:2], *shared.stride()[:2]),
        SIZE=size,
        TILES=tiles,
        PARTS=prompt_splits,
        BLOCK_M=lines,
        **numbers,
    )
    out = partial.new_empty((rows, query_heads, dim), dtype=ring.dtype)
    block_s = max(2, power_of_two(splits))
    launch(merge, (rows, query_heads), partial, weight, out, BLOCK_S=block_s, **of_heads)
    return out


def _splits(wanted: int, programs: int, columns: int, least: int) -> int:
    """Number of parts to split a program's keys into: enough programs, none with too few keys."""
    return max(1, min(-(-wanted // programs), -(-columns // least), 16))


@jit
def _fold(
    queries, keys, values, seen, total, top, mixed,
    scaling, softcap, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add a block of keys [N, D] to the running softmax of queries [M, D]."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
    if HAS_SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    # A line that has seen nothing yet: -infinity minus itself would be NaN.
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
    """Write the result of a part and its log-sum-exp."""
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
    """The bounds, in whole blocks, of one part of the keys from `low` to `live`."""
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
    """Keys and values [N, D] of some columns of the cache; 0 where `there` is false."""
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
    """One row's own tokens, newest first, for one key head; part 0 writes the new one."""
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
        # This step's key and value come from registers: no program waits for another's store.
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
    """One prompt for all rows that continue it and all query heads of one key head."""
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
    # Every row has seen its own new token, so at least one part is finite.
    shares = tl.exp(weights - tl.max(weights, 0))
    mixed = tl.load(
        partial + (place * SPLITS + parts)[:, None] * DIM + dims[None, :],
        mask=there[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(mixed * shares[:, None], 0) / tl.sum(shares, 0)
    tl.store(out + place * DIM + dims, merged.to(out.dtype.element_ty), mask=dims < DIM)
