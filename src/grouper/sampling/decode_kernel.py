"""Attention of one new token a row over the slot cache, in a form that can be replayed.

Everything that changes from step to step is read from tensors: the column that is written, how
long each row is, which prompt it continues.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grouper.kernels.triton import decode as triton
from grouper.models.attention import AttentionSpec

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
    return triton.serves(torch.empty(0, device=device, dtype=dtype))


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
    return triton.decode(
        *(query, new, own, prompts, (state.lengths, state.prompt_lengths)),
        column=state.column,
        members=state.members,
        window=spec.window,
        scaling=spec.scaling,
        softcap=spec.softcap,
    )
