"""Attention with a gradient, over rows that continue prompts, on the CPU.

PyTorch's own kernel runs the forward. Its backward on a CPU repeats grouped keys, multiplies small
matrices and visits every masked column. Ours recomputes the scores, as FlashAttention's backward
does (Dao et al., 2022), and multiplies large matrices, a few heads at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grouper.kernels.cpu.library import DTYPES, call, letters, library
from grouper.kernels.switch import device_type, is_running

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - no public name
"""What `scaled_dot_product_attention` runs on the CPU, without hiding the log-sum-exp."""

ROOM = 1 << 23
"""Scores held at a time: about 100 MB with everything derived from them."""


@dataclass(frozen=True, slots=True, eq=False)
class VisibleSpan:
    """What the queries of each of R rows see: the columns of its prompt, then its own, causally."""

    prompts: Tensor
    """[R] int64: number of tokens in each row's prompt, at most `prompt_columns`."""
    lengths: Tensor
    """[R] int64: number of queries of each row; the rest is padding with gradient zero."""
    prompt_columns: int
    window: int | None
    """Maximum number of tokens that a query sees, itself included; None: no limit."""


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend` takes these tensors and is faster: only the backward differs."""
    _, heads, tokens, _ = query.shape
    return (
        is_running()
        and device_type(query) == "cpu"
        and torch.is_grad_enabled()
        and query.shape[3] == value.shape[3]
        and heads // key.shape[1] * tokens * key.shape[2] <= ROOM
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and library() is not None
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
        span: VisibleSpan = ctx.span
        rows, heads, tokens, dim = query.shape
        columns, group = key.shape[2], heads // key.shape[1]
        blocks = rows * key.shape[1]
        q, g = (t.reshape(blocks, group * tokens, dim) for t in (query, grad))
        k, v = (t.reshape(blocks, columns, dim) for t in (key, value))
        weights = weight.reshape(blocks, -1)
        deltas = (grad.float() * out.float()).sum(-1).reshape(blocks, -1)
        to_q, to_k, to_v = (torch.empty_like(t) for t in (q, k, v))
        step = max(1, ROOM // (group * tokens * columns))
        for first in range(0, blocks, step):
            at = slice(first, first + step)
            # Scores and their gradients are in float32: small differences between them matter.
            with _halves_multiplied(q.dtype):
                scores = torch.bmm(q[at].float(), k[at].float().transpose(1, 2))
                to_shares = torch.bmm(g[at].float(), v[at].float().transpose(1, 2))
            shares, to_scores = (torch.empty(scores.shape, dtype=q.dtype) for _ in range(2))
            call(
                f"attention_backward_{letters(q.dtype)}",
                (
                    *(scores, to_shares, weights[at].contiguous(), deltas[at].contiguous()),
                    *(shares, to_scores, span.prompts, span.lengths),
                ),
                *(first, len(scores), key.shape[1], group, tokens, columns),
                *(span.prompt_columns, span.window or 0, float(ctx.scaling)),
                torch.get_num_threads(),
            )
            to_q[at] = torch.bmm(to_scores, k[at])
            to_k[at] = torch.bmm(to_scores.transpose(1, 2), q[at])
            to_v[at] = torch.bmm(shares.transpose(1, 2), g[at])
        return to_q.view_as(query), to_k.view_as(key), to_v.view_as(value), None, None, None


@contextlib.contextmanager
def _halves_multiplied(dtype: torch.dtype) -> Iterator[None]:
    """Let products of float32 tensors round their factors to bfloat16, where that is exact.

    Sums stay in float32. Factors that hold bfloat16 numbers lose nothing, and the processor's
    bfloat16 unit takes half the time.
    """
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time
    before = settings.fp32_precision
    if dtype is torch.bfloat16:
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


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
        query: T tokens per row.
        key: the columns of the row's prompt, then T of its own.
        value: as `key`.
        mask: `span` as a bool mask, broadcastable to [R, 1, T, K]; None: causal, T = K.
        span: which columns each query sees.
        scaling: factor of the scores.
    """
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    out: Tensor = _Attention.apply(query, key, value, bias, span, scaling)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out
