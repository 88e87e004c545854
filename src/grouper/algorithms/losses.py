"""Losses: pure functions of log-probabilities that return one value per token, never reduced.

Shapes are whatever the caller uses, equal or broadcastable: `[rows, tokens]` here. The caller
multiplies by the batch's weights and sums; see `weighting.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Log-ratios are clamped to this before `exp`, which overflows float32 at 88.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How far a ratio may move before it stops counting."""

    low: float = 0.2
    """The lower bound is `1 - low`."""
    high: float = 0.28
    """The upper bound is `1 + high`."""
    dual: float | None = None
    """Above 1: the loss of a token with a negative advantage is at most `-dual * A`."""


# (log-ratios, log-probs, advantages, bounds) -> loss per token.
SurrogateFunction = Callable[[Tensor, Tensor, Tensor, Bounds], Tensor]


def nll(logprobs: Tensor) -> Tensor:
    """Negative log-likelihood, `-log p`: the loss of supervised fine-tuning.

    >>> nll(torch.tensor([-2.0])).tolist()
    [2.0]
    """
    return -logprobs


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, _mask: Tensor | None = None) -> Tensor:
    """`log(p / p_old)`, clamped so that its exponential stays finite.

    Every token has its own ratio (GRPO, arXiv 2402.03300), whatever the mask.
    """
    difference = logprobs - old_logprobs
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """`mean_t log(p_t / p_old_t)` over the target tokens of a row, the same for each of them.

    The length-normalized sequence ratio of GSPO (arXiv 2507.18071, eq. 7), in logarithms.

    Args:
        logprobs: [R, T].
        old_logprobs: [R, T].
        mask: [R, T] bool, the target tokens; a row without any gets 0.

    >>> new, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.1]])
    >>> sequence_log_ratio(new, old, torch.tensor([[True, True]])).tolist()   # (0.5 + 0.1) / 2
    [[0.3..., 0.3...]]
    """
    differences = torch.where(mask, logprobs - old_logprobs, 0.0)
    tokens = mask.sum(1, keepdim=True).clamp(min=1)
    means = differences.sum(1, keepdim=True) / tokens
    bounded = means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bounded.expand_as(logprobs)


