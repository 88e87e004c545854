"""The fused kernels of a decoding step on CUDA, in Triton: forward only.

At a few hundred rows a step should be bound by the number of kernels that start (an estimate from
memory bandwidth, not measured), and a transformers model starts several for each norm, rotation and
activation. Each function here is one kernel, and rounds where the model's own code does.
"""

# ruff: noqa: N803, PLR0917 - Triton's own style: constants in capitals, pointers one by one
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from grouper.kernels.triton.language import AVAILABLE, jit, launch, serves, tl

__all__ = ["AVAILABLE", "gated", "gated_serves", "norm_serves", "rms_norm", "rotate"]
__all__ += ["rotate_serves"]

BLOCK = 1024
WIDEST = 1 << 15
"""Elements of a row that one program holds."""


def norm_serves(x: Tensor, weight: Tensor) -> bool:
    """Whether `rms_norm` takes these."""
    return _serves(x, weight) and x.is_contiguous() and weight.shape[0] <= WIDEST


def rotate_serves(x: Tensor, cosine: Tensor) -> bool:
    """Whether `rotate` takes heads [1, H, N, D] and cosines [1, N, D]."""
    return (
        _serves(x, cosine)
        and x.dim() == 4
        and cosine.dim() == 3
        and x.shape[0] == cosine.shape[0] == 1
        and cosine.shape[-1] == x.shape[-1]
        and x.shape[-1] % 2 == 0
        and x.stride(-1) == 1
        and cosine.is_contiguous()
    )


def gated_serves(gate: Tensor, up: Tensor) -> bool:
    """Whether `gated` takes these."""
    alike = gate.shape == up.shape and gate.dtype == up.dtype
    return alike and _serves(gate, up) and gate.is_contiguous() and up.is_contiguous()


def _serves(*tensors: Tensor) -> bool:
    return not torch.is_grad_enabled() and serves(*tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, ones: bool = False) -> Tensor:
    """X / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

    Args:
        x: [..., D], contiguous.
        weight: [D].
        eps: inside the root.
        ones: multiply by 1 + weight, before rounding (Gemma).
    """
    width = weight.shape[0]
    dtype = x.dtype if ones else torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty_like(x, dtype=dtype)
    block = 1 << (width - 1).bit_length()
    launch(
        _norm,
        (x.numel() // width,),
        x,
        weight,
        out,
        width,
        eps,
        ONES=ones,
        BLOCK=block,
        num_warps=min(8, max(1, block // 256)),
    )
    return out


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021), each half of a head's dimensions as a pair.

    Args:
        x: [1, H, N, D].
        cosine: [1, N, D].
        sine: [1, N, D].
    """
    _, heads, tokens, dim = x.shape
    dtype = torch.promote_types(x.dtype, cosine.dtype)
    out = x.new_empty((1, tokens, heads, dim), dtype=dtype)
    lines = 1 << (heads - 1).bit_length()
    launch(
        _rotate,
        (tokens,),
        x,
        cosine,
        sine.contiguous(),
        out,
        heads,
        x.stride(1),
        x.stride(2),
        DIM=dim,
        LINES=lines,
        BLOCK=1 << (dim - 1).bit_length(),
    )
    return out.transpose(1, 2)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up (Shazeer, 2020), `activation` being `silu` or `gelu_tanh`."""
    out, count = torch.empty_like(gate), gate.numel()
    launch(
        _gate, (-(-count // BLOCK),), gate, up, out, count, SILU=activation == "silu", BLOCK=BLOCK
    )
    return out


@jit
def _norm(x, weight, out, width, eps, ONES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    there = at < width
    start = tl.program_id(0).to(tl.int64) * width
    given = tl.load(x + start + at, mask=there, other=0.0)
    values = given.to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    factors = tl.load(weight + at, mask=there, other=0.0)
    if ONES:
        scaled = scaled * (1.0 + factors.to(tl.float32))
    else:
        scaled = scaled.to(given.dtype).to(tl.float32) * factors.to(tl.float32)
    tl.store(out + start + at, scaled.to(out.dtype.element_ty), mask=there)


@jit
def _rotate(
    x, cosine, sine, out, heads, head_step, token_step,
    DIM: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lines = tl.arange(0, LINES)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    there = (lines < heads) & (dims < DIM)
    half: tl.constexpr = DIM // 2
    partner = tl.where(dims < half, dims + half, dims - half)
    base = x + token * token_step + lines * head_step
    kind = out.dtype.element_ty
    own = tl.load(base + dims, mask=there, other=0.0).to(tl.float32)
    other = tl.load(base + partner, mask=there, other=0.0).to(tl.float32)
    other = tl.where(dims < half, -other, other)
    cos = tl.load(cosine + token * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    sin = tl.load(sine + token * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    # Two products and their sum, each rounded.
    turned = (own * cos).to(kind).to(tl.float32) + (other * sin).to(kind).to(tl.float32)
    tl.store(out + (token * heads + lines) * DIM + dims, turned.to(kind), mask=there)


@jit
def _gate(gate, up, out, count, SILU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    kind = out.dtype.element_ty
    given = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
    if SILU:
        curved = given * tl.sigmoid(given)
    else:
        # 0.5 x (1 + tanh y) = x sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x^3)
        curved = given * tl.sigmoid(1.5957691216057308 * (given + 0.044715 * given * given * given))
    factor = tl.load(up + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, (curved.to(kind).to(tl.float32) * factor).to(kind), mask=there)
