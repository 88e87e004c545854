"""One new token a row over the slot cache on the CPU, in a form that can be replayed."""

from __future__ import annotations

import torch
from torch import Tensor

from grouper.kernels.cpu import ops
from grouper.kernels.cpu.calls import DTYPES
from grouper.kernels.cpu.library import library
from grouper.models.attention import AttentionSpec
from grouper.sampling.decode_kernel import Cache, DecodeState, Pair, plain_decode


def has_compiled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are compiled kernels for this device and type."""
    return device.type == "cpu" and dtype in DTYPES and library() is not None


def compiled_decode(
    query: Tensor, new: Pair, cache: Cache, state: DecodeState, spec: AttentionSpec
) -> Tensor:
    """As `plain_decode`, by the compiled kernel where it takes these tensors."""
    prompts, own = cache
    key, value = (fresh.to(own[0].dtype).contiguous() for fresh in new)
    rows, heads, dim = key.shape
    folded = query.to(own[0].dtype).reshape(rows, heads, -1, query.shape[2]).contiguous()
    if dim != query.shape[2] or not ops.decode_serves(folded, (key, value), own, prompts):
        return plain_decode(query, new, cache, state, spec)
    out = ops.decode(
        *(folded, (key, value), own, prompts),
        (state.lengths, state.owners, state.prompt_lengths),
        column=state.column,
        window=spec.window,
        scaling=spec.scaling,
        softcap=spec.softcap,
    )
    return out.view(query.shape)
