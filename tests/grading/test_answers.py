"""A text is read once, whatever it is compared with; and what it says is all in its record."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from grouper.grading import answers, chains, values
from grouper.grading.answers import read, read_reference
from grouper.grading.equivalence import exact, same
from grouper.types import Verdict


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Count how often each function reads each text."""
    counts: Counter[tuple[str, str]] = Counter()
    for module, name in [
        (answers, "tidy"),
        (answers, "canonical"),
        (answers, "candidates"),
        (answers, "is_unsolved"),
        (answers, "surrounding_words"),
        (chains, "split"),
        (values, "canonical"),
        (values, "read_number"),
        (values, "read_counted"),
        (values, "split_unit"),
    ]:
        function = getattr(module, name)

        def counted(text, *rest, _function=function, _name=f"{module.__name__}.{name}"):
            counts[_name, text] += 1
            return _function(text, *rest)

        monkeypatch.setattr(module, name, counted)
    kept = (answers._kept_answer, answers._kept_reference, answers.statement_of, chains.chain_of)
    for cached in kept:
        cached.cache_clear()
    return counts


def test_a_reference_is_read_once_for_all_answers(readings: Counter[tuple[str, str]]) -> None:
    reference = r"\frac{17}{3} apples"
    for answer in ("17/4", "five", "(1, 2)", "x = 5", "it is 5", "about 5 pears", "3:4", "5 a.m."):
        exact(answer, reference)
        exact(answer, reference)
    assert readings["grouper.grading.answers.tidy", reference] == 1
    assert {count for key, count in readings.items() if key[1] == reference} == {1}


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("The total is 17 apples", "18"),
        ("B. 17 cm", "B. 18 m"),
        ("x = 1 + 2 = 4", "x = 3"),
        ("(1/2, 3/4)", "(1/2, 4/5)"),
        (r"x \equiv 10 \pmod{7}", r"x \equiv 4 \pmod{7}"),
    ],
)
def test_no_text_is_read_twice(
    readings: Counter[tuple[str, str]], answer: str, reference: str
) -> None:
    exact(answer, reference)
    # A value may stand in several parts of an answer; the answer itself does not.
    for text in (answer, reference):
        counts = [count for key, count in readings.items() if key[1] == text]
        assert counts
        assert set(counts) == {1}


def test_a_record_holds_what_the_text_says() -> None:
    statement = read(r"B. $x = 1{,}500 \text{ cm} = 15 \text{ m}$").statement
    assert statement.choice.letter == "B"
    chain = statement.bare.readings[0].chain
    assert chain.label == "x"
    assert [value.number and value.number.value for value in chain.values] == [
        Fraction(1500),
        Fraction(15),
    ]
    assert [value.unit and value.unit.kind for value in chain.values] == ["length", "length"]
    assert chain.last.core.text.strip() == "15"


def test_records_are_kept_by_their_text() -> None:
    assert read("x+1") is read("x+1")
    assert read_reference(r"\approx 5").statement is read("5").statement
    assert read(r"\approx 5").statement is not read("5").statement


@pytest.mark.parametrize(
    ("text", "defect"),
    [
        ("", "empty"),
        (r"\frac{1}{2", "unbalanced braces"),
        ("(1, 2", "unbalanced brackets"),
        ("1" * 2001, "longer than 2000 characters"),
        ("9^{9^{9^9}}", "a tower of powers too large to write down"),
        ("(" * 20 + ")" * 20, "more than 200 brackets, or nested more than 16 deep"),
    ],
)
def test_a_text_that_cannot_be_read_has_a_defect(text: str, defect: str) -> None:
    assert read(text).defect == defect
    assert read_reference(text).defect == defect


@pytest.mark.parametrize("text", ["100000!", r"\frac12\begin{pmatrix}(9^{99999})!\\1\end{pmatrix}"])
def test_a_reference_may_be_too_large_where_an_answer_is_only_wrong(text: str) -> None:
    assert read(text).defect is None
    assert read_reference(text).defect == "a number too large to write down"


def test_a_power_in_a_matrix_with_a_fraction_before_it_is_graded() -> None:
    """It raised an error out of the grader."""
    text = r"\frac12\begin{pmatrix}9^{99999}\\1\end{pmatrix}"
    pairs = {("5", text): Verdict.INCORRECT, (text, "5"): Verdict.INCORRECT}
    pairs[text, text] = Verdict.CORRECT
    for (answer, reference), verdict in pairs.items():
        decision = exact(answer, reference)
        assert decision is not None
        assert decision.verdict is verdict


def test_texts_that_are_too_long_for_an_answer_are_not_kept() -> None:
    """A model may write any amount of text into its box."""
    assert read("1" * 2000) is read("1" * 2000)
    assert read("1" * 2001) is not read("1" * 2001)
    assert read_reference("1" * 2001) is not read_reference("1" * 2001)


def test_what_the_exact_stages_cannot_tell_is_passed_on() -> None:
    assert same(read("x+x"), read_reference("2x")) is None
