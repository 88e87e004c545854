"""Objectives: the parts of a loss, put together as the recipe says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import make_batch, tiny_model

from grouper.algorithms.batching import TrainBatch
from grouper.config.schema import GRPOConfig
from grouper.models.policy import Policy, TokenOutputs
from grouper.training.optimizers import make_optimizer
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import grpo_objective, update


def outputs_of(batch: TrainBatch, seed: int = 0) -> TokenOutputs:
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(batch.mask.shape, generator=generator)
    return TokenOutputs(logprobs.requires_grad_(), torch.rand(batch.mask.shape))


def config(**settings: Any) -> GRPOConfig:
    return GRPOConfig(**{"require_correct_in_group": False, **settings})


def test_nothing_off_the_mask_reaches_the_loss() -> None:
    """T26: NaN and infinity on padding stay there."""
    batch = make_batch()
    outputs = outputs_of(batch)
    bad = torch.where(batch.mask, outputs.logprobs.detach(), torch.nan).requires_grad_()
    objective = grpo_objective(config(beta=0.1, importance="truncate"))
    batch = replace(batch, reference_logprobs=torch.where(batch.mask, -1.0, -torch.inf))
    loss, tallies = objective.loss(TokenOutputs(bad, outputs.entropies), batch)
    loss.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert torch.isfinite(loss).all()
    assert bad.grad is not None
    assert torch.isfinite(bad.grad[batch.mask]).all()
    assert torch.isfinite(torch.tensor([tally.sum for tally in tallies.values()])).all()


def test_the_kl_term_is_added_once() -> None:
    """T22."""
    batch = make_batch()
    outputs = outputs_of(batch)
    batch = replace(batch, reference_logprobs=outputs.logprobs.detach() - 0.5)
    plain, _ = grpo_objective(config()).loss(outputs, batch)
    for name, value in {"k2": 0.125, "k3": torch.tensor(-0.5).exp().item() - 0.5}.items():
        with_kl, tallies = grpo_objective(config(beta=0.3, kl=name)).loss(outputs, batch)
        added = ((with_kl - plain) / batch.weights)[batch.mask]
        assert added.tolist() == pytest.approx([0.3 * value] * len(added), abs=1e-6)
        assert tallies["policy/kl"].mean == pytest.approx(value, abs=1e-6)
    in_reward = grpo_objective(config(beta=0.3, kl="k1"))
    assert in_reward.loss(outputs, batch)[0].equal(plain)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_weights_are_of_the_trainer_over_the_sampler(mode: str) -> None:
    batch = make_batch()
    outputs = outputs_of(batch)
    gap = torch.zeros(batch.mask.shape)
    gap[:, 0] = 5.0  # the trainer finds the first token of every row far more likely
    batch = replace(batch, sampler_logprobs=outputs.logprobs.detach() - gap)
    plain, _ = grpo_objective(config()).loss(outputs, batch)
    weighed, tallies = grpo_objective(config(importance=mode)).loss(outputs, batch)
    factor = {"truncate": 2.0, "mask": 0.0}[mode]
    torch.testing.assert_close(weighed[:, 0], factor * plain[:, 0])
    assert weighed[:, 1:].equal(plain[:, 1:])
    assert tallies["policy/importance"].min == min(1.0, factor)


def test_the_clip_fraction_counts_what_the_clip_silences() -> None:
    batch = make_batch()
    outputs = outputs_of(batch)
    batch = replace(batch, old_logprobs=outputs.logprobs.detach() - 1.0)
    loss, tallies = grpo_objective(config()).loss(outputs, batch)
    (gradient,) = torch.autograd.grad(loss.sum(), outputs.logprobs)
    silent = (gradient == 0) & batch.mask & (batch.advantages[:, None] != 0)
    assert tallies["policy/clip_fraction"].sum == int(silent.sum()) > 0


def test_the_entropy_bonus_raises_entropy() -> None:
    """Through the real head: advantages of zero leave the bonus alone to act."""
    policy = Policy(tiny_model("qwen3"))
    batch = make_batch()
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    settings = config(entropy_bonus=0.1, optimizer={"learning_rate": 1e-3})
    optimizer = make_optimizer(policy, settings.optimizer)
    entropies = []
    for _ in range(5):
        result = update(
            ParallelPolicy(policy),
            batch,
            grpo_objective(settings),
            optimizer,
            scale=1.0,
            max_grad_norm=1.0,
            token_budget=1000,
        )
        entropies.append(result.tallies["trained/entropy"].mean)
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.01


def test_log_probs_and_entropy_of_what_is_trained_are_reported() -> None:
    batch = make_batch()
    outputs = outputs_of(batch)
    _, tallies = grpo_objective(config()).loss(outputs, batch)
    assert outputs.entropies is not None
    for name, values in (("logprob", outputs.logprobs.detach()), ("entropy", outputs.entropies)):
        wanted = float(values[batch.mask].double().mean())
        assert tallies[f"trained/{name}"].mean == pytest.approx(wanted)