def ppo_clip(log_ratios: Tensor, logprobs: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    """`-min(rho * A, clip(rho, 1 - low, 1 + high) * A)` with `rho = exp(log_ratios)`.

    PPO's surrogate (arXiv 1707.06347, eq. 7) with the separate bounds of DAPO (arXiv
    2503.14476). For A > 0 the gradient ends above `1 + high`, for A < 0 below `1 - low`. With a
    dual clip (arXiv 1912.09729, eq. 5) it also ends above `rho = dual` where A < 0.

    >>> rho = torch.tensor([2.0, 2.0, 0.5, 0.5])
    >>> signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    >>> loss = ppo_clip(rho.log(), rho.log(), signs, Bounds(low=0.2, high=0.28))
    >>> [round(value, 2) for value in loss.tolist()]
    [-1.28, 2.0, -0.5, 0.8]
    >>> dual = ppo_clip(torch.tensor([9.0]).log(), rho[:1], signs[1:2], Bounds(dual=3.0))
    >>> dual.tolist()
    [3.0]
    """
    del logprobs
    ratio = log_ratios.exp()
    bounded = ratio.clamp(1.0 - bounds.low, 1.0 + bounds.high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    if bounds.dual is None:
        return loss
    dual_bound = -bounds.dual * advantages
    return torch.where(advantages < 0, torch.minimum(loss, dual_bound), loss)


def cispo(log_ratios: Tensor, logprobs: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    """`-sg[clip(rho, 1 - low, 1 + high)] * A * log p`: CISPO (MiniMax-M1, arXiv 2506.13585).

    The ratio only weighs a token and carries no gradient (sg: stop-gradient), so no token is
    ever silenced.

    >>> logprobs = torch.tensor([-2.0])
    >>> cispo(torch.tensor([3.0]).log(), logprobs, torch.tensor([1.0]), Bounds(high=0.5)).tolist()
    [3.0]
    """
    ratio = log_ratios.detach().exp()
    weight = ratio.clamp(1.0 - bounds.low, 1.0 + bounds.high)
    return -weight * advantages * logprobs


def policy_gradient(
    log_ratios: Tensor, logprobs: Tensor, advantages: Tensor, bounds: Bounds
) -> Tensor:
    """`-A * log p`: REINFORCE (Williams, 1992). Neither ratio nor bounds.

    >>> policy_gradient(torch.zeros(1), torch.tensor([-2.0]), torch.tensor([3.0]), Bounds())
    tensor([6.])
    """
    del log_ratios, bounds
    return -advantages * logprobs


def kl_k1(logprobs: Tensor, reference_logprobs: Tensor, _ratios: Tensor | None = None) -> Tensor:
    """`log p - log p_ref`: the k1 estimate of KL(p || p_ref) from samples of p.

    Unbiased, of either sign. Its gradient has expectation 0, so it is of use in a reward and of
    none in a loss.

    >>> kl_k1(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()
    [2.0]
    """
    return log_ratio(logprobs, reference_logprobs)


def kl_k2(logprobs: Tensor, reference_logprobs: Tensor, _ratios: Tensor | None = None) -> Tensor:
    """`(log p - log p_ref)^2 / 2`: the k2 estimate of KL(p || p_ref).

    Biased in value, never negative; its gradient on samples of p is that of the KL itself
    (Schulman, "Approximating KL divergence", 2020).

    >>> kl_k2(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()
    [2.0]
    """
    difference = log_ratio(logprobs, reference_logprobs)
    return 0.5 * difference**2


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor, _ratios: Tensor | None = None) -> Tensor:
    """`r - 1 - log r` with `r = p_ref / p`: the k3 estimate of KL(p || p_ref) from samples of p.

    Unbiased, never negative, 0 exactly where both agree (Schulman, "Approximating KL
    divergence", 2020; GRPO, arXiv 2402.03300, eq. 4).

    >>> kl_k3(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0])).tolist()
    [0.0, 0.367...]
    """
    difference = log_ratio(reference_logprobs, logprobs)
    return difference.exp() - 1.0 - difference


def kl_k3_weighted(logprobs: Tensor, reference_logprobs: Tensor, log_ratios: Tensor) -> Tensor:
    """`rho * (r - 1 - log r)` with `rho = p / p_old`: k3 from samples of an older policy.

    Unbiased whatever the policy has become since, and its gradient is that of the KL itself, which
    k3's alone is not (DeepSeek-V3.2, arXiv 2512.02556; TRL's `use_bias_correction_kl`).

    >>> now, reference = torch.tensor([-1.0]), torch.tensor([-2.0])
    >>> kl_k3_weighted(now, reference, torch.tensor([2.0]).log()).tolist()
    [0.735...]
    """
    return log_ratios.exp() * kl_k3(logprobs, reference_logprobs)


def truncated_importance(log_ratios: Tensor, cap: float) -> Tensor:
    """`min(p / q, cap)` per token, q being what the sampler reported: truncated weights.

    "Truncated importance sampling" between an engine and its trainer (Yao et al., 2025). Equal
    log-probs give exactly 1.

    >>> truncated_importance(torch.tensor([0.0, 2.0, -2.0]), 2.0).tolist()
    [1.0, 2.0, 0.135...]
    """
    return log_ratios.exp().clamp(max=cap)


def masked_importance(log_ratios: Tensor, cap: float) -> Tensor:
    """`p / q` where it lies within `1 / cap` and `cap`, else 0: tokens too far off are left out.

    >>> masked_importance(torch.tensor([0.0, 2.0, -2.0, 0.5]), 2.0).tolist()
    [1.0, 0.0, 0.0, 1.648...]
    """
    ratio = log_ratios.exp()
    is_close = (ratio <= cap) & (ratio >= 1.0 / cap)
    return torch.where(is_close, ratio, 0.0)


LOG_RATIOS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": log_ratio,
    "sequence": sequence_log_ratio,
}
SURROGATES: dict[str, SurrogateFunction] = {
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
}
# (log-probs, reference log-probs, log-ratios to the old log-probs) -> KL per token.
KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "k3_weighted": kl_k3_weighted,
}
IMPORTANCE_WEIGHTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "truncate": truncated_importance,
    "mask": masked_importance,
}
