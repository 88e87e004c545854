r"""Does the answer equal the reference? Three stages decide, the cheapest first.

    text      the same normalised string
    number    the same exact numbers, part by part; `Fraction` arithmetic, no sympy
    symbolic  the same expression, through Math-Verify in a worker, judged by numbers

Each stage says yes or no, or passes the pair on. What the first two decide never reaches a worker.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from grouper.grading.normalise import canonical, closing_brace, tidy, tidy_reference
from grouper.grading.numbers import (
    ROUNDED_FROM,
    Number,
    TooLargeError,
    is_number,
    matched,
    read_counted,
    read_large,
    read_number,
    same_large,
    same_number,
    split_unit,
)
from grouper.grading.shapes import (
    COLON,
    MAX_NESTING,
    Chain,
    atoms_of,
    candidates,
    chain_of,
    compare,
    depths,
    is_unsolved,
    paired,
    same_label,
    split,
    variables,
)
from grouper.grading.surrounding_words import without_surrounding_words
from grouper.types import Verdict

# Characters; a longer text is not the answer to a maths problem and not worth parsing.
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
    """Processor time in a worker; 0 for the exact stages, which are not timed here."""


_PLAIN = re.compile(
    r"(?:\\?\$)?(-?)(?:\\?\$)?([0-9]{1,300}|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.([0-9]{1,300}))?"
)
_EQUAL = Equivalence(Verdict.CORRECT, "number", "equal numbers")
_DIFFERENT = Equivalence(Verdict.INCORRECT, "number", "different numbers")
_SAME_TEXT = Equivalence(Verdict.CORRECT, "text", "same text")
_WORDS_FOR_A_NUMBER = "words where a number is expected"


def exact(prediction: str, reference: str) -> Equivalence | None:
    r"""The text and number stages; None where only the symbolic stage can tell.

    >>> verdict, stage, reason, _ = exact("18.00 dollars", "18")
    >>> verdict.value, stage, reason
    ('correct', 'number', 'equal numbers')
    >>> exact("1/2^99", "1/2^98").verdict.value, exact("x+x", "2x")
    ('incorrect', None)
    """
    if decided := _plainly(prediction, reference) or _by_spelling(prediction, reference):
        return decided
    comparison = Comparison()
    try:
        outcome = comparison.answers(tidy(prediction), tidy_reference(reference))
    except TooLargeError:
        return Equivalence(Verdict.UNPARSEABLE, "number", "a number too large to write down")
    if outcome is not False:
        reason = comparison.reason
        return Equivalence(Verdict.CORRECT, comparison.stage, reason) if outcome else None
    reason = comparison.refusal or "another number of parts, or brackets"
    verdict = Verdict.UNPARSEABLE if reason == _WORDS_FOR_A_NUMBER else Verdict.INCORRECT
    return Equivalence(verdict, comparison.stage, reason)


def _by_spelling(prediction: str, reference: str) -> Equivalence | None:
    """What can be decided before either text is read."""
    if why := unreadable(reference):
        return Equivalence(Verdict.NOT_SCORED, "text", f"the reference cannot be read: {why}")
    if prediction == reference:
        return _SAME_TEXT
    why = _broken(prediction)
    return Equivalence(Verdict.UNPARSEABLE, "text", why) if why else None


def _plainly(prediction: str, reference: str) -> Equivalence | None:
    """Two plain numbers, compared as decimals: most pairs in practice, and the fast path."""
    right = _PLAIN.fullmatch(reference)
    left = right and _PLAIN.fullmatch(prediction)
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


_CHOICE = re.compile(
    r"(?:[Oo]ption |[Cc]hoice )?(?:(?:\(([A-Ja-j])\)|([A-J])[.:)]) ?(.*)|([A-J]))",
    re.ASCII | re.DOTALL,
)
_ANOTHER_CHOICE = re.compile(
    r"\b[A-J]\b|\([a-j]\)|\b(?:or|and|not|either|wrong|false|incorrect|except)\b|[,;/&]",
    re.ASCII,
)


def choice_of(text: str) -> tuple[str, str]:
    """(letter, value) of a multiple-choice answer; either may be empty. A bare `b` is a variable.

    >>> choice_of("B. 5"), choice_of("(b)"), choice_of("b")
    (('B', '5'), ('B', ''), ('', 'b'))
    """
    match = _CHOICE.fullmatch(text)
    if match is None:
        return "", text
    return (match[1] or match[2] or match[4]).upper(), match[3] or ""


def bare_value(reference: str) -> str:
    """A tidy reference, without the choice letter before its value."""
    text = tidy_reference(reference)
    return choice_of(text)[1] or text


class Congruence(NamedTuple):
    r"""A remainder: `x \equiv 3 \pmod{7}`."""

    label: str
    remainder: int
    modulus: int


_CONGRUENCE = re.compile(
    r"(?:(\\?[A-Za-z]{1,8}) ?(?:\\equiv|=) ?)?(-?\d{1,300}) ?"
    r"(?:\\pmod|\(? ?\\?(?:bmod|mod)) ?\{? ?([1-9]\d{0,300}) ?\}? ?\)?",
    re.ASCII,
)


def congruence_of(text: str) -> Congruence | None:
    r"""The remainder that a tidy text states by `\equiv` or `\pmod`, or None.

    >>> congruence_of(r"x \equiv 10 \pmod{7}")
    Congruence(label='x', remainder=3, modulus=7)
    """
    match = _CONGRUENCE.fullmatch(text) if "mod" in text else None
    if match is None:
        return None
    modulus = int(match[3])
    return Congruence(match[1] or "", int(match[2]) % modulus, modulus)


# --- part by part --------------------------------------------------------------------------------

_SENTENCE_END = re.compile(
    r"[.:;?!] +[A-Za-z]|\\(?:Rightarrow|Leftrightarrow|rightarrow|implies|iff|to)(?![A-Za-z])",
    re.ASCII,
)
# `It is 150` and `103 where x`, which no letters of a formula are.
_STATES_A_VALUE = re.compile(
    r"\b(?:is|are|was|were|equals)\b.*(?:\d|\\[A-Za-z])|(?:\d|\\[A-Za-z]).*\b(?:where|when|if|is|are)\b",
    re.ASCII | re.DOTALL,
)
_UNKNOWN = re.compile(r"\\?[A-Za-z](?:_(?:\{\w+\}|\w))?|\\(?!angle|triangle)[a-z]+", re.ASCII)
_TEXT_REASONS = ("same text", "other words", _WORDS_FOR_A_NUMBER)


class Comparison:
    """One tidy answer against one reference, by text and exact numbers.

    The symbolic stage is this with `values`, `sides`, `equations` and `regions` that can tell more.
    """

    def __init__(self) -> None:
        self.stage = "text"
        self.reason = ""
        """Why the answer is right."""
        self.refusal = ""
        """Why it is not."""

    def answers(self, prediction: str, reference: str) -> bool | None:
        """Whether an answer equals the reference, with the words around it or without them."""
        if canonical(prediction) == canonical(reference):
            self.reason = "same text"
            return True
        congruence = congruence_of(reference)
        if congruence is not None:
            return self._congruences(congruence_of(prediction), congruence)
        outcome = self._readings(prediction, reference)
        bare = "" if outcome else without_surrounding_words(prediction, reference)
        if bare in ("", prediction):
            return outcome
        if canonical(bare) == canonical(reference):
            self.reason = "same text but for the words around it"
            return True
        worded = self._readings(bare, reference)
        return None if worded is False and outcome is None else worded

    def _congruences(self, prediction: Congruence | None, reference: Congruence) -> bool:
        """Whether an answer states the same remainder by the same number."""
        self.stage = "number"
        self.reason, self.refusal = "the same remainder", "another remainder"
        if prediction is None or prediction.modulus != reference.modulus:
            return False
        labels = {prediction.label, reference.label} - {""}
        return prediction.remainder == reference.remainder and len(labels) < 2

    def _readings(self, prediction: str, reference: str) -> bool | None:
        """Whether any reading of an answer as it stands equals any reading of the reference."""
        (given, given_value), (letter, value) = choice_of(prediction), choice_of(reference)
        if letter and given and (given != letter or not (value and given_value)):
            self.reason = self.refusal = "the letter of the choice"
            return given == letter and (bool(value) or not _ANOTHER_CHOICE.search(given_value))
        if letter and value:
            prediction, reference = given_value if given else prediction, value
        decided: bool | None = False
        if is_unsolved(prediction) and not is_unsolved(reference):
            self.refusal = "an inequality is left to be solved"
            return decided
        for left, right in paired(prediction, reference):
            outcome = compare(left, right, self.atoms)
            if outcome is None:
                outcome = self.regions(prediction, reference)
            if outcome:
                return True
            decided = None if outcome is None else decided
        return decided

    def atoms(self, prediction: str, reference: str) -> bool | None:
        """Two single answers: values, or equations with one value or several."""
        outcome, reason = self._chains(chain_of(prediction), chain_of(reference))
        if outcome is False:
            self.refusal = reason
        else:
            self.reason = reason or self.reason
        if reason not in _TEXT_REASONS:
            self.stage = "number"
        return outcome

    def _chains(self, prediction: Chain, reference: Chain) -> Outcome:
        """Whether two chains of equal sides state the same."""
        if why := _misstated(prediction, reference):
            return False, why
        labels = prediction.label, reference.label
        renamed = all(labels) and not same_label(*labels)
        if renamed or reference.is_equation or (reference.label and prediction.is_equation):
            return self.equations(prediction, reference)
        outcome, reason = self.values(prediction.values[-1], reference.values[-1])
        if outcome is False:
            return outcome, reason
        for value in prediction.values[:-1]:
            stated = self._is_stated(value, prediction, reference)
            if stated is False:
                return False, "the equation given is false"
            outcome = stated and outcome
        return outcome, reason

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
        outcomes = [self.sides(value, other) for other in known]
        if True in outcomes:
            return True
        return None if None in outcomes else False

    def values(self, prediction: str, reference: str) -> Outcome:
        """Two values without labels."""
        if canonical(prediction).removeprefix("+") == canonical(reference).removeprefix("+"):
            return True, "same text"
        left, right, compared = _as_numbers(prediction, reference)
        if compared is not None:
            return compared
        if decided := _same_words(prediction, reference, left, right):
            return decided
        core, unit = split_unit(prediction)
        expected_core, expected_unit = split_unit(reference)
        units = {unit, expected_unit} - {None}
        if unit and expected_unit and matched(unit, expected_unit) is None:
            return False, "another unit"
        if len(units) < 2 and canonical(core) == canonical(expected_core):
            return True, "same text but for the unit"
        return self._ratios(prediction, reference)

    def _ratios(self, prediction: str, reference: str) -> Outcome:
        r"""`1:\sqrt2` against another ratio, or a ratio of two against its quotient."""
        given = split(prediction, COLON)
        expected = split(reference, COLON)
        if len(given) == 1 and len(expected) <= 2:
            return self.values(prediction, _quotient(*expected)) if expected[1:] else (None, "")
        parts = (*given, *expected)
        if len(given) != len(expected) or not all(part.strip("0 ") for part in parts):
            return False, "a ratio of other parts"
        outcomes = [
            self.values(_quotient(p, given[0]), _quotient(r, expected[0]))[0]
            for p, r in zip(given[1:], expected[1:], strict=True)
        ]
        if False in outcomes:
            return False, "ratios"
        return None if None in outcomes else True, "ratios"

    def sides(self, prediction: str, reference: str) -> bool | None:
        """Two values on the way to an answer: arithmetic may be left to be done."""
        try:
            left, right = read_number(prediction), read_number(reference)
        except TooLargeError:
            return _same_large(prediction, reference, on_the_way=True)[0]
        if left is not None and right is not None:
            return same_number(left._replace(unevaluated=False), right)[0]
        return True if canonical(prediction) == canonical(reference) else None

    def equations(self, prediction: Chain, reference: Chain) -> Outcome:  # noqa: ARG002 - for workers
        """Two equations that cannot be compared value by value; left to the worker."""
        return None, ""

    def regions(self, prediction: str, reference: str) -> bool | None:  # noqa: ARG002 - as above
        """Sets written in different shapes, `x > 3` and `(3, oo)`; left to the worker."""
        return None


def _as_numbers(
    prediction: str, reference: str
) -> tuple[Number | None, Number | None, tuple[bool, str] | None]:
    """Read two values as numbers; where both are, also whether they are the same, and why."""
    try:
        right = read_number(reference)
        left = read_number(prediction)
        if right and left is None:
            left = read_number(choice_of(prediction)[1]) or read_counted(prediction)
    except TooLargeError:
        return None, None, _same_large(prediction, reference)
    if left is None or right is None:
        return left, right, None
    return left, right, same_number(left, right)


def _same_large(prediction: str, reference: str, *, on_the_way: bool = False) -> tuple[bool, str]:
    """Compare two values of which one is a number too large to write down.

    Args:
        prediction: tidy text.
        reference: tidy text.
        on_the_way: it is no answer yet, so that arithmetic may be left to be done.

    Raises:
        TooLargeError: one of them is more than powers of whole numbers.
    """
    left, right = read_large(prediction), read_large(reference)
    if left is None or right is None:
        raise TooLargeError
    if on_the_way:
        left = left._replace(unevaluated=False)
    return same_large(left, right)


def _misstated(prediction: Chain, reference: Chain) -> str | None:
    """Why an answer cannot state what the reference does, whatever its value; or None."""
    if len(reference.sides) == 1 < len(prediction.sides):
        if any(_STATES_A_VALUE.search(side) for side in prediction.sides[:-1]):
            return "a sentence that ends in an equation"
        if _SENTENCE_END.search(prediction.sides[0]):
            return "a sentence that ends in an equation"
        if prediction.is_equation and prediction.values[-1] == "0":
            return "an equation instead of a value"
    if reference.label and prediction.is_equation and not variables(reference.values[-1]):
        return "an equation is left to be solved"
    labels = prediction.label, reference.label
    if all(labels) and not same_label(*labels):
        # `y = 2x` may be `x = y/2`; `y = 2` is not `x = 2`, nor `f(x) = 2x` the same of `g(x)`.
        turned = all(map(_UNKNOWN.fullmatch, labels)) and not is_number(reference.values[-1])
        return None if turned else f"{labels[0]} instead of {labels[1]}"
    return None


def _quotient(top: str, bottom: str) -> str:
    return rf"\frac{{{top}}}{{{bottom}}}"


_CLOCK = re.compile(
    r"(\d{1,2})(?=:| ?[ap])(?::([0-5]\d))?(?:(?<=:\d\d):([0-5]\d))?(?: ?([ap])\.? ?m\.?)?",
    re.ASCII | re.IGNORECASE,
)


def _same_time(prediction: str, reference: str) -> Outcome | None:
    """`9:00 AM` for `9 a.m.`; `a.m.` or `p.m.` on one side only is ignored."""
    clocks = [_CLOCK.fullmatch(text) for text in (prediction, reference)]
    times = [(int(c[1]), c[2] or "00", c[3] or "00", (c[4] or "").lower()) for c in clocks if c]
    if len(times) < 2:
        return None
    halves = {half for *_, half in times} - {""}
    same = times[0][:3] == times[1][:3] and len(halves) < 2
    if not same and any(clock and clock[3] for clock in clocks):
        return None  # it may be a ratio of three
    return same, "clock times"


_WORDY = re.compile(r"[A-Za-z][A-Za-z' .-]*", re.ASCII)
_WORDS = re.compile(r"(?i:yes|no|odd)|[A-Z]{3,}", re.ASCII)


def _same_words(
    prediction: str, reference: str, left: Number | None, right: Number | None
) -> Outcome | None:
    """Words against words or a number, and clock times; None for anything else."""
    wordy = _is_words(prediction), _is_words(reference)
    if all(wordy):
        same = _spoken(prediction) == _spoken(reference)
        return same, "same text" if same else "other words"
    if wordy[0] and right is not None:
        return False, _WORDS_FOR_A_NUMBER
    if wordy[1] and left is not None:
        return False, "a number where words are expected"
    return _same_time(prediction, reference)


def _is_words(text: str) -> bool:
    """Whether a text is words, or letters in an order, rather than a product of variables."""
    long = _WORDY.fullmatch(text) and max(map(len, text.split(" "))) >= 4
    return bool(long or _WORDS.fullmatch(text))


def _spoken(text: str) -> str:
    return re.sub(r"^(?:the|an?) |[^a-z ]", "", " ".join(text.casefold().split()))


# --- what cannot be read -------------------------------------------------------------------------


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
    for node in candidates(bare_value(reference)):
        for atom in atoms_of(node):
            if any(map(_is_too_large, chain_of(atom).values)):
                return "a number too large to write down"
    return None


def _is_too_large(value: str) -> bool:
    """Whether a value is a number of which not even the remainders are known."""
    try:
        read_number(value)
    except TooLargeError:
        return read_large(value) is None
    return False


# Three powers of numbers on top of each other: 9^{9^{9^9}}, 9**9**9**9.
_TOWER = re.compile(
    r"\d\s*(?:\^|\*\*)\s*[({]*\s*\d+\s*(?:\^|\*\*)\s*[({]*\s*\d+\s*(?:\^|\*\*)", re.ASCII
)

_LETTERED = re.compile(r"[^\w(]*(?:text\w*\{)?[A-J]\)", re.ASCII)


def _broken(text: str) -> str | None:
    """What is wrong with an answer before it is even read."""
    if len(text) > MAX_ANSWER:
        return f"longer than {MAX_ANSWER} characters"
    if not tidy(text) or _TOWER.search(text):
        return "a tower of powers too large to write down" if tidy(text) else "empty"
    if closing_brace("{" + text + "}", 0) != len(text) + 1:
        return "unbalanced braces"
    opened = text.count("(") + text.count("[")  # `(0, 1]` is balanced, and so is `B) 5`
    closed = text.count(")") + text.count("]") - bool(_LETTERED.match(text))
    if opened != closed:
        return "unbalanced brackets"
    if opened + text.count("{") > _MAX_BRACKETS or depths(text)[1] > MAX_NESTING:
        return f"more than {_MAX_BRACKETS} brackets, or nested more than {MAX_NESTING} deep"
    return None
