r"""Words around an answer: "The total is 16 apples.", "72, in total", `4t \text{ for all } t`.

A strict answer is a value, but models put sentences where it belongs. Here the words around the one
value of a text are taken away, unless they deny it, compare it or compute with it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from grouper.grading.brackets import LISTED, split
from grouper.grading.chains import is_label
from grouper.grading.normalize import CONSTANTS, GREEK
from grouper.grading.numbers import NOT_UNITS, find_unit
from grouper.grading.patterns import PATTERNS

_DATA = json.loads(Path(__file__).with_name("units.json").read_text("utf-8"))
# Words that change what a value says, and therefore are never taken away.
_TELLING = NOT_UNITS | frozenset(_DATA["not prose"].split())
# Words that link the value to the question: `The total is 16`.
_LINKING = frozenset(["is", "are", "was", "be", "at", "equals", "equal", "then", "so"])
_SHORT_WORDS = frozenset(_DATA["short words"].split())
# Words of three letters that are no product of variables, names among them.
_THREE_LETTERS = frozenset(_DATA["three letters"].split())
_DIGIT_OR_COMMAND = PATTERNS["digit or command"]
# The same, or a variable that is the whole text.
_VALUE = PATTERNS["digit, command or variable"]
_MAX_WORDS = 20
_MARKS = ",:;'\"()"
_SPELLED = PATTERNS["spelled word"]
# Signs that compute with or compare what stands before them.
_OPERATORS = "=+*/^<>,"
# Words of a unit that are kept behind a value.
_UNIT_WORDS = 4
_CONDITION = PATTERNS["condition"]


class SurroundingWords(NamedTuple):
    """Which kinds of words a tidy text has around its value."""

    condition: bool
    """`4t for all t`."""
    asides: bool
    """`72, in total`."""
    sentence: bool
    """`The total is 16`; also where the text is no single value at all."""


def surrounding_words(text: str) -> SurroundingWords:
    """Return the kinds of words around the value of a tidy text.

    >>> surrounding_words("It is 16")
    SurroundingWords(condition=False, asides=False, sentence=True)
    >>> surrounding_words("72, in total")
    SurroundingWords(condition=False, asides=True, sentence=False)
    """
    is_value = _VALUE.search(text) is not None and stated_value(text) == text
    return SurroundingWords(
        condition=without_condition(text) != text,
        asides=without_asides(text) != text,
        sentence=not is_value,
    )


@lru_cache(maxsize=8192)
def without_surrounding_words(text: str, reference_words: SurroundingWords) -> str:
    r"""Return a tidy answer without the words around its value, where the reference has none.

    A reference with words of its own is answered by words, so the answer keeps the same kind.

    >>> none, in_words = surrounding_words("16"), surrounding_words("blue")
    >>> without_surrounding_words("It is 16", none), without_surrounding_words("It is 16", in_words)
    ('16', 'It is 16')
    >>> without_surrounding_words(r"\approx 16", none)
    '16'
    """
    text = text.removeprefix(r"\approx").lstrip()
    if not reference_words.condition:
        text = without_condition(text)
    if not reference_words.asides:
        text = without_asides(text)
    if not reference_words.sentence:
        text = stated_value(text)
    return text


def stated_value(text: str) -> str:
    r"""Return the value of a tidy text that is a sentence about it; any other text unchanged.

    >>> stated_value("The total is 16"), stated_value("Jason has 16 apples left in the box")
    ('16', '16')
    >>> stated_value("It is not 16"), stated_value("16 or 17"), stated_value(r"2 \sin x")
    ('It is not 16', '16 or 17', '2 \\sin x')
    """
    tokens = text.split(" ")
    if len(tokens) > 2 * _MAX_WORDS:
        return text
    first = 0
    while first < len(tokens) and _is_word(tokens[first]):
        first += 1
    last = len(tokens)
    while last > first and _is_word(tokens[last - 1]):
        last -= 1
    before = tokens[:first]
    core = tokens[first:last]
    after = tokens[last:]
    if not _is_one_value(core) or not _may_be_left_out([*before, *after]):
        return text
    if len(after) > _UNIT_WORDS:
        after = after[: _unit_words(after)]
    return " ".join([*core, *after]).rstrip(",:;")


def _is_one_value(tokens: list[str]) -> bool:
    """Whether the tokens between the words are one value, and none of them denies it."""
    text = " ".join(tokens)
    if not _DIGIT_OR_COMMAND.search(text) or text[0] in _OPERATORS:
        return False
    for token in tokens:
        if _is_word(token) or (_tells(token) and token.lower() not in CONSTANTS):
            return False
    name, equals, _ = text.partition("=")
    return not equals or is_label(name.strip())


def _may_be_left_out(words: list[str]) -> bool:
    """Whether words say nothing about the value beside them; a letter alone is a variable."""
    if any(_tells(word) for word in words):
        return False
    return any(len(word.strip(_MARKS)) > 1 for word in words)


def _is_word(token: str) -> bool:
    """Whether a token is a word rather than variables, a function or a number."""
    if token == "I":
        return True
    bare = token.strip(_MARKS).lower()
    if bare in GREEK or bare in CONSTANTS or not _SPELLED.fullmatch(bare):
        return False
    if len(bare) == 3:
        return bare in _THREE_LETTERS
    return len(bare) >= 4 or bare in _SHORT_WORDS


def _tells(token: str) -> bool:
    """Whether a word changes what the value beside it says."""
    bare = token.strip(_MARKS).lower()
    return bare in _TELLING and bare not in _LINKING


def _unit_words(words: list[str]) -> int:
    """Count the words behind a value that are its unit: two of "square feet of carpet"."""
    for count in range(_UNIT_WORDS, 0, -1):
        if find_unit(" ".join(words[:count]).strip(_MARKS)):
            return count
    return 0


def without_asides(text: str) -> str:
    """Return a tidy list without those of its members that are words.

    >>> without_asides("72, in total"), without_asides("72, not 73"), without_asides("red, blue")
    ('72', '72, not 73', 'red, blue')
    """
    members = split(text, LISTED)
    values = [member for member in members if not is_aside(member)]
    is_changed = len(values) < len(members)
    has_value = any(_DIGIT_OR_COMMAND.search(member) for member in values)
    return ",".join(values) if is_changed and has_value else text


def is_aside(member: str) -> bool:
    """Whether a member of a list is words that say nothing about the value.

    >>> is_aside(" in total"), is_aside("not 73"), is_aside("none"), is_aside("a")
    (True, False, False, False)
    """
    tokens = member.split()
    if not tokens or max(len(token) for token in tokens) <= 2:
        return False
    return all(_is_word(token) and not _tells(token) for token in tokens)


def without_condition(text: str) -> str:
    r"""Return a tidy text without the words after its value that say for what it holds.

    >>> without_condition("4t for all t"), without_condition("n + 1 where n is whole")
    ('4t', 'n + 1')
    """
    match = _CONDITION.search(text)
    if match is None or match.start() == 0:
        return text
    return text[: match.start()].rstrip()
