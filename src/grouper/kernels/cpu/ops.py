"""The compiled kernels as functions of tensors, with gradients.

Each takes and returns ordinary CPU tensors. Its `..._serves` says whether there are kernels, and
for these tensors; callers fall back to the model's own code for anything else. The library is
asked for last, so that it is not built for models that are not on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grouper.kernels.cpu.calls import DTYPES, call, letters, threads_for
from grouper.kernels.cpu.library import library

Pair = tuple[Tensor, Tensor]
"""Keys and values."""

NORMS = {"fff", "bbb", "bff", "bfb"}
ROTATIONS = {"fff": "fff", "bbb": "bbb", "bff": "ffb"}
"""Types of a rotation -> types of its backward."""


def norm_serves(x: Tensor, weight: Tensor, *, ones: bool) -> bool:
    """Whether `rms_norm` takes these."""
    return (
        letters(x.dtype, weight.dtype, _norm_dtype(x, weight, ones=ones)) in NORMS
        and x.is_cpu
        and weight.is_cpu
        and x.is_contiguous()
        and weight.is_contiguous()
        and library() is not None
    )


def rotate_serves(x: Tensor, cosine: Tensor) -> bool:
    """Whether `rotate` takes heads [1, H, N, D] and cosines [1, N, D]."""
    return (
        x.is_cpu
        and x.dim() == 4
        and cosine.dim() == 3
        and x.shape[0] == cosine.shape[0] == 1
        and cosine.shape[-1] == x.shape[-1]
        and x.shape[-1] % 2 == 0
        and x.stride(-1) == 1
        and letters(x.dtype, cosine.dtype, _wider(x, cosine)) in ROTATIONS
        and library() is not None
    )


def gated_serves(gate: Tensor, up: Tensor) -> bool:
    """Whether `gated` takes these."""
    return _alike(gate, up) and gate.shape == up.shape


def decode_serves(query: Tensor, new: Pair, own: Pair, prompts: Pair) -> bool:
    """Whether `decode` takes these."""
    return (
        _alike(query, *new, *own, *prompts)
        and own[0].shape == own[1].shape
        and prompts[0].shape == prompts[1].shape
        and query.shape[3] == own[0].shape[3]
    )


def draw_serves(logits: Tensor) -> bool:
    """Whether `draw` takes logits [n, V]."""
    return (
        logits.dtype is torch.float32
        and logits.is_cpu
        and logits.stride(-1) == 1
        and library() is not None
    )


def attention_serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attention_backward` serves the attention of these."""
    return (
        query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and query.is_cpu
        and library() is not None
    )


def _alike(*tensors: Tensor) -> bool:
    first = tensors[0]
    return (
        first.dtype in DTYPES
        and first.is_cpu
        and all(t.is_contiguous() and t.dtype == first.dtype for t in tensors)
        and library() is not None
    )


def _wider(x: Tensor, other: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, other.dtype)


def _norm_dtype(x: Tensor, weight: Tensor, *, ones: bool) -> torch.dtype:
    return x.dtype if ones else _wider(x, weight)


