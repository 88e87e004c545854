"""The compiled kernels as functions of tensors.

Each takes and returns ordinary CPU tensors. Its `..._serves` says whether a kernel exists and takes
these tensors; for anything else callers fall back to the model's own code. The library is loaded
last, so that it is not built for models on other devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grouper.kernels.cpu.library import DTYPES, call, letters, library, threads_for
from grouper.kernels.layers import fits_rotation, norm_dtype

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
