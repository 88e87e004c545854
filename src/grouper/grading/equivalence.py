r"""Stage two of grading: does the answer equal the reference? Three stages, the cheapest first.

    text      the same normalised string
    number    the same exact numbers, part by part; `Fraction` arithmetic, no sympy
    symbolic  the same expression, through Math-Verify in a worker, judged by numbers

A stage answers yes, no, or passes on. What the first two can decide never reaches a worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from grouper.grading.normalise import canonical, closing_brace, tidy, tidy_reference
from grouper.grading.numbers import TooLargeError, matched, read_number, same_number, split_unit
from grouper.grading.shapes import (
    COLON,
    Chain,
    candidates,
    chain_of,
    compare,
    paired,
    same_label,
    split,
    too_nested,
    variables,
)
from grouper.types import Verdict

# Characters; a longer answer is no answer to a maths problem and is not worth parsing.
MAX_ANSWER = 2_000
_MAX_BRACKETS = 200

Outcome = tuple[bool | None, str]
"""Equal, not equal or not decided here; and why."""


class Equivalence(NamedTuple):
    """Whether two answers are the same, which stage decided, and why."""

    verdict: Verdict
    stage: str
    reason: str
    seconds: float = 0.0
    """A worker's time on it; the exact stages do not measure theirs."""


def equivalent(
    prediction: str,
    reference: str,
    symbolic: Callable[[str, str], Equivalence] | None = None,
) -> Equivalence:
    r"""The verdict on one pair; `symbolic` is asked only where the exact stages pass on.

    >>> verdict, stage, reason, _ = equivalent("18.00 dollars", "18")
    >>> verdict.value, stage, reason
    ('correct', 'number', 'equal numbers')
    >>> equivalent("1/2^99", "1/2^98").verdict.value
    'incorrect'
    """
    decided = exact(prediction, reference)
    if decided is None:
        decided = symbolic(prediction, reference) if symbolic else SYMBOLIC_OFF
    return decided


SYMBOLIC_OFF = Equivalence(
    Verdict.INCORRECT, "number", "not equal as text or number; the symbolic stage is off"
)
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,300}")  # no two spellings of one number
_PLAIN = re.compile(
    r"(?:\\?\$)?(-?)(?:\\?\$)?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,300})(?:\.([0-9]{1,300}))?"
)
_EQUAL = Equivalence(Verdict.CORRECT, "number", "equal numbers")
_DIFFERENT = Equivalence(Verdict.INCORRECT, "number", "different numbers")
_SAME_TEXT = Equivalence(Verdict.CORRECT, "text", "same text")


def exact(prediction: str, reference: str) -> Equivalence | None:
    """The text and number stages; None where only the symbolic stage can tell."""
    if decided := _plainly(prediction, reference):
        return decided
    if why := unreadable(reference):
        return Equivalence(Verdict.NOT_SCORED, "text", f"the reference cannot be read: {why}")
    if prediction == reference:
        return _SAME_TEXT
    if why := _broken(prediction):
        return Equivalence(Verdict.UNPARSEABLE, "text", why)
    left, right = tidy(prediction), tidy_reference(reference)
    if canonical(left) == canonical(right):
        return _SAME_TEXT
    if _is_choice(left, right):
        return Equivalence(Verdict.CORRECT, "text", "same choice")
    comparison = Comparison()
    try:
        outcome = comparison.answers(left, right)
    except TooLargeError:
        return Equivalence(Verdict.UNPARSEABLE, "number", "a number too large to write down")
    if outcome is None:
        return None
    if outcome:
        return Equivalence(Verdict.CORRECT, comparison.stage, comparison.reason)
    verdict = Verdict.UNPARSEABLE if comparison.wordy else Verdict.INCORRECT
    refusal = comparison.refusal or "another number of parts, or brackets"
    return Equivalence(verdict, comparison.stage, refusal)


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


