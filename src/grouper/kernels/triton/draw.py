"""Drawing on CUDA in two kernels that read the logits once; full distributions only.

The logits of a hundred rows over a vocabulary of 150,000 take a tenth of the bytes of a small
model's weights, and `draw` passes over them a dozen times. Here each block of the vocabulary is
summed first; then only the block that a row's uniform number falls into is read again.
"""

# ruff: noqa: N803, PLR0917 - Triton's own style: constants in capitals, pointers one by one
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grouper.kernels.triton.language import jit, launch, power_of_two, serves, tl

BLOCK = 2048


def draws_here(logits: Tensor) -> bool:
    """Whether `kernel_draw` takes these."""
    return logits.dtype == torch.float32 and logits.stride(-1) == 1 and serves(logits)


def kernel_draw(
    logits: Tensor, uniform: Tensor, temperature: Tensor, early: Tensor | None, stops: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row, as `draw.draw` gives without truncation, up to the rounding of sums.

    Args:
        logits: [n, V] float32.
        uniform: [n] in [0, 1).
        temperature: [n]; 0 takes the highest logit.
        early: [n] bool, rows that may not draw stop tokens; None: every row may.
        stops: [V] bool, the stop tokens.

    Returns:
        Token ids [n] int64, their log-probs [n] and the entropies [n] in nats, both float32.
    """
    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // BLOCK)
    held = logits.new_empty(5, rows, blocks)
    tokens = torch.empty(rows, dtype=torch.long, device=logits.device)
    logprobs, entropies = logits.new_empty(rows), logits.new_empty(rows)
    bans = stops[:1] if early is None else early
    common: dict[str, Any] = {"BANS": early is not None, "BLOCK": BLOCK}
    bounds = (vocabulary, logits.stride(0))
    launch(_sums, (rows, blocks), logits, temperature, bans, stops, held, *bounds, **common)
    launch(
        *(_pick, (rows,), logits, uniform, temperature, bans, stops, held),
        *(tokens, logprobs, entropies, *bounds, blocks),
        BLOCKS=power_of_two(blocks),
        **common,
    )
    return tokens, logprobs, entropies


@jit
def _scaled(
    logits, temperature, early, stops, row, block, vocabulary, row_step,
    BANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a row divided by its temperature: complete, and without banned tokens."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    there = at < vocabulary
    heat = tl.load(temperature + row)
    values = tl.load(logits + row * row_step + at, mask=there, other=float("-inf"))
    values = values / tl.where(heat == 0, 1.0, heat)
    allowed = values
    if BANS:
        banned = (tl.load(stops + at, mask=there, other=0) != 0) & (tl.load(early + row) != 0)
        allowed = tl.where(banned, float("-inf"), values)
    return at, values, allowed


@jit
def _sums(
    logits, temperature, early, stops, held, vocabulary, row_step,
    BANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per block: the highest logit and the sum of exponentials, of all tokens and of allowed ones,
    and the sum of differences from the highest logit, weighted by their exponentials.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    _, values, allowed = _scaled(
        logits, temperature, early, stops, row, block, vocabulary, row_step, BANS, BLOCK
    )
    top = tl.max(values, 0)
    best = tl.max(allowed, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    size = tl.num_programs(0) * blocks
    place = held + row * blocks + block
    tl.store(place, top)
    below = tl.where(values == float("-inf"), 0.0, values - base)
    shares = tl.exp(values - base)
    tl.store(place + size, tl.sum(shares, 0))
    tl.store(place + 4 * size, tl.sum(shares * below, 0))
    tl.store(place + 2 * size, best)
    # Beside a stop token that is all but certain, the others would be nothing.
    least = tl.where(best == float("-inf"), 0.0, best)
    tl.store(place + 3 * size, tl.sum(tl.exp(allowed - least), 0))


@jit
def _pick(
    logits, uniform, temperature, early, stops, held, tokens, logprobs, entropies, vocabulary,
    row_step, blocks, BLOCKS: tl.constexpr, BANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the block that holds a row's token, and the token in it."""
    row = tl.program_id(0).to(tl.int64)
    size = tl.num_programs(0) * blocks
    numbers = tl.arange(0, BLOCKS)
    real = numbers < blocks
    place = held + row * blocks + numbers
    tops = tl.load(place, mask=real, other=float("-inf"))
    sums = tl.load(place + size, mask=real, other=0.0)
    bests = tl.load(place + 2 * size, mask=real, other=float("-inf"))
    masses = tl.load(place + 3 * size, mask=real, other=0.0)
    spreads = tl.load(place + 4 * size, mask=real, other=0.0)
    top = tl.max(tops, 0)
    weights = tl.exp(tops - top)
    total = tl.sum(sums * weights, 0)
    # A block's sums are relative to its own highest logit: correct them to the row's.
    gaps = tl.where(tops == float("-inf"), 0.0, tops - top)
    spread = tl.sum((spreads + sums * gaps) * weights, 0)
    best = tl.max(bests, 0)
    masses = masses * tl.exp(bests - best)
    greedy = tl.load(temperature + row) == 0
    whole = tl.sum(masses, 0)
    wanted = tl.load(uniform + row) * whole
    sofar = tl.cumsum(masses, 0)
    # Rounding may leave no block above the wanted share: take the last one that is not empty.
    last = tl.max(tl.where(masses > 0, numbers, 0), 0)
    block = tl.min(tl.where((sofar > wanted) & (masses > 0), numbers, last), 0)
    block = tl.where(greedy, tl.min(tl.where(bests == best, numbers, BLOCKS - 1), 0), block)
    before = tl.sum(tl.where(numbers < block, masses, 0.0), 0)
    at, values, allowed = _scaled(
        logits, temperature, early, stops, row, block, vocabulary, row_step, BANS, BLOCK
    )
    shares = tl.exp(allowed - best)
    inside = before + tl.cumsum(shares, 0)
    final = tl.max(tl.where(shares > 0, at, 0), 0)
    token = tl.min(tl.where((inside > wanted) & (shares > 0), at, final), 0)
    token = tl.where(greedy, tl.min(tl.where(allowed == best, at, vocabulary - 1), 0), token)
    chosen = tl.max(tl.where(at == token, values, float("-inf")), 0)
    tl.store(tokens + row, tl.minimum(token, vocabulary - 1).to(tl.int64))
    tl.store(logprobs + row, chosen - top - tl.log(total))
    # H = log(sum e^z) - sum p z, with the highest z subtracted from both.
    tl.store(entropies + row, tl.log(total) - spread / total)
