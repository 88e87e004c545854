"""The statistics against SciPy and statsmodels on 1,000 random tables, and simulated coverage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from gates import package

from grouper.evaluation.statistics import (
    EXACT_FLIPS,
    mcnemar_p_value,
    mean_interval,
    paired_comparison,
    pass_at_k,
    sign_flip_p_value,
    t_interval,
    t_quantile,
    wilson_interval,
)

TABLES = 1_000
Draw = Callable[[np.random.Generator, int], np.ndarray]


@pytest.fixture(scope="module")
def scipy_stats():
    return package("scipy.stats", extra="dev")


def test_wilson_is_that_of_statsmodels():
    proportion = package("statsmodels.stats.proportion", extra="dev")
    rng = np.random.default_rng(0)
    for _ in range(TABLES):
        n = int(rng.integers(1, 2_000))
        count, confidence = int(rng.integers(0, n + 1)), float(rng.choice([0.8, 0.95, 0.99]))
        low, high = proportion.proportion_confint(count, n, 1 - confidence, method="wilson")
        mine = wilson_interval(count, n, confidence)
        assert (mine.low, mine.high) == pytest.approx((low, high), rel=1e-12, abs=1e-12)


def test_mcnemar_is_that_of_statsmodels():
    tables = package("statsmodels.stats.contingency_tables", extra="dev")
    rng = np.random.default_rng(1)
    for _ in range(TABLES):
        table = rng.integers(0, rng.integers(1, 200), (2, 2))
        theirs = tables.mcnemar(table, exact=True).pvalue
        mine = mcnemar_p_value(int(table[0, 1]), int(table[1, 0]))
        assert mine == pytest.approx(theirs, rel=1e-10)


def test_sign_flips_are_scipy_s_permutation_test(scipy_stats):
    rng = np.random.default_rng(2)
    for _ in range(TABLES):
        size = int(rng.integers(2, 9))
        differences = rng.integers(-4, 5, size) / 4
        theirs = scipy_stats.permutation_test(
            (differences,),
            lambda d, axis: d.mean(axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=np.inf,
        ).pvalue
        assert sign_flip_p_value(list(differences)) == pytest.approx(theirs, abs=1e-12)


def test_drawn_sign_flips_are_near_scipy_s(scipy_stats):
    rng = np.random.default_rng(3)
    for _ in range(5):
        differences = rng.integers(-4, 6, EXACT_FLIPS + 2) / 4
        theirs = scipy_stats.permutation_test(
            (differences,),
            lambda d, axis: d.mean(axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=np.inf,
        ).pvalue
        assert sign_flip_p_value(list(differences)) == pytest.approx(theirs, abs=0.02)


def test_quantiles_and_intervals_of_t_are_scipy_s(scipy_stats):
    rng = np.random.default_rng(4)
    for degrees in (*range(1, 60), 100, 999, 5_000):
        for p in (0.9, 0.975, 0.995):
            assert t_quantile(p, degrees) == pytest.approx(scipy_stats.t.ppf(p, degrees), rel=1e-8)
    for _ in range(TABLES):
        values = rng.normal(size=int(rng.integers(2, 40)))
        theirs = scipy_stats.ttest_1samp(values, 0).confidence_interval(0.95)
        mine = t_interval(list(values))
        assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), rel=1e-8)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_pass_at_k_by_enumeration(n):
    for outcomes in itertools.product((0, 1), repeat=n):
        for k in range(1, n + 1):
            subsets = [max(subset) for subset in itertools.combinations(outcomes, k)]
            expected = sum(subsets) / len(subsets)
            assert pass_at_k(n, sum(outcomes), k) == pytest.approx(expected, abs=1e-14)


# --- coverage ------------------------------------------------------------------------------------


def beta(a: float, b: float) -> tuple[Draw, float]:
    return (lambda rng, n: rng.beta(a, b, n)), a / (a + b)


def one_of(*rates: float) -> tuple[Draw, float]:
    return (lambda rng, n: rng.choice(rates, n)), math.fsum(rates) / len(rates)


def each_of(*rates: float) -> tuple[Draw, float]:
    return (lambda rng, n: np.resize(rates, n)), math.fsum(rates) / len(rates)


# Problems, samples of each, rates of the problems: an accuracy.
ACCURACIES: dict[str, tuple[int, int, tuple[Draw, float]]] = {
    "few that are ever right": (30, 8, beta(0.05, 0.95)),
    "many of them": (200, 8, beta(0.05, 0.95)),
    "easy, even and hard": (30, 8, one_of(0.05, 0.5, 0.95)),
    "a competition": (30, 16, beta(0.3, 0.7)),
    "anything": (100, 4, beta(1, 1)),
    "one sample": (500, 1, one_of(0.35)),
    "a small set": (10, 4, beta(1, 1)),
}
# Rates before -> rates after, of the same problems: a difference.
Change = Callable[[np.ndarray], np.ndarray]
DIFFERENCES: dict[str, tuple[int, int, tuple[Draw, float], Change]] = {
    "three problems that did not change": (3, 8, each_of(0.3, 0.5, 0.7), lambda p: p),
    "ten that did not": (10, 8, beta(1, 1), lambda p: p),
    "a competition, better": (30, 16, beta(0.3, 0.7), lambda p: 1 - (1 - p) ** 2),
    "four samples, better": (80, 4, one_of(0.3), lambda p: p + 0.2),
    "one sample, better": (300, 1, beta(1, 1), lambda p: p**0.5),
}
REPEATS = 2_000


@pytest.mark.slow
@pytest.mark.parametrize("setting", ACCURACIES)
def test_the_interval_of_an_accuracy_covers_the_truth(setting):
    problems, samples, (draw, truth) = ACCURACIES[setting]
    rng, hits = np.random.default_rng(7), 0
    for _ in range(REPEATS):
        right = rng.random((problems, samples)) < draw(rng, problems)[:, None]
        hits += mean_interval(right.astype(float).tolist()).covers(truth)
    assert 0.93 <= hits / REPEATS <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("setting", DIFFERENCES)
def test_the_interval_of_a_difference_covers_the_truth(setting):
    problems, samples, (draw, _), change = DIFFERENCES[setting]
    rng, hits = np.random.default_rng(8), 0
    truth = float(np.mean(change(many := draw(rng, 10**6)) - many))
    for _ in range(REPEATS):
        rates = draw(rng, problems)
        before, after = (rng.binomial(samples, p) / samples for p in (rates, change(rates)))
        found = paired_comparison(before, after, samples=samples)
        hits += found.interval.covers(truth)
    assert 0.93 <= hits / REPEATS <= 0.97


def test_what_did_not_change_is_still_uncertain():
    """K9: an interval of no width says that there is nothing to find out."""
    interval = paired_comparison([0.25, 0.5, 1.0], [0.25, 0.5, 1.0], samples=8).interval
    assert interval.low == pytest.approx(-4.3027 / 24, abs=1e-4)
    assert interval.high == -interval.low
