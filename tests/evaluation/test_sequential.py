"""Intervals at every look: their coverage, whatever made the experiment stop."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grouper.evaluation.sequential import (
    MOST_SEEDS,
    sequential_interval,
    share_of_a_look,
    two_sided_p,
)
from grouper.evaluation.statistics import t_interval, t_quantile


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 10, 29])
def test_the_closed_form_agrees_with_the_beta_function(degrees: int) -> None:
    for p in (0.6, 0.9, 0.975, 0.9999):
        t = t_quantile(p, degrees)
        assert two_sided_p(np.array([t]), degrees)[0] == pytest.approx(2 * (1 - p), rel=1e-6)


def test_more_looks_have_smaller_shares() -> None:
    shares = [share_of_a_look(most) for most in (2, 3, 5, 10, 20)]
    assert shares[0] == 0.05
    assert shares == sorted(shares, reverse=True)
    # Looks depend on each other, so that a share is more than Bonferroni's.
    for most, share in zip((3, 5, 10, 20), shares[1:], strict=True):
        assert share > 0.05 / (most - 1)


def test_one_look_is_students() -> None:
    assert sequential_interval([0.1, 0.3], 2) == t_interval([0.1, 0.3])
    assert sequential_interval([0.1], 5) == t_interval([0.1])


@pytest.mark.parametrize(("values", "most"), [([0.1] * 4, 3), ([0.1], 1), ([0.1], MOST_SEEDS + 1)])
def test_impossible_numbers_of_seeds_are_errors(values: list[float], most: int) -> None:
    with pytest.raises(ValueError, match="which may be 2 to"):
        sequential_interval(values, most)


def stopped(
    random: np.random.Generator, effect: float, spread: float, most: int, until: str
) -> tuple[bool, bool, int]:
    """Run one experiment: whether its interval covers the effect, leaves out 0; and its seeds."""
    values = random.normal(effect, spread, most)
    for n in range(2, most + 1):
        interval = intervals(values[:n], most)
        decided = not interval[0] <= 0 <= interval[1]
        narrow = interval[1] - interval[0] < 0.06
        if (decided if until == "verdict" else narrow) or n == most:
            return interval[0] <= effect <= interval[1], decided, n
    raise AssertionError


_QUANTILES: dict[tuple[int, int], float] = {}


def intervals(values: np.ndarray, most: int) -> tuple[float, float]:
    """The same as `sequential_interval`, without a root search for each."""
    n = len(values)
    key = (n, most)
    if key not in _QUANTILES:
        exact = sequential_interval(values.tolist(), most)
        half = (exact.high - exact.low) / 2
        _QUANTILES[key] = half / (values.std(ddof=1) / math.sqrt(n))
    half = _QUANTILES[key] * values.std(ddof=1) / math.sqrt(n)
    return values.mean() - half, values.mean() + half


@pytest.mark.parametrize("until", ["verdict", "narrow"])
@pytest.mark.parametrize("most", [3, 5, 10])
@pytest.mark.parametrize("effect", [0.0, 0.01, 0.03])
def test_coverage_whatever_made_it_stop(effect: float, most: int, until: str) -> None:
    """Seeds differ by two points: at 4,000 experiments the error of a coverage is 0.35 points."""
    random = np.random.default_rng([7, most])
    outcomes = [stopped(random, effect, 0.02, most, until) for _ in range(4_000)]
    coverage = np.mean([covers for covers, _, _ in outcomes])
    assert coverage >= 0.94
    if until == "verdict" and effect == 0:
        assert coverage <= 0.96, "not wider than it has to be"
        assert np.mean([decided for _, decided, _ in outcomes]) <= 0.06


def test_looking_at_ordinary_intervals_is_wrong_much_more_often() -> None:
    values = np.random.default_rng(3).normal(0.0, 0.02, (4_000, 10))
    wrong = np.zeros(len(values), dtype=bool)
    for n in range(2, 11):
        seeds = values[:, :n]
        half = t_quantile(0.975, n - 1) * seeds.std(1, ddof=1) / math.sqrt(n)
        wrong |= np.abs(seeds.mean(1)) > half
    assert wrong.mean() > 0.15