_LETTER = re.compile(r"\(?([A-J])\)?", re.ASCII)
_CHOSEN = re.compile(r"(?:\(?([A-Ja-j])\)|([A-J])[.:])(?: ?([ A-Za-z].*))?", re.ASCII)
_ANOTHER_CHOICE = re.compile(
    r"\b[A-J]\b|\([a-j]\)|\b(?:or|and|not|either|wrong|false|incorrect|except)\b|[,;/&]", re.ASCII
)
_MARKED = re.compile(
    r"(?:\(?([A-J])\)|([A-J])[.:]) ?(?!.*(?:\([A-J]\)|\b[A-J][.:)]))(\S.*)", re.ASCII
)


def _is_choice(prediction: str, reference: str) -> bool:
    """Whether a tidy answer chooses the letter that the reference is; a bare `b` is a variable."""
    asked, chosen = _LETTER.fullmatch(reference), _CHOSEN.fullmatch(prediction)
    if asked is None or chosen is None or _ANOTHER_CHOICE.search(chosen[3] or ""):
        return False
    return asked[1] == (chosen[1] or chosen[2]).upper()


def choice_of(text: str) -> tuple[str, str]:
    """(letter, value) of a choice that is written with its value; no letter for anything else.

    >>> choice_of("B. 5"), choice_of("(A) 3, (B) 4")
    (('B', '5'), ('', '(A) 3, (B) 4'))
    """
    match = _MARKED.fullmatch(text)
    return (match[1] or match[2], match[3]) if match else ("", text)


# --- part by part ----------------------------------------------------------------------------------

_SENTENCE_END = re.compile(
    r"[.:;?!] +[A-Za-z]|\\(?:Rightarrow|Leftrightarrow|rightarrow|implies|iff|to)(?![A-Za-z])",
    re.ASCII,
)
_UNKNOWN = re.compile(r"\\?[A-Za-z](?:_(?:\{\w+\}|\w))?|\\(?!angle|triangle)[a-z]+", re.ASCII)
_TEXT_REASONS = ("same text", "other words", "words where a number is expected")


