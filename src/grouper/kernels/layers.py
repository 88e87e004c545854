"""Norms, rotary embeddings and gates in one kernel each, with gradients, for the CPU and for CUDA.

`kernels` is the module `cpu.ops` or `triton.layers`. Both have

    norm(x, weight, eps, ones) -> the normalized x
    norm_gradient(grad, x, weight, eps, ones) -> of x and of the weight
    rotate(x, cosine, sine, dtype) -> heads turned
    gate(gate, up, m, c) -> gate sigmoid(m gate + c gate^3) up
    gate_gradient(grad, gate, up, m, c) -> of gate and of up

and a `..._serves` for each of the three.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Run = Callable[..., Tensor]

_ROOT = 1.5957691216057308  # sqrt(8 / pi)
# Activation -> its coefficients m and c in x sigmoid(m x + c x^3).
CURVES = {"silu": (1.0, 0.0), "gelu_tanh": (_ROOT, _ROOT * 0.044715)}


def norm_dtype(x: Tensor, weight: Tensor, *, ones: bool) -> torch.dtype:
    """The dtype of a norm's result."""
    return x.dtype if ones else torch.promote_types(x.dtype, weight.dtype)


def fits_rotation(x: Tensor, cosine: Tensor) -> bool:
    """Whether the tensors have the shapes of heads [1, H, N, D] and cosines [1, N, D]."""
    return (
        x.dim() == 4
        and cosine.dim() == 3
        and x.shape[0] == cosine.shape[0] == 1
        and cosine.shape[-1] == x.shape[-1]
        and x.shape[-1] % 2 == 0
    )


def rms_norm(
    kernels: ModuleType, x: Tensor, weight: Tensor, eps: float, *, ones: bool = False
) -> Tensor:
    """X / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

    Args:
        kernels: the module whose kernels take these tensors.
        x: [..., D].
        weight: [D].
        eps: added inside the root.
        ones: multiply by 1 + weight before rounding, as Gemma does.
    """
    if x.dim() == 4 and x.stride(1) < x.stride(2):  # heads before tokens (Gemma 3)
        return rms_norm(kernels, x.transpose(1, 2), weight, eps, ones=ones).transpose(1, 2)
    run = partial(kernels.norm, eps=eps, ones=ones)
    return _run(run, partial(kernels.norm_gradient, eps=eps, ones=ones), 0, x, weight)


def rotate(kernels: ModuleType, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021); dimension i is paired with dimension i + D / 2.

    Args:
        kernels: the module whose kernels take these tensors.
        x: [1, H, N, D].
        cosine: [1, N, D].
        sine: [1, N, D].
    """
    dtype = torch.promote_types(x.dtype, cosine.dtype)
    gradient = partial(_turned_back, kernels, x.dtype)
    return _run(partial(kernels.rotate, dtype=dtype), gradient, 1, x, cosine, sine)


def rotate_both(
    kernels: ModuleType, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys as `rotate` does, in one kernel where there is one."""
    together = getattr(kernels, "rotate_both", None)
    if together is None or torch.is_grad_enabled() or query.dtype != key.dtype:
        query, key = (rotate(kernels, heads, cosine, sine) for heads in (query, key))
        return query, key
    dtype = torch.promote_types(query.dtype, cosine.dtype)
    pair: tuple[Tensor, Tensor] = together(query, key, cosine, sine, dtype)
    return pair


def _turned_back(
    kernels: ModuleType, dtype: torch.dtype, grad: Tensor, cosine: Tensor, sine: Tensor
) -> tuple[Tensor]:
    """The gradient of `rotate`: a rotation with the sines' halves swapped and negated."""
    back = -sine.roll(sine.shape[-1] // 2, -1)
    return (kernels.rotate(grad, cosine, back, dtype),)


def gated(kernels: ModuleType, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up (Shazeer, 2020), `activation` a name in `CURVES`; [..., D]."""
    m, c = CURVES[activation]
    run = partial(kernels.gate, m=m, c=c)
    return _run(run, partial(kernels.gate_gradient, m=m, c=c), 0, gate, up)


def _run(run: Run, gradient: Callable[..., Any], first: int, *tensors: Tensor) -> Tensor:
    """The result of a kernel, connected to autograd where gradients are enabled.

    Args:
        run: calls the kernel with the tensors.
        gradient: maps the output's gradient and the saved tensors to the gradients of the first
            inputs.
        first: how many of the tensors are saved for it.
        tensors: the inputs.
    """
    # A sampler calls these often without gradients, and autograd's overhead would show.
    do: Run = partial(_Op.apply, run, gradient, first) if torch.is_grad_enabled() else run
    return do(*tensors)


class _Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, gradient: Any, first: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[first:])
        ctx.gradient, ctx.count = gradient, len(tensors)
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        found = ctx.gradient(grad, *ctx.saved_tensors)
        return None, None, None, *found, *[None] * (ctx.count - len(found))
