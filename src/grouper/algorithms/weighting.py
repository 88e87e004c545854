"""Weightings: what each target token counts, fixed once over a whole optimizer step.

Every function takes the target mask of the step `[rows, tokens]` (True where a token was sampled
or demonstrated and may be trained) and returns float64 weights of the same shape, zero off the
mask, so that the loss of any part of the step is `(per_token * weights).sum()` and parts add up.
A step without a single target token gets all zeros, not NaN.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

WeightingFunction = Callable[[Tensor, float], Tensor]


def token_mean(mask: Tensor, constant: float = 0.0) -> Tensor:
    """Every token of the step counts the same: `1 / tokens` (DAPO, arXiv 2503.14476).

    >>> import torch
    >>> token_mean(torch.tensor([[True, True], [True, False]])).sum().item()
    1.0
    """
    del constant
    total = mask.sum().clamp(min=1)
    return mask.double() / total


def sequence_mean(mask: Tensor, constant: float = 0.0) -> Tensor:
    """Every sequence counts the same: `1 / (sequences * its tokens)` (GRPO, arXiv 2402.03300).

    A token of a long wrong answer is punished less than one of a short wrong answer. Sequences
    without a target token leave the denominator.

    >>> import torch
    >>> sequence_mean(torch.tensor([[True, True], [True, False]])).tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    """
    del constant
    lengths = mask.sum(dim=1, keepdim=True)
    sequences = (lengths > 0).sum().clamp(min=1)
    return mask.double() / (lengths.clamp(min=1) * sequences)


def constant(mask: Tensor, constant: float) -> Tensor:
    """A fixed divisor: `1 / (sequences * constant)` (Dr. GRPO, arXiv 2503.20783).

    >>> import torch
    >>> constant(torch.tensor([[True, True], [True, False]]), 4.0).tolist()
    [[0.125, 0.125], [0.125, 0.0]]
    """
    if constant <= 0:
        raise ValueError(f"the constant weighting needs a positive constant, got {constant}")
    sequences = mask.any(dim=1).sum().clamp(min=1)
    return mask.double() / (constant * sequences)


WEIGHTINGS: dict[str, WeightingFunction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant,
}
