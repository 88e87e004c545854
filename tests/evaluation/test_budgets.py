"""Curves of accuracy against tokens, by hand and against sampling with the smaller budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grouper.evaluation.budgets import budget_curve, samples_curve
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.evaluation.result_tables import curve_tables
from grouper.types import FinishReason, Verdict


def item(
    problem: int, sample: int, tokens: int, answer: str | None, logprob: float | None = None
) -> EvaluationItem:
    """A completion whose right answer is 1; with 80 tokens it was cut off."""
    verdict = Verdict.CORRECT if answer == "1" else Verdict.INCORRECT
    return EvaluationItem(
        problem_id=f"p/{problem}",
        subject=None,
        level=None,
        sample=sample,
        prompt="",
        completion="",
        answer="1",
        extracted=answer,
        verdict=Verdict.NO_ANSWER if answer is None else verdict,
        reason="",
        stage="",
        finish_reason=FinishReason.LENGTH if tokens == 80 else FinishReason.STOP_TOKEN,
        tokens=tokens,
        logprob=logprob,
    )


def result_of(items: Sequence[EvaluationItem], samples: int = 1, **card: Any) -> EvaluationResult:
    return EvaluationResult(
        name="grpo", phase="grpo", step=1, split="test", items=items, samples=samples, card=card
    )


def test_a_budget_counts_what_ends_within_it() -> None:
    items = [
        item(0, 0, 10, "1"),
        item(1, 0, 40, "1"),
        item(2, 0, 41, "2"),
        item(3, 0, 80, "1"),  # its answer was there before it was cut off
        item(4, 0, 80, None),
    ]
    points = budget_curve(result_of(items), parts=4)
    assert [point.tokens for point in points] == [20, 40, 60, 80]
    assert [point.accuracy.mean for point in points] == [0.2, 0.4, 0.4, 0.6]
    assert [point.attempted for point in points] == [0.2, 0.4, 0.6, 0.8]
    assert [point.precision for point in points] == pytest.approx([1, 1, 2 / 3, 3 / 4])


def test_the_budget_is_that_of_the_settings_although_nothing_was_as_long() -> None:
    result = result_of([item(0, 0, 10, "1")], sampling={"max_new_tokens": 64})
    assert [point.tokens for point in budget_curve(result)] == [8, 16, 24, 32, 40, 48, 56, 64]
    assert budget_curve(result)[0].attempted == 0
    assert math.isnan(budget_curve(result)[0].precision)


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 80), st.sampled_from(["1", "2", None])), min_size=1, max_size=30
    )
)
def test_more_tokens_never_lose_an_answer_and_all_of_them_are_the_evaluation(
    rows: list[tuple[int, str | None]],
) -> None:
    result = result_of([item(n, 0, *row) for n, row in enumerate(rows)])
    points = budget_curve(result)
    assert points[-1].accuracy == result.overall
    means = [point.accuracy.mean for point in points]
    assert means == sorted(means)
    attempts = [point.attempted for point in points]
    assert attempts == sorted(attempts)


def test_samples_by_hand() -> None:
    answers = ["1", "2", "2", "1"], ["2", "2", "1", "1"]
    logprobs = [-0.1, -0.2, -0.5, -0.4], [-0.3, -0.1, -0.2, -0.2]
    items = [
        item(problem, sample, 10 + sample, answers[problem][sample], logprobs[problem][sample])
        for problem in range(2)
        for sample in range(4)
    ]
    one, two, four = samples_curve(result_of(items, samples=4))
    assert (one.k, two.k, four.k) == (1, 2, 4)
    assert (one.tokens, four.tokens) == (11.5, 46.0)
    assert one.average == two.average == four.average == 0.5
    # Blocks (1 2) (2 1), (2 2) (1 1): ties count half.
    assert two.majority == pytest.approx((0.5 + 0.5) / 2)
    assert four.majority == 0.5
    # The most certain of (1 2) is right, of (2 1) too; of (2 2) not, of (1 1) is.
    assert two.certain == pytest.approx((1 + 0.5) / 2)
    assert four.certain == pytest.approx((1 + 0) / 2)
    # Of the six pairs of two right ones among four, one has none.
    assert two.best == pytest.approx(5 / 6)
    assert four.best == 1


def test_without_log_probs_nobody_is_certain() -> None:
    items = [item(0, sample, 10, "1") for sample in range(2)]
    points = samples_curve(result_of(items, samples=2))
    assert all(math.isnan(point.certain) for point in points)
    *_, table = curve_tables([result_of(items, samples=2)])
    assert [cell.text for cell in table.rows[-1][-2:]] == ["-", "100.0"]


def test_one_sample_has_no_curve_of_samples() -> None:
    assert samples_curve(result_of([item(0, 0, 10, "1")])) == []
    assert len(curve_tables([result_of([item(0, 0, 10, "1")])])) == 1
