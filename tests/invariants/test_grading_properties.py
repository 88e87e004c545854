"""What must hold for any two answers: reflexivity, symmetry, no exception, no missed deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from grouper.config.schema import GradingConfig
from grouper.grading import Grader, extract, extract_lenient
from grouper.grading.equivalence import Equivalence, exact
from grouper.types import AnswerContract, AnswerKind, Grade, Verdict

CONTRACTS = (
    AnswerContract(kind=AnswerKind.TAG, open="<a>", close="</a>", turn_markers=("\nUser:",)),
    AnswerContract(kind=AnswerKind.BOXED),
    AnswerContract(kind=AnswerKind.HASHES),
    AnswerContract(kind=AnswerKind.LAST_NUMBER),
)
TAG = CONTRACTS[0]
DEADLINE = 2.0
FAST = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)

# Exact numbers in the many ways of writing them.
integers = st.integers(-(10**12), 10**12)
fractions = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**4)


def spellings(value: Fraction) -> list[str]:
    """Ways to write one number exactly."""
    n, d = value.numerator, value.denominator
    sign, n = ("-" if n < 0 else ""), abs(n)
    if d == 1:
        return [
            f"{sign}{n}",
            f"{sign}{n:,}",
            f"{sign}{n}.0",
            f"${sign}{n}$",
            f"{sign}0{n}",
            f"{sign}\\frac{{{2 * n}}}{{2}}",
            f"x = {sign}{n}",
            f"({sign}{n})",
            f"{sign}{n} apples",
        ]
    whole, rest = divmod(n, d)
    found = [
        f"{sign}{n}/{d}",
        f"{sign}\\frac{{{n}}}{{{d}}}",
        f"{sign}\\dfrac{{{3 * n}}}{{{3 * d}}}",
        f"\\frac{{{sign}{n}}}{{{d}}}",
    ]
    if whole:
        found.append(f"{sign}{whole}\\frac{{{rest}}}{{{d}}}")
    return found


numbers = st.one_of(integers.map(Fraction), fractions)


@FAST
@given(numbers, st.data())
def test_every_spelling_of_a_number_equals_every_other(value: Fraction, data: st.DataObject):
    prediction, reference = (data.draw(st.sampled_from(spellings(value))) for _ in range(2))
    decided = exact(prediction, reference)
    assert decided is not None, (prediction, reference)
    assert decided.verdict is Verdict.CORRECT, (prediction, reference, decided)


@FAST
@given(numbers, numbers, st.data())
def test_different_numbers_are_never_equal(a: Fraction, b: Fraction, data: st.DataObject):
    if a == b:
        return
    prediction = data.draw(st.sampled_from(spellings(a)))
    reference = data.draw(st.sampled_from(spellings(b)))
    decided = exact(prediction, reference)
    assert decided is None or decided.verdict is not Verdict.CORRECT, (prediction, reference)


# Answers of any shape, from the pieces that answers are made of.
atoms = st.one_of(
    integers.map(str),
    fractions.map(lambda f: f"\\frac{{{f.numerator}}}{{{f.denominator}}}"),
    st.sampled_from(
        ["x", "2x+1", "\\sqrt{3}", "\\pi", "-\\infty", "\\text{blue}", "30^\\circ", "\\$5", "7\\%"]
    ),
)
answers = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=4).map(lambda p: f"({', '.join(p)})"),
        st.lists(inner, min_size=2, max_size=4).map(lambda p: f"\\{{{', '.join(p)}\\}}"),
        st.tuples(inner, inner).map(lambda p: f"[{p[0]}, {p[1]})"),
        st.lists(inner, min_size=2, max_size=3).map(
            lambda p: f"\\begin{{pmatrix}}{' & '.join(p)}\\end{{pmatrix}}"
        ),
    ),
    max_leaves=6,
)
pieces = st.lists(
    st.sampled_from(
        [
            *r"0123456789xyzeiABC+-*/^_=(){}[],.!%$|<> \&²½'",
            *(r"\frac", r"\sqrt", r"\pi", r"\text", r"\cup", r"\infty", r"\left", r"\{", r"\}"),
            *(r"\pm", r"\\", r"\begin", r"\end", "pmatrix", " and ", " or ", "feet", "inches"),
            *("\u202e", "\x00", "\ud800", "٣", "<a>", "</a>", r"\boxed{", "####", "the answer is"),
        ]
    ),
    max_size=25,
).map("".join)
anything = st.one_of(answers, pieces, st.text(max_size=60))


@pytest.mark.slow
@FAST
@given(answers)
def test_an_answer_equals_itself(answer: str):
    decided = exact(answer, answer)
    assert decided is not None
    assert decided.verdict is Verdict.CORRECT
    dressed = exact(f" ${answer}$. ", answer)
    assert dressed is None or dressed.verdict in (Verdict.CORRECT, Verdict.INCORRECT)


@pytest.mark.slow
@FAST
@given(answers, answers)
def test_equality_is_symmetric_where_nothing_is_rounded(a: str, b: str):
    """No reference here has four decimals, a percent sign or a unit: those are read one way."""
    if any(mark in a + b for mark in ("\\%", "circ", "\\$")):
        return
    here, there = exact(a, b), exact(b, a)
    assert (here is None) == (there is None), (a, b)
    if here is not None and there is not None:
        same = (here.verdict is Verdict.CORRECT, there.verdict is Verdict.CORRECT)
        assert same in ((True, True), (False, False)), (a, b)


@pytest.mark.slow
@FAST
@given(anything, anything)
def test_the_exact_rungs_answer_anything(prediction: str, reference: str):
    started = time.perf_counter()
    decided = exact(prediction, reference)
    assert decided is None or isinstance(decided, Equivalence)
    if prediction == reference and decided is not None:
        assert decided.verdict is not Verdict.INCORRECT, prediction
    assert time.perf_counter() - started < 1


@pytest.mark.slow
@FAST
@given(anything, st.sampled_from(CONTRACTS))
def test_lenient_extraction_finds_what_strict_finds(text: str, contract: AnswerContract):
    strict, lenient = extract(text, contract), extract_lenient(text, contract)
    assert strict.reason
    assert lenient.reason
    assert strict.answer is None or lenient.answer is not None
    for found in (strict, lenient):
        assert found.answer is None or (found.answer and found.answer in text)


# Prose from the pieces that the lenient reading tells apart.
prose = st.lists(
    st.sampled_from(
        [
            *(
                "$",
                "$ ",
                "$$",
                r"\(",
                r"\)",
                r"\[",
                r"\]",
                r"\a",
                r"\text{",
                "{",
                "}",
                "(",
                ")",
                "[",
            ),
            *(
                " ",
                "\n",
                ", ",
                ". ",
                "; ",
                ": ",
                "! ",
                "**",
                "*",
                "`",
                "=",
                "=>",
                "\\\\",
                "\\",
                "-",
            ),
            *(
                "5",
                "12.5",
                "1,234",
                "9^{9^{9^9}}",
                "x",
                "ab",
                "B",
                "½",
                "%",
                "\ue000",
                "\ud800",
                "3rd",
            ),
            *("and ", "the answer is ", "Answer", "So ", "Therefore, ", "Check: ", "which ", "in "),
            *(
                "hours ",
                "million ",
                "per ",
                "1. ",
                "- ",
                "> ",
                "# ",
                r"\begin{align}",
                r"\end{align}",
            ),
        ]
    ),
    max_size=40,
).map("".join)


@settings(FAST, max_examples=1000)
@given(prose)
def test_any_prose_is_read(text: str):
    found = extract_lenient(text, CONTRACTS[1])
    assert found.reason
    assert found.answer is None or (found.answer and found.answer in text)


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(TAG, GradingConfig(timeout_seconds=DEADLINE), workers=2) as grader:
        yield grader


def _never_raises_nor_overruns(grader: Grader, prediction: str, reference: str) -> None:
    grade = grader.submit(f"<a>{prediction}</a>", reference).result(timeout=60)
    assert isinstance(grade, Grade)
    assert grade.reason
    assert grade.seconds < DEADLINE + 1, grade
    if prediction == reference and grade.extracted == reference:
        wrong = grade.verdict in (Verdict.INCORRECT, Verdict.NO_ANSWER)
        assert not wrong, grade


@pytest.mark.slow
@settings(FAST, max_examples=150)
@given(anything, anything)
def test_all_rungs_answer_anything(grader: Grader, prediction: str, reference: str):
    _never_raises_nor_overruns(grader, prediction, reference)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(FAST, max_examples=10_000, phases=(Phase.generate,))
@given(anything, anything)
def test_ten_thousand_fuzzed_pairs(grader: Grader, prediction: str, reference: str):
    _never_raises_nor_overruns(grader, prediction, reference)


@pytest.mark.slow
@settings(FAST, max_examples=500, phases=(Phase.generate,))
@given(
    st.sampled_from(["x^2-1", "(x-1)(x+1)", r"\sqrt{12}", r"2\sqrt{3}", r"\frac{\pi}{2}", "1-1/e"]),
    st.sampled_from(["1+1/e", "x^2 - 1", r"\pi/2", "2*sqrt(3)", "x+1", r"\sqrt{3}", "e^x", "y"]),
)
def test_the_symbolic_rung_is_symmetric(grader: Grader, a: str, b: str):
    here = grader.submit(f"<a>{a}</a>", b).result()
    there = grader.submit(f"<a>{b}</a>", a).result()
    assert here.correct == there.correct, (a, b)
