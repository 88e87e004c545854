"""The compiled kernels as functions of tensors.

Each takes and returns ordinary CPU tensors. Its `..._serves` says whether a kernel exists and takes
these tensors; for anything else callers fall back to the model's own code. The library is loaded
last, so that it is not built for models on other devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grouper.kernels.cpu.library import DTYPES, call, letters, library, threads_for
from grouper.kernels.layers import fits_rotation, norm_dtype
from grouper.kernels.switch import device_type, is_running, representative

Pair = tuple[Tensor, Tensor]
"""Keys and values."""

NORMS = {"fff", "bbb", "bff", "bfb"}
ROTATIONS = {"fff", "bbb", "bff"}


def norm_serves(x: Tensor, weight: Tensor, *, ones: bool) -> bool:
    """Whether `norm` takes these."""
    types = letters(x.dtype, weight.dtype, norm_dtype(x, weight, ones=ones))
    return types in NORMS and x.is_contiguous() and weight.is_contiguous() and _here(x, weight)


def rotate_serves(x: Tensor, cosine: Tensor) -> bool:
    """Whether `rotate` takes heads [1, H, N, D] and cosines [1, N, D]."""
    types = letters(x.dtype, cosine.dtype, torch.promote_types(x.dtype, cosine.dtype))
    return types in ROTATIONS and fits_rotation(x, cosine) and x.stride(-1) == 1 and _here(x)


def gated_serves(gate: Tensor, up: Tensor) -> bool:
    """Whether `gate` takes these."""
    return gate.shape == up.shape and _alike(gate, up)


def decode_serves(query: Tensor, new: Pair, own: Pair, prompts: Pair) -> bool:
    """Whether `decode` takes these."""
    sizes = {store.shape[3] for store in (query, *own, *prompts)}
    return len(sizes) == 1 and _alike(query, *new, *own, *prompts)


def draw_serves(logits: Tensor) -> bool:
    """Whether `draw` takes logits [n, V]."""
    return logits.dtype is torch.float32 and logits.stride(-1) == 1 and _here(logits)


def _here(*tensors: Tensor) -> bool:
    return all(tensor.is_cpu for tensor in tensors) and library() is not None


def _alike(*tensors: Tensor) -> bool:
    dtype = tensors[0].dtype
    dense = all(tensor.is_contiguous() and tensor.dtype == dtype for tensor in tensors)
    return dtype in DTYPES and dense and _here(*tensors)


def norm(x: Tensor, weight: Tensor, eps: float, *, ones: bool) -> Tensor:
    """As `kernels/layers.py` says."""
    out = x.new_empty(x.shape, dtype=norm_dtype(x, weight, ones=ones))
    numbers = (x.numel() // len(weight), len(weight), float(eps), ones, threads_for(x.numel()))
    call(f"rms_norm_{letters(x.dtype, weight.dtype, out.dtype)}", (x, weight, out), *numbers)
    return out


def norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, ones: bool
) -> tuple[Tensor, Tensor]:
    """As `kernels/layers.py` says."""
    threads, types = threads_for(x.numel()), letters(x.dtype, weight.dtype, grad.dtype)
    to_x = torch.empty_like(x)
    to_weight = x.new_zeros((threads, len(weight)), dtype=torch.float32)
    numbers = (x.numel() // len(weight), len(weight), float(eps), ones, threads)
    tensors = (grad.contiguous(), x, weight, to_x, to_weight)
    call(f"rms_norm_backward_{types}", tensors, *numbers)
    return to_x, to_weight.sum(0).to(weight.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, dtype: torch.dtype) -> Tensor:
    """Heads [1, H, N, D] -> the same, contiguous as [1, N, H, D]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    _, heads, tokens, dim = x.shape
    out = x.new_empty((1, tokens, heads, dim), dtype=dtype)
    numbers = (tokens, heads, dim, x.stride(2), x.stride(1), threads_for(x.numel()))
    tensors = (x, cosine.contiguous(), sine.contiguous(), out)
    call(f"rotate_{letters(x.dtype, cosine.dtype, dtype)}", tensors, *numbers)
    return out.transpose(1, 2)