def _normed(x: Tensor, weight: Tensor, eps: float, *, ones: bool) -> tuple[Tensor, Tensor, str]:
    """The normalised x, the inverse root of each row, and the kernel's types."""
    width = weight.shape[0]
    rows = x.numel() // width
    out = x.new_empty(x.shape, dtype=_norm_dtype(x, weight, ones=ones))
    inverse = x.new_empty(rows, dtype=torch.float32)
    types = letters(x.dtype, weight.dtype, out.dtype)
    numbers = (rows, width, float(eps), ones, threads_for(x.numel()))
    call(f"rms_norm_{types}", (x, weight, out, inverse), *numbers)
    return out, inverse, types


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, ones: bool) -> Tensor:
        out, inverse, ctx.types = _normed(x, weight, eps, ones=ones)
        ctx.save_for_backward(x, weight, inverse)
        ctx.ones = ones
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, inverse = ctx.saved_tensors
        width, rows, threads = weight.shape[0], inverse.shape[0], threads_for(x.numel())
        x_grad = torch.empty_like(x)
        w_grad = inverse.new_zeros(threads, width)
        tensors = (grad.contiguous(), x, weight, inverse, x_grad, w_grad)
        name = f"rms_norm_backward_{ctx.types}"
        call(name, tensors, rows, width, ctx.ones, threads)
        return x_grad, w_grad.sum(0).to(weight.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, ones: bool = False) -> Tensor:
    """X / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

    Args:
        x: [..., D], contiguous.
        weight: [D].
        eps: inside the root.
        ones: multiply by 1 + weight, before rounding (Gemma).
    """
    if not torch.is_grad_enabled():  # a sampler calls this often, and autograd takes its time
        return _normed(x, weight, eps, ones=ones)[0]
    out: Tensor = _RMSNorm.apply(x, weight, eps, ones)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor, dtype: torch.dtype, *, back: bool) -> Tensor:
    """Heads [1, H, N, D] -> the same, contiguous as [1, N, H, D]."""
    _, heads, tokens, dim = x.shape
    out = x.new_empty((1, tokens, heads, dim), dtype=dtype)
    numbers = (tokens, heads, dim, x.stride(2), x.stride(1), back, threads_for(x.numel()))
    tensors = (x, cosine.contiguous(), sine.contiguous(), out)
    call(f"rotate_{letters(x.dtype, cosine.dtype, dtype)}", tensors, *numbers)
    return out.transpose(1, 2)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.dtype = x.dtype
        return _rotated(x, cosine, sine, _wider(x, cosine), back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cosine, sine = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        return _rotated(grad, cosine, sine, ctx.dtype, back=True), None, None


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021), each half of a head's dimensions as a pair.

    Args:
        x: [1, H, N, D].
        cosine: [1, N, D].
        sine: [1, N, D].
    """
    if not torch.is_grad_enabled():
        return _rotated(x, cosine, sine, _wider(x, cosine), back=False)
    out: Tensor = _Rotate.apply(x, cosine, sine)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


_ROOT = 1.5957691216057308  # sqrt(8 / pi)
CURVES = {"silu": (1.0, 0.0), "gelu_tanh": (_ROOT, _ROOT * 0.044715)}
"""Activation -> m and c of x sigmoid(m x + c x^3)."""


def _gated(gate: Tensor, up: Tensor, m: float, c: float) -> Tensor:
    out, count = torch.empty_like(gate), gate.numel()
    call(f"gated_{letters(gate.dtype)}", (gate, up, out), count, m, c, threads_for(count))
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, m: float, c: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.curve = (m, c)
        return _gated(gate, up, m, c)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        gate_grad, up_grad, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        tensors = (grad.contiguous(), gate, up, gate_grad, up_grad)
        numbers = (count, *ctx.curve, threads_for(count))
        call(f"gated_backward_{letters(gate.dtype)}", tensors, *numbers)
        return gate_grad, up_grad, None, None


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up (Shazeer, 2020), `activation` a name in `CURVES`."""
    if not torch.is_grad_enabled():
        return _gated(gate, up, *CURVES[activation])
    out: Tensor = _Gated.apply(gate, up, *CURVES[activation])  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


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
    """Attention of one new token a row over its prompt and its own columns of the ring.

    The new key and value are written first.

    Args:
        query: [rows, Hkv, G, D].
        new: key and value of this step [rows, Hkv, D], which are written into `own`.
        own: keys and values [at least rows, Hkv, width, D].
        prompts: keys and values [P, Hkv, columns, D].
        lengths: [rows] columns of its own that each row sees, this step's included; [rows] the
            prompt that it continues; [P] tokens of each prompt; all int64.
        column: [1] int64, this step's column; a row's others lie before it, round the ring.
        window: tokens a row sees at most, itself included; None: all.
        scaling: of the scores.
        softcap: of the scores; None: none.

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
    """One token per row, as `sampling.draw.draw` gives without truncation, but for rounding.

    Args:
        logits: [n, V] float32.
        uniform: [n] float32 in [0, 1).
        temperature: [n] float32; 0 takes the highest logit.
        early: [n] bool, rows that may not draw stop tokens; None: none of them.
        stops: [V] bool.

    Returns:
        Token ids [n] int64, their log-probs [n] and the entropies [n] in nats, both float32.
    """
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.long)
    logprobs, entropies = logits.new_empty(rows), logits.new_empty(rows)
    bans = stops[:1] if early is None else early
    tensors = (logits, uniform, temperature, bans, stops, tokens, logprobs, entropies)
    numbers = (rows, vocabulary, logits.stride(0), early is not None)
    call("draw_f", tensors, *numbers, threads_for(logits.numel()))
    return tokens, logprobs, entropies


def attention_backward(
    scores: tuple[Tensor, ...],
    lengths: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    *,
    scaling: float,
    first: int,
    per_row: int,
    shape: tuple[int, int, int, int, int],
) -> tuple[Tensor, Tensor]:
    """What stands between the matrix products of attention's backward.

    Args:
        scores: unscaled scores and gradients of the shares [n, G * T, K], log-sum-exps of the
            scaled scores and deltas [n, G * T], float32, contiguous.
        lengths: tokens of each row's prompt, and of each row, [R] int64.
        dtype: of the results.
        scaling: of the scores.
        first: number of the first of the n blocks among all rows and heads of keys.
        per_row: heads of keys.
        shape: G, T, K, the columns of prompts, the window or 0.

    Returns:
        Shares and gradients of the scores [n, G * T, K]; zero where nothing is seen.
    """
    made = [torch.empty(scores[0].shape, dtype=dtype) for _ in range(2)]
    call(
        f"attention_backward_{letters(dtype)}",
        (*scores, *made, *lengths),
        *(first, scores[0].shape[0], per_row, *shape, float(scaling)),
        torch.get_num_threads(),
    )
    return made[0], made[1]
