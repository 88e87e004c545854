r"""Stage two of grading: does the answer equal the reference? A ladder of named rungs.

    text      the same normalised string
    number    the same exact numbers, part by part; `Fraction` arithmetic, no sympy
    symbolic  the same expression, through Math-Verify in a worker, double-checked numerically

A rung answers yes, no, or passes on. What the first two can decide never reaches a worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from grouper.grading.choices import chosen_value, is_choice, value_of_choice
from grouper.grading.equations import Chain, chain_of, compare_chains
from grouper.grading.extraction import closing_brace
from grouper.grading.normalise import canonical, tidy, tidy_reference
from grouper.grading.numerals import ROUNDED_FROM, Number, read_number, same_number, split_unit
from grouper.grading.rational import TooLargeError
from grouper.grading.structure import Kind, Node, compare, paired_readings, readings
from grouper.grading.units import matched
from grouper.grading.wording import (
    WORDS_DIFFER,
    WORDS_FOR_NUMBER,
    is_words,
    same_ratio,
    same_words,
)
from grouper.types import Verdict

_MAX_BRACKETS = 200
_MAX_NESTING = 16
"""Brackets in brackets; parsing time grows with the depth, and no answer needs as many."""
MAX_ANSWER = 2_000
"""Characters; a longer answer is no answer to a maths problem and is not worth parsing."""


class Equivalence(NamedTuple):
    """Whether two answers are the same, which rung decided, and why."""

    verdict: Verdict
    rung: str
    reason: str
    seconds: float = 0.0
    """A worker's time on it; the exact rungs do not measure theirs."""


def equivalent(
    prediction: str,
    reference: str,
    symbolic: Callable[[str, str], Equivalence] | None = None,
) -> Equivalence:
    r"""Walk the ladder for one pair; `symbolic` is asked only where the exact rungs pass on.

    >>> verdict, rung, reason, _ = equivalent("18.00 dollars", "18")
    >>> verdict.value, rung, reason
    ('correct', 'number', 'equal numbers')
    >>> equivalent("1/2^99", "1/2^98").verdict.value
    'incorrect'
    """
    decided = exact(prediction, reference)
    if decided is not None:
        return decided
    if symbolic is None:
        return Equivalence(
            Verdict.INCORRECT, "number", "not equal as text or number; the symbolic rung is off"
        )
    return symbolic(prediction, reference)


_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,300}")  # no two spellings of one number
_PLAIN = re.compile(
    r"(?:\\?\$)?(-?)(?:\\?\$)?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,300})(?:\.([0-9]{1,300}))?"
)
_EQUAL = Equivalence(Verdict.CORRECT, "number", "equal numbers")
_DIFFERENT = Equivalence(Verdict.INCORRECT, "number", "different numbers")
_SAME_TEXT = Equivalence(Verdict.CORRECT, "text", "same text")


def exact(prediction: str, reference: str) -> Equivalence | None:
    """The text and number rungs; None where only the symbolic rung can tell."""
    decided = _plainly(prediction, reference)
    if decided is not None:
        return decided
    why = unreadable(reference)
    if why is not None:
        return Equivalence(Verdict.NOT_SCORED, "text", f"the reference cannot be read: {why}")
    if prediction == reference:
        return _SAME_TEXT
    why = _broken(prediction)
    if why is not None:
        return Equivalence(Verdict.UNPARSEABLE, "text", why)
    return _by_spelling(tidy(prediction), tidy_reference(reference))


def _plainly(prediction: str, reference: str) -> Equivalence | None:
    """Two plain numbers, compared digit by digit: most of all grading, and no arithmetic."""
    if _INTEGER.fullmatch(reference) and _INTEGER.fullmatch(prediction):
        return _SAME_TEXT if prediction == reference else _DIFFERENT
    right = _PLAIN.fullmatch(reference)
    left = right and _PLAIN.fullmatch(prediction)
    if left is None or right is None:
        return None
    if prediction == reference:
        return _SAME_TEXT
    if _digits(left) == _digits(right):
        return _EQUAL
    # With four decimals or more a reference may be rounded.
    return _DIFFERENT if len(right[3] or "") < 4 else None