def gate(gate: Tensor, up: Tensor, m: float, c: float) -> Tensor:
    """As `kernels/layers.py` says."""
    out, count = torch.empty_like(gate), gate.numel()
    call(f"gated_{letters(gate.dtype)}", (gate, up, out), count, m, c, threads_for(count))
    return out


def gate_gradient(
    grad: Tensor, gate: Tensor, up: Tensor, m: float, c: float
) -> tuple[Tensor, Tensor]:
    """As `kernels/layers.py` says."""
    to_gate, to_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    tensors = (grad.contiguous(), gate, up, to_gate, to_up)
    call(f"gated_backward_{letters(gate.dtype)}", tensors, count, m, c, threads_for(count))
    return to_gate, to_up


def decode(
    query: Tensor,
    new: Pair,
    own: Pair,
    prompts: Pair,
    lengths: tuple[Tensor, Tensor, Tensor],
    *,
    column: Tensor,
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attention of one new token per row over its prompt and its own columns of the ring.

    The new key and value are written first.

    Args:
        query: [rows, Hkv, G, D].
        new: key and value of this step [rows, Hkv, D], which are written into `own`.
        own: keys and values [at least rows, Hkv, width, D].
        prompts: keys and values [P, Hkv, columns, D].
        lengths: [rows] number of its own columns that each row sees, this step's included; [rows]
            index of the prompt that it continues; [P] tokens of each prompt; all int64.
        column: [1] int64, this step's column; a row's earlier ones precede it around the ring.
        window: maximum number of tokens that a query sees, itself included; None: no limit.
        scaling: factor of the scores.
        softcap: cap of the scores; None: none.

    Returns:
        [rows, Hkv, G, D].
    """
    rows, heads, group, dim = query.shape
    out = torch.empty_like(query)
    sizes = (rows, heads, group, dim, own[0].shape[2], prompts[0].shape[2], window or 0)
    call(
        f"decode_{letters(query.dtype)}",
        (query, *new, *own, *prompts, out, *lengths, column),
        *(*sizes, float(scaling), float(softcap or 0)),
        torch.get_num_threads() if rows * heads >= 8 else 1,
    )
    return out


def draw(
    logits: Tensor, uniform: Tensor, temperature: Tensor, early: Tensor | None, stops: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row, as `sampling.draw.draw` gives without truncation, up to rounding.

    Args:
        logits: [n, V] float32.
        uniform: [n] float32 in [0, 1).
        temperature: [n] float32; 0 takes the highest logit.
        early: [n] bool, rows that may not draw stop tokens; None: every row may.
        stops: [V] bool, the stop tokens.

    Returns:
        Token ids [n] int64, their log-probs [n] and the entropies [n] in nats, both float32.
    """
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.long)
    logprobs, entropies = logits.new_empty(rows), logits.new_empty(rows)
    tensors = (logits, uniform, temperature, early, stops, tokens, logprobs, entropies)
    call("draw_f", tensors, rows, vocabulary, logits.stride(0), threads_for(logits.numel()))
    return tokens, logprobs, entropies


# --- attention with a gradient, over rows that continue prompts -----------------------------------

# PyTorch's own kernel runs the forward. Its backward on a CPU repeats grouped keys, multiplies
# small matrices and visits every masked column. Ours recomputes the scores, as FlashAttention's
# backward does (Dao et al., 2022), and multiplies large matrices, a few heads at a time.

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


def attention_serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
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
        if q.dtype is torch.bfloat16:
            # Row by row: products of as many rows as there happen to be are compiled anew, and kept
            # (`models.policy.BFLOAT16_MULTIPLE`).
            step = min(step, key.shape[1])
        for first in representative(range(0, blocks, step), query):
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
