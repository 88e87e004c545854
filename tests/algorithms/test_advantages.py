"""Advantages: hand-worked numbers, grouping by id, exact zeros, gradients of nothing."""

from __future__ import annotations

import itertools
import math
from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grouper.algorithms.advantages import (
    ADVANTAGES,
    STD_EPS,
    batch_standardised,
    decoupled,
    mean_baseline,
    no_baseline,
    only_best,
    pass_at_k,
    relative_to_mean,
    standardised,
)

BASELINES = sorted(set(ADVANTAGES) - {"none", "only_best"})
GROUP_BASELINES = sorted(set(ADVANTAGES) - {"none", "batch_standardised"})
# With these a group may be silent though its rewards differ.
OFTEN_SILENT = {"relative", "pass_at_k", "only_best", "zero"}
REWARDS = st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.2, -6.5]), min_size=1, max_size=24)


@pytest.mark.parametrize("name", BASELINES)
def test_equal_rewards_give_exactly_zero(name: str) -> None:
    # The mean of eight times 0.7 is not 0.7 in floating point.
    rewards = torch.full((8,), 0.7)
    assert ADVANTAGES[name](rewards, torch.zeros(8, dtype=torch.int64)).tolist() == [0.0] * 8


@pytest.mark.parametrize("name", BASELINES)
def test_a_group_of_one_gets_zero(name: str) -> None:
    assert ADVANTAGES[name](torch.tensor([3.0]), torch.tensor([5])).tolist() == [0.0]


@pytest.mark.parametrize("name", ADVANTAGES)
@given(rewards=REWARDS, data=st.data())
def test_rows_need_not_be_adjacent(name: str, rewards: list[float], data: st.DataObject) -> None:
    """Groups are told by their ids."""
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards)))
    order = data.draw(st.permutations(range(len(rewards))))
    values = torch.tensor(rewards, dtype=torch.float64)
    ids = torch.tensor(groups)
    straight = ADVANTAGES[name](values, ids)
    shuffled = ADVANTAGES[name](values[list(order)], ids[list(order)])
    torch.testing.assert_close(shuffled, straight[list(order)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", BASELINES)
@given(rewards=REWARDS)
def test_advantages_of_a_group_sum_to_zero(name: str, rewards: list[float]) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    total = ADVANTAGES[name](values, torch.zeros(len(rewards), dtype=torch.int64)).sum()
    assert abs(float(total)) < 1e-9


def test_the_standard_deviation_is_the_sample_one() -> None:
    # (1, 0, 0, 0): mean 0.25, sample std 0.5.
    advantages = standardised(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    assert advantages.tolist() == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3, rel=1e-12)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must both be \[rows\]"):
        standardised(torch.zeros(3), torch.zeros(2, dtype=torch.int64))


def test_raw_rewards_have_no_baseline() -> None:
    assert no_baseline(
        torch.tensor([0.7, 0.7, -1.0]), torch.tensor([0, 0, 1])
    ).tolist() == pytest.approx([0.7, 0.7, -1.0])


def test_the_batch_is_one_group_to_reinforce_plus_plus() -> None:
    """A flat group still learns from how the other groups did."""
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
    found = batch_standardised(rewards, groups)
    assert found.tolist() == standardised(rewards, torch.zeros(4, dtype=torch.int64)).tolist()
    assert standardised(rewards, groups).tolist() == [0.0] * 4
    assert found[0] > 0 > found[2]


@pytest.mark.parametrize("name", GROUP_BASELINES)
@given(rewards=REWARDS, others=REWARDS)
def test_another_group_changes_nothing(
    name: str, rewards: list[float], others: list[float]
) -> None:
    alone = ADVANTAGES[name](
        torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64)
    )
    together = ADVANTAGES[name](
        torch.tensor([*others, *rewards], dtype=torch.float64),
        torch.tensor([3] * len(others) + [0] * len(rewards)),
    )
    torch.testing.assert_close(together[len(others) :], alone, rtol=0, atol=1e-9)


@given(rewards=REWARDS)
def test_one_component_decoupled_is_the_plain_advantage_scaled(rewards: list[float]) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    ids = torch.zeros(len(rewards), dtype=torch.int64)
    found = decoupled(values[:, None], torch.tensor([2.0]), ids, standardised)
    plain = 2.0 * standardised(values, ids)
    spread = plain.std(correction=min(1, len(plain) - 1))
    torch.testing.assert_close(found, plain / (spread + STD_EPS), rtol=0, atol=1e-12)


def test_decoupled_components_of_different_spread_count_alike() -> None:
    """The sum of the two hides the small one; each with its own scale does not."""
    small, large = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([100.0, 100.0, 0.0, 0.0])
    ids = torch.zeros(4, dtype=torch.int64)
    apart = decoupled(torch.stack([small, large], 1), torch.ones(2), ids, standardised)
    summed = standardised(small + large, ids)
    assert float(apart[0] - apart[1]) == pytest.approx(float(apart[0] - apart[2]), rel=1e-2)
    assert float(summed[0] - summed[1]) < 0.02 * float(summed[0] - summed[2])


def test_decoupling_centred_rewards_changes_the_scale_alone() -> None:
    """The baseline of a sum is the sum of the baselines; over the step, the spread is then 1."""
    parts = torch.tensor([[1.0, 3.0], [0.0, 5.0], [0.5, -2.0]], dtype=torch.float64)
    ids = torch.zeros(3, dtype=torch.int64)
    found = decoupled(parts, torch.tensor([2.0, 0.5], dtype=torch.float64), ids, mean_baseline)
    whole = mean_baseline(parts @ torch.tensor([2.0, 0.5], dtype=torch.float64), ids)
    torch.testing.assert_close(found, whole / (whole.std() + STD_EPS), rtol=0, atol=1e-12)
    assert float(found.std()) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("name", sorted(set(GROUP_BASELINES) - OFTEN_SILENT))
@given(rewards=REWARDS, data=st.data())
def test_a_group_is_silent_exactly_when_its_rewards_are_equal(
    name: str, rewards: list[float], data: st.DataObject
) -> None:
    """A group is silent exactly when all its raw rewards are equal, whatever their scale."""
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(rewards), max_size=len(rewards)))
    values = torch.tensor(rewards, dtype=torch.float64)
    found = ADVANTAGES[name](values, torch.tensor(groups))
    for group in set(groups):
        rows = [i for i, g in enumerate(groups) if g == group]
        flat = len({rewards[i] for i in rows}) == 1
        assert (not found[rows].any()) == flat


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_the_last_bit_does_not_depend_on_the_processor(rewards: list[float]) -> None:
    """MKL's square root, which PyTorch calls, is not the one of IEEE 754 on every processor."""
    found = standardised(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards)))
    # One after the other: `sum` carries the rounding along from Python 3.12 on.
    mean = reduce(add, rewards) / len(rewards)
    squares = reduce(add, [(r - mean) ** 2 for r in rewards])
    deviation = math.sqrt(squares / (len(rewards) - 1))
    flat = len(set(rewards)) == 1
    assert found.tolist() == [0.0 if flat else (r - mean) / (deviation + 1e-4) for r in rewards]


