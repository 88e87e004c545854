"""The labeled table, through the whole ladder; reflexivity; what never reaches a worker."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from equivalence_table import ROWS as FIRST_ROWS
from equivalence_table_audit import AUDIT_ROWS
from equivalence_table_real import REAL_ROWS
from equivalence_table_second import SECOND_ROWS
from equivalence_table_third import THIRD_ROWS

from grouper.config.schema import GradingConfig
from grouper.data.references import check_references
from grouper.grading import Grader
from grouper.grading.equivalence import exact
from grouper.types import AnswerContract, AnswerKind, Verdict

ROWS = [*FIRST_ROWS, *REAL_ROWS, *AUDIT_ROWS, *SECOND_ROWS, *THIRD_ROWS]
VERDICTS = {
    "+": {Verdict.CORRECT},
    # How a wrong answer is wrong (different, or no mathematics at all) is not what a row claims.
    "-": {Verdict.INCORRECT, Verdict.UNPARSEABLE},
    "?": {Verdict.UNPARSEABLE},
    "0": {Verdict.NOT_SCORED},
}
TAG = AnswerContract(kind=AnswerKind.TAG, open="<a>", close="</a>")


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(TAG, GradingConfig(timeout_seconds=20)) as grader:
        yield grader


def test_table_is_large_and_has_no_repeats() -> None:
    assert len(ROWS) >= 400
    assert len({(reference, prediction) for reference, prediction, _, _ in ROWS}) == len(ROWS)


def test_what_the_exact_stages_decide_is_as_labeled() -> None:
    """Two rows in three, without a worker and therefore in the fast tier."""
    graded = [(*row, exact(row[1], row[0])) for row in ROWS]
    decided = [row for row in graded if row[-1] is not None]
    assert len(decided) > 600
    assert [row for row in decided if row[-1].verdict not in VERDICTS[row[2]]] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "prediction", "label", "note"),
    ROWS,
    ids=[f"{i}-{note}" for i, (*_, note) in enumerate(ROWS)],
)
def test_row(grader: Grader, reference: str, prediction: str, label: str, note: str) -> None:
    grade = grader.submit(f"<a>{prediction}</a>", reference).result()
    assert grade.verdict in VERDICTS[label], (note, grade)


@pytest.mark.parametrize("reference", sorted({row[0] for row in ROWS if row[2] != "0"}))
def test_every_reference_equals_itself(grader: Grader, reference: str) -> None:
    assert grader.submit(f"<a>{reference}</a>", reference).result().correct


@pytest.mark.parametrize(
    ("reference", "prediction"),
    [
        ("1, 2", "1, 3"),
        ("(1, 2)", "(1, 3)"),
        ("x=1, y=2", "x=1, y=3"),
        (r"\sqrt{2}, x", r"\sqrt{2}, y"),
    ],
)
def test_a_refusal_does_not_say_that_the_text_is_the_same(
    grader: Grader, reference: str, prediction: str
) -> None:
    for text in (prediction, reference.partition(",")[0] + ","):
        grade = grader.submit(f"<a>{text}</a>", reference).result()
        assert not grade.correct
        assert "same" not in grade.reason


def test_exact_stages_decide_numbers_without_a_worker() -> None:
    for prediction, reference in [
        ("18", "19"),
        (r"\frac12", "0.25"),
        ("$5", "6"),
        ("(1,2)", "(1,3)"),
    ]:
        decided = exact(prediction, reference)
        assert decided is not None
        assert decided.verdict is Verdict.INCORRECT
        assert decided.stage == "number"


@pytest.mark.parametrize("sign", [r"\$", "€", r"-\$", "minus ", r"minus \$"])
def test_a_sign_that_a_model_repeats_is_no_number(sign: str) -> None:
    """It was read one sign a call: in the trainer's own process, until the stack was full."""
    decided = exact(sign * (1990 // len(sign)) + "5", "5")
    assert decided is None or decided.verdict is not Verdict.CORRECT


def test_perfect_roots_need_no_worker() -> None:
    """Nor the symbolic stage, which a recipe may switch off."""
    for prediction, reference in [(r"\sqrt{16}", "4"), ("3", r"\sqrt[3]{27}"), ("8^{2/3}", "4")]:
        decided = exact(prediction, reference)
        assert decided is not None
        assert (decided.verdict, decided.stage) == (Verdict.CORRECT, "number")


def test_stages_are_named() -> None:
    stages = [decided and decided.stage for decided in map(exact, ("x+1", "0.5"), ("x + 1", "1/2"))]
    assert stages == ["text", "number"]
    assert exact(r"\sqrt{12}", r"2\sqrt{3}") is None


def _references(shared_data: Path) -> dict[str, set[str]]:
    def rows(name: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in (shared_data / name).open(encoding="utf-8")]

    gsm8k = rows("gsm8k/train.jsonl") + rows("gsm8k/test.jsonl")
    math = rows("math/train.jsonl") + rows("math/validation.jsonl")
    return {
        "gsm8k": {row["answer"].rpartition("####")[2].strip() for row in gsm8k},
        # One row of MATH has an empty answer; a Problem cannot be made of it.
        "math": {row["answer"] for row in math} - {""},
        "svamp": {str(row["Answer"]) for row in rows("svamp.jsonl")},
        "aime": {str(row["answer"]) for row in rows("aime24.jsonl")},
        "amc": {str(row["answer"]) for row in rows("amc23.jsonl")},
    }


def _unreadable(references: set[str]) -> dict[str, str]:
    found = check_references(sorted(references))
    return {reference: why for reference, why in found.items() if why is not None}


@pytest.mark.parametrize("source", ["gsm8k", "svamp", "aime", "amc"])
def test_references_of_a_source_are_readable(shared_data: Path, source: str) -> None:
    references = _references(shared_data)[source]
    assert references
    assert _unreadable(references) == {}


@pytest.mark.slow
def test_sampled_math_references_are_readable(shared_data: Path) -> None:
    references = sorted(_references(shared_data)["math"])
    assert _unreadable(set(random.Random(0).sample(references, 400))) == {}


@pytest.mark.slow
def test_all_math_references_are_readable_and_correct(shared_data: Path, grader: Grader) -> None:
    references = sorted(_references(shared_data)["math"])
    assert _unreadable(set(references)) == {}
    grades = grader.grade([f"<a>{r}</a>" for r in references], references)
    assert [r for r, g in zip(references, grades, strict=True) if not g.correct] == []


@pytest.mark.slow
def test_math_references_of_other_problems_are_wrong(shared_data: Path, grader: Grader) -> None:
    """Distinct references paired at random: hardly any may be equal."""
    references = sorted(_references(shared_data)["math"])
    shuffled = references[:]
    random.Random(1).shuffle(shuffled)
    pairs = [(a, b) for a, b in zip(references, shuffled, strict=True) if a != b][:1500]
    grades = grader.grade([f"<a>{a}</a>" for a, _ in pairs], [b for _, b in pairs])
    equal = [pair for pair, grade in zip(pairs, grades, strict=True) if grade.correct]
    assert len(equal) < 15, equal
