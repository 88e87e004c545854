"""Objectives: what the update minimises, as a value per token, with metrics that merge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grouper.algorithms.batching import TrainBatch
from grouper.algorithms.losses import (
    IMPORTANCE_WEIGHTS,
    KL_ESTIMATORS,
    RATIOS,
    SURROGATES,
    Bounds,
    log_ratio,
    nll,
)
from grouper.models.policy import TokenOutputs
from grouper.types import Tally

if TYPE_CHECKING:
    from grouper.config.schema import GRPOConfig

__all__ = ["Objective", "grpo_objective", "rehearsal_objective", "sft_objective"]

Term = Callable[[TokenOutputs, TrainBatch, dict[str, Tally]], Tensor]
"""(outputs, slice, tallies to add to) -> loss per token [R, T]."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss per token.

    `objective(outputs, slice)` gives the loss [R, T], zero off the mask, and tallies over the
    slice's target tokens.
    """

    terms: tuple[Term, ...]
    """Summed."""
    entropy_gradient: bool = False
    """Whether the entropies must carry a gradient."""

    def __call__(self, outputs: TokenOutputs, batch: TrainBatch) -> tuple[Tensor, dict[str, Tally]]:
        tallies: dict[str, Tally] = {}
        total = torch.zeros_like(outputs.logprobs)
        for term in self.terms:
            total = total + term(outputs, batch, tallies)
        # `where` before any product: what stands on padding may be anything, NaN included.
        return torch.where(batch.mask, total, 0.0), tallies


def _tally(values: Tensor, mask: Tensor) -> Tally:
    """Tally of the masked values of [R, T]."""
    picked = values.detach()[mask].double()
    if not picked.numel():
        return Tally.of([])
    low, high = picked.aminmax()
    return Tally(float(picked.sum()), float(picked.numel()), float(low), float(high))


def _nll(outputs: TokenOutputs, batch: TrainBatch, tallies: dict[str, Tally]) -> Tensor:
    loss = nll(outputs.logprobs)
    tallies["loss"] = _tally(loss, batch.mask)
    tallies["entropy"] = _tally(outputs.entropies, batch.mask)
    return loss


sft_objective = Objective((_nll,))
"""Negative log-likelihood of every demonstrated token."""


def grpo_objective(config: GRPOConfig) -> Objective:
    """The surrogate, and the KL and entropy terms where the recipe has them."""
    terms: list[Term] = [_surrogate(config)]
    if config.beta > 0 and not config.kl_in_reward:
        terms.append(_kl(config))
    if config.entropy_bonus > 0:
        terms.append(_entropy(config.entropy_bonus))
    return Objective(tuple(terms), entropy_gradient=config.entropy_bonus > 0)


def rehearsal_objective(entropy_bonus: float) -> Objective:
    """What takes as much memory as the objective of a phase, and needs nothing but tokens.

    Likelihood in place of the surrogate. The gradient of an entropy term makes the backward of
    the head hold more, so the term is there where the phase has it.
    """
    if entropy_bonus == 0:
        return sft_objective
    return Objective((_nll, _entropy(entropy_bonus)), entropy_gradient=True)


def _surrogate(config: GRPOConfig) -> Term:
    ratio_of, surrogate = RATIOS[config.ratio], SURROGATES[config.surrogate]
    bounds = Bounds(low=config.clip_low, high=config.clip_high, dual=config.dual_clip)
    importance = IMPORTANCE_WEIGHTS.get(config.importance)

    def term(outputs: TokenOutputs, batch: TrainBatch, tallies: dict[str, Tally]) -> Tensor:
        logprobs, mask = outputs.logprobs, batch.mask
        # One update a batch: the old log-probs are the current ones, so the ratio is exactly 1.
        on_policy = batch.old_logprobs is None
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        ratios = ratio_of(logprobs, old, mask)
        advantages = batch.advantages[:, None].to(ratios.dtype)
        loss = surrogate(ratios, logprobs, advantages, bounds)
        tallies["trained/entropy"] = _tally(outputs.entropies, mask)
        tallies["trained/logprob"] = _tally(logprobs, mask)
        if not on_policy:
            ratio = ratios.detach().exp()
            tallies["policy/ratio"] = _tally(ratio, mask)
            clipped = _outside(ratio, advantages, bounds)
            tallies["policy/clip_fraction"] = _tally(clipped.double(), mask)
        if batch.sampler_logprobs is not None:
            difference = log_ratio(old, batch.sampler_logprobs)
            tallies["sampler_logprob_diff"] = _tally(difference.abs(), mask)
            if importance is not None:
                weights = importance(difference, config.importance_cap)
                tallies["policy/importance"] = _tally(weights, mask)
                loss = weights * loss
        return loss

    return term


def _outside(ratio: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    """Where the ratio is beyond the bound that its advantage pushes it towards."""
    above = (ratio > 1 + bounds.high) & (advantages > 0)
    return above | ((ratio < 1 - bounds.low) & (advantages < 0))


def _kl(config: GRPOConfig) -> Term:
    estimate = KL_ESTIMATORS[config.kl]

    def term(outputs: TokenOutputs, batch: TrainBatch, tallies: dict[str, Tally]) -> Tensor:
        assert batch.reference_logprobs is not None, "a KL term needs its reference"
        kl = estimate(outputs.logprobs, batch.reference_logprobs)
        tallies["policy/kl"] = _tally(kl, batch.mask)
        return config.beta * kl

    return term


def _entropy(bonus: float) -> Term:
    def term(outputs: TokenOutputs, *_: object) -> Tensor:
        return -bonus * outputs.entropies

    return term
