"""Weightings: hand-computed numbers (T17), and nothing left to normalize by (T9)."""

from __future__ import annotations

import pytest
import torch

from grouper.algorithms.weighting import WEIGHTINGS

MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "long", "short"),
    [("token_mean", 1 / 5, 1 / 5), ("sequence_mean", 1 / 8, 1 / 2), ("constant", 1 / 20, 1 / 20)],
)
def test_weights_by_hand(name: str, long: float, short: float) -> None:
    """A row without a target leaves numerator and denominator alike (T8)."""
    weights = WEIGHTINGS[name](MASK, 10.0)
    assert weights[0].tolist() == pytest.approx([long] * 4)
    assert weights[1].tolist() == pytest.approx([short, 0, 0, 0])
    assert weights[2].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_step_without_targets_has_zero_weights(name: str) -> None:
    weights = WEIGHTINGS[name](torch.zeros(2, 3, dtype=torch.bool), 10.0)
    assert weights.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_the_mask_is_not_written_to(name: str) -> None:
    mask = MASK.clone()
    WEIGHTINGS[name](mask, 10.0)
    assert torch.equal(mask, MASK)


def test_a_constant_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        WEIGHTINGS["constant"](MASK, 0.0)
