"""Drawn are measured beyond the budget, and the advice fits what was seen."""

from __future__ import annotations

import pytest

from grouper.advice.checks import find
from grouper.advice.findings import Drawn


def test_a_budget_that_fits_is_told_as_such() -> None:
    report = Drawn(completions=[(n, True) for n in range(1, 101)], budget=95)
    assert (report.median, report.p95, report.open_ended) == (50, 95, False)
    assert report.truncated == pytest.approx(0.05)


def test_what_was_cut_off_is_a_lower_bound() -> None:
    report = Drawn(completions=[(40, False)] * 10, budget=10)
    assert report.open_ended
    assert report.truncated == 1.0
    assert "at least 40" in str(report)


def test_ending_exactly_at_the_budget_is_not_truncated() -> None:
    """T7: a completion as long as the budget that ends by itself is whole."""
    assert Drawn(completions=[(10, True), (10, True)], budget=10).truncated == 0.0
    assert Drawn(completions=[(10, True), (10, False)], budget=10).truncated == 0.5


@pytest.mark.parametrize(
    ("drawn", "begun", "fix"),
    [
        ([(40, False)] * 10, False, "Most never stop at all: teach the stop token first (SFT)"),
        ([(40, True)] * 10, False, "Set sampling.max_new_tokens=64. To train anyway: grpo.allow"),
        ([(40, True)] * 10, True, "=64, with --resume --allow-changes to keep what is there"),
        ([(40, True)] * 5 + [(9, True)] * 5, False, ""),
    ],
)
def test_a_budget_that_cuts_off_most_is_found_before_grpo(
    drawn: list[tuple[int, bool]], begun: bool, fix: str
) -> None:
    found = find(Drawn(completions=drawn, budget=10, before="grpo", begun=begun))
    assert [fix in one.fix for one in found] == [True] * bool(fix)
    assert [one.name for one in found] == ["cut off"] * bool(fix)


@pytest.mark.parametrize(("late", "names"), [(2, []), (3, ["stopping"])])
def test_a_model_that_does_not_stop_is_found_after_sft(late: int, names: list[str]) -> None:
    drawn = [(10, False)] * late + [(5, True)] * (10 - late)
    found = find(Drawn(completions=drawn, budget=10))
    assert [one.name for one in found] == names
    assert all(str(one).startswith("Only 70% of the samples end by themselves") for one in found)