class Comparison:
    """One tidy answer against one reference, by text and exact numbers.

    The symbolic stage is this with `values`, `sides` and `equations` that can tell more.
    """

    def __init__(self) -> None:
        self.stage = "text"
        self.reason = ""
        """Why the answer is right."""
        self.refusal = ""
        """Why it is not."""
        self.wordy = False
        """Whether there are words where a number is expected."""

    def answers(self, prediction: str, reference: str) -> bool | None:
        """Every reading of one against every reading of the other."""
        letter, reference = choice_of(reference)
        if letter:
            given, value = choice_of(re.sub(r"^\([a-j]\)", lambda m: m[0].upper(), prediction))
            bare = _LETTER.fullmatch(prediction)
            if given or bare:
                same = letter == (given or bare[1])
                self.reason = self.refusal = "the letter of the choice"
                if bare or not same:
                    return same
            prediction = value
        decided: bool | None = False
        for left, right in paired(prediction, reference):
            outcome = compare(left, right, self.atoms)
            if outcome is None:
                outcome = self.regions(prediction, reference)
            if outcome:
                return True
            decided = None if outcome is None else decided
        return decided

    def atoms(self, prediction: str, reference: str) -> bool | None:
        outcome, reason = self._chains(chain_of(prediction), chain_of(reference))
        if outcome is False:
            self.refusal = reason
        else:
            self.reason = reason or self.reason
        if reason not in _TEXT_REASONS:
            self.stage = "number"
        self.wordy |= reason == _TEXT_REASONS[2]
        return outcome

    def _chains(self, prediction: Chain, reference: Chain) -> Outcome:
        """Whether an answer states what the reference does."""
        if [*map(canonical, prediction.sides)] == [*map(canonical, reference.sides)]:
            return True, "same text"
        bare = len(prediction.sides) == 1
        if reference.is_equation:
            if bare:
                return False, "the reference is an equation, the answer is not"
            return self.equations(prediction, reference)
        if not bare and len(reference.sides) == 1:
            if _SENTENCE_END.search(prediction.sides[0]):
                return False, "a sentence that ends in an equation"
            if prediction.is_equation and prediction.values[-1] == "0":
                return False, "an equation where a value is asked"
        if reference.label and prediction.label:
            if not same_label(prediction.label, reference.label):
                if self._labels_settle_it(prediction, reference):
                    return False, f"{prediction.label} is given, {reference.label} is asked"
                return self.equations(prediction, reference)
        elif reference.label and prediction.is_equation:
            return self.equations(prediction, reference)
        outcome, reason = self.values(prediction.values[-1], reference.values[-1])
        if outcome is not False:
            for value in prediction.values[:-1]:
                stated = self._is_stated(value, prediction, reference)
                if stated is False:
                    return False, "the equation given is false"
                outcome = stated and outcome
        return outcome, reason

    def _labels_settle_it(self, prediction: Chain, reference: Chain) -> bool:
        """Whether other labels are wrong: `y = 2x` may be `x = y/2`, `f(x) = 2x` may not."""
        if not (_UNKNOWN.fullmatch(prediction.label) and _UNKNOWN.fullmatch(reference.label)):
            return True
        left, right = prediction.values[-1], reference.values[-1]
        both = read_number(left) is not None and read_number(right) is not None
        return both or canonical(left) == canonical(right)

    def _is_stated(self, value: str, prediction: Chain, reference: Chain) -> bool | None:
        """Whether a value on the way to the answer agrees with what is known.

        A formula in letters that the reference's value has not (`A = bh = 6`) can only be checked
        where the reference gives a formula, too.
        """
        letters = variables(value)
        if not letters <= variables(reference.values[-1]) and not any(
            map(variables, reference.values[:-1])
        ):
            return True
        known = reference.values if letters else (*reference.values, prediction.values[-1])
        outcomes = {self.sides(value, other) for other in known}
        return True if True in outcomes else None if None in outcomes else False

    def values(self, prediction: str, reference: str) -> Outcome:
        """Two values without labels."""
        if canonical(prediction).removeprefix("+") == canonical(reference).removeprefix("+"):
            return True, "same text"
        right, left = read_number(reference), read_number(prediction)
        if right is not None and left is None:
            left = read_number(choice_of(prediction)[1])
        if left is not None and right is not None:
            return same_number(left, right)
        wordy = _is_words(prediction), _is_words(reference)
        if all(wordy):
            same = _spoken(prediction) == _spoken(reference)
            return same, "same text" if same else "other words"
        if wordy[0] and right is not None:
            return False, "words where a number is expected"
        if wordy[1] and left is not None:
            return False, "a number where words are expected"
        (left_core, left_unit), (right_core, right_unit) = (
            split_unit(prediction),
            split_unit(reference),
        )
        if left_unit and right_unit and matched(left_unit, right_unit) is None:
            return False, "another unit"
        if left_unit in (None, right_unit) or right_unit is None:
            if canonical(left_core) == canonical(right_core):
                return True, "same text but for the unit"
        clocks = _CLOCK.fullmatch(prediction), _CLOCK.fullmatch(reference)
        if clocks[0] and clocks[1]:
            return _same_time(clocks[0], clocks[1]), "clock times"
        if ":" in reference:
            return self._ratios(prediction, reference)
        return (False, "a ratio where none is asked") if ":" in prediction else (None, "")

    def _ratios(self, prediction: str, reference: str) -> Outcome:
        r"""`1:\sqrt2` against another ratio, or a ratio of two against its quotient."""
        asked, given = split(reference, COLON), split(prediction, COLON)
        if len(given) == 1 and len(asked) == 2:
            return self.values(prediction, rf"\frac{{{asked[0]}}}{{{asked[1]}}}")
        if len(given) != len(asked) or not all(part.strip("0 ") for part in (*given, *asked)):
            return False, "a ratio of other parts"
        outcomes = [
            self.values(rf"\frac{{{p}}}{{{given[0]}}}", rf"\frac{{{r}}}{{{asked[0]}}}")[0]
            for p, r in zip(given[1:], asked[1:], strict=True)
        ]
        return False if False in outcomes else None if None in outcomes else True, "ratios"

    def sides(self, prediction: str, reference: str) -> bool | None:
        """Two values on the way to an answer: arithmetic may be left to be done."""
        left, right = read_number(prediction), read_number(reference)
        if left is not None and right is not None:
            return same_number(left._replace(unevaluated=False), right)[0]
        return True if canonical(prediction) == canonical(reference) else None

    def equations(self, prediction: Chain, reference: Chain) -> Outcome:  # noqa: ARG002 - for workers
        """Two equations that cannot be compared value by value."""
        return None, ""

    def regions(self, prediction: str, reference: str) -> bool | None:  # noqa: ARG002 - as above
        """Shapes that differ on paper: `x > 3` against `(3, oo)`."""
        return None


