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
    gate_positive: float = 1.0
    """SAPO: how steeply the gate closes where the advantage is positive."""
    gate_negative: float = 1.05
    """SAPO: the same where it is not."""


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


def sapo(log_ratios: Tensor, logprobs: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    """`-A * 4 / tau * sigmoid(tau * (rho - 1))`: a soft gate in place of the clip.

    SAPO (arXiv 2511.20347, eq. 5 and 6). The factor makes the slope 1 at `rho = 1`; further away,
    the gradient fades on both sides. `tau` is one for A > 0, and a larger one otherwise.

    >>> rho = torch.tensor([1.0, 1.0])
    >>> loss = sapo(rho.log(), rho.log(), torch.tensor([1.0, -1.0]), Bounds(gate_negative=2.0))
    >>> loss.tolist()       # 4 / tau / 2
    [-2.0, 1.0]
    """
    del logprobs
    is_positive = advantages > 0
    steepness = torch.where(is_positive, bounds.gate_positive, bounds.gate_negative)
    steepness = steepness.to(log_ratios.dtype)
    gate = torch.sigmoid(steepness * (log_ratios.exp() - 1.0)) * 4.0 / steepness
    return -gate * advantages


def _moved_too_far(distance: Tensor, moved: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    """Find tokens beyond a bound in the direction that their advantage pushes them.

    Args:
        distance: between both policies at each token, at least 0.
        moved: the change of the token's log-probability.
        advantages: broadcastable.
        bounds: `high` where the advantage is positive, `low` where it is negative.
    """
    above = (advantages > 0) & (moved > 0) & (distance > bounds.high)
    below = (advantages < 0) & (moved < 0) & (distance > bounds.low)
    return above | below


def beyond_ratio(
    log_ratios: Tensor, logprobs: Tensor, advantages: Tensor, bounds: Bounds
) -> Tensor:
    """Find tokens whose ratio lies beyond the bound that their advantage pushes them toward.

    >>> rho = torch.tensor([2.0, 2.0, 0.5])
    >>> signs = torch.tensor([1.0, -1.0, -1.0])
    >>> beyond_ratio(rho.log(), rho.log(), signs, Bounds()).tolist()
    [True, False, True]
    """
    del logprobs
    ratio = log_ratios.detach().exp()
    above = (ratio > 1.0 + bounds.high) & (advantages > 0)
    below = (ratio < 1.0 - bounds.low) & (advantages < 0)
    return above | below


def beyond_total_variation(
    log_ratios: Tensor, logprobs: Tensor, advantages: Tensor, bounds: Bounds
) -> Tensor:
    """Find tokens with `|p - p_old|` above a bound, in the direction of their advantage.

    The total variation of "this token or another one" (DPPO, arXiv 2602.04879).

    >>> p = torch.tensor([0.5, 0.02])
    >>> old = torch.tensor([0.2, 0.01])         # the second ratio is 2, the change only 0.01
    >>> up = torch.ones(2)
    >>> beyond_total_variation((p / old).log(), p.log(), up, Bounds(high=0.15)).tolist()
    [True, False]
    """
    now = logprobs.detach().exp()
    old = (logprobs - log_ratios).detach().exp()
    return _moved_too_far((now - old).abs(), log_ratios.detach(), advantages, bounds)


def beyond_binary_kl(
    log_ratios: Tensor, logprobs: Tensor, advantages: Tensor, bounds: Bounds
) -> Tensor:
    """Find tokens with `KL(p_old || p)` of "this token or another one" above a bound.

    `p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))` (DPPO, arXiv 2602.04879).

    >>> import numpy as np
    >>> p, old = torch.tensor([0.5]), torch.tensor([0.2])
    >>> kl = 0.2 * np.log(0.2 / 0.5) + 0.8 * np.log(0.8 / 0.5)      # 0.193
    >>> bounds = [Bounds(high=kl - 1e-4), Bounds(high=kl + 1e-4)]
    >>> [beyond_binary_kl((p / old).log(), p.log(), torch.ones(1), b).item() for b in bounds]
    [True, False]
    """
    # A probability that rounds to 1 has no finite logarithm of its complement.
    most = 1.0 - torch.finfo(logprobs.dtype).eps
    now = logprobs.detach().exp().clamp(max=most)
    old = (logprobs - log_ratios).detach().exp().clamp(max=most)
    others = (1.0 - old) * (torch.log1p(-old) - torch.log1p(-now))
    distance = others - old * log_ratios.detach()
    return _moved_too_far(distance, log_ratios.detach(), advantages, bounds)


def dppo_tv(log_ratios: Tensor, logprobs: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    """`-rho * A`, 0 where `beyond_total_variation`: DPPO (arXiv 2602.04879).

    The bound is on the change of a probability and not on its ratio, which is large for rare tokens
    that have hardly changed.

    >>> p = torch.tensor([0.5, 0.02])
    >>> old = torch.tensor([0.2, 0.01])
    >>> loss = dppo_tv((p / old).log(), p.log(), torch.ones(2), Bounds(high=0.15))
    >>> [round(value, 3) for value in loss.abs().tolist()]
    [0.0, 2.0]
    """
    is_silent = beyond_total_variation(log_ratios, logprobs, advantages, bounds)
    return torch.where(is_silent, 0.0, -log_ratios.exp() * advantages)


def dppo_kl(log_ratios: Tensor, logprobs: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    """`-rho * A`, 0 where `beyond_binary_kl`: DPPO (arXiv 2602.04879).

    >>> p = torch.tensor([0.5, 0.02])
    >>> old = torch.tensor([0.2, 0.01])
    >>> loss = dppo_kl((p / old).log(), p.log(), torch.ones(2), Bounds(high=0.05))
    >>> [round(value, 3) for value in loss.abs().tolist()]
    [0.0, 2.0]
    """
    is_silent = beyond_binary_kl(log_ratios, logprobs, advantages, bounds)
    return torch.where(is_silent, 0.0, -log_ratios.exp() * advantages)


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
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}
# As the surrogates, -> bool per token: those that `policy/clip_fraction` counts.
SILENCED: dict[str, SurrogateFunction] = {
    **dict.fromkeys(SURROGATES, beyond_ratio),
    "dppo_tv": beyond_total_variation,
    "dppo_kl": beyond_binary_kl,
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
