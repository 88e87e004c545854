"""Flat tokens as padded rows, and back: each way is the other's gradient.

Autograd would add every gradient up token by token, since an index might name a token twice. Here
only padding does, whose gradient is zero or is not wanted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["collect_rows", "gather_heads", "spread_rows"]


def gather_heads(flat: Tensor, index: Tensor) -> Tensor:
    """Flat heads [1, H, N, D] at token indices [B, L] -> [B, H, L, D]."""
    rows, width = index.shape
    picked = flat[0].index_select(1, index.reshape(-1))
    return picked.view(flat.shape[1], rows, width, flat.shape[3]).transpose(0, 1)


def _live(blocks: Tensor, scatter: Tensor) -> Tensor:
    """[B, H, L, D] -> [1, H, live tokens, D]."""
    heads, dim = blocks.shape[1], blocks.shape[3]
    return blocks.transpose(0, 1).reshape(heads, -1, dim).index_select(1, scatter)[None]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        return gather_heads(flat, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (scatter,) = ctx.saved_tensors
        return _live(grad, scatter), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        ctx.shape = blocks.shape
        return _live(blocks, scatter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (scatter,) = ctx.saved_tensors
        rows, heads, width, dim = ctx.shape
        blocks = grad.new_zeros(heads, rows * width, dim).index_copy_(1, scatter, grad[0])
        return blocks.view(heads, rows, width, dim).transpose(0, 1), None


def spread_rows(flat: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
    """Flat heads as padded rows.

    Args:
        flat: [1, H, N, D].
        gather: [B, L] int64, the flat token at each place; padding names any.
        scatter: [N] int64, the place (row times L plus column) of each flat token.

    Returns:
        [B, H, L, D]. A gradient of padding is thrown away.
    """
    out: Tensor = _Spread.apply(flat, gather, scatter)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


def collect_rows(blocks: Tensor, scatter: Tensor) -> Tensor:
    """Padded rows [B, H, L, D] as flat heads [1, H, N, D]; padding gets a gradient of zero.

    Args:
        blocks: the rows.
        scatter: [N] int64, as in `spread_rows`.
    """
    out: Tensor = _Collect.apply(blocks, scatter)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out