def test_a_group_whose_mean_is_not_positive_has_no_relative_advantage() -> None:
    """The quotient would turn the sign of every advantage."""
    ids = torch.zeros(3, dtype=torch.int64)
    assert relative_to_mean(torch.tensor([0.0, -1.0, -2.0]), ids).tolist() == [0.0] * 3
    assert relative_to_mean(torch.tensor([1.0, -1.0, 0.0]), ids).tolist() == [0.0] * 3


@pytest.mark.parametrize(("right", "k"), [(1, 2), (2, 4), (5, 3), (3, 1)])
def test_the_advantage_of_pass_at_k_is_its_mean_over_all_choices(right: int, k: int) -> None:
    """Every choice of k rollouts is a draw of its own; a rollout has the mean of its choices."""
    size = 8
    rewards = torch.tensor([1.0] * right + [0.0] * (size - right))
    choices = list(itertools.combinations(range(size), k))
    scores = [float(any(row < right for row in choice)) for choice in choices]
    mean = sum(scores) / len(scores)
    deviation = math.sqrt(mean * (1 - mean))
    expected = []
    for row in range(size):
        own = [score for choice, score in zip(choices, scores, strict=True) if row in choice]
        expected.append((sum(own) / len(own) - mean) / deviation)
    found = pass_at_k(rewards, torch.zeros(size, dtype=torch.int64), k=k)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_only_the_best_positive_answers_of_a_group_count() -> None:
    rewards = torch.tensor([1.1, 1.0, 1.1, -1.0, -2.0, 0.5])
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    assert only_best(rewards, ids).tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
