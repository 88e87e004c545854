r"""Does the answer equal the reference? Three stages decide, the cheapest first.

    text      the same normalized string
    number    the same exact numbers, part by part; `Fraction` arithmetic, no sympy
    symbolic  the same expression, through Math-Verify in a worker, judged by numbers

Each stage says yes or no, or passes the pair on. What the first two decide never reaches a worker.
Both texts are read first (`answers.py`), so that here only what they say is compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple

from grouper.grading.answers import Answer, Congruence, Reference, Statement, read, read_reference
from grouper.grading.chains import Chain, same_label
from grouper.grading.numbers import (
    ROUNDED_FROM,
    TooLargeError,
    matched,
    same_large,
    same_number,
)
from grouper.grading.patterns import PATTERNS
from grouper.grading.shapes import compare, pair_readings
from grouper.grading.values import Value
from grouper.types import Verdict

Outcome = tuple[bool | None, str]
"""Equal, not equal or not decided here; and why."""


class Equivalence(NamedTuple):
    """Whether two answers are the same, which stage decided, and why."""

    verdict: Verdict
    stage: str
    reason: str
    seconds: float = 0.0
    """Processor time in a worker; 0 for the exact stages, which are not timed here."""


_PLAIN_DECIMAL = PATTERNS["plain decimal"]
_EQUAL = Equivalence(Verdict.CORRECT, "number", "equal numbers")
_DIFFERENT = Equivalence(Verdict.INCORRECT, "number", "different numbers")
_SAME_TEXT = Equivalence(Verdict.CORRECT, "text", "same text")
_TOO_LARGE = Equivalence(Verdict.UNPARSEABLE, "number", "a number too large to write down")


def exact(prediction: str, reference: str) -> Equivalence | None:
    r"""Compare two texts by spelling and exact numbers; None where only a worker can tell.

    >>> verdict, stage, reason, _ = exact("18.00 dollars", "18")
    >>> verdict.value, stage, reason
    ('correct', 'number', 'equal numbers')
    >>> exact("1/2^99", "1/2^98").verdict.value, exact("x+x", "2x")
    ('incorrect', None)
    """
    return _same_decimals(prediction, reference) or same(
        read(prediction), read_reference(reference)
    )


def _same_decimals(prediction: str, reference: str) -> Equivalence | None:
    """Compare two plain numbers as decimals: most pairs in practice, and the fast path."""
    right = _PLAIN_DECIMAL.fullmatch(reference)
    left = right and _PLAIN_DECIMAL.fullmatch(prediction)
    if left is None or right is None:
        return None
    if prediction == reference:
        return _SAME_TEXT
    if _decimal(left) == _decimal(right):
        return _EQUAL
    # With four decimals or more a reference may be rounded.
    return _DIFFERENT if len(right[3] or "") < ROUNDED_FROM else None


def _decimal(number: re.Match[str]) -> Decimal:
    sign, whole, part = number.groups("")
    return Decimal(f"{sign}{whole.replace(',', '')}.{part}")


# --- the stages ----------------------------------------------------------------------------------


def same(answer: Answer, reference: Reference) -> Equivalence | None:
    r"""Compare two answers that are read; None where only the symbolic stage can tell.

    >>> same(read("1, 2"), read_reference("2, 1")).stage
    'number'
    """
    for stage in _STAGES:
        decision = stage(answer, reference)
        if decision is not None:
            return decision
    return None


def _by_text(answer: Answer, reference: Reference) -> Equivalence | None:
    """Decide by spelling: whether both can be read, and are written the same."""
    if reference.defect:
        why = f"the reference cannot be read: {reference.defect}"
        return Equivalence(Verdict.NOT_SCORED, "text", why)
    if answer.text == reference.text:
        return _SAME_TEXT
    if answer.defect:
        return Equivalence(Verdict.UNPARSEABLE, "text", answer.defect)
    if answer.statement.canonical == reference.statement.canonical:
        return _SAME_TEXT
    return None


def _by_numbers(answer: Answer, reference: Reference) -> Equivalence | None:
    """Decide part by part, by exact numbers and by words."""
    comparison = Comparison()
    try:
        outcome = comparison.statements(answer.statement, reference.statement)
    except TooLargeError:
        return _TOO_LARGE
    return None if outcome is None else comparison.conclude(is_equal=outcome)


Stage = Callable[[Answer, Reference], Equivalence | None]
"""(answer, reference) -> the decision, or None to pass the pair on."""
_STAGES: tuple[Stage, ...] = (_by_text, _by_numbers)


# --- part by part --------------------------------------------------------------------------------

_WORDS_FOR_A_NUMBER = "words where a number is expected"
_TEXT_REASONS = ("same text", "other words", _WORDS_FOR_A_NUMBER)


class Comparison:
    """One answer against one reference, by text and exact numbers.

    The symbolic stage is this with `values`, `sides`, `equations` and `regions` that can tell more.
    """

    def __init__(self) -> None:
        self.stage = "text"
        self.reason = ""
        """Why the answer is right."""
        self.refusal = ""
        """Why it is not."""

    def conclude(self, *, is_equal: bool) -> Equivalence:
        """Return the decision, with the stage and the reason of the last part compared."""
        if is_equal:
            return Equivalence(Verdict.CORRECT, self.stage, self.reason)
        reason = self.refusal or "another number of parts, or brackets"
        verdict = Verdict.UNPARSEABLE if reason == _WORDS_FOR_A_NUMBER else Verdict.INCORRECT
        return Equivalence(verdict, self.stage, reason)

    def statements(self, answer: Statement, reference: Statement) -> bool | None:
        """Whether an answer equals the reference, with the words around it or without them."""
        if reference.congruence is not None:
            return self._congruences(answer.congruence, reference.congruence)
        outcome = self._readings(answer, reference)
        if outcome:
            return True
        bare = answer.without_words(reference)
        if bare.text in ("", answer.text):
            return outcome
        if bare.canonical == reference.canonical:
            self.reason = "same text but for the words around it"
            return True
        bare_outcome = self._readings(bare, reference)
        is_undecided = outcome is None and not bare_outcome
        return None if is_undecided else bare_outcome

    def _congruences(self, answer: Congruence | None, reference: Congruence) -> bool:
        """Whether an answer states the same remainder by the same number."""
        self.stage = "number"
        self.reason, self.refusal = "the same remainder", "another remainder"
        if answer is None or answer.modulus != reference.modulus:
            return False
        labels = {answer.label, reference.label} - {""}
        return answer.remainder == reference.remainder and len(labels) < 2

    def _readings(self, answer: Statement, reference: Statement) -> bool | None:
        """Whether any reading of an answer as it stands equals any reading of the reference."""
        choice = answer.choice
        expected = reference.choice
        if choice.letter and expected.letter:
            has_values = choice.value and expected.value
            if choice.letter != expected.letter or not has_values:
                self.reason = self.refusal = "the letter of the choice"
                # A letter alone must be the only one that the answer names.
                is_clear = bool(expected.value) or not choice.is_hedged
                return choice.letter == expected.letter and is_clear
        if expected.letter and expected.value:
            answer = answer.bare
            reference = reference.bare
        if answer.is_unsolved and not reference.is_unsolved:
            self.refusal = "an inequality is left to be solved"
            return False
        outcomes = []
        for node, reference_node in pair_readings(answer.readings, reference.readings):
            outcome = compare(node, reference_node, self.chains)
            if outcome is None:
                outcome = self.regions(answer, reference)
            if outcome:
                return True
            outcomes.append(outcome)
        return None if None in outcomes else False

    def chains(self, answer: Chain, reference: Chain) -> bool | None:
        """Whether two single answers are the same: values, or equations with one or several."""
        outcome, reason = self._sides_of(answer, reference)
        if outcome is False:
            self.refusal = reason
        else:
            self.reason = reason or self.reason
        if reason not in _TEXT_REASONS:
            self.stage = "number"
        return outcome

    def _sides_of(self, answer: Chain, reference: Chain) -> Outcome:
        """Compare two chains: the last values, then what stands before them."""
        misstatement = _find_misstatement(answer, reference)
        if misstatement is not None:
            return False, misstatement
        is_renamed = answer.label and reference.label and not _share_label(answer, reference)
        if is_renamed or reference.is_equation or (reference.label and answer.is_equation):
            return self.equations(answer, reference)
        outcome, reason = self.values(answer.last, reference.last)
        if outcome is False:
            return outcome, reason
        for value in answer.values[:-1]:
            is_stated = self._is_stated(value, answer, reference)
            if is_stated is False:
                return False, "the equation given is false"
            outcome = is_stated and outcome
        return outcome, reason

    def _is_stated(self, value: Value, answer: Chain, reference: Chain) -> bool | None:
        """Whether a value on the way to the answer agrees with what is known.

        A formula in letters that the reference's value has not (`A = bh = 6`) can only be checked
        where the reference gives a formula, too.
        """
        has_formula = any(other.variables for other in reference.values[:-1])
        if not has_formula and not value.variables <= reference.last.variables:
            return True
        known_values = reference.values
        if not value.variables:
            known_values = (*known_values, answer.last)
        outcomes = [self.sides(value, known_value) for known_value in known_values]
        if True in outcomes:
            return True
        return None if None in outcomes else False

    def values(self, answer: Value, reference: Value) -> Outcome:
        """Compare two values without labels."""
        for test in _VALUE_TESTS:
            outcome = test(answer, reference)
            if outcome is not None:
                return outcome
        return self._ratios(answer, reference)

    def _ratios(self, answer: Value, reference: Value) -> Outcome:
        r"""Compare `1:\sqrt2` with another ratio, or a ratio of two with its quotient."""
        ratio = answer.ratio
        expected = reference.ratio
        if len(ratio.parts) == len(expected.parts) == 1:
            return None, ""
        if len(ratio.parts) == 1 and len(expected.parts) == 2:
            return self.values(answer, expected.quotient)
        has_empty_part = ratio.has_empty_part or expected.has_empty_part
        if len(ratio.parts) != len(expected.parts) or has_empty_part:
            return False, "a ratio of other parts"
        outcomes = [
            self.values(proportion, expected_proportion)[0]
            for proportion, expected_proportion in zip(
                ratio.proportions, expected.proportions, strict=True
            )
        ]
        if False in outcomes:
            return False, "ratios"
        return None if None in outcomes else True, "ratios"

    def sides(self, value: Value, known_value: Value) -> bool | None:
        """Whether two values on the way to an answer agree; arithmetic may be left to be done."""
        if value.is_too_large or known_value.is_too_large:
            return _same_large_number(value, known_value, on_the_way=True)[0]
        left = value.number
        right = known_value.number
        if left is not None and right is not None:
            return same_number(left._replace(unevaluated=False), right)[0]
        return True if value.canonical == known_value.canonical else None

    def equations(self, answer: Chain, reference: Chain) -> Outcome:  # noqa: ARG002 - for workers
        """Leave two equations that cannot be compared value by value to the worker."""
        return None, ""

    def regions(self, answer: Statement, reference: Statement) -> bool | None:  # noqa: ARG002 - as above
        """Leave sets written in different shapes, `x > 3` and `(3, oo)`, to the worker."""
        return None


def _find_misstatement(answer: Chain, reference: Chain) -> str | None:
    """Return why an answer cannot state what the reference does, whatever its value; or None."""
    if len(reference.sides) == 1 < len(answer.sides):
        if answer.is_sentence:
            return "a sentence that ends in an equation"
        if answer.is_equation and answer.last.text == "0":
            return "an equation instead of a value"
    if reference.label and answer.is_equation and not reference.last.variables:
        return "an equation is left to be solved"
    if answer.label and reference.label and not _share_label(answer, reference):
        # `y = 2x` may be `x = y/2`; `y = 2` is not `x = 2`, nor `f(x) = 2x` the same of `g(x)`.
        may_be_turned = answer.has_unknown and reference.has_unknown
        if not may_be_turned or reference.last.is_number:
            return f"{answer.label} instead of {reference.label}"
    return None


def _share_label(answer: Chain, reference: Chain) -> bool:
    return same_label(answer.label, reference.label)


# --- value by value ------------------------------------------------------------------------------


def _same_spelling(answer: Value, reference: Value) -> Outcome | None:
    if answer.unsigned == reference.unsigned:
        return True, "same text"
    return None


def _same_number(answer: Value, reference: Value) -> Outcome | None:
    try:
        right = reference.number
        left = answer.number
        if right is not None and left is None:
            left = answer.counted
    except TooLargeError:
        return _same_large_number(answer, reference)
    return same_number(left, right) if left is not None and right is not None else None


def _same_large_number(
    answer: Value, reference: Value, *, on_the_way: bool = False
) -> tuple[bool, str]:
    """Compare two values of which one is a number too large to write down.

    Args:
        answer: a value of the answer.
        reference: a value of the reference.
        on_the_way: it is no answer yet, so that arithmetic may be left to be done.

    Raises:
        TooLargeError: one of them is more than powers of whole numbers.
    """
    left = answer.remainders
    right = reference.remainders
    if left is None or right is None:
        raise TooLargeError
    if on_the_way:
        left = left._replace(unevaluated=False)
    return same_large(left, right)


def _same_words(answer: Value, reference: Value) -> Outcome | None:
    """Compare words with words or with a number."""
    if answer.is_words and reference.is_words:
        is_same = answer.spoken == reference.spoken
        return is_same, "same text" if is_same else "other words"
    if answer.is_words and reference.number is not None:
        return False, _WORDS_FOR_A_NUMBER
    if reference.is_words and answer.number is not None:
        return False, "a number where words are expected"
    return None


def _same_time(answer: Value, reference: Value) -> Outcome | None:
    """Compare times of day: `9:00 AM` for `9 a.m.`."""
    time = answer.clock
    expected = reference.clock
    if time is None or expected is None:
        return None
    is_same = time.is_same(expected)
    if not is_same and (time.second or expected.second):
        return None  # it may be a ratio of three
    return is_same, "clock times"


def _same_but_for_the_unit(answer: Value, reference: Value) -> Outcome | None:
    unit = answer.unit
    expected = reference.unit
    if unit and expected and matched(unit, expected) is None:
        return False, "another unit"
    is_one_unit = not unit or not expected or unit == expected
    if is_one_unit and answer.core.canonical == reference.core.canonical:
        return True, "same text but for the unit"
    return None


ValueTest = Callable[[Value, Value], Outcome | None]
"""(answer, reference) -> the outcome, or None to pass the pair on."""
_VALUE_TESTS: tuple[ValueTest, ...] = (
    _same_spelling,
    _same_number,
    _same_words,
    _same_time,
    _same_but_for_the_unit,
)
