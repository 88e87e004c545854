"""Advantages: hand-worked numbers, grouping by id, exact zeros, gradients of nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grouper.algorithms.advantages import ADVANTAGES, standardised

REWARDS = st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.2, -6.5]), min_size=1, max_size=24)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_give_exactly_zero(name: str) -> None:
    # The mean of eight times 0.7 is not 0.7 in floating point (T13).
    rewards = torch.full((8,), 0.7)
    assert ADVANTAGES[name](rewards, torch.zeros(8, dtype=torch.int64)).tolist() == [0.0] * 8


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_of_one_gets_zero(name: str) -> None:
    assert ADVANTAGES[name](torch.tensor([3.0]), torch.tensor([5])).tolist() == [0.0]


@pytest.mark.parametrize("name", ADVANTAGES)
@given(rewards=REWARDS, data=st.data())
def test_rows_need_not_be_adjacent(name: str, rewards: list[float], data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards)))
    order = data.draw(st.permutations(range(len(rewards))))
    values = torch.tensor(rewards, dtype=torch.float64)
    ids = torch.tensor(groups)
    straight = ADVANTAGES[name](values, ids)
    shuffled = ADVANTAGES[name](values[list(order)], ids[list(order)])
    torch.testing.assert_close(shuffled, straight[list(order)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(rewards=REWARDS)
def test_advantages_of_a_group_sum_to_zero(name: str, rewards: list[float]) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    total = ADVANTAGES[name](values, torch.zeros(len(rewards), dtype=torch.int64)).sum()
    assert abs(float(total)) < 1e-9


def test_the_standard_deviation_is_the_sample_one() -> None:
    # T12: (1, 0, 0, 0): mean 0.25, sample std 0.5.
    advantages = standardised(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    assert advantages.tolist() == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3, rel=1e-12)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must both be \[rows\]"):
        standardised(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
