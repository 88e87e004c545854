"""Norms, rotary embeddings and gates in one kernel each, with gradients, for the CPU and for CUDA.

`kernels` is the module `cpu.ops` or `triton.layers`. Both have

    norm(x, weight, eps, ones=) -> the normalised x, and a tuple of what its gradient needs besides
    norm_gradient(grad, x, weight, *kept, eps=, ones=) -> of x, and parts of the weight's [n, D]
    rotate(x, cosine, sine, dtype, back=) -> heads turned, or a gradient turned back
    gate(gate, up, m, c) -> gate sigmoid(m gate + c gate^3) up
    gate_gradient(grad, gate, up, m, c) -> of gate and of up

and a `..._serves` for each of the three.
"""

# ruff: noqa: PLR0917 - what autograd calls takes its arguments by position

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_ROOT = 1.5957691216057308  # sqrt(8 / pi)
# Activation -> m and c of x sigmoid(m x + c x^3).
CURVES = {"silu": (1.0, 0.0), "gelu_tanh": (_ROOT, _ROOT * 0.044715)}


def norm_dtype(x: Tensor, weight: Tensor, *, ones: bool) -> torch.dtype:
    """What a norm gives."""
    return x.dtype if ones else torch.promote_types(x.dtype, weight.dtype)


def fits_rotation(x: Tensor, cosine: Tensor) -> bool:
    """Whether these are heads [1, H, N, D] and cosines [1, N, D]."""
    return (
        x.dim() == 4
        and cosine.dim() == 3
        and x.shape[0] == cosine.shape[0] == 1
        and cosine.shape[-1] == x.shape[-1]
        and x.shape[-1] % 2 == 0
    )


# Without a gradient a sampler calls these often, and autograd would take its time.


def rms_norm(
    kernels: ModuleType, x: Tensor, weight: Tensor, eps: float, *, ones: bool = False
) -> Tensor:
    """X / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

    Args:
        kernels: serve these.
        x: [..., D].
        weight: [D].
        eps: inside the root.
        ones: multiply by 1 + weight, before rounding (Gemma).
    """
    if x.dim() == 4 and not x.is_contiguous():  # heads before tokens (Gemma 3)
        return rms_norm(kernels, x.transpose(1, 2), weight, eps, ones=ones).transpose(1, 2)
    out: Tensor
    if torch.is_grad_enabled():
        out = _RMSNorm.apply(kernels, x, weight, eps, ones)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    else:
        out, _ = kernels.norm(x, weight, eps, ones=ones)
    return out


def rotate(kernels: ModuleType, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021), each half of a head's dimensions as a pair.

    Args:
        kernels: serve these.
        x: [1, H, N, D].
        cosine: [1, N, D].
        sine: [1, N, D].
    """
    if not torch.is_grad_enabled():
        return _turned(kernels, x, cosine, sine)
    out: Tensor = _Rotate.apply(kernels, x, cosine, sine)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


def gated(kernels: ModuleType, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up (Shazeer, 2020), `activation` a name in `CURVES`; [..., D]."""
    out: Tensor
    if torch.is_grad_enabled():
        out = _Gated.apply(kernels, gate, up, *CURVES[activation])  # type: ignore[no-untyped-call]  # torch leaves it untyped
    else:
        out = kernels.gate(gate, up, *CURVES[activation])
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: ModuleType, x: Tensor, weight: Tensor, eps: float, ones: bool
    ) -> Tensor:
        out: Tensor
        out, kept = kernels.norm(x, weight, eps, ones=ones)
        ctx.save_for_backward(x, weight, *kept)
        ctx.kernels, ctx.eps, ctx.ones = kernels, eps, ones
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, *kept = ctx.saved_tensors
        to_x, to_weight = ctx.kernels.norm_gradient(
            grad, x, weight, *kept, eps=ctx.eps, ones=ctx.ones
        )
        return None, to_x, to_weight.sum(0).to(weight.dtype), None, None


def _turned(kernels: ModuleType, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, cosine.dtype)
    out: Tensor = kernels.rotate(x, cosine, sine, dtype, back=False)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.kernels, ctx.dtype = kernels, x.dtype
        return _turned(kernels, x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        back = ctx.kernels.rotate(grad, *ctx.saved_tensors, ctx.dtype, back=True)
        return None, back, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: ModuleType, gate: Tensor, up: Tensor, m: float, c: float
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels, ctx.curve = kernels, (m, c)
        out: Tensor = kernels.gate(gate, up, m, c)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        to_gate, to_up = ctx.kernels.gate_gradient(grad, *ctx.saved_tensors, *ctx.curve)
        return None, to_gate, to_up, None, None
