"""Intervals and tests for accuracies: numbers in, numbers out, nothing but numpy.

Problems are the independent units throughout. Several samples of one problem are one cluster:
drawing more of them makes that problem's score sharper, never the number of problems larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

Verdict = Literal["better", "worse", "no evidence"]

# Of every interval that is shown.
CONFIDENCE = 0.95
# Permutation draws; a p-value is at least 1 / (RESAMPLES + 1).
RESAMPLES = 10_000
# Up to this many non-zero differences every one of the 2^m sign patterns is tried.
EXACT_FLIPS = 14
# Random numbers held at once (16 MB), whatever the number of problems.
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
    """Of the mean scores: after - before."""
    interval: Interval
    """For the difference."""
    p_value: float
    """Two-sided, under "nothing changed"."""
    problems: int
    higher: int
    """Problems whose score rose."""
    lower: int
    """Problems whose score fell."""
    method: str
    """The test and the interval, by name."""
    verdict: Verdict
    """`better` or `worse` only where the interval leaves out 0 and the test agrees."""


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, not {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def t_quantile(p: float, degrees: int) -> float:
    """The quantile of Student's t distribution for p in (0.5, 1).

    Where P(|T| <= t), one less a regularised incomplete beta function (Abramowitz and Stegun 1964,
    26.7.1), is 2 p - 1.

    >>> round(t_quantile(0.975, 2), 4), round(t_quantile(0.975, 29), 4)
    (4.3027, 2.0452)
    """
    # 30 ms that only several samples or seeds need.
    from mpmath import betainc, findroot  # type: ignore[import-untyped] # ships no types

    def excess(t: Any) -> Any:
        outside = betainc(degrees / 2, 0.5, 0, degrees / (degrees + t * t), regularized=True)
        return 2 - 2 * p - outside

    return float(findroot(excess, NormalDist().inv_cdf(p)))


def t_interval(values: Sequence[float], least: float = 0.0, most: float = math.inf) -> Interval:
    """Student's interval of a mean: m -+ t s / sqrt(n), with n - 1 degrees of freedom.

    The sum of squares in s is `least` at least, and no end is beyond `most`, where no mean can be.
    Of one value it is all that there can be.

    By hand, 1 and 3: m = 2, s = sqrt(2), t = 12.706, so 2 -+ 12.706.

    >>> interval = t_interval([1, 3])
    >>> round(interval.low, 3), round(interval.high, 3)
    (-10.706, 14.706)
    """
    n = len(values)
    if n < 2:
        return Interval(-most, most)
    mean = math.fsum(values) / n
    squares = max(math.fsum((value - mean) ** 2 for value in values), least)
    half = t_quantile(0.5 + CONFIDENCE / 2, n - 1) * math.sqrt(squares / (n - 1) / n)
    return Interval(max(-most, mean - half), min(most, mean + half))


def wilson_interval(successes: float, trials: float, confidence: float = CONFIDENCE) -> Interval:
    """Wilson score interval of a proportion (Wilson 1927; Newcombe 1998, method 3).

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
    centre = mean + z * z / (2 * trials)
    spread = z * math.sqrt(mean * (1 - mean) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # At 0 and 1 the formula's bound is exact; rounding must not push it past the mean.
    low = max(0.0, min(mean, (centre - spread) / scale))
    high = min(1.0, max(mean, (centre + spread) / scale))
    return Interval(low, high)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is correct) from c correct of n.

    1 - C(n-c, k) / C(n, k): the share of the k-subsets of the n samples that hold a correct one
    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).

    By hand, 1 correct of 4, k = 2: 3 of the 6 pairs hold it.

    >>> pass_at_k(4, 1, 2)
    0.5

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} correct among {n} samples is not defined")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_interval(scores: Sequence[Sequence[float]]) -> Interval:
    """Interval of the mean over problems of the mean over each problem's samples.

    A Wilson interval on the effective sample size n* = n / r (Kish's design effect; Dean and Pagano
    2015 find the Wilson form the best of its kind for clustered data). r is the variance of the n
    problem means over p(1-p), which is 1 where the samples of a problem always agree and 1/m where
    they are independent. It is estimated from S = n min(p, 1-p) problems at most, so it is drawn
    towards 1 like by a fifth of one: r = (S r + 0.2) / (S + 0.2). Without that, one right answer
    in 30 problems of 8 samples would pass for 240 independent ones. No resampling, so no seed;
    with one sample per problem it is exactly Wilson's.

    By hand, 2 problems of 4 samples, all right and half right: p = 0.75, the variance is 0.0625,
    r = 0.0625 / 0.1875 = 1/3, S = 0.5, drawn to (0.5/3 + 0.2) / 0.7 = 11/21, so n* = 42/11.

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
    if any(not samples or not 0 <= min(samples) <= max(samples) <= 1 for samples in scores):
        raise ValueError("every problem needs samples, with scores in [0, 1]")
    means = [math.fsum(samples) / len(samples) for samples in scores]
    n = len(means)
    mean = min(1.0, math.fsum(means) / n)
    variance = math.fsum((m - mean) ** 2 for m in means) / n
    most = sum(len(samples) for samples in scores)
    spread = mean * (1 - mean)
    ratio = 1.0
    if spread > 0:
        minority = n * min(mean, 1 - mean)
        ratio = min(1.0, max(n / most, variance / spread))
        ratio = (minority * ratio + _TOWARDS_ONE) / (minority + _TOWARDS_ONE)
    effective = n / ratio
    return wilson_interval(min(mean * effective, effective), effective)


# Problems that the design effect is drawn towards "samples of a problem agree" by.
_TOWARDS_ONE = 0.2


def mcnemar_p_value(higher: int, lower: int) -> float:
    """Exact two-sided McNemar test: given the changes, was up as likely as down?

    Twice the smaller tail of Binomial(higher + lower, 1/2), at most 1 (McNemar 1947; the exact
    form is in Fagerland, Lydersen and Laake 2014).

    By hand, 7 up and 1 down: 2 (C(8,0) + C(8,1)) / 2^8 = 18 / 256.

    >>> mcnemar_p_value(7, 1)
    0.0703125
    """
    changed = higher + lower
    # Each binomial coefficient from the one before: 30,000 of them by themselves take minutes.
    steps = range(1, min(higher, lower) + 1)
    tail = sum(accumulate(steps, lambda ways, i: ways * (changed + 1 - i) // i, initial=1))
    # Integers throughout: a float power of 2 overflows from 1024 changes on.
    return min(1.0, 2 * tail / (1 << changed))


def _bonett_price(higher: int, lower: int, n: int, z: float) -> Interval:
    """Adjusted Wald interval of a paired difference of proportions (Bonett and Price 2012).

    With u = (higher+1)/(n+2) and d = (lower+1)/(n+2): u - d -+ z sqrt((u + d - (u-d)^2)/(n+2)).

    By hand, 7 up and 1 down of 21: u = 8/23, d = 2/23, so 0.2609 -+ 1.96 * 0.1263.

    >>> interval = _bonett_price(7, 1, 21, _z(0.95))
    >>> round(interval.low, 3), round(interval.high, 3)
    (0.013, 0.508)
    """
    up, down = (higher + 1) / (n + 2), (lower + 1) / (n + 2)
    spread = z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return Interval(max(-1.0, up - down - spread), min(1.0, up - down + spread))


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Two-sided permutation test of a mean paired difference of 0 (Fisher 1935).

    Without a change, each problem's difference was as likely to carry the other sign. The p-value
    is the share of sign patterns whose |mean| reaches the observed one: all 2^m patterns up to
    m = 14 non-zero differences, else 10 000 drawn ones, counting the observed pattern itself.

    By hand, three rises: of the 8 patterns only +++ and --- reach the sum.

    >>> sign_flip_p_value([0.5, 0.25, 0.0, 0.25])
    0.25
    """
    values = np.asarray([d for d in differences if d != 0], dtype=np.float64)
    if not len(values):
        return 1.0
    # Equal sums may differ in their last bits, depending on the order of addition.
    reach = abs(float(values.sum())) - 1e-9 * float(np.abs(values).sum())
    if len(values) <= EXACT_FLIPS:
        patterns = np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1
        sums = (1.0 - 2.0 * patterns) @ values
        return float(np.mean(np.abs(sums) >= reach))
    rng = np.random.default_rng([0, 1])
    hits = 0
    size = max(1, _CELLS // len(values))
    for rows in [min(size, RESAMPLES - start) for start in range(0, RESAMPLES, size)]:
        signs = 1.0 - 2.0 * rng.integers(0, 2, (rows, len(values)))
        hits += int(np.sum(np.abs(signs @ values) >= reach))
    return (hits + 1) / (RESAMPLES + 1)


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
        samples: of each problem.

    Raises:
        ValueError: lists of different length, empty, or with scores outside [0, 1].
    """
    if len(before) != len(after) or len(before) == 0:
        raise ValueError(f"cannot pair {len(before)} scores with {len(after)}")
    if not all(0 <= score <= 1 for score in (*before, *after)):
        raise ValueError("scores must be in [0, 1]")
    differences = [float(new) - float(old) for old, new in zip(before, after, strict=True)]
    higher, lower = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    n = len(before)
    if all(score in (0, 1) for score in (*before, *after)):
        interval = _bonett_price(higher, lower, n, _z(CONFIDENCE))
        p_value = mcnemar_p_value(higher, lower)
        method = "exact McNemar test, Bonett-Price interval"
    else:
        # Where (nearly) nothing changed, as wide as if one sample of one problem had.
        interval = t_interval(differences, least=(n - 1) / n / samples**2, most=1.0)
        p_value = sign_flip_p_value(differences)
        method = "sign-flip test, t interval over problems"
    verdict: Verdict = "better" if interval.low > 0 else "worse"
    if p_value >= 1 - CONFIDENCE or interval.covers(0.0):
        verdict = "no evidence"
    mean = math.fsum(after) / n
    return PairedComparison(
        after=mean,
        difference=mean - math.fsum(before) / n,
        interval=interval,
        p_value=p_value,
        problems=n,
        higher=higher,
        lower=lower,
        method=method,
        verdict=verdict,
    )
