r"""What the parts of the symbolic stage guard against: with any of them off, a verdict is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from grouper.grading import symbolic
from grouper.grading.equivalence import exact
from grouper.types import Verdict

# (part, what it is replaced with, reference, answer, verdict with the part)
GUARDED: list[tuple[str, Any, str, str, Verdict]] = [
    # Worked-out values only: the question given back earns nothing.
    ("_refused", lambda *_: None, "55", r"\sum_{k=1}^{10} k", Verdict.INCORRECT),
    ("_refused", lambda *_: None, "19", r"12 + 7 + 0\pi", Verdict.INCORRECT),
    ("_refused", lambda *_: None, "1", r"\sin^2 x + \cos^2 x", Verdict.INCORRECT),
    ("_refused", lambda *_: None, r"\frac{1}{2}", r"\sin 150^\circ", Verdict.INCORRECT),
    ("_refused", lambda *_: None, r"\angle ABC", r"\angle BCA", Verdict.INCORRECT),
    # Digits: nearly equal is not equal, and what is written must be seen.
    ("_written_digits", lambda *_: 0, r"\pi", r"\pi + 10^{-120}", Verdict.INCORRECT),
    ("_written_digits", lambda *_: 0, "x", r"x + 10^{-40}", Verdict.INCORRECT),
    ("_CONFIRMING", 30, r"\sqrt{2}", r"\sqrt{2} + \pi^{-53}", Verdict.INCORRECT),
    # Values where a root has several: the real one, and only where both sides are real.
    (
        "_with_real_roots",
        lambda side: side,
        r"\sqrt{2} - 2",
        r"\sqrt{2} + \sqrt[3]{-8}",
        Verdict.CORRECT,
    ),
    ("_on_branches", lambda *_: False, r"\sqrt{xy}", r"\sqrt{x}\sqrt{y}", Verdict.CORRECT),
    # Regions: the ends and their brackets, and the variable.
    ("without_builder", lambda text: text, r"[0, \infty)", r"\{x \mid x \ge 0\}", Verdict.CORRECT),
]


@pytest.mark.parametrize(("part", "off", "reference", "answer", "verdict"), GUARDED)
def test_each_part_changes_the_verdict(
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    off: object,
    reference: str,
    answer: str,
    verdict: Verdict,
) -> None:
    assert exact(answer, reference) is None
    assert symbolic.judge(answer, reference).verdict is verdict
    monkeypatch.setattr(symbolic, part, off)
    assert symbolic.judge(answer, reference).verdict is not verdict


@pytest.mark.parametrize(
    ("reference", "answer", "verdict"),
    [
        (r"(3, \infty)", "x > 3", Verdict.CORRECT),
        (r"(3, \infty)", r"x \ge 3", Verdict.INCORRECT),
        (r"(3, \infty)", "x < 3", Verdict.INCORRECT),
        (r"(-4\sqrt{3}, -4)", r"-4\sqrt{3} < x < -4", Verdict.CORRECT),
        (r"(-4\sqrt{3}, -4)", r"-3\sqrt{3} < x < -4", Verdict.INCORRECT),
        (r"(-\infty, 2) \cup (2, \infty)", r"x \ne 2", Verdict.CORRECT),
        (r"(-\infty, 2) \cup (2, \infty)", r"x \ne 3", Verdict.INCORRECT),
        (r"x \in [1, 2]", r"1 \le x \le 2", Verdict.CORRECT),
        ("x > 1", "y > 1", Verdict.INCORRECT),
        (r"\mathbb{R}", "x > 0", Verdict.INCORRECT),
    ],
)
def test_regions_are_compared_end_by_end(reference: str, answer: str, verdict: Verdict) -> None:
    assert symbolic.judge(answer, reference).verdict is verdict