def _digits(number: re.Match[str]) -> tuple[str, str, str]:
    sign, whole, part = number.groups("")
    whole, part = whole.replace(",", "").lstrip("0"), part.rstrip("0")
    return sign if whole or part else "", whole, part


def _by_spelling(prediction: str, reference: str) -> Equivalence | None:
    if canonical(prediction) == canonical(reference):
        return _SAME_TEXT
    if is_choice(prediction, reference):
        return Equivalence(Verdict.CORRECT, "text", "same choice")
    chosen = chosen_value(prediction, reference)
    if isinstance(chosen, bool):
        verdict = Verdict.CORRECT if chosen else Verdict.INCORRECT
        return Equivalence(verdict, "text", "the letter of the choice")
    if chosen is not None:
        return _by_spelling(*chosen)
    try:
        return _by_parts(prediction, reference)
    except TooLargeError:
        return Equivalence(Verdict.UNPARSEABLE, "number", "a number too large to write down")


def _by_parts(prediction: str, reference: str) -> Equivalence | None:
    """Compare every reading of one with every reading of the other, part by part."""
    test = _AtomTest()
    undecided = False
    for left, right in paired_readings(prediction, reference):
        outcome = compare(left, right, test)
        if outcome:
            return Equivalence(Verdict.CORRECT, test.rung, test.reason)
        undecided |= outcome is None
    if undecided:
        return None
    verdict = Verdict.UNPARSEABLE if test.wordy else Verdict.INCORRECT
    return Equivalence(verdict, test.rung, test.refusal or "another number of parts, or brackets")


class _AtomTest:
    """The exact test of two atoms, remembering the highest rung used and the last reasons."""

    def __init__(self) -> None:
        self.rung = "text"
        self.reason = ""
        self.refusal = ""
        self.wordy = False

    def __call__(self, prediction: str, reference: str) -> bool | None:
        outcome, reason = same_atoms(prediction, reference)
        if outcome is False:
            self.refusal = reason
        else:
            self.reason = reason or self.reason
        if reason not in ("same text", WORDS_DIFFER, WORDS_FOR_NUMBER):
            self.rung = "number"
        self.wordy |= reason == WORDS_FOR_NUMBER
        return outcome


@lru_cache(maxsize=8192)
def same_atoms(prediction: str, reference: str) -> tuple[bool | None, str]:
    """Whether two single answers are the same, if the exact rungs can tell, and why."""
    if canonical(prediction).removeprefix("+") == canonical(reference).removeprefix("+"):
        return True, "same text"
    given, asked = chain_of(prediction), chain_of(reference)
    if misstated := _misstated(given, asked):
        return False, misstated
    return compare_chains(
        given, asked, answer=_same_values, side=_same_sides, equation=lambda _, __: (None, "")
    )


def _misstated(prediction: Chain, reference: Chain) -> str | None:
    """Why an equation does not answer a question for a value, or None."""
    first, *_ = prediction.sides
    if len(prediction.sides) == 1 or len(reference.sides) > 1:
        return None
    if _SENTENCE_END.search(first):
        return "a sentence that ends in an equation"
    if prediction.values[-1] == "0" and not prediction.label and read_number(first) is None:
        return "an equation where a value is asked"
    return None


def _same_sides(prediction: str, reference: str) -> tuple[bool | None, str]:
    """Two values on the way to an answer: arithmetic may be left to be done."""
    left, right = read_number(prediction), read_number(reference)
    if left is None or right is None:
        return _same_values(prediction, reference)
    return same_number(left._replace(undone=False), right._replace(undone=False))


