"""Norms, rotary embeddings and gates on CUDA in one kernel each, with gradients.

A transformers model launches several kernels for each of them, and every one reads and writes all
of the activations: with a few hundred rows a decoding step is bound by the number of launches, an
update by memory traffic. Forwards round where the model's own code does; backwards compute in
float32 and round once. Only the inputs are saved for the backward.

They stay, though no card has measured them yet, because they save launches: of PyTorch's operations
a norm takes 8, the rotary embedding of queries and keys 10, and a gate 2.
"""

# ruff: noqa: N803, PLR0917 - Triton's own style: constants in capitals, pointers one by one
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grouper.kernels.layers import fits_rotation, norm_dtype
from grouper.kernels.triton.language import jit, launch, power_of_two, serves, tl

# Maximum number of elements of a row that one program holds.
WIDEST = 1 << 15
# Elements that a program processes at a time where rows are short; at least one row.
TILE = 2048
# Elements per warp.
OF_A_WARP = 512
# Programs that share the rows of a norm's backward; each writes a partial sum of the weight's
# gradient.
PARTIAL_SUMS = 1024


def norm_serves(x: Tensor, weight: Tensor, *, ones: bool) -> bool:
    """Whether `norm` takes these."""
    del ones
    return x.dim() > 1 and weight.shape[0] <= WIDEST and serves(x, weight)


def rotate_serves(x: Tensor, cosine: Tensor) -> bool:
    """Whether `rotate` takes heads [1, H, N, D] and cosines [1, N, D]."""
    return fits_rotation(x, cosine) and serves(x, cosine)


def gated_serves(gate: Tensor, up: Tensor) -> bool:
    """Whether `gate` takes these."""
    alike = gate.shape == up.shape and gate.dtype == up.dtype
    return alike and gate.dim() > 1 and serves(gate, up)


def _steps(x: Tensor) -> tuple[Tensor, int, int, int]:
    """How a norm finds the rows of a tensor [..., D]: in groups of evenly spaced rows.

    Heads that are columns of a joined product are such groups, one for each token.

    Returns:
        The tensor, or a dense copy of one that has no such groups; the rows of a group; the steps
        from group to group and from row to row.
    """
    if x.stride(-1) == 1 and x.dim() == 4 and x.shape[0] == 1:
        return x, x.shape[2], x.stride(1), x.stride(2)
    rows = _rows(x)
    return rows, 1, rows.stride(0), 0


