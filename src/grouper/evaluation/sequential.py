"""Intervals that stay valid although the data decide when to stop: seeds added one at a time.

Whoever looks at an ordinary interval after every seed and stops at the first that leaves out 0 will
find a difference where there is none, more often than the interval says. Here every look has a
smaller share of the error, so that the intervals of all looks together miss the truth in 5 % of
experiments (repeated confidence intervals, Jennison and Turnbull 1989, with Pocock's equal shares,
1977). The price is a wider interval, which depends on the number of seeds that may be run at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from grouper.evaluation.statistics import CONFIDENCE, Interval, t_interval

# Experiments that the share of a look is computed from; its error is below 0.0002.
_EXPERIMENTS = 200_000
# Seeds of an experiment at a time, to bound the memory.
_CHUNK = 20_000
# More seeds than anyone runs; the share hardly falls from there on.
MOST_SEEDS = 50


def two_sided_p(t: np.ndarray, degrees: int) -> np.ndarray:
    """Compute P(|T| > t) of Student's distribution with a whole number of degrees of freedom.

    The finite sums over powers of cos(theta), theta = arctan(t / sqrt(degrees)), are those of
    Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.

    By hand, 1 degree: 1 - 2 arctan(1) / pi. 2 degrees: 1 - t / sqrt(2 + t^2).

    >>> two_sided_p(np.array([1.0]), 1).round(6), two_sided_p(np.array([1.0]), 2).round(6)
    (array([0.5]), array([0.42265]))

    Args:
        t: 0 or more.
        degrees: of freedom, 1 or more.
    """
    theta = np.arctan(t / math.sqrt(degrees))
    sine = np.sin(theta)
    cosine = np.cos(theta)
    odd = degrees % 2
    # The terms are cos^odd, 2/3 cos^3, ..., or 1, 1/2 cos^2, ..., up to cos^(degrees - 2).
    term = cosine if odd else np.ones_like(cosine)
    total = np.zeros_like(cosine)
    for power in range(odd, degrees - 1, 2):
        total = total + term
        term = term * cosine * cosine * (power + 1) / (power + 2)
    inside = sine * total
    if odd:
        inside = 2 / math.pi * (theta + inside)
    return 1 - inside


@lru_cache
def share_of_a_look(most: int) -> float:
    """Compute the error of one look where there are looks after 2, 3, .. `most` values.

    It is the level at which Student's test of a true mean, repeated at every look, rejects it at
    one of them in 5 % of experiments: the 5 % quantile of the smallest p-value of an experiment,
    of normal values and by simulation with fixed random numbers.

    >>> share_of_a_look(2)
    0.05
    """
    error = round(1 - CONFIDENCE, 10)
    if most <= 2:
        return error
    random = np.random.default_rng([19, most])
    smallest = []
    for _ in range(_EXPERIMENTS // _CHUNK):
        values = random.standard_normal((_CHUNK, most))
        sums = values.cumsum(1)
        squares = (values**2).cumsum(1)
        least = np.ones(_CHUNK)
        for n in range(2, most + 1):
            mean = sums[:, n - 1] / n
            variance = (squares[:, n - 1] - n * mean**2) / (n - 1)
            t = np.abs(mean) / np.sqrt(variance / n)
            least = np.minimum(least, two_sided_p(t, n - 1))
        smallest.append(least)
    return float(np.quantile(np.concatenate(smallest), error))


def sequential_interval(
    values: Sequence[float], most: int, least: float = 0.0, furthest: float = math.inf
) -> Interval:
    """Compute the interval of a mean at one of several looks.

    Args:
        values: so far; no interval is finite before the second.
        most: values there would be at the last look, at most `MOST_SEEDS`.
        least: as of `t_interval`.
        furthest: no mean can be beyond it; `most` of `t_interval`.

    Raises:
        ValueError: there are more values than there may be.
    """
    if not 2 <= most <= MOST_SEEDS or len(values) > most:
        raise ValueError(f"{len(values)} values of {most}, which may be 2 to {MOST_SEEDS}")
    confidence = 1 - share_of_a_look(most)
    return t_interval(values, least=least, most=furthest, confidence=confidence)
