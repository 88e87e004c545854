"""Losses: the four quadrants of the clip, the KL estimator, finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grouper.algorithms.losses import MAX_LOG_RATIO, clipped, kl_k3, log_ratio, nll


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
    value = clipped(logs, logs, torch.tensor([advantage], dtype=torch.float64), Bounds())
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
    assert torch.isfinite(clipped(log_ratio(*far), far[0], torch.tensor([-1.0]), Bounds())).all()
    assert torch.isfinite(kl_k3(far[1], far[0])).all()


@pytest.mark.parametrize(
    "loss",
    [
        nll,
        lambda x: clipped(log_ratio(x, _OLD), x, _A, Bounds()),
        lambda x: kl_k3(x, torch.tensor([-1.5, -0.3, -2.0]).double()),
    ],
    ids=["nll", "clipped", "kl_k3"],
)
def test_gradients_match_finite_differences(loss: object) -> None:
    point = torch.tensor([-1.2, -1.7, -0.8], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (point,), eps=1e-6, atol=1e-8)


_A: Tensor = torch.tensor([0.7, -1.1, 0.4]).double()
