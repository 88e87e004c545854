"""What follows a head's product on CUDA: log-probs, entropies and the logits' gradient.

Chunks of logits [tokens, vocabulary] are most of an update's memory traffic, and plain operations
pass over them about twenty times. Here one kernel reads a chunk once for the scores, and another
reads it once and writes its gradient, in the same memory where the dtype allows it.

With x the product, the logits are z = b tanh(a x), or a x if the head has no cap.
"""

# ruff: noqa: N803, PLR0917 - Triton's own style: constants in capitals, pointers one by one
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from grouper.kernels.triton.language import jit, launch, power_of_two, tanh, tl

# Logits that a program processes at a time.
BLOCK = 4096
WARPS = 8


Curve = tuple[float, float]
"""Inner and outer of z = outer tanh(inner x); outer 0: z = inner x."""


def scores(products: Tensor, targets: Tensor, curve: Curve) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of targets, the normalizers and the entropies in nats, each [n] in float32.

    Args:
        products: [n, V], dense, of hidden states and the head's weight.
        targets: [n] int64.
        curve: maps products to logits.
    """
    rows, width = products.shape
    held = products.new_empty((3, rows), dtype=torch.float32)
    launch(
        *(_scores, (rows,), products, targets, held, width, *curve),
        CAPPED=curve[1] != 0,
        BLOCK=min(BLOCK, power_of_two(width)),
        num_warps=WARPS,
    )
    return held[0], held[1], held[2]


def gradient(
    products: Tensor,
    of_tokens: tuple[Tensor, ...],
    curve: Curve,
    dtype: torch.dtype,
    *,
    entropies: bool,
) -> Tensor:
    """The gradient [n, V] with respect to the products, in their memory if it has their dtype.

    Args:
        products: as for `scores`; overwritten.
        of_tokens: [n] each: targets, normalizers, entropies, and the gradients with respect to
            log-probs and entropies.
        curve: maps products to logits.
        dtype: of the result.
        entropies: whether a gradient flows through the entropies.
    """
    rows, width = products.shape
    out = products if products.dtype == dtype else products.new_empty(products.shape, dtype=dtype)
    block = min(BLOCK, power_of_two(width))
    launch(
        *(_gradient, (rows, -(-width // block)), products, *(t.contiguous() for t in of_tokens)),
        *(out, width, *curve),
        CAPPED=curve[1] != 0,
        ENTROPIES=entropies,
        BLOCK=block,
        num_warps=WARPS,
    )
    return out


@jit
def _scores(
    products, targets, held, width, inner, outer, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores of one token; sums are relative to the highest logit so far."""
    row = tl.program_id(0).to(tl.int64)
    given = products + row * width
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    spread = tl.zeros((1,), tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        there = at < width
        logits = inner * tl.load(given + at, mask=there, other=0.0).to(tl.float32)
        if CAPPED:
            logits = outer * tanh(logits)
        highest = tl.maximum(top, tl.max(tl.where(there, logits, float("-inf")), 0))
        below = logits - highest
        shares = tl.where(there, tl.exp(below), 0.0)
        # Earlier sums were relative to a lower maximum: correct them by its rise.
        risen = tl.where(total > 0, top - highest, 0.0)
        keep = tl.exp(risen)
        spread = (spread + total * risen) * keep + tl.sum(shares * below, 0)
        total = total * keep + tl.sum(shares, 0)
        top = highest
    chosen = inner * tl.load(given + tl.load(targets + row)).to(tl.float32)
    if CAPPED:
        chosen = outer * tanh(chosen)
    one = row + tl.arange(0, 1)
    rows = tl.num_programs(0)
    tl.store(held + one, chosen - top - tl.log(total))
    tl.store(held + rows + one, top + tl.log(total))
    tl.store(held + 2 * rows + one, tl.log(total) - spread / total)


@jit
def _gradient(
    products, targets, normalizers, entropies, to_logprobs, to_entropies, out, width, inner, outer,
    CAPPED: tl.constexpr, ENTROPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """D logp_t / dz_i = [i = t] - p_i, and dH / dz_i = -p_i (log p_i + H)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    logits = inner * tl.load(products + row * width + at, mask=there, other=0.0).to(tl.float32)
    slope = inner
    if CAPPED:
        bent = tanh(logits)
        logits = outer * bent
        slope = outer * inner * (1 - bent * bent)
    logprobs = logits - tl.load(normalizers + row)
    pull = tl.load(to_logprobs + row)
    pulls = tl.zeros((BLOCK,), tl.float32) + pull
    if ENTROPIES:
        pulls += (logprobs + tl.load(entropies + row)) * tl.load(to_entropies + row)
    pulls = tl.where(at == tl.load(targets + row), pull, 0.0) - tl.exp(logprobs) * pulls
    tl.store(out + row * width + at, (pulls * slope).to(out.dtype.element_ty), mask=there)
