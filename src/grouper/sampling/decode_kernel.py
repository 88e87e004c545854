"""Attention of one new token a row over the slot cache, in a form that can be replayed.

Everything that changes from step to step is read from tensors: the column that is written, how
long each row is, which prompt it continues. `kernel_decode` is Triton's: it reads only live
tokens, a prompt once for all rows that continue it and a key head once for all its query heads,
and divides the keys of a row over several programs where there are few rows (as Flash-Decoding
does; Dao, Haziza, Massa and Sizov, 2023), whose parts are merged by their log-sum-exp.
`plain_decode` is the same in plain operations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grouper.models.attention import AttentionSpec
from grouper.sampling.decode_programs import AVAILABLE, merge, own_part, prompt_part

PROGRAMS_PER_PROCESSOR = 4
"""Programs a multiprocessor that keys are divided for; an estimate, not measured."""

Pair = tuple[Tensor, Tensor]
"""Keys and values."""

Cache = tuple[Pair, Pair]
"""Prompts [places, Hkv, Tp, D] and the ring [slots, Hkv, width, D] of one layer."""


@dataclass(frozen=True, slots=True)
class DecodeState:
    """Where each row is; the tensors are changed in place from step to step.

    A row that nobody reads may be left out of `members`; what comes out for it means nothing.
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

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `kernel_decode` can run here."""
    return AVAILABLE and device.type == "cuda" and dtype != torch.float64


def plain_decode(
    query: Tensor, new: Pair, cache: Cache, state: DecodeState, spec: AttentionSpec
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
    (prompts, own), rows, heads = cache, state.rows, new[0].shape[1]
    for ring, fresh in zip(own, new, strict=True):
        ring[:rows].index_copy_(2, state.column, fresh[:, :, None].to(ring.dtype))
    keys, values = (
        torch.cat([shared[state.owners], ring[:rows]], 2)
        for shared, ring in zip(prompts, own, strict=True)
    )
    width, prompt_width = own[0].shape[2], prompts[0].shape[2]
    ages = (state.column - torch.arange(width, device=query.device)) % width
    columns = torch.arange(prompt_width, device=query.device)
    before = state.prompt_lengths[state.owners][:, None]
    lengths = state.lengths[:, None]
    seen = torch.cat([columns < before, ages < lengths], 1)
    if spec.window is not None:
        distance = torch.cat([before + lengths - 1 - columns, ages.expand(rows, -1)], 1)
        seen &= distance < spec.window
    folded = query.to(keys.dtype).reshape(rows, heads, -1, query.shape[2])
    scores = folded @ keys.transpose(2, 3)
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    shares = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return (shares.to(values.dtype) @ values).reshape(query.shape)


def kernel_decode(
    query: Tensor, new: Pair, cache: Cache, state: DecodeState, spec: AttentionSpec
) -> Tensor:
    """As `plain_decode`, by Triton."""
    prompts, own = cache
    query, key, value = (_last_dense(t) for t in (query, *new))
    rows, query_heads, dim = query.shape
    heads = key.shape[1]
    share = query_heads // heads
    places, size = state.members.shape
    tiling = _tiling(cache, state, heads, share)
    splits = tiling.own_splits + tiling.prompt_splits
    partial = query.new_empty((rows, query_heads, splits, dim), dtype=torch.float32)
    weight = query.new_empty((rows, query_heads, splits), dtype=torch.float32)
    ring, shared = own[0].stride(), prompts[0].stride()
    numbers = _numbers(spec, own[0], tiling) | {"SHARE": share, "SPLITS": splits}
    steps = [stride for t in (query, key, value) for stride in t.stride()[:2]]
    own_part[(rows, heads, tiling.own_splits)](
        query,
        key,
        value,
        *own,
        state.lengths,
        state.column,
        partial,
        weight,
        *steps,
        ring[0],
        ring[1],
        own[0].shape[2],
        FIRST=tiling.prompt_splits,
        PARTS=tiling.own_splits,
        BLOCK_M=tiling.own_lines,
        **numbers,
    )
    prompt_part[(places * tiling.tiles, heads, tiling.prompt_splits)](
        query,
        *prompts,
        state.members,
        state.prompt_lengths,
        state.lengths,
        partial,
        weight,
        query.stride(0),
        query.stride(1),
        shared[0],
        shared[1],
        SIZE=size,
        TILES=tiling.tiles,
        PARTS=tiling.prompt_splits,
        BLOCK_M=tiling.lines,
        **numbers,
    )
    return _merged(partial, weight, own[0].dtype)


def _merged(partial: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, Hq, D] of parts [rows, Hq, splits, D] and their log-sum-exps [rows, Hq, splits]."""
    rows, heads, splits, dim = partial.shape
    out = partial.new_empty((rows, heads, dim), dtype=dtype)
    merge[(rows, heads)](
        partial,
        weight,
        out,
        SPLITS=splits,
        BLOCK_S=max(2, _power_of_two(splits)),
        DIM=dim,
        BLOCK_D=max(16, _power_of_two(dim)),
    )
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """How the work of a step is cut into programs.

    Example: 32 rows of one group, 2 query heads a key head: 1 tile of 64 lines.
    """

    block_d: int
    """Dimensions of a head that a program holds, a power of two."""
    block_n: int
    """Keys that it takes in at a time."""
    own_lines: int
    """Lines of a program over a row's own keys."""
    lines: int
    """Lines of a program over a prompt's keys."""
    tiles: int
    """Programs that the lines of a prompt are divided over."""
    own_splits: int
    """Programs that a row's own keys are divided over."""
    prompt_splits: int
    """Programs that a prompt's keys are divided over."""


def _tiling(cache: Cache, state: DecodeState, heads: int, share: int) -> _Tiling:
    """For `heads` key heads of `share` query heads each."""
    (prompts, _), (ring, _) = cache
    places, size = state.members.shape
    block_d = max(16, _power_of_two(ring.shape[3]))
    # What a program holds in shared memory stays below the 99 KB of the smaller devices.
    wide = block_d * ring.element_size() > 256
    block_n = 32 if wide else 64
    lines = min(32 if wide else 64, max(16, _power_of_two(size * share)))
    tiles = -(-size * share // lines)
    wanted = PROGRAMS_PER_PROCESSOR * _processors(state.lengths.device)
    return _Tiling(
        block_d=block_d,
        block_n=block_n,
        own_lines=max(16, _power_of_two(share)),
        lines=lines,
        tiles=tiles,
        own_splits=_splits(wanted, state.rows * heads, ring.shape[2], 2 * block_n),
        prompt_splits=_splits(wanted, places * tiles * heads, prompts.shape[2], block_n),
    )


def _numbers(spec: AttentionSpec, ring: Tensor, tiling: _Tiling) -> dict[str, Any]:
    """What both parts are told of the layer, and how they are compiled."""
    return {
        "scaling": spec.scaling,
        "softcap": spec.softcap or 0.0,
        "window": spec.window or 0,
        "HAS_SOFTCAP": spec.softcap is not None,
        "HAS_WINDOW": spec.window is not None,
        "DIM": ring.shape[3],
        "BLOCK_D": tiling.block_d,
        "BLOCK_N": tiling.block_n,
        "num_warps": 4 if tiling.block_d <= 128 else 8,
        "num_stages": 1 if ring.element_size() > 2 else 3,
    }


def _last_dense(heads: Tensor) -> Tensor:
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _splits(wanted: int, programs: int, columns: int, least: int) -> int:
    """Parts that the keys of a program are cut into: enough programs, none with too few keys."""
    return max(1, min(-(-wanted // programs), -(-columns // least), 16))


@functools.lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 16
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
