"""Intervals and tests for accuracies, as functions of numbers with numpy alone.

Problems are the independent units throughout. Several samples of one problem are one cluster:
more samples make that problem's score more precise, but never the number of problems larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

Verdict = Literal["better", "worse", "no evidence"]

# Confidence level of every interval in reports.
CONFIDENCE = 0.95
# Sampled sign patterns; a p-value is at least 1 / (RESAMPLES + 1).
RESAMPLES = 10_000
# Up to this many non-zero differences, every one of the 2^m sign patterns is tried.
EXACT_FLIPS = 14
# Random numbers in memory at a time (16 MB), whatever the number of problems.
_CELLS = 2_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A closed interval.

    >>> Interval(-0.1, 0.2).covers(0.0)
    True
    """

    low: float
    high: float

    def covers(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """Two measurements of the same problems, compared problem by problem."""

    after: float
    """Mean score, in [0, 1] for accuracies."""
    difference: float
    """Difference of the mean scores: after - before."""
    interval: Interval
    """Interval of the difference."""
    p_value: float
    """Two-sided p-value, under "nothing changed"."""
    problems: int
    higher: int
    """Problems whose score rose."""
    lower: int
    """Problems whose score fell."""
    method: str
    """The test and the interval, by name."""
    verdict: Verdict
    """`better` or `worse` only where the interval leaves out 0 and the test agrees."""

    @property
    def before(self) -> float:
        """Mean score before."""
        return self.after - self.difference

    @property
    def points(self) -> str:
        """The difference with its interval, for sentences."""
        low = 100 * self.interval.low
        high = 100 * self.interval.high
        return f"{100 * self.difference:+.1f} points [{low:+.1f}, {high:+.1f}]"


def _z(confidence: float) -> float:
    """Return the quantile of the normal distribution for a two-sided interval."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, not {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def t_quantile(p: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution for p in (0.5, 1).

    It is the t where P(|T| <= t) is 2 p - 1. That probability is one less a regularized incomplete
    beta function (Abramowitz and Stegun 1964, 26.7.1).

    >>> round(t_quantile(0.975, 2), 4), round(t_quantile(0.975, 29), 4)
    (4.3027, 2.0452)
    """
    # Importing it takes 30 ms, and only several samples or seeds need it.
    from mpmath import betainc, findroot  # type: ignore[import-untyped] # ships no types

    def excess(t: Any) -> Any:
        x = degrees / (degrees + t * t)
        outside = betainc(degrees / 2, 0.5, 0, x, regularized=True)
        return 2 - 2 * p - outside

    return float(findroot(excess, NormalDist().inv_cdf(p)))


def t_interval(
    values: Sequence[float],
    least: float = 0.0,
    most: float = math.inf,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Compute Student's interval of a mean: m -+ t s / sqrt(n), with n - 1 degrees of freedom.

    The sum of squares in s is `least` at least, and no end is beyond `most`, where no mean can be.
    One value gives the whole range of possible means.

    By hand, 1 and 3: m = 2, s = sqrt(2), t = 12.706, so 2 -+ 12.706.

    >>> interval = t_interval([1, 3])
    >>> round(interval.low, 3), round(interval.high, 3)
    (-10.706, 14.706)
    """
    n = len(values)
    if n < 2:
        return Interval(-most, most)
    mean = math.fsum(values) / n
    sum_of_squares = math.fsum((value - mean) ** 2 for value in values)
    sum_of_squares = max(sum_of_squares, least)
    standard_error = math.sqrt(sum_of_squares / (n - 1) / n)
    half_width = t_quantile(0.5 + confidence / 2, n - 1) * standard_error
    low = max(-most, mean - half_width)
    high = min(most, mean + half_width)
    return Interval(low, high)


def wilson_interval(successes: float, trials: float, confidence: float = CONFIDENCE) -> Interval:
    """Compute the Wilson score interval of a proportion (Wilson 1927; Newcombe 1998, method 3).

    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) with p = successes / trials.

    By hand, 8 of 10 at z = 1.96: (0.8 + 0.19208 -+ 1.96 sqrt(0.016 + 0.009604)) / 1.38416.

    >>> interval = wilson_interval(8, 10)
    >>> round(interval.low, 3), round(interval.high, 3)
    (0.49, 0.943)
    >>> wilson_interval(0, 0)
    Interval(low=0.0, high=1.0)

    Raises:
        ValueError: successes outside 0..trials, or confidence outside (0, 1).
    """
    z = _z(confidence)
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials")
    if not trials:
        return Interval(0.0, 1.0)
    mean = successes / trials
    center = mean + z * z / (2 * trials)
    variance = mean * (1 - mean) / trials
    correction = z * z / (4 * trials * trials)
    spread = z * math.sqrt(variance + correction)
    scale = 1 + z * z / trials
    low = (center - spread) / scale
    high = (center + spread) / scale
    # At 0 and 1 the formula's bound is exact; rounding must not push it past the mean.
    low = max(0.0, min(mean, low))
    high = min(1.0, max(mean, high))
    return Interval(low, high)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate P(at least one of k samples is correct), without bias, from c correct of n.

    1 - C(n-c, k) / C(n, k): the share of the k-subsets of the n samples that have a correct one
    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).

    By hand, 1 correct of 4, k = 2: 3 of the 6 pairs have it.

    >>> pass_at_k(4, 1, 2)
    0.5

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} correct among {n} samples is not defined")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_interval(scores: Sequence[Sequence[float]]) -> Interval:
    """Compute the interval of the mean over problems of the mean over each problem's samples.

    A Wilson interval on the effective sample size n* = n / r (Kish's design effect; Dean and Pagano
    2015 find the Wilson form the best of its kind for clustered data). r is the variance of the n
    problem means over p(1-p), which is 1 where the samples of a problem always agree and 1/m where
    they are independent. It is estimated from S = n min(p, 1-p) problems at most, so it is moved
    toward 1 with the weight of a fifth of a problem: r = (S r + 0.2) / (S + 0.2). Without that,
    one right answer in 30 problems of 8 samples would count as 240 independent ones. No
    resampling, so no seed; with one sample per problem it is exactly Wilson's.

    By hand, 2 problems of 4 samples, all right and half right: p = 0.75, the variance is 0.0625,
    r = 0.0625 / 0.1875 = 1/3, S = 0.5, moved to (0.5/3 + 0.2) / 0.7 = 11/21, so n* = 42/11.

    >>> interval = mean_interval([[1, 1, 1, 1], [1, 1, 0, 0]])
    >>> expected = wilson_interval(0.75 * 42 / 11, 42 / 11)
    >>> math.isclose(interval.low, expected.low)
    True
    >>> mean_interval([[1], [0], [1]]) == wilson_interval(2, 3)
    True

    Args:
        scores: per problem, its samples' scores in [0, 1].

    Raises:
        ValueError: a problem without samples, or a score outside [0, 1].
    """
    if not scores:
        return Interval(0.0, 1.0)
    means = []
    for samples in scores:
        if not samples or not 0 <= min(samples) <= max(samples) <= 1:
            raise ValueError("every problem needs samples, with scores in [0, 1]")
        means.append(math.fsum(samples) / len(samples))
    n = len(means)
    mean = min(1.0, math.fsum(means) / n)
    variance = math.fsum((m - mean) ** 2 for m in means) / n
    all_samples = sum(len(samples) for samples in scores)
    largest_variance = mean * (1 - mean)
    ratio = 1.0
    if largest_variance > 0:
        ratio = max(n / all_samples, variance / largest_variance)
        ratio = min(1.0, ratio)
        minority = n * min(mean, 1 - mean)
        ratio = (minority * ratio + _TOWARDS_ONE) / (minority + _TOWARDS_ONE)
    effective_size = n / ratio
    successes = min(mean * effective_size, effective_size)
    return wilson_interval(successes, effective_size)


# Weight, in problems, of "samples of a problem agree" in the estimate of the design effect.
_TOWARDS_ONE = 0.2


def mcnemar_p_value(higher: int, lower: int) -> float:
    """Compute the exact two-sided McNemar test of "up was as likely as down" for the changes.

    The p-value is twice the smaller tail of Binomial(higher + lower, 1/2), at most 1 (McNemar 1947;
    the exact form is in Fagerland, Lydersen and Laake 2014).

    By hand, 7 up and 1 down: 2 (C(8,0) + C(8,1)) / 2^8 = 18 / 256.

    >>> mcnemar_p_value(7, 1)
    0.0703125
    """
    changed = higher + lower
    # Each binomial coefficient is computed from the previous one: 30,000 of them by themselves take
    # minutes.
    coefficient = 1
    tail = 1
    for i in range(1, min(higher, lower) + 1):
        coefficient = coefficient * (changed + 1 - i) // i
        tail += coefficient
    # Integers throughout: a float power of 2 overflows from 1024 changes on.
    return min(1.0, 2 * tail / (1 << changed))


def _bonett_price(higher: int, lower: int, n: int, z: float) -> Interval:
    """Compute the adjusted Wald interval of a paired difference of proportions.

    Source: Bonett and Price 2012.

    With u = (higher+1)/(n+2) and d = (lower+1)/(n+2): u - d -+ z sqrt((u + d - (u-d)^2)/(n+2)).

    By hand, 7 up and 1 down of 21: u = 8/23, d = 2/23, so 0.2609 -+ 1.96 * 0.1263.

    >>> interval = _bonett_price(7, 1, 21, _z(0.95))
    >>> round(interval.low, 3), round(interval.high, 3)
    (0.013, 0.508)
    """
    up = (higher + 1) / (n + 2)
    down = (lower + 1) / (n + 2)
    difference = up - down
    variance = (up + down - difference**2) / (n + 2)
    spread = z * math.sqrt(variance)
    low = max(-1.0, difference - spread)
    high = min(1.0, difference + spread)
    return Interval(low, high)


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Compute the two-sided permutation test of a mean paired difference of 0 (Fisher 1935).

    Without a change, each problem's difference was as likely to have the other sign. The p-value
    is the share of sign patterns whose |mean| reaches the observed one: all 2^m patterns up to
    m = 14 non-zero differences, else 10,000 random ones, counting the observed pattern itself.

    By hand, three rises: of the 8 patterns only +++ and --- reach the sum.

    >>> sign_flip_p_value([0.5, 0.25, 0.0, 0.25])
    0.25
    """
    values = np.asarray([d for d in differences if d != 0], dtype=np.float64)
    m = len(values)
    if m == 0:
        return 1.0
    # Equal sums may differ in their last bits, depending on the order of addition.
    rounding = 1e-9 * float(np.abs(values).sum())
    threshold = abs(float(values.sum())) - rounding
    if m <= EXACT_FLIPS:
        # Bit i of a pattern's number decides the sign of value i.
        numbers = np.arange(2**m)[:, None]
        bits = numbers >> np.arange(m) & 1
        signs = 1.0 - 2.0 * bits
        hits = np.abs(signs @ values) >= threshold
        return float(np.mean(hits))
    rng = np.random.default_rng([0, 1])
    count = 0
    chunk = max(1, _CELLS // m)
    for start in range(0, RESAMPLES, chunk):
        rows = min(chunk, RESAMPLES - start)
        bits = rng.integers(0, 2, (rows, m))
        signs = 1.0 - 2.0 * bits
        hits = np.abs(signs @ values) >= threshold
        count += int(np.sum(hits))
    return (count + 1) / (RESAMPLES + 1)


def paired_comparison(
    before: Sequence[float],
    after: Sequence[float],
    *,
    samples: int = 1,
) -> PairedComparison:
    """Compare two score lists of the same problems in the same order.

    Where every score is 0 or 1: exact McNemar test and Bonett-Price interval. Else (several
    samples per problem): sign-flip permutation test and Student's interval over problems.

    >>> result = paired_comparison([0] * 8 + [1, 1], [1] * 8 + [1, 0])
    >>> result.higher, result.lower, round(result.difference, 1), result.p_value, result.verdict
    (8, 1, 0.7, 0.0390625, 'better')
    >>> paired_comparison([0, 1, 1], [1, 1, 1]).verdict
    'no evidence'

    Args:
        before: score in [0, 1] of each problem.
        after: the same, in the same order.
        samples: number of samples of each problem.

    Raises:
        ValueError: lists of different length, empty, or with scores outside [0, 1].
    """
    if len(before) != len(after) or len(before) == 0:
        raise ValueError(f"cannot pair {len(before)} scores with {len(after)}")
    scores = [*before, *after]
    if not all(0 <= score <= 1 for score in scores):
        raise ValueError("scores must be in [0, 1]")
    n = len(before)
    differences = [float(new) - float(old) for old, new in zip(before, after, strict=True)]
    higher = sum(difference > 0 for difference in differences)
    lower = sum(difference < 0 for difference in differences)
    if all(score in (0, 1) for score in scores):
        interval = _bonett_price(higher, lower, n, _z(CONFIDENCE))
        p_value = mcnemar_p_value(higher, lower)
        method = "exact McNemar test, Bonett-Price interval"
    else:
        # Where (nearly) nothing changed, as wide as if one sample of one problem had.
        least = (n - 1) / n / samples**2
        interval = t_interval(differences, least=least, most=1.0)
        p_value = sign_flip_p_value(differences)
        method = "sign-flip test, t interval over problems"
    verdict: Verdict = "better" if interval.low > 0 else "worse"
    if p_value >= 1 - CONFIDENCE or interval.covers(0.0):
        verdict = "no evidence"
    mean_before = math.fsum(before) / n
    mean_after = math.fsum(after) / n
    return PairedComparison(
        after=mean_after,
        difference=mean_after - mean_before,
        interval=interval,
        p_value=p_value,
        problems=n,
        higher=higher,
        lower=lower,
        method=method,
        verdict=verdict,
    )
