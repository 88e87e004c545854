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

from grouper.grading.extraction import closing_brace
from grouper.grading.normalise import canonical, tidy
from grouper.grading.numerals import read_number, same_number, without_unit
from grouper.grading.rational import TooLargeError
from grouper.grading.structure import Kind, Node, compare, readings
from grouper.types import Verdict

__all__ = ["Equivalence", "equivalent", "exact", "same_atoms", "split_equation", "unreadable"]

_MAX_BRACKETS = 200
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
    return _by_spelling(tidy(prediction), tidy(reference))


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
    if _is_choice(prediction, reference):
        return Equivalence(Verdict.CORRECT, "text", "same choice")
    try:
        return _by_parts(prediction, reference)
    except TooLargeError:
        return Equivalence(Verdict.UNPARSEABLE, "number", "a number too large to write down")


def _by_parts(prediction: str, reference: str) -> Equivalence | None:
    """Compare every reading of one with every reading of the other, part by part."""
    test = _AtomTest()
    undecided = False
    for right in readings(reference):
        for left in readings(prediction):
            outcome = compare(left, right, test)
            if outcome:
                return Equivalence(Verdict.CORRECT, test.rung, test.reason)
            undecided |= outcome is None
    if undecided:
        return None
    verdict = Verdict.UNPARSEABLE if test.wordy else Verdict.INCORRECT
    return Equivalence(verdict, test.rung, test.reason or "another number of parts, or brackets")


class _AtomTest:
    """The exact test of two atoms, remembering the highest rung used and the last reason."""

    def __init__(self) -> None:
        self.rung = "text"
        self.reason = ""
        self.wordy = False

    def __call__(self, prediction: str, reference: str) -> bool | None:
        outcome, reason = same_atoms(prediction, reference)
        self.reason = reason or self.reason
        if reason not in ("same text", _WORDS_DIFFER, _WORDS_FOR_NUMBER):
            self.rung = "number"
        self.wordy |= reason == _WORDS_FOR_NUMBER
        return outcome


_WORDS_DIFFER = "other words"
_WORDS_FOR_NUMBER = "words where a number is expected"


@lru_cache(maxsize=8192)
def same_atoms(prediction: str, reference: str) -> tuple[bool | None, str]:
    """Whether two single values are the same, if the exact rungs can tell, and why."""
    if canonical(prediction).removeprefix("+") == canonical(reference).removeprefix("+"):
        return True, "same text"
    left_name, left = split_equation(prediction)
    right_name, right = split_equation(reference)
    if left_name and right_name:
        return _same_equations((left_name, left), (right_name, right))
    misstated = left_name and _misstated(left_name, left)
    if misstated:
        return False, misstated
    if right_name and not _names_a_value(right_name):
        return None, ""
    return _same_values(left, right)


def _misstated(name: str, value: str) -> str | None:
    """Why `name = value` does not answer a question for a value, or None."""
    if _SENTENCE_END.search(name):
        return "a sentence that ends in an equation"
    if _false_statement(name, value):
        return "the equation given is false"
    if value == "0" and not _names_a_value(name):
        return "an equation where a value is asked"
    return None


def _same_values(prediction: str, reference: str) -> tuple[bool | None, str]:
    if canonical(prediction) == canonical(reference):
        return True, "same text"
    right, left = read_number(reference), read_number(prediction)
    if left is not None and right is not None:
        return same_number(left, right)
    wordy = _is_words(prediction), _is_words(reference)
    if any(wordy) and (all(wordy) or left is not None or right is not None):
        return _same_words(prediction, reference, wordy)
    if canonical(without_unit(prediction)) == canonical(without_unit(reference)):
        return True, "same text but for the unit"
    return _same_ratio(prediction, reference)


def _same_words(prediction: str, reference: str, wordy: tuple[bool, bool]) -> tuple[bool, str]:
    """Words against words or against a number."""
    if wordy == (True, True):
        same = _spoken(prediction) == _spoken(reference)
        return same, "same text" if same else _WORDS_DIFFER
    return False, _WORDS_FOR_NUMBER if wordy[0] else "a number where words are expected"


def split_equation(text: str) -> tuple[str | None, str]:
    """(left side, last right side) of `x = 5` and of chains; (None, text) without an equation."""
    if "=" not in text or _INEQUALITY.search(text):
        return None, text
    first, *_, last = (side.strip() for side in text.split("="))
    return (first, last) if first and last else (None, text)


_SENTENCE_END = re.compile(r"[.:;?!] +[A-Za-z]", re.ASCII)
_INEQUALITY = re.compile(r"[!:]=|[<>]|\\(?:le|ge|ne|lt|gt)(?![A-Za-z])")
_VALUE_NAME = re.compile(
    r"\\?[A-Za-z]+(?:_\{\w+\}|'|\([\w,]*\))*|\|?[A-Za-z]{1,3}\|?|\([A-Za-z,]+\)|[A-Za-z ]+"
    r"|\\(?:angle|triangle|overline|widehat|vec) ?\{?[A-Za-z]+\}?",
    re.ASCII,
)