def _rows(x: Tensor) -> Tensor:
    """[..., D] as [rows, D] with dense rows; a copy if the rows are not evenly spaced."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _warps(elements: int) -> int:
    return min(16, max(1, elements // OF_A_WARP))


def _tile(width: int) -> dict[str, Any]:
    """The compile-time constants of a norm's programs, for rows of this width."""
    block = power_of_two(width)
    lines = max(1, TILE // block)
    return {"LINES": lines, "BLOCK": block, "num_warps": _warps(lines * block)}


def norm(x: Tensor, weight: Tensor, eps: float, *, ones: bool) -> Tensor:
    """As `kernels/layers.py` says."""
    count = x.numel() // x.shape[-1]
    spaced, *steps = _steps(x)
    tile = _tile(x.shape[-1])
    out = x.new_empty(x.shape, dtype=norm_dtype(x, weight, ones=ones))
    launch(
        *(_norm, (-(-count // tile["LINES"]),), spaced, weight, out),
        *(count, x.shape[-1], *steps, eps),
        ONES=ones,
        **tile,
    )
    return out


def add_norm(
    x: Tensor, added: Tensor, weight: Tensor, eps: float, *, ones: bool
) -> tuple[Tensor, Tensor]:
    """The sum of two tensors [..., D] of one dtype, rounded to it, and the norm of the sum."""
    rows, others = _rows(x), _rows(added)
    tile = _tile(x.shape[-1])
    total = x.new_empty(x.shape)
    out = x.new_empty(x.shape, dtype=norm_dtype(x, weight, ones=ones))
    launch(
        *(_add_norm, (-(-len(rows) // tile["LINES"]),), rows, others, weight, total, out),
        *(*rows.shape, rows.stride(0), others.stride(0), eps),
        ONES=ones,
        **tile,
    )
    return total, out


def norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, ones: bool
) -> tuple[Tensor, Tensor]:
    """As `kernels/layers.py` says."""
    rows, grads, tile = _rows(x), _rows(grad), _tile(x.shape[-1])
    tiles = -(-len(rows) // tile["LINES"])
    programs = min(tiles, PARTIAL_SUMS)
    to_x = x.new_empty(x.shape)
    to_weight = x.new_empty((programs, weight.shape[0]), dtype=torch.float32)
    steps = (rows.stride(0), grads.stride(0))
    launch(
        *(_norm_gradient, (programs,), rows, weight, grads, to_x, to_weight),
        *(*rows.shape, *steps, eps, -(-tiles // programs)),
        ONES=ones,
        **tile,
    )
    return to_x, to_weight.sum(0).to(weight.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, dtype: torch.dtype) -> Tensor:
    """Heads [1, H, N, D] -> the same, contiguous as [1, N, H, D]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    _, heads, tokens, dim = x.shape
    out = x.new_empty((1, tokens, heads, dim), dtype=dtype)
    lines, block = power_of_two(heads), power_of_two(dim)
    launch(
        *(_rotate, (tokens,), x, cosine.contiguous(), sine.contiguous(), out),
        *(heads, x.stride(1), x.stride(2)),
        DIM=dim,
        LINES=lines,
        BLOCK=block,
        num_warps=_warps(lines * block),
    )
    return out.transpose(1, 2)


def rotate_both(
    query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, each as `rotate` does, in one kernel."""
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    tokens, dim = query.shape[2:]
    outs = [x.new_empty((1, tokens, x.shape[1], dim), dtype=dtype) for x in (query, key)]
    lines, block = power_of_two(max(query.shape[1], key.shape[1])), power_of_two(dim)
    launch(
        *(_rotate_both, (tokens, 2), query, key, cosine.contiguous(), sine.contiguous(), *outs),
        *(query.shape[1], query.stride(1), query.stride(2)),
        *(key.shape[1], key.stride(1), key.stride(2)),
        DIM=dim,
        LINES=lines,
        BLOCK=block,
        num_warps=_warps(lines * block),
    )
    query, key = (out.transpose(1, 2) for out in outs)
    return query, key


def gate(gate: Tensor, up: Tensor, m: float, c: float) -> Tensor:
    """As `kernels/layers.py` says."""
    out = gate.new_empty(gate.shape)
    _over_gates(_gate, gate, _rows(up), out, curve=(m, c))
    return out


def gate_gradient(
    grad: Tensor, gate: Tensor, up: Tensor, m: float, c: float
) -> tuple[Tensor, Tensor]:
    """As `kernels/layers.py` says."""
    to_gate, to_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _over_gates(_gate_gradient, gate, _rows(up), grad.contiguous(), to_gate, to_up, curve=(m, c))
    return to_gate, to_up


def _over_gates(kernel: Any, gate: Tensor, *others: Tensor, curve: tuple[float, float]) -> None:
    """Launch a kernel of gates with its inputs, then its outputs, which are dense."""
    rows = _rows(gate)
    block = min(1024, power_of_two(rows.shape[1]))
    launch(
        *(kernel, (len(rows), -(-rows.shape[1] // block)), rows, *others),
        *(rows.shape[1], rows.stride(0), others[0].stride(0), *curve),
        BLOCK=block,
        num_warps=_warps(block),
    )


@jit
def _normed(given, weight, dims, width, eps, ONES: tl.constexpr):
    """Rows [LINES, BLOCK], normed and multiplied, in float32; rounded as PyTorch rounds them."""
    values = given.to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values, 1)[:, None] / width + eps)
    factors = tl.load(weight + dims, mask=dims < width, other=0.0).to(tl.float32)
    if ONES:
        factors += 1.0
    else:
        scaled = scaled.to(given.dtype).to(tl.float32)
    return scaled * factors


@jit
def _norm(
    x, weight, out, rows, width, group, group_step, step, eps,
    ONES: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lines = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    there = (lines < rows) & (dims < width)
    start = lines // group * group_step + lines % group * step
    given = tl.load(x + start + dims, mask=there, other=0.0)
    normed = _normed(given, weight, dims, width, eps, ONES)
    tl.store(out + lines * width + dims, normed.to(out.dtype.element_ty), mask=there)


@jit
def _add_norm(
    x, added, weight, total, out, rows, width, step, added_step, eps,
    ONES: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lines = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    there = (lines < rows) & (dims < width)
    first = tl.load(x + lines * step + dims, mask=there, other=0.0).to(tl.float32)
    second = tl.load(added + lines * added_step + dims, mask=there, other=0.0).to(tl.float32)
    # The norm reads the rounded sum, as it would from memory.
    sums = (first + second).to(total.dtype.element_ty)
    tl.store(total + lines * width + dims, sums, mask=there)
    normed = _normed(sums, weight, dims, width, eps, ONES)
    tl.store(out + lines * width + dims, normed.to(out.dtype.element_ty), mask=there)


@jit
def _norm_gradient(
    x, weight, grad, to_x, to_weight, rows, width, step, grad_step, eps, rounds,
    ONES: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the inputs, and per program a sum of the weight's over its rows."""
    program = tl.program_id(0)
    dims = tl.arange(0, BLOCK)[None, :]
    factors = tl.load(weight + dims, mask=dims < width, other=0.0).to(tl.float32)
    if ONES:
        factors += 1.0
    sums = tl.zeros((LINES, BLOCK), tl.float32)
    for number in range(rounds):
        tile = (number * tl.num_programs(0) + program).to(tl.int64)
        lines = tile * LINES + tl.arange(0, LINES)[:, None]
        there = (lines < rows) & (dims < width)
        values = tl.load(x + lines * step + dims, mask=there, other=0.0).to(tl.float32)
        pulls = tl.load(grad + lines * grad_step + dims, mask=there, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(values * values, 1)[:, None] / width + eps)
        scaled = values * inverse
        sums += pulls * scaled
        # With n = x / r, of which r depends on every x: dx = (g w - n mean(g w n)) / r.
        pulls *= factors
        pulls = (pulls - scaled * (tl.sum(pulls * scaled, 1)[:, None] / width)) * inverse
        tl.store(to_x + lines * width + dims, pulls.to(to_x.dtype.element_ty), mask=there)
    at = tl.arange(0, BLOCK)
    tl.store(to_weight + program * width + at, tl.sum(sums, 0), mask=at < width)


@jit
def _rotate(
    x, cosine, sine, out, heads, head_step, token_step,
    DIM: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of one token."""
    _turn(x, cosine, sine, out, heads, head_step, token_step, DIM, LINES, BLOCK)


@jit
def _rotate_both(
    query, key, cosine, sine, query_out, key_out,
    query_heads, query_head_step, query_token_step, key_heads, key_head_step, key_token_step,
    DIM: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate the queries of one token, or its keys."""
    if tl.program_id(1) == 0:
        _turn(
            query, cosine, sine, query_out, query_heads, query_head_step, query_token_step,
            DIM, LINES, BLOCK,
        )  # fmt: skip
    else:
        _turn(
            key, cosine, sine, key_out, key_heads, key_head_step, key_token_step,
            DIM, LINES, BLOCK,
        )  # fmt: skip


@jit
def _turn(
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
    cos = tl.load(cosine + token * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    other = tl.where(dims < half, -other, other)
    sin = tl.load(sine + token * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    # Two products and their sum, each rounded.
    turned = (own * cos).to(kind).to(tl.float32) + (other * sin).to(kind).to(tl.float32)
    tl.store(out + (token * heads + lines) * DIM + dims, turned.to(kind), mask=there)


@jit
def _gate(gate, up, out, width, gate_step, up_step, m, c, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    kind = out.dtype.element_ty
    given = tl.load(gate + row * gate_step + at, mask=there, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_step + at, mask=there, other=0.0).to(tl.float32)
    curved = given * tl.sigmoid(given * (m + c * given * given))
    result = curved.to(kind).to(tl.float32) * factor
    tl.store(out + row * width + at, result.to(kind), mask=there)


@jit
def _gate_gradient(
    gate, up, grad, to_gate, to_up, width, gate_step, up_step, m, c, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    kind = to_gate.dtype.element_ty
    given = tl.load(gate + row * gate_step + at, mask=there, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_step + at, mask=there, other=0.0).to(tl.float32)
    pull = tl.load(grad + row * width + at, mask=there, other=0.0).to(tl.float32)
    share = tl.sigmoid(given * (m + c * given * given))
    tl.store(to_up + row * width + at, (pull * given * share).to(kind), mask=there)
    slope = share + given * share * (1.0 - share) * (m + 3.0 * c * given * given)
    tl.store(to_gate + row * width + at, (pull * factor * slope).to(kind), mask=there)
