r"""Answers, read once: everything that a text alone says, before it is compared with another.

    Answer     the text as written: whether it can be read at all
    Statement  the tidy text: its choice letter, its congruence, the words around its value
    Node       one way to read it as a shape: a list, a tuple, ... (`shapes.py`)
    Chain      a part of a shape: equal sides (`chains.py`)
    Value      one side: its number, its unit, its words (`values.py`)

Each of them holds the next. What most comparisons do without is worked out when it is first asked
for and then kept, and the records are cached by their text, so that a reference is read once and
not once for each answer to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from grouper.grading.brackets import MAX_NESTING, depths
from grouper.grading.choices import Choice, choice_of
from grouper.grading.lazy import once
from grouper.grading.normalize import canonical, closing_brace, tidy
from grouper.grading.patterns import PATTERNS
from grouper.grading.shapes import Node, candidates, is_unsolved
from grouper.grading.surrounding_words import (
    SurroundingWords,
    surrounding_words,
    without_surrounding_words,
)

# Characters; a longer text is not the answer to a math problem and not worth parsing.
MAX_ANSWER = 2_000
_MAX_BRACKETS = 200
# A reference of more words than both is an explanation.
_MAX_WORDS = 40
_MAX_LONG_WORDS = 20
# Texts that are kept. A step asks for a reference as often as its group is large.
_REMEMBERED = 8192

_CONGRUENCE = PATTERNS["congruence"]
_TOWER = PATTERNS["tower"]
_LETTERED = PATTERNS["lettered"]
_WORD = PATTERNS["word"]


class Congruence(NamedTuple):
    r"""A remainder: `x \equiv 3 \pmod{7}`."""

    label: str
    remainder: int
    modulus: int


def congruence_of(text: str) -> Congruence | None:
    r"""Return the remainder that a tidy text states by `\equiv` or `\pmod`, or None.

    >>> congruence_of(r"x \equiv 10 \pmod{7}")
    Congruence(label='x', remainder=3, modulus=7)
    """
    match = _CONGRUENCE.fullmatch(text) if "mod" in text else None
    if match is None:
        return None
    modulus = int(match[3])
    return Congruence(match[1] or "", int(match[2]) % modulus, modulus)


@dataclass(frozen=True)
class Statement:
    """A tidy text and everything that it says."""

    text: str

    @once
    def canonical(self) -> str:
        """The spelling that the text stage compares."""
        return canonical(self.text)

    @once
    def congruence(self) -> Congruence | None:
        """The remainder that it states."""
        return congruence_of(self.text)

    @once
    def choice(self) -> Choice:
        """The letter of a multiple-choice answer and the value behind it."""
        return choice_of(self.text)

    @once
    def bare(self) -> Statement:
        """The value behind the letter of a choice; itself without a letter or a value."""
        value = self.choice.value
        return statement_of(value) if value and value != self.text else self

    @once
    def readings(self) -> tuple[Node, ...]:
        """The shapes that it may have, the most likely one first."""
        return candidates(self.text)

    @once
    def is_unsolved(self) -> bool:
        """Whether it has an inequality without a name alone on one of its sides."""
        return is_unsolved(self.text)

    @once
    def words(self) -> SurroundingWords:
        """Which kinds of words it has around its value."""
        return surrounding_words(self.text)

    def without_words(self, reference: Statement) -> Statement:
        """Return the statement without those kinds of words that a reference has not."""
        return statement_of(without_surrounding_words(self.text, reference.words))


@lru_cache(maxsize=_REMEMBERED)
def statement_of(text: str) -> Statement:
    """Return the one record of a tidy text."""
    return Statement(text)


@dataclass(frozen=True)
class Answer:
    """A text as a model or an author wrote it."""

    text: str

    @once
    def tidied(self) -> str:
        """The text without typesetting."""
        return tidy(self.text)

    @once
    def statement(self) -> Statement:
        """What the text says."""
        return statement_of(self.tidied)

    @once
    def defect(self) -> str | None:
        """Why the text cannot be read, as far as its spelling shows; None if it can."""
        return _find_misspelling(self)


@dataclass(frozen=True)
class Reference(Answer):
    r"""The right answer, whose author may mark it as an approximation.

    >>> read_reference(r"\approx 8.24 \text{ mph}").statement.text
    '8.24 mph'
    >>> read_reference(r"\frac{1}{2}").defect is None, read_reference(r"\frac{1}{2").defect
    (True, 'unbalanced braces')
    """

    @once
    def statement(self) -> Statement:
        """What the text says."""
        return statement_of(self.tidied.removeprefix(r"\approx").lstrip())

    @once
    def defect(self) -> str | None:
        """Why nothing can be graded against it, as far as its spelling shows; None if it can."""
        misspelling = _find_misspelling(self)
        if misspelling is not None:
            return misspelling
        if len(self.text.split()) > _MAX_WORDS and len(_WORD.findall(self.text)) > _MAX_LONG_WORDS:
            return "it is an explanation, not an answer"
        chains = [chain for node in self.statement.bare.readings for chain in node.chains]
        values = [value for chain in chains for value in chain.values]
        # Of some numbers that are too large to write down not even the remainders are known.
        if any(value.is_too_large and value.remainders is None for value in values):
            return "a number too large to write down"
        return None


def read(text: str) -> Answer:
    r"""Read an answer; what it says is worked out on first use and then kept.

    A text that is too long for an answer is not kept: it may be all of a completion.

    >>> answer = read(r"$x = \frac12$")
    >>> answer.statement.canonical, answer.defect
    ('x=\\frac{1}{2}', None)
    >>> answer.statement.readings[0].chain.last.number.value
    Fraction(1, 2)
    """
    return _kept_answer(text) if len(text) <= MAX_ANSWER else Answer(text)


def read_reference(text: str) -> Reference:
    """Read a reference; like `read`, apart from which it is kept."""
    return _kept_reference(text) if len(text) <= MAX_ANSWER else Reference(text)


_kept_answer = lru_cache(maxsize=_REMEMBERED)(Answer)
_kept_reference = lru_cache(maxsize=_REMEMBERED)(Reference)


def _find_misspelling(answer: Answer) -> str | None:
    """Return why the spelling of an answer cannot be read; None if it can."""
    text = answer.text
    if len(text) > MAX_ANSWER:
        return f"longer than {MAX_ANSWER} characters"
    if not answer.tidied:
        return "empty"
    if _TOWER.search(text):
        return "a tower of powers too large to write down"
    return _find_unbalanced(text)


def _find_unbalanced(text: str) -> str | None:
    """Return what is wrong with the brackets of a text; None if nothing is."""
    if closing_brace("{" + text + "}", 0) != len(text) + 1:
        return "unbalanced braces"
    opened = text.count("(") + text.count("[")  # `(0, 1]` is balanced, and so is `B) 5`
    closed = text.count(")") + text.count("]") - bool(_LETTERED.match(text))
    if opened != closed:
        return "unbalanced brackets"
    if opened + text.count("{") > _MAX_BRACKETS or depths(text)[1] > MAX_NESTING:
        return f"more than {_MAX_BRACKETS} brackets, or nested more than {MAX_NESTING} deep"
    return None
