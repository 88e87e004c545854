"""What the gradient may not depend on: row splits, padding, layout, order, rows without signal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import (
    make_batch,
    make_group,
    one_step,
    taught_step,
    tiny_model,
    tiny_teachers,
    with_exact_norms,
)
from torch import Tensor

from grouper.algorithms.batching import TrainBatch
from grouper.algorithms.weighting import WEIGHTINGS, token_mean
from grouper.config.schema import GRPOConfig
from grouper.models.policy import Policy
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import Objective, accumulate_gradient, grpo_objective, sft_objective

GRPO = grpo_objective(GRPOConfig())
OBJECTIVES = {"sft": sft_objective, "grpo": GRPO}


def gradient(
    batch: TrainBatch,
    objective: Objective = GRPO,
    *,
    budget: int = 10_000,
    native: bool = True,
    family: str = "qwen3",
    exact: bool = True,
) -> Tensor:
    """The gradient in float64; `exact` replaces the norms that compute in float32."""
    model = tiny_model(family, dtype=torch.float64, scale=2.0)
    policy = Policy(with_exact_norms(model) if exact else model, native=native)
    double = batch.to("cpu", torch.float64)
    accumulate_gradient(ParallelPolicy(policy), double, objective, token_budget=budget)
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("budget", [1, 9, 17, 33])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_row_splits(family: str, budget: int, name: str, weighting: str) -> None:
    """T16: uneven micro-batches give the gradient of the whole step, relative 1e-12."""
    batch = make_batch(dtype=torch.float64, weighting=WEIGHTINGS[weighting], constant=7.0)
    whole = gradient(batch, OBJECTIVES[name], family=family)
    split = gradient(batch, OBJECTIVES[name], family=family, budget=budget)
    assert relative(split, whole) < 1e-12


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("native", [True, False], ids=["shared-prompts", "padded"])
@pytest.mark.parametrize(
    ("kl", "top_k"), [("reverse", 0), ("forward", 0), ("reverse", 5), ("sampled", 0)]
)
def test_splits_of_three_streams(kl: str, top_k: int, native: bool, weighting: str) -> None:
    """Rewards, worked solutions and two teachers: each has one denominator for the whole step."""
    batch = taught_step(WEIGHTINGS[weighting], constant=7.0)
    objective = grpo_objective(GRPOConfig(), guide=tiny_teachers(kl, top_k).guide)
    whole = gradient(batch, objective, native=native)
    for budget in (1, 13, 29):
        split = gradient(batch, objective, native=native, budget=budget)
        assert relative(split, whole) < 1e-12


def test_each_stream_has_its_own_part_of_the_gradient() -> None:
    """The gradient of a step is the sum of those of its streams, each alone."""
    batch = taught_step()
    assert batch.likelihood_weights is not None
    assert batch.teacher_weights is not None
    objective = grpo_objective(GRPOConfig(), guide=tiny_teachers().guide)
    parts = []
    for name in ("weights", "likelihood_weights", "teacher_weights"):
        kept = getattr(batch, name)
        assert kept.any()
        parts.append(gradient(replace(batch.without_weight(), **{name: kept}), objective))
        assert float(parts[-1].norm()) > 1e-4
    assert relative(parts[0] + parts[1] + parts[2], gradient(batch, objective)) < 1e-12


def test_the_stream_of_solutions_is_supervised_fine_tuning() -> None:
    """Its gradient is that of SFT on the same worked solutions, times its weight."""
    batch = taught_step()
    assert batch.is_solution is not None
    solutions = batch.select(batch.is_solution.nonzero().flatten())
    objective = grpo_objective(GRPOConfig(), guide=tiny_teachers().guide)
    assert batch.likelihood_weights is not None
    alone = replace(batch.without_weight(), likelihood_weights=batch.likelihood_weights)
    weights = token_mean(solutions.mask)
    plain = replace(solutions, weights=weights, likelihood_weights=None, teacher_weights=None)
    expected = 0.5 * gradient(plain, sft_objective)
    assert relative(gradient(alone, objective), expected) < 1e-12


@pytest.mark.parametrize("native", [True, False], ids=["shared-prompts", "padded"])
def test_row_splits_with_the_models_own_norms(native: bool) -> None:
    batch = make_batch(dtype=torch.float64)
    whole = gradient(batch, native=native, exact=False)
    split = gradient(batch, native=native, exact=False, budget=9)
    assert relative(split, whole) < 1e-6


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen2-sliding", "mistral", "gemma2", "gemma3", "gpt2"]
)
def test_shared_prompts_and_padded_rows_agree(family: str) -> None:
    batch = make_batch(dtype=torch.float64)
    shared = gradient(batch, family=family, exact=False)
    padded = gradient(batch, family=family, native=False, exact=False)
    assert relative(shared, padded) < 1e-6


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_layouts_agree_to_float64_with_exact_norms(family: str) -> None:
    batch = make_batch(dtype=torch.float64)
    shared = gradient(batch, family=family)
    assert relative(shared, gradient(batch, family=family, native=False)) < 1e-12


def test_more_padding_changes_nothing() -> None:
    batch = make_batch(dtype=torch.float64)

    def widen(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, 5))

    wide = replace(
        batch,
        prompt_ids=widen(batch.prompt_ids),
        completion_ids=widen(batch.completion_ids),
        mask=widen(batch.mask),
        weights=widen(batch.weights),
        sampler_logprobs=None,
    )
    for native in (True, False):
        assert relative(gradient(wide, native=native), gradient(batch, native=native)) < 1e-6


def test_the_order_of_groups_and_rows_changes_nothing() -> None:
    batch = make_batch(dtype=torch.float64)
    order = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(0))
    assert relative(gradient(batch.select(order)), gradient(batch)) < 1e-12


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_rows_without_signal_change_nothing_but_time(weighting: str) -> None:
    groups = [make_group(0, [1.0, 0.0], [3, 5]), make_group(1, [1.0, 1.0], [4, 6])]
    batches = [
        one_step(
            groups,
            [[1.0, -1.0], [0.0, 0.0]],
            WEIGHTINGS[weighting],
            constant=9.0,
            keep_flat=keep,
        )
        for keep in (True, False)
    ]
    kept, cut = batches
    assert (kept.rows, cut.rows) == (4, 2)
    assert relative(gradient(cut), gradient(kept)) < 1e-12


def test_dropping_a_row_equals_never_having_sampled_it() -> None:
    """T8: an unscored rollout is in no numerator and no denominator."""
    with_unscored = make_group(0, [1.0, None, 0.0], [3, 8, 5])
    rollouts = tuple(r for r in with_unscored.rollouts if r.reward.total is not None)
    without = replace(with_unscored, rollouts=rollouts)
    pair = [
        one_step([group], [[1.0, -1.0]], WEIGHTINGS["token_mean"])
        for group in (with_unscored, without)
    ]
    assert torch.equal(gradient(pair[0]), gradient(pair[1]))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_stop_token_has_a_gradient(name: str) -> None:
    """Masks come from lengths: the last token of every row moves the loss (P16)."""
    objective: Objective = OBJECTIVES[name]
    batch = make_batch(dtype=torch.float64)
    policy = Policy(tiny_model(dtype=torch.float64))
    logprobs = policy(batch).logprobs.detach().requires_grad_()
    outputs = policy(batch)
    outputs = type(outputs)(logprobs, outputs.entropies)
    per_token, _ = objective.loss(outputs, batch)
    per_token.sum().backward()
    assert logprobs.grad is not None
    last = batch.completion_lengths - 1
    assert (logprobs.grad[torch.arange(batch.rows), last] != 0).all()
    assert (logprobs.grad[~batch.mask] == 0).all()


def test_the_gradient_matches_finite_differences() -> None:
    """One direction through the whole policy, old log-probs fixed, KL on."""
    torch.manual_seed(0)
    policy = Policy(with_exact_norms(tiny_model(dtype=torch.float64, scale=2.0)))
    base = make_batch(dtype=torch.float64)
    with torch.no_grad():
        now = policy(base).logprobs
    batch = replace(base, old_logprobs=now - 0.05, reference_logprobs=now + 0.1)
    objective = grpo_objective(GRPOConfig(beta=0.1))
    accumulate_gradient(ParallelPolicy(policy), batch, objective, token_budget=10_000)
    parameters = [p for p in policy.parameters() if p.grad is not None]
    direction = [torch.randn_like(p) for p in parameters]
    gradients = [p.grad for p in parameters if p.grad is not None]
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))

    def loss_at(step: float) -> float:
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=step)
            per_token, _ = objective.loss(policy(batch), batch)
            value = float(per_token.sum())
            for p, d in zip(parameters, direction, strict=True):
                p.sub_(d, alpha=step)
        return value

    numeric = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    assert numeric == pytest.approx(slope, rel=1e-6)


def test_on_policy_ratio_is_exactly_one_at_any_temperature() -> None:
    """T2, T18: at temperature 0.5 the surrogate is minus the advantage, bit for bit."""
    batch = replace(make_batch(), temperature=0.5)
    per_token, _ = GRPO.loss(Policy(tiny_model())(batch), batch)
    expected = -batch.advantages[:, None] * batch.weights
    assert torch.equal(per_token[batch.mask], expected[batch.mask])
