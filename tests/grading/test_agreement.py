"""Our verdicts beside Math-Verify's: the known differences show, and a hang is no hang."""

from __future__ import annotations

import time

import pytest

from grouper.config.schema import GradingConfig
from grouper.grading.agreement import compare_with_math_verify
from grouper.types import AnswerContract, AnswerKind, Verdict

BOXED = AnswerContract(kind=AnswerKind.BOXED)


def test_known_differences_are_listed() -> None:
    rows = [
        (r"\boxed{42}", "42"),
        (r"\boxed{41}", "42"),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
        (r"\boxed{\frac{1}{2^{99}}}", r"\frac{1}{2^{98}}"),  # Math-Verify says equal (P8)
        (r"\boxed{17⁄32}", r"\frac{17}{32}"),  # and cannot read this
        ("no answer", "42"),
        (r"\boxed{1}", r"\frac{1"),
    ]
    found = compare_with_math_verify(*zip(*rows, strict=True), BOXED, GradingConfig())
    assert (len(found.compared), found.left_out) == (5, 2)
    assert [pair.agree for pair in found.compared] == [True, True, True, False, False]
    wrong_yes, wrong_no = found.disagreements
    assert (wrong_yes.ours.verdict, wrong_yes.theirs) == (Verdict.INCORRECT, Verdict.CORRECT)
    assert (wrong_no.ours.verdict, wrong_no.theirs) == (Verdict.CORRECT, Verdict.INCORRECT)
    assert found.counts[("correct", "correct")] == 2
    assert all(pair.why for pair in found.compared)


def test_what_hangs_math_verify_is_killed_and_named() -> None:
    hangs = r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}"
    settings = GradingConfig(timeout_seconds=1)
    started = time.monotonic()
    found = compare_with_math_verify(
        [rf"\boxed{{{hangs}}}", r"\boxed{7}"], ["12", "7"], BOXED, settings
    )
    assert [pair.theirs for pair in found.compared] == [Verdict.TIMEOUT, Verdict.CORRECT]
    assert [pair.agree for pair in found.compared] == [True, True]
    assert time.monotonic() - started < 20


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare_with_math_verify(["a", "b"], ["a"], BOXED, GradingConfig())
