"""Statistics against published values, brute force, SciPy and statsmodels, and simulation."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable

import numpy as np
import pytest
from gates import package

from grouper.evaluation import statistics as st
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


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # Newcombe 1998 (Statistics in Medicine 17, 857-872), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_the_published_table(successes, trials, low, high):
    interval = wilson_interval(successes, trials)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


@pytest.mark.parametrize("trials", [1, 2, 7, 40])
def test_wilson_bounds_solve_the_score_equation(trials):
    """Independent of the closed form: a bound p has |p_hat - p| = z sqrt(p(1-p)/n)."""
    z = 1.6448536269514722
    for successes in range(trials + 1):
        mean = successes / trials
        interval = wilson_interval(successes, trials, 0.9)
        assert 0 <= interval.low <= mean <= interval.high <= 1
        for bound in (interval.low, interval.high):
            if 0 < bound < 1:
                spread = z * math.sqrt(bound * (1 - bound) / trials)
                assert abs(mean - bound) == pytest.approx(spread, rel=1e-9)


def test_wilson_all_right_ends_exactly_at_one():
    for trials in range(1, 200):
        assert wilson_interval(trials, trials).high == 1.0
        assert wilson_interval(0, trials).low == 0.0


@pytest.mark.parametrize("bad", [(3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0), (1, 2, 0.0)])
def test_wilson_refuses_nonsense(bad):
    with pytest.raises(ValueError, match=r"successes of 2 trials|between 0 and 1"):
        wilson_interval(*bad)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_counts_subsets(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_unbiased():
    """Its mean over all outcomes of n samples is 1 - (1-p)^k, which c/n alone is not."""
    p, n, k = 0.3, 6, 4
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(7))
    assert mean == pytest.approx(1 - 0.7**4)


@pytest.mark.parametrize("bad", [(4, 1, 5), (4, 1, 0), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_refuses_counts_that_cannot_be(bad):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*bad)


# Accuracy with several samples a problem


def test_samples_that_all_agree_count_as_one():
    """Four copies of every answer are worth no more than one."""
    assert mean_interval([[1] * 4] * 3 + [[0] * 4] * 5) == wilson_interval(3, 8)


def test_independent_samples_narrow_the_interval_but_never_below_their_number():
    interval = mean_interval([[1, 0]] * 10)
    few, many = wilson_interval(9.5, 19), wilson_interval(10, 20)
    assert few.low < interval.low < many.low < many.high < interval.high < few.high


def test_all_right_stays_as_wide_as_the_number_of_problems():
    assert mean_interval([[1] * 16] * 10) == wilson_interval(10, 10)


def test_the_clustered_interval_covers_the_truth():
    """30 problems of mixed difficulty x 8 samples: the naive interval of 240 covers far less."""
    rng = np.random.default_rng(0)
    hits = naive = 0
    for _ in range(400):
        rates = rng.choice([0.05, 0.5, 0.95], size=30)
        scores = (rng.random((30, 8)) < rates[:, None]).astype(float)
        hits += mean_interval(scores.tolist()).covers(0.5)
        naive += wilson_interval(int(scores.sum()), 240).covers(0.5)
    assert 0.92 <= hits / 400 <= 0.98
    assert naive / 400 < 0.8


@pytest.mark.parametrize("scores", [[[1], []], [[2.0]], [[-0.5, 1]], [[float("nan")]]])
def test_scores_must_be_scores(scores):
    with pytest.raises(ValueError, match="every problem needs samples"):
        mean_interval(scores)


# Paired tests


def test_mcnemar_equals_the_textbook():
    """Armitage and Berry 1994, p. 127: 12 against 2 discordant pairs, two-sided p = 0.0129."""
    assert mcnemar_p_value(12, 2) == pytest.approx(0.0129, abs=5e-5)
    assert mcnemar_p_value(2, 12) == mcnemar_p_value(12, 2)


@pytest.mark.parametrize("changed", range(9))
def test_mcnemar_equals_enumeration_of_all_outcomes(changed):
    outcomes = [sum(o) for o in itertools.product((0, 1), repeat=changed)]
    for higher in range(changed + 1):
        far = abs(higher - changed / 2)
        expected = sum(abs(o - changed / 2) >= far for o in outcomes) / len(outcomes)
        assert mcnemar_p_value(higher, changed - higher) == pytest.approx(expected)


def test_mcnemar_with_thousands_of_changes():
    assert mcnemar_p_value(1500, 1500) == 1.0
    assert 0 <= mcnemar_p_value(2500, 500) < 1e-200


def test_mcnemar_with_as_many_changes_as_a_large_evaluation_has_takes_no_minute():
    """With the continuity correction, the normal distribution is as good as exact here."""
    began = time.process_time()
    normal = math.erfc((400 - 1) / math.sqrt(2 * 39_600))
    assert mcnemar_p_value(20_000, 19_600) == pytest.approx(normal, rel=1e-3)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("seed", range(20))
def test_sign_flips_equal_enumeration(seed):
    rng = random.Random(seed)
    differences = [rng.choice([-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1]) for _ in range(8)]
    observed = abs(sum(differences))
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((-1, 1), repeat=8)
    ]
    assert sign_flip_p_value(differences) == sum(s >= observed for s in sums) / len(sums)


def test_drawn_sign_flips_agree_with_all_of_them(monkeypatch):
    rng = random.Random(4)
    differences = [rng.choice([-0.25, 0.25, 0.5]) for _ in range(13)]
    exact = sign_flip_p_value(differences)
    monkeypatch.setattr(st, "EXACT_FLIPS", 5)
    assert sign_flip_p_value(differences) == pytest.approx(exact, abs=0.015)


def test_a_p_value_from_draws_is_never_zero():
    assert sign_flip_p_value([0.5] * 100) == 1 / 10_001


def test_two_equal_models_show_no_evidence():
    scores = [0, 1, 1, 0, 1]
    result = paired_comparison(scores, scores)
    assert (result.difference, result.p_value, result.verdict) == (0.0, 1.0, "no evidence")
    assert result.interval.covers(0.0)


@pytest.mark.parametrize("samples", [1, 4])
def test_swapping_the_models_mirrors_the_comparison(samples):
    rng = np.random.default_rng(1)
    before = rng.binomial(samples, 0.4, 200) / samples
    after = rng.binomial(samples, 0.6, 200) / samples
    up, down = paired_comparison(before, after), paired_comparison(after, before)
    assert (up.verdict, down.verdict) == ("better", "worse")
    assert up.difference == -down.difference
    assert up.p_value == down.p_value
    assert up.interval.low == pytest.approx(-down.interval.high, abs=0.005)


def test_better_is_never_said_where_the_interval_covers_zero_or_the_test_does_not_agree():
    """Every possible table of up to 12 problems."""
    for n in range(1, 13):
        for higher in range(n + 1):
            for lower in range(n - higher + 1):
                before = [0] * higher + [1] * lower + [1] * (n - higher - lower)
                after = [1] * higher + [0] * lower + [1] * (n - higher - lower)
                result = paired_comparison(before, after)
                clear = not result.interval.covers(0.0) and result.p_value < 0.05
                assert (result.verdict != "no evidence") == clear
                if clear:
                    assert (result.verdict == "better") == (higher > lower)


def test_one_lucky_problem_is_no_evidence():
    assert paired_comparison([0.25], [0.75]).verdict == "no evidence"
    assert paired_comparison([0.25] * 4, [0.75] * 4).verdict == "no evidence"
    # Six rises of six: p = 2/64.
    assert paired_comparison([0.25] * 6, [0.75] * 6).verdict == "better"


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 4])
def test_false_alarms_stay_below_the_stated_level(samples):
    rng = np.random.default_rng(5)
    alarms = 0
    runs = 150
    for _ in range(runs):
        rates = rng.beta(1, 1, 60)
        pair = rng.binomial(samples, rates, (2, 60)) / samples
        alarms += paired_comparison(pair[0], pair[1]).verdict != "no evidence"
    assert alarms / runs <= 0.10


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 4])
def test_the_interval_of_a_difference_covers_the_truth(samples):
    rng = np.random.default_rng(6)
    hits = 0
    runs = 150
    for _ in range(runs):
        before = rng.binomial(samples, 0.3, 80) / samples
        after = rng.binomial(samples, 0.5, 80) / samples
        hits += paired_comparison(before, after).interval.covers(0.2)
    assert hits / runs >= 0.90


def test_resampling_draws_from_a_generator_of_its_own():
    rng = np.random.default_rng(2)
    before, after = rng.integers(0, 5, (2, 300)) / 4
    first = paired_comparison(before, after)
    np.random.default_rng(9).random()
    assert paired_comparison(before, after) == first


def test_many_sign_flips_are_drawn_in_blocks_and_counted_once():
    assert sign_flip_p_value([0.5, -0.5] * 3500) == 1.0  # the last block is a smaller one


def test_right_or_wrong_gets_the_exact_test_and_the_interval_of_proportions():
    before, after = [0] * 7 + [1] + [1] * 13, [1] * 7 + [0] + [1] * 13
    found = paired_comparison(before, after)
    assert (found.higher, found.lower, found.problems) == (7, 1, 21)
    assert found.method == "exact McNemar test, Bonett-Price interval"
    assert found.p_value == 18 / 256
    assert (found.interval.low, found.interval.high) == pytest.approx((0.013, 0.508), abs=1e-3)
    # The interval alone would say "better".
    assert found.verdict == "no evidence"


def test_shares_get_the_sign_flip_test_and_the_t_interval():
    changes = [0.9, 0.02, 0.02, 0.02, 0.02, 0.02]
    found = paired_comparison([0.1] * 6, [0.1 + change for change in changes])
    assert found.method == "sign-flip test, t interval over problems"
    assert found.p_value == 2 / 2**6
    # The test alone would say "better".
    assert found.interval.covers(0.0)
    assert found.verdict == "no evidence"


@pytest.mark.parametrize(
    ("before", "after"), [([1], [1, 0]), ([], []), ([2.0], [1.0]), ([0.5], [math.nan])]
)
def test_pairs_that_do_not_pair_are_refused(before, after):
    with pytest.raises(ValueError, match=r"cannot pair|scores must be in"):
        paired_comparison(before, after)


# --- against SciPy and statsmodels, and by simulation --------------------------------------------

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


@pytest.mark.slow
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


@pytest.mark.slow
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
def test_the_coverage_of_the_interval_of_an_accuracy(setting):
    problems, samples, (draw, truth) = ACCURACIES[setting]
    rng, hits = np.random.default_rng(7), 0
    for _ in range(REPEATS):
        right = rng.random((problems, samples)) < draw(rng, problems)[:, None]
        hits += mean_interval(right.astype(float).tolist()).covers(truth)
    assert 0.93 <= hits / REPEATS <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("setting", DIFFERENCES)
def test_the_coverage_of_the_interval_of_a_difference(setting):
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