_CLOCK = re.compile(
    r"(\d{1,2})(?=:| ?[ap])(?::([0-5]\d))?(?: ?([ap])\.? ?m\.?)?", re.ASCII | re.IGNORECASE
)


def _same_time(prediction: re.Match[str], reference: re.Match[str]) -> bool:
    """`9:00 AM` for `9 a.m.`; a half of the day that one side leaves out says nothing."""
    (hour, minute, half), (other_hour, other_minute, other_half) = (
        (int(clock[1]), clock[2] or "00", (clock[3] or "").lower())
        for clock in (prediction, reference)
    )
    same = (hour, minute) == (other_hour, other_minute)
    return same and (half == other_half or not (half and other_half))


_WORDY = re.compile(r"[A-Za-z][A-Za-z' .-]*", re.ASCII)
_WORDS = re.compile(r"yes|no|odd|[A-Z]{3,}", re.ASCII)


def _is_words(text: str) -> bool:
    """Whether a text is words, or letters in an order, rather than a product of variables."""
    if _WORDS.fullmatch(text) or text.lower() in ("yes", "no", "odd"):
        return True
    if not _WORDY.fullmatch(text) or text.lower() in ("infinity", "infty"):
        return False
    return max(map(len, text.split(" "))) >= 4


def _spoken(text: str) -> str:
    words = re.sub(r"[^a-z ]", "", text.casefold()).split()
    return " ".join(words[1:] if words[:1] in (["the"], ["a"], ["an"]) else words)


# --- what cannot be read ---------------------------------------------------------------------------


@lru_cache(maxsize=65_536)
def unreadable(reference: str) -> str | None:
    r"""Why a reference cannot be graded against, as far as its spelling shows; None if it can.

    >>> unreadable(r"\frac{1}{2}") is None, unreadable(r"\frac{1}{2")
    (True, 'unbalanced braces')
    """
    if why := _broken(reference):
        return why
    if len(reference.split()) > 40 and len(re.findall(r"[A-Za-z]{3,}", reference)) > 20:
        return "it is an explanation, not an answer"
    try:
        for node in candidates(choice_of(tidy_reference(reference))[1]):
            for value in chain_of(node.text).values:
                read_number(value)
    except TooLargeError:
        return "a number too large to write down"
    return None


# Three powers of numbers on top of each other: 9^{9^{9^9}}, 9**9**9**9.
_TOWER = re.compile(
    r"\d\s*(?:\^|\*\*)\s*[({]*\s*\d+\s*(?:\^|\*\*)\s*[({]*\s*\d+\s*(?:\^|\*\*)", re.ASCII
)


def _broken(text: str) -> str | None:
    """What is wrong with an answer before it is even read."""
    if len(text) > MAX_ANSWER:
        return f"longer than {MAX_ANSWER} characters"
    if not tidy(text):
        return "empty"
    if _TOWER.search(text):
        return "a tower of powers too large to write down"
    whole = "{" + text + "}"
    if closing_brace(whole, 0) != len(whole) - 1:
        return "unbalanced braces"
    opened = text.count("(") + text.count("[")  # `(0, 1]` is balanced
    if opened != text.count(")") + text.count("]"):
        return "unbalanced brackets"
    if opened + text.count("{") > _MAX_BRACKETS:
        return f"more than {_MAX_BRACKETS} brackets"
    return "brackets nested more than 16 deep" if too_nested(text) else None
