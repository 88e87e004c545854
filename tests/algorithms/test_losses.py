"""Losses: the four quadrants of the clip, the KL estimator, finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grouper.algorithms.losses import (
    IMPORTANCE_WEIGHTS,
    KL_ESTIMATORS,
    MAX_LOG_RATIO,
    SURROGATES,
    Bounds,
    SurrogateFunction,
    beyond_binary_kl,
    cispo,
    dppo_kl,
    dppo_tv,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_weighted,
    log_ratio,
    masked_importance,
    nll,
    policy_gradient,
    ppo_clip,
    sapo,
    sequence_log_ratio,
    truncated_importance,
)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # Inside the bounds the slope is -A; outside it is 0 exactly where clipping protects.
        (1.0, 1.0, -1.0, -1.0),
        (1.5, 1.0, -1.28, 0.0),
        (0.5, 1.0, -0.5, -1.0),
        (1.0, -1.0, 1.0, 1.0),
        (1.5, -1.0, 1.5, 1.0),
        (0.5, -1.0, 0.8, 0.0),
    ],
)
def test_clip_quadrants(ratio: float, advantage: float, loss: float, slope: float) -> None:
    logs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    value = ppo_clip(logs, logs, torch.tensor([advantage], dtype=torch.float64), Bounds())
    value.sum().backward()
    assert float(value) == pytest.approx(loss)
    # d loss / d log ratio = slope * ratio.
    assert logs.grad is not None
    assert float(logs.grad) == pytest.approx(slope * ratio)


def test_k3_is_unbiased_on_a_five_token_vocabulary() -> None:
    policy = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    reference = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)
    exact = float((policy * (policy / reference).log()).sum())
    estimate = float((policy * kl_k3(policy.log(), reference.log())).sum())
    assert estimate == pytest.approx(exact, rel=1e-12)
    assert (kl_k3(policy.log(), reference.log()) >= 0).all()


def test_k3_is_exactly_zero_where_both_agree() -> None:
    values = torch.tensor([-0.1, -7.3, -50.0])
    assert kl_k3(values, values.clone()).tolist() == [0.0, 0.0, 0.0]


def test_a_log_ratio_of_a_hundred_stays_finite() -> None:
    far = torch.tensor([0.0]), torch.tensor([-100.0])
    assert float(log_ratio(*far)) == MAX_LOG_RATIO
    assert torch.isfinite(ppo_clip(log_ratio(*far), far[0], torch.tensor([-1.0]), Bounds())).all()
    assert torch.isfinite(kl_k3(far[1], far[0])).all()


_OLD: Tensor = torch.tensor([[-1.0, -2.0, -0.5]]).double()
_A: Tensor = torch.tensor([[0.7, -1.1, 0.4]]).double()
_MASK = torch.tensor([[True, True, False]])
_BOUNDS = Bounds(low=0.2, high=0.28, dual=3.0)

GRADIENTS = {
    "nll": nll,
    "ppo_clip": lambda x: ppo_clip(log_ratio(x, _OLD), x, _A, _BOUNDS),
    "ppo_clip sequence": lambda x: ppo_clip(sequence_log_ratio(x, _OLD, _MASK), x, _A, _BOUNDS),
    # The ratio carries no gradient: what is differentiated is the log-prob alone.
    "cispo": lambda x: cispo(_OLD * 0.1, x, _A, _BOUNDS),
    "policy_gradient": lambda x: policy_gradient(_OLD, x, _A, _BOUNDS),
    "kl_k1": lambda x: kl_k1(x, _OLD),
    "kl_k2": lambda x: kl_k2(x, _OLD),
    "kl_k3": lambda x: kl_k3(x, _OLD),
    "kl_k3_weighted": lambda x: kl_k3_weighted(x, _OLD, log_ratio(x, _A)),
    "sequence_log_ratio": lambda x: sequence_log_ratio(x, _OLD, _MASK),
    "truncated_importance": lambda x: truncated_importance(x - _OLD, 3.0),
    "masked_importance": lambda x: masked_importance(x - _OLD, 3.0),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_match_finite_differences(name: str) -> None:
    point = torch.tensor([[-1.2, -1.7, -0.8]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(GRADIENTS[name], (point,), eps=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", SURROGATES)
def test_on_policy_every_surrogate_is_the_policy_gradient(name: str) -> None:
    """At a ratio of 1 all of them push with `-A * d log p`."""
    logprobs = torch.tensor([-0.3, -2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.7, -1.3], dtype=torch.float64)
    ratios = log_ratio(logprobs, logprobs.detach())
    SURROGATES[name](ratios, logprobs, advantages, Bounds()).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx((-advantages).tolist())


def test_the_dual_clip_ends_the_gradient_of_a_hopeless_token() -> None:
    """T21: where A < 0 and the ratio is far above, the plain loss pushes without end."""
    logs = torch.tensor([math.log(10.0)], dtype=torch.float64, requires_grad=True)
    bad = torch.tensor([-2.0], dtype=torch.float64)
    plain = ppo_clip(logs, logs, bad, Bounds())
    assert float(plain) == pytest.approx(20.0)
    dual = ppo_clip(logs, logs, bad, Bounds(dual=3.0))
    assert float(dual) == pytest.approx(6.0)
    (gradient,) = torch.autograd.grad(dual.sum(), logs)
    assert float(gradient) == 0.0
    # Below the bound, and where A > 0, it changes nothing.
    near = torch.tensor([math.log(2.0)], dtype=torch.float64)
    for advantage in (bad, -bad):
        same = ppo_clip(near, near, advantage, Bounds(dual=3.0))
        assert same.equal(ppo_clip(near, near, advantage, Bounds()))


def test_cispo_never_silences_a_token() -> None:
    """Far outside the bounds the clipped surrogate has no gradient, CISPO that of the bound."""
    logprobs = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    ratios = log_ratio(logprobs, torch.tensor([-4.0]).double())
    loss = cispo(ratios, logprobs, torch.tensor([2.0]).double(), Bounds(low=1.0, high=4.0))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs, retain_graph=True)
    assert float(gradient) == pytest.approx(-5.0 * 2.0)
    silent = ppo_clip(ratios, logprobs, torch.tensor([2.0]).double(), Bounds(high=4.0))
    assert float(torch.autograd.grad(silent.sum(), logprobs)[0]) == 0.0


def test_the_sequence_ratio_is_the_geometric_mean_of_the_token_ratios() -> None:
    new = torch.tensor([[-1.0, -0.5, -9.0], [-2.0, -9.0, -9.0]])
    old = torch.tensor([[-1.2, -1.5, 0.0], [-1.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = sequence_log_ratio(new, old, mask).exp()
    tokens = log_ratio(new, old, mask).exp()
    assert found[0].tolist() == pytest.approx([float((tokens[0, 0] * tokens[0, 1]).sqrt())] * 3)
    assert found[1].tolist() == pytest.approx([float(tokens[1, 0])] * 3)
    # A row without a target has a ratio of 1, not NaN.
    assert sequence_log_ratio(new, old, torch.zeros_like(mask)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_every_estimator_is_zero_where_both_agree_and_finite_far_apart(name: str) -> None:
    """T22, T23."""
    values, far = torch.tensor([-0.1, -7.3, -50.0]), torch.tensor([-100.0, 0.0])
    same = KL_ESTIMATORS[name](values, values.clone(), torch.full((3,), MAX_LOG_RATIO))
    assert same.tolist() == [0.0, 0.0, 0.0]
    apart = KL_ESTIMATORS[name](far, far.flip(0), torch.full((2,), MAX_LOG_RATIO))
    assert torch.isfinite(apart).all()


_POLICY = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
_REFERENCE = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)


def test_k1_is_unbiased_on_a_five_token_vocabulary() -> None:
    exact = float((_POLICY * (_POLICY / _REFERENCE).log()).sum())
    estimate = float((_POLICY * kl_k1(_POLICY.log(), _REFERENCE.log())).sum())
    assert estimate == pytest.approx(exact, rel=1e-12)


RIGHT = {"k1": False, "k2": True, "k3": False, "k3_weighted": True}


@pytest.mark.parametrize(("name", "right"), RIGHT.items())
def test_which_estimator_has_the_gradient_of_the_kl(name: str, right: bool) -> None:
    """T22: over samples of the policy, k2's gradient is that of the KL and k1's is zero.

    k3's is that of the KL the other way round; with the ratio as its weight it is the KL's.
    """
    logits = _POLICY.log().clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - _REFERENCE.log())).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    ratios = logprobs - _POLICY.log()
    sampled = (_POLICY * KL_ESTIMATORS[name](logprobs, _REFERENCE.log(), ratios)).sum()
    (found,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    assert torch.allclose(found, wanted, atol=1e-12) == right
    if name == "k1":
        assert float(found.abs().max()) < 1e-12
    if name == "k3":
        backwards = (_REFERENCE * (_REFERENCE.log() - logprobs)).sum()
        (other,) = torch.autograd.grad(backwards, logits)
        torch.testing.assert_close(found, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", IMPORTANCE_WEIGHTS)
def test_without_a_gap_every_importance_weight_is_exactly_one(name: str) -> None:
    """T27."""
    assert IMPORTANCE_WEIGHTS[name](torch.zeros(4), 2.0).tolist() == [1.0] * 4


def test_importance_weights_are_bounded_per_token() -> None:
    """T27: a small gap a token does not add up to a huge weight over a long row."""
    gaps = torch.full((100,), 0.012)
    assert float(gaps.sum().exp()) > 3
    for weigh in IMPORTANCE_WEIGHTS.values():
        assert float(weigh(gaps, 2.0).max()) == pytest.approx(math.exp(0.012))
    far = torch.tensor([5.0, -5.0])
    assert truncated_importance(far, 2.0).tolist() == pytest.approx([2.0, math.exp(-5)])
    assert masked_importance(far, 2.0).tolist() == [0.0, 0.0]


def test_a_soft_gate_has_the_slope_of_the_ratio_at_one() -> None:
    """There SAPO's gradient is that of the ratio itself; further away it fades on both sides."""
    for advantage in (1.0, -1.0):
        slopes = []
        for ratio in (0.2, 1.0, 4.0):
            logs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
            signs = torch.tensor([advantage], dtype=torch.float64)
            loss = sapo(logs, logs, signs, Bounds(gate_positive=2.0, gate_negative=3.0))
            (slope,) = torch.autograd.grad(loss.sum(), logs)
            slopes.append(float(slope) / ratio / -advantage)
        assert slopes[1] == pytest.approx(1.0)
        assert 0 < slopes[0] < 1
        assert 0 < slopes[2] < 1


@pytest.mark.parametrize("surrogate", [dppo_tv, dppo_kl])
def test_a_bound_on_probabilities_silences_in_one_direction(
    surrogate: SurrogateFunction,
) -> None:
    """A large change counts as long as it goes against the advantage; a small one always does."""
    old = torch.tensor([0.3, 0.3, 0.9, 0.9, 1e-4], dtype=torch.float64)
    now = torch.tensor([0.9, 0.9, 0.3, 0.3, 5e-4], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    logprobs = now.log().requires_grad_()
    loss = surrogate(logprobs - old.log(), logprobs, advantages, Bounds(low=0.15, high=0.15))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    is_silent = [True, False, True, False, False]
    assert (gradient == 0).tolist() == is_silent
    expected = torch.where(torch.tensor(is_silent), 0.0, -advantages * now / old)
    torch.testing.assert_close(gradient, expected)


def test_a_probability_of_one_is_finite_to_the_binary_kl() -> None:
    ones = torch.zeros(2)
    silent = beyond_binary_kl(ones, ones, torch.tensor([1.0, -1.0]), Bounds())
    assert silent.tolist() == [False, False]
