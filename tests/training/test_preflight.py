"""Pre-flight: lengths are measured beyond the budget, and the advice fits what was seen."""

from __future__ import annotations

import pytest

from grouper.training.preflight import length_report


def test_a_budget_that_fits_is_told_as_such() -> None:
    report = length_report(list(range(1, 101)), [True] * 100, budget=95)
    assert (report.median, report.p95, report.open_ended) == (50, 95, False)
    assert report.truncated == pytest.approx(0.05)


def test_what_was_cut_off_is_a_lower_bound() -> None:
    report = length_report([40] * 10, [False] * 10, budget=10)
    assert report.open_ended
    assert report.truncated == 1.0
    assert "at least 40" in str(report)


def test_ending_exactly_at_the_budget_is_not_truncated() -> None:
    """T7: a completion as long as the budget that ends by itself is whole."""
    assert length_report([10, 10], [True, True], budget=10).truncated == 0.0
    assert length_report([10, 10], [True, False], budget=10).truncated == 0.5
