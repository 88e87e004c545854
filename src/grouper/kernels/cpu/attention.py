"""Attention with a gradient, over rows that continue prompts, on the CPU.

PyTorch's own kernel runs the forward. Its backward on a CPU repeats grouped keys, keeps to small
products and looks at every masked column; ours makes the scores again and works in large
products of matrices (as FlashAttention's backward does, Dao et al., 2022), a few heads at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grouper.kernels.cpu.ops import attention_backward, attention_serves
from grouper.kernels.switch import device_type, is_running

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - no public name
"""What `scaled_dot_product_attention` runs on the CPU, which keeps the log-sum-exp to itself."""

ROOM = 1 << 23
"""Scores that are held at a time: about 100 MB with all that is made of them."""


@dataclass(frozen=True, slots=True, eq=False)
class VisibleSpan:
    """Which columns each of R rows of queries sees: those of its prompt, then its own, causally."""

    prompts: Tensor
    """[R] int64: tokens of each row's prompt, at most `prompt_columns`."""
    lengths: Tensor
    """[R] int64: queries of each row; the others are padding, whose gradient is zero."""
    prompt_columns: int
    window: int | None
    """Tokens a query sees at most, itself included; None: all."""


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend` takes these and has an advantage: it is about the backward."""
    _, heads, tokens, _ = query.shape
    return (
        is_running()
        and device_type(query) == "cpu"
        and torch.is_grad_enabled()
        and query.shape[3] == value.shape[3]
        and heads // key.shape[1] * tokens * key.shape[2] <= ROOM
        and attention_serves(query, key, value)
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Any, *others: Any
    ) -> Tensor:
        span, scaling = others
        out: Tensor
        out, weight = FLASH(
            query, key, value, attn_mask=bias, is_causal=bias is None, scale=scaling
        )
        ctx.save_for_backward(query, key, value, out, weight)
        ctx.span, ctx.scaling = span, scaling
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, weight = ctx.saved_tensors
        deltas = (grad.float() * out.float()).sum(-1)
        rows, heads, tokens, dim = query.shape
        columns, group = key.shape[2], heads // key.shape[1]
        blocks = rows * key.shape[1]
        q, g = (t.reshape(blocks, group * tokens, dim) for t in (query, grad))
        k, v = (t.reshape(blocks, columns, dim) for t in (key, value))
        by_block = (weight.reshape(blocks, -1), deltas.reshape(blocks, -1))
        made = [torch.empty_like(t) for t in (q, k, v)]
        step = max(1, ROOM // (group * tokens * columns))
        for first in range(0, blocks, step):
            part = slice(first, first + step)
            results = _block(
                (q[part], k[part], v[part], g[part]),
                tuple(t[part].contiguous() for t in by_block),
                ctx.span,
                scaling=ctx.scaling,
                first=first,
                per_row=key.shape[1],
                shape=(group, tokens),
            )
            for whole, result in zip(made, results, strict=True):
                whole[part] = result
        grads = (m.view(t.shape) for m, t in zip(made, (query, key, value), strict=True))
        return *grads, None, None, None


@contextlib.contextmanager
def _halves_multiplied(dtype: torch.dtype) -> Iterator[None]:
    """Products of float32 tensors inside may round their factors to bfloat16, if that is exact.

    Sums stay in float32. Where the factors are bfloat16 numbers already nothing is rounded, and
    the processor's bfloat16 unit does it in half the time.
    """
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time
    before = settings.fp32_precision
    if dtype is torch.bfloat16:
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _block(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    sums: tuple[Tensor, ...],
    span: VisibleSpan,
    *,
    scaling: float,
    first: int,
    per_row: int,
    shape: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries [n, Q, D], keys [n, K, D] and values of some rows and heads."""
    q, k, v, g = tensors
    # Scores and what comes of them in float32: a difference of two of them is what counts.
    with _halves_multiplied(q.dtype):
        scores = torch.bmm(q.float(), k.float().transpose(1, 2))
        share_grads = torch.bmm(g.float(), v.float().transpose(1, 2))
    shares, score_grads = attention_backward(
        (scores, share_grads, *sums),
        (span.prompts, span.lengths),
        q.dtype,
        scaling=scaling,
        first=first,
        per_row=per_row,
        shape=(*shape, k.shape[1], span.prompt_columns, span.window or 0),
    )
    return (
        torch.bmm(score_grads, k),
        torch.bmm(score_grads.transpose(1, 2), q),
        torch.bmm(shares.transpose(1, 2), g),
    )


def attend(  # noqa: PLR0917 - tensors by position
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    span: VisibleSpan,
    scaling: float,
) -> Tensor:
    """Attention of query [R, H, T, D] over key and value [R, Hkv, K, D] -> [R, H, T, D].

    Args:
        query: T tokens of each row.
        key: columns of the row's prompt, then T of its own.
        value: as `key`.
        mask: what `span` says as bool, broadcastable to [R, 1, T, K]; None: causal, T = K.
        span: what each query sees.
        scaling: of the scores.
    """
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    out: Tensor = _Attention.apply(query, key, value, bias, span, scaling)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out