def _names_a_value(left: str) -> bool:
    """`x`, `f(x)`, `AB`, `P(A)`, or a number: what may stand before `=` in an answer."""
    return _VALUE_NAME.fullmatch(left) is not None or read_number(left) is not None


def _false_statement(left: str, right: str) -> bool:
    """`8/2=9` is no answer even where 9 is right."""
    first, second = read_number(left), read_number(right)
    if first is None or second is None:
        return False
    return not same_number(first._replace(undone=False), second._replace(undone=False))[0]


def _same_equations(
    prediction: tuple[str, str], reference: tuple[str, str]
) -> tuple[bool | None, str]:
    (left_name, left), (right_name, right) = prediction, reference
    named = _VALUE_NAME.fullmatch(right_name) is not None
    if left_name == right_name and named:
        return _same_values(left, right)
    if read_number(right_name) is not None and _names_a_value(left_name):
        return _same_values(left, right)  # the reference is a chain of numbers: `0.56 = 56%`
    both = read_number(left) is not None and read_number(right) is not None
    if both and named and _VALUE_NAME.fullmatch(left_name):
        return False, f"{left_name} is given, {right_name} is asked"
    return None, ""


_CHOICE = re.compile(r"\(?([A-J])\)?", re.ASCII)
_CHOSEN = re.compile(r"(?:\(?([A-Ja-j])\)|([A-J])[.:])(?: ?([ A-Za-z].*))?", re.ASCII)
_ANOTHER_CHOICE = re.compile(r"\b[A-J]\b|\([a-j]\)|\b(?:or|and|not|either)\b|[,;/&]", re.ASCII)


def _is_choice(prediction: str, reference: str) -> bool:
    """`(B)`, `B.`, `(b)` and `B: two` all choose B; a bare `b` is a variable."""
    asked, chosen = _CHOICE.fullmatch(reference), _CHOSEN.fullmatch(prediction)
    if asked is None or chosen is None:
        return False
    if _ANOTHER_CHOICE.search(chosen.group(3) or ""):
        return False
    return asked.group(1) == (chosen.group(1) or chosen.group(2)).upper()


_WORDY = re.compile(r"[A-Za-z][A-Za-z' .-]*", re.ASCII)
_SHORT_WORDS = frozenset({"yes", "no", "odd"})
_SYMBOLIC_WORDS = frozenset({"infinity", "infty", "inf"})


def _is_words(text: str) -> bool:
    """Whether a text is words rather than a product of variables."""
    if text.lower() in _SHORT_WORDS:
        return True
    if not _WORDY.fullmatch(text) or text.lower() in _SYMBOLIC_WORDS:
        return False
    return max(map(len, text.split(" "))) >= 4


def _spoken(text: str) -> str:
    words = re.sub(r"[^a-z ]", "", text.casefold()).split()
    return " ".join(words[1:] if words[:1] in (["the"], ["a"], ["an"]) else words)


_RATIO = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)
_CLOCK = re.compile(r"(\d{1,2})(?::([0-5]\d))?\s*([ap])\.?\s?m\.?", re.ASCII | re.IGNORECASE)


def _same_ratio(prediction: str, reference: str) -> tuple[bool | None, str]:
    """Ratios in proportion and clock times; `2:30` could be either and must be the same."""
    clocks = _CLOCK.fullmatch(prediction), _CLOCK.fullmatch(reference)
    if clocks[0] and clocks[1]:
        times = [(int(m[1]), m[2] or "00", m[3].lower()) for m in clocks if m]
        return times[0] == times[1], "clock times"
    ratio = _RATIO.fullmatch(reference)
    if ratio is None:
        return None, ""
    a, b = int(ratio[1]), int(ratio[2])
    given = _RATIO.fullmatch(prediction)
    if given is None:
        number = read_number(prediction)
        same = number is not None and b != 0 and number.value * b == a
        return (True, "equal ratios") if same else (None, "")
    if len(ratio[2]) == 2 and a <= 24:
        return False, "a time or ratio that differs"
    return int(given[1]) * b == a * int(given[2]), "ratios"


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
    try:
        for node in readings(tidy(reference)):
            _read_atoms(node)
    except TooLargeError:
        return "a number too large to write down"
    return None


def _read_atoms(node: Node) -> None:
    if node.kind is Kind.ATOM:
        read_number(node.text)
    for item in node.items:
        _read_atoms(item)


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
    return None


# Three powers of numbers on top of each other: 9^{9^{9^9}}, 9**9**9**9.
_TOWER = re.compile(
    r"\d\s*(?:\^|\*\*)\s*[({]*\s*\d+\s*(?:\^|\*\*)\s*[({]*\s*\d+\s*(?:\^|\*\*)", re.ASCII
)
