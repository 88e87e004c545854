"""Objectives: what the update minimises, as a value per token, with metrics that merge."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grouper.algorithms.losses import SURROGATES, kl_k3, log_ratio, nll
from grouper.batching import TrainBatch
from grouper.config import GRPOConfig
from grouper.policy import TokenOutputs
from grouper.types import Tally

__all__ = ["Objective", "grpo_objective", "sft_objective"]

Objective = Callable[[TokenOutputs, TrainBatch], tuple[Tensor, dict[str, Tally]]]
"""(outputs, slice) -> loss per token [R, T] and tallies over the slice's target tokens."""


def _tally(values: Tensor, mask: Tensor) -> Tally:
    """Tally of the masked values of [R, T]."""
    picked = values.detach()[mask].double()
    if not picked.numel():
        return Tally.of([])
    low, high = picked.aminmax()
    return Tally(float(picked.sum()), float(picked.numel()), float(low), float(high))


def sft_objective(outputs: TokenOutputs, batch: TrainBatch) -> tuple[Tensor, dict[str, Tally]]:
    """Negative log-likelihood of every demonstrated token."""
    loss = nll(outputs.logprobs)
    tallies = {"loss": _tally(loss, batch.mask), "entropy": _tally(outputs.entropies, batch.mask)}
    return loss, tallies


def grpo_objective(config: GRPOConfig) -> Objective:
    """The clipped surrogate with the k3 KL term of weight `beta`."""
    surrogate = SURROGATES[config.surrogate]

    def objective(outputs: TokenOutputs, batch: TrainBatch) -> tuple[Tensor, dict[str, Tally]]:
        mask = batch.mask
        # One update a batch: the old log-probs are the current ones, so the ratio is exactly 1.
        on_policy = batch.old_logprobs is None
        old = outputs.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        ratios = log_ratio(outputs.logprobs, old)
        advantages = batch.advantages[:, None].to(ratios.dtype)
        loss = surrogate(ratios, advantages, config.clip_low, config.clip_high)
        tallies = {"policy/entropy": _tally(outputs.entropies, mask)}
        if not on_policy:
            ratio = ratios.detach().exp()
            clipped = ((ratio > 1 + config.clip_high) & (advantages > 0)) | (
                (ratio < 1 - config.clip_low) & (advantages < 0)
            )
            tallies["policy/clip_fraction"] = _tally(clipped.double(), mask)
        if batch.sampler_logprobs is not None:
            gap = (outputs.logprobs - batch.sampler_logprobs).abs()
            tallies["policy/gap"] = _tally(gap, mask)
        if batch.reference_logprobs is not None:
            kl = kl_k3(outputs.logprobs, batch.reference_logprobs)
            tallies["policy/kl"] = _tally(kl, mask)
            loss = loss + config.beta * kl
        return torch.where(mask, loss, 0.0), tallies

    return objective
