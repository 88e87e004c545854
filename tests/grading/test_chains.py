"""Equations: drawn references, spoiled in one part or written otherwise; every side counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from equation_cases import Case, cases

from grouper.config.schema import GradingConfig
from grouper.grading import Grader
from grouper.types import AnswerContract, AnswerKind, Grade

TAG = AnswerContract(kind=AnswerKind.TAG, open="<a>", close="</a>")
Graded = list[tuple[Case, Grade]]


def _graded(found: list[Case]) -> Graded:
    with Grader(TAG, GradingConfig(timeout_seconds=20)) as grader:
        grades = grader.grade(
            [f"<a>{case.prediction}</a>" for case in found], [case.reference for case in found]
        )
    return list(zip(found, grades, strict=True))


def _references(shared_data: Path) -> list[str]:
    rows = [
        json.loads(line)
        for name in ("train", "validation")
        for line in (shared_data / f"math/{name}.jsonl").open(encoding="utf-8")
    ]
    return sorted({row["answer"] for row in rows} - {""})


def _listed(pairs: Graded) -> str:
    """One line a pair: what was done to it, and what the grader said."""
    lines = [
        f"{case.how}: {case.prediction!r} for {case.reference!r}: {grade.verdict} ({grade.reason})"
        for case, grade in pairs
    ]
    return "\n".join(["", *lines])


# Seed 0 is the one that the grader was made with; the others it has not seen.
@pytest.mark.parametrize(
    ("count", "seed"),
    [(500, 0), pytest.param(2000, 7, marks=pytest.mark.slow)],
)
def test_spoiled_equations_are_refused_and_rewritten_ones_accepted(
    shared_data: Path, count: int, seed: int
) -> None:
    found = cases(count, seed, _references(shared_data))
    tally = Counter(case.harmless for case in found)
    assert min(tally[True], tally[False]) >= count
    graded = _graded(found)
    accepted = [pair for pair in graded if not pair[0].harmless and pair[1].correct]
    assert not accepted, _listed(accepted)
    refused = [pair for pair in graded if pair[0].harmless and not pair[1].correct]
    assert len(refused) <= tally[True] // 1000, _listed(refused)


def test_drawn_cases_are_of_many_kinds_and_the_same_every_time() -> None:
    found = cases(200, 3)
    assert found == cases(200, 3)
    assert len({case.how for case in found}) >= 40
    assert len({(case.reference, case.prediction) for case in found}) == len(found)
    assert all(case.reference != case.prediction for case in found)


def test_drawn_references_equal_themselves() -> None:
    references = sorted({case.reference for case in cases(200, 5)})
    graded = _graded([Case(r, r, harmless=True, how="nothing") for r in references])
    assert [case.reference for case, grade in graded if not grade.correct] == []
