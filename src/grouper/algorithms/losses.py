"""Losses: pure functions of log-probabilities that return one value a token, never reduced.

Shapes are whatever the caller uses, equal or broadcastable: `[rows, tokens]` here. The caller
multiplies by the batch's weights and sums; see `weighting.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["SURROGATES", "SurrogateFunction", "clipped", "kl_k3", "log_ratio", "nll"]

SurrogateFunction = Callable[[Tensor, Tensor, float, float], Tensor]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`, which overflows float32 at 88."""


def nll(logprobs: Tensor) -> Tensor:
    """Negative log-likelihood, `-log p`: the loss of supervised fine-tuning.

    >>> nll(torch.tensor([-2.0])).tolist()
    [2.0]
    """
    return -logprobs


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """`log(p / p_old)` per token, clamped so that its exponential stays finite."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped(log_ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """`-min(rho * A, clip(rho, 1 - low, 1 + high) * A)` with `rho = exp(log_ratios)`.

    PPO's surrogate (arXiv 1707.06347, eq. 7) with the separate bounds of DAPO (arXiv
    2503.14476). For A > 0 the gradient ends above `1 + high`, for A < 0 below `1 - low`.

    >>> rho = torch.tensor([2.0, 2.0, 0.5, 0.5])
    >>> loss = clipped(rho.log(), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2, 0.28)
    >>> [round(value, 2) for value in loss.tolist()]
    [-1.28, 2.0, -0.5, 0.8]
    """
    ratio = log_ratios.exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, bounded * advantages)


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """`r - 1 - log r` with `r = p_ref / p`: the k3 estimate of KL(p || p_ref) from samples of p.

    Unbiased, never negative, 0 exactly where both agree (Schulman, "Approximating KL
    divergence", 2020; GRPO, arXiv 2402.03300, eq. 4).

    >>> kl_k3(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0])).tolist()
    [0.0, 0.367...]
    """
    difference = log_ratio(reference_logprobs, logprobs)
    return difference.exp() - 1.0 - difference


SURROGATES: dict[str, SurrogateFunction] = {"clipped": clipped}
