r"""Words around an answer: "The total is 16 apples.", "72, in total", `4t \text{ for all } t`.

A strict answer is a value, but models put sentences where it belongs. Here the words around the one
value of a text are taken away, unless they deny it, compare it or compute with it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from grouper.grading.normalise import CONSTANTS, GREEK
from grouper.grading.numbers import NOT_UNITS, find_unit
from grouper.grading.shapes import is_label

_DATA = json.loads(Path(__file__).with_name("units.json").read_text("utf-8"))
# Words that change what a value says, and therefore are never taken away.
_TELLING = NOT_UNITS | frozenset(_DATA["not prose"].split())
# Words that link the value to what is asked: `The total is 16`.
_LINKING = frozenset(["is", "are", "was", "be", "at", "equals", "equal", "then", "so"])
_SHORT_WORDS = frozenset(_DATA["short words"].split())
# Words of three letters that are no product of variables, names among them.
_THREE_LETTERS = frozenset(_DATA["three letters"].split())
_VALUE = re.compile(r"\d|\\[A-Za-z]")
_MAX_WORDS = 20
_MARKS = ",:;'\"()"
_SPELLED = re.compile(r"[a-z](?:[a-z'-]*[a-z])?")
# Words of a unit that are kept behind a value.
_UNIT_WORDS = 4


def _is_word(token: str) -> bool:
    """Whether a token is a word rather than variables, a function or a number."""
    if token == "I":
        return True
    bare = token.strip(_MARKS).lower()
    if bare in GREEK or bare in CONSTANTS or not _SPELLED.fullmatch(bare):
        return False
    return bare in _SHORT_WORDS or len(bare) >= 4 or (len(bare) == 3 and bare in _THREE_LETTERS)


def stated_value(text: str) -> str:
    r"""The value of a tidy text that is a sentence about it; any other text unchanged.

    >>> stated_value("The total is 16"), stated_value("Jason has 16 apples left in the box")
    ('16', '16')
    >>> stated_value("It is not 16"), stated_value("16 or 17"), stated_value(r"2 \sin x")
    ('It is not 16', '16 or 17', '2 \\sin x')
    """
    tokens = text.split(" ")
    if len(tokens) > 2 * _MAX_WORDS:
        return text
    first, last = 0, len(tokens)
    while first < last and _is_word(tokens[first]):
        first += 1
    while last > first and _is_word(tokens[last - 1]):
        last -= 1
    before, core, after = tokens[:first], tokens[first:last], tokens[last:]
    value = " ".join(core)
    denied = any(_tells(token) and token.lower() not in CONSTANTS for token in core)
    if not _VALUE.search(value) or value[0] in "=+*/^<>," or any(map(_is_word, core)) or denied:
        return text
    if any(map(_tells, before + after)) or not any(
        len(w.strip(_MARKS)) > 1 for w in before + after
    ):
        return text  # a letter alone is a variable
    name, equals, _ = value.partition("=")
    if equals and not is_label(name.strip()):
        return text  # two values
    if len(after) > _UNIT_WORDS:
        after = after[: _unit_words(after)]
    return " ".join([value, *after]).rstrip(",:;")


def _unit_words(words: list[str]) -> int:
    """How many of the words behind a value are its unit: two of "square feet of carpet"."""
    counts = range(_UNIT_WORDS, 0, -1)
    return next((n for n in counts if find_unit(" ".join(words[:n]).strip(_MARKS))), 0)


def _tells(token: str) -> bool:
    bare = token.strip(_MARKS).lower()
    return bare in _TELLING and bare not in _LINKING


def without_asides(text: str, members: list[str]) -> str:
    """A tidy text without those of its members that are words: `72` of "72, in total"."""
    kept = [member for member in members if not is_aside(member)]
    if len(kept) == len(members) or not any(map(_VALUE.search, kept)):
        return text
    return ",".join(kept)


def is_aside(member: str) -> bool:
    """Whether a member of a list is words that say nothing about the value.

    >>> is_aside(" in total"), is_aside("not 73"), is_aside("none"), is_aside("a")
    (True, False, False, False)
    """
    tokens = member.split()
    words = bool(tokens) and all(map(_is_word, tokens)) and not any(map(_tells, tokens))
    return words and max(map(len, tokens)) > 2


_CONDITION = re.compile(r",? ?\b(?:for (?:all|every|any|each)|where)\b .*", re.DOTALL)


def without_condition(text: str) -> str:
    r"""A tidy text without the words after its value that say for what it holds.

    >>> without_condition("4t for all t"), without_condition("n + 1 where n is whole")
    ('4t', 'n + 1')
    """
    match = _CONDITION.search(text)
    return text[: match.start()].rstrip() if match and match.start() > 0 else text