def _same_values(prediction: str, reference: str) -> tuple[bool | None, str]:
    if canonical(prediction) == canonical(reference):
        return True, "same text"
    right, left = read_number(reference), read_number(prediction)
    if left is not None and right is not None:
        return same_number(left, right)
    if left is not None and left.open:
        return False, "digits that go on are no exact value"
    if right is not None and (thousands := _in_thousands(prediction)):
        return same_number(thousands, right)
    wordy = is_words(prediction), is_words(reference)
    if any(wordy) and (all(wordy) or left is not None or right is not None):
        return same_words(prediction, reference, wordy)
    return _same_but_for_unit(prediction, reference)


_SUFFIXED = re.compile(r"(\S*\d) ?[kK]", re.ASCII)


def _in_thousands(text: str) -> Number | None:
    """`10k`: only where a number is asked, as in an expression `k` is a variable."""
    match = _SUFFIXED.fullmatch(text)
    number = match and read_number(match.group(1))
    return number._replace(value=number.value * 1000, decimals=-1) if number else None


def _same_but_for_unit(prediction: str, reference: str) -> tuple[bool | None, str]:
    """Expressions with words after them; what is left goes to ratios and the symbolic rung."""
    (left, left_unit), (right, right_unit) = split_unit(prediction), split_unit(reference)
    if left_unit and right_unit and left_unit != right_unit:
        if matched(left_unit, right_unit) is None:
            return False, "another unit"
        return None, ""
    if canonical(left) == canonical(right):
        return True, "same text but for the unit"
    return same_ratio(prediction, reference)


_SENTENCE_END = re.compile(
    r"[.:;?!] +[A-Za-z]|\\(?:Rightarrow|Leftrightarrow|rightarrow|implies|iff|to)(?![A-Za-z])",
    re.ASCII,
)


@lru_cache(maxsize=65_536)
def unreadable(reference: str) -> str | None:
    r"""Why a reference cannot be graded against, as far as its spelling shows; None if it can.

    >>> unreadable(r"\frac{1}{2}") is None, unreadable(r"\frac{1}{2")
    (True, 'unbalanced braces')
    """
    why = _broken(reference)
    if why is not None:
        return why
    if len(reference.split()) > 40 and len(re.findall(r"[A-Za-z]{3,}", reference)) > 20:
        return "it is an explanation, not an answer"
    text = tidy_reference(reference)
    choice = value_of_choice(text)
    try:
        reasons = [_atoms_problem(node) for node in readings(choice[1] if choice else text)]
    except TooLargeError:
        return "a number too large to write down"
    return reasons[0] if all(reasons) else None


def _atoms_problem(node: Node) -> str | None:
    if node.kind is Kind.ATOM:
        number = read_number(node.text)
        if number is not None and number.open and number.decimals < ROUNDED_FROM:
            return f"a decimal that goes on after fewer than {ROUNDED_FROM} digits"
    return next((why for item in node.items if (why := _atoms_problem(item))), None)


def _broken(text: str) -> str | None:
    """What is wrong with an answer before it is even read."""
    if len(text) > MAX_ANSWER:
        return f"longer than {MAX_ANSWER} characters"
    if not tidy(text):
        return "empty"
    if _TOWER.search(text):
        return "a tower of powers too large to write down"
    return _unbalanced(text)


def _unbalanced(text: str) -> str | None:
    if "{" in text or "}" in text:
        whole = "{" + text + "}"
        if closing_brace(whole, 0) != len(whole) - 1:
            return "unbalanced braces"
    openers = text.count("(") + text.count("[")  # `(0, 1]` is balanced
    if openers != text.count(")") + text.count("]"):
        return "unbalanced brackets"
    if openers + text.count("{") > _MAX_BRACKETS:
        return f"more than {_MAX_BRACKETS} brackets"
    if _nesting(text) > _MAX_NESTING:
        return f"brackets nested more than {_MAX_NESTING} deep"
    return None


def _nesting(text: str) -> int:
    deepest = depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


# Three powers of numbers on top of each other: 9^{9^{9^9}}, 9**9**9**9.
_TOWER = re.compile(
    r"\d\s*(?:\^|\*\*)\s*[({]*\s*\d+\s*(?:\^|\*\*)\s*[({]*\s*\d+\s*(?:\^|\*\*)", re.ASCII
)
