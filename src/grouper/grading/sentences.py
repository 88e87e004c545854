r"""Prose as sentences, with what must not be read as words masked: formulas, emphasis, bullets.

The masked text has as many characters as the text itself, so that a place in one is a place in the
other. All scans are linear.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Stands for a character of a formula, so that no full stop or word inside ends or begins anything.
MATHS = "\ue000"
_BLOCK = (
    r"\\begin\{(?P<name>align|equation|gather|aligned)\*?\}"
    r"(?P<block>(?:[^\\]|\\(?!begin\{(?:al|eq|ga))){1,2000}?)\\end\{(?P=name)\*?\}"
)
# A command, a sign, or one or two letters.
_WORDLESS = (
    r"\\(?:text\w*|mbox|begin|end|operatorname|mathrm)\{[^{}$]{0,60}\}"
    r"|\\[A-Za-z]+|\\.|[^$\nA-Za-z\\]|(?<![A-Za-z])[A-Za-z]{1,2}(?![A-Za-z])"
)
_FORMULAS = (
    r"\\\[(?P<brackets>[^\ue000]{1,2000}?)\\\]",
    r"\\\((?P<parentheses>[^\ue000]{1,1000}?)\\\)",
    r"(?<!\\)\$\$(?P<display>[^$]{1,2000})\$\$",
    _BLOCK,
    # As Pandoc reads it: the dollars of "$5 and $6" are money.
    r"(?<![\\$])\$(?P<tight>(?![\s$])[^$\n]{0,300}?[^\s$\\])\$(?![\d$])",
    # With spaces inside there may be no words, which are a sentence between two amounts.
    rf"(?<![\\$])\$(?P<spaced>(?:{_WORDLESS}){{1,300}})\$(?![\d$])",
)
"""The ways to write a formula; the last group of each holds what is inside."""
_FORMULA = re.compile("|".join(_FORMULAS), re.DOTALL)
_EMPHASIS = re.compile(
    r"(?<![\w)}])\*\*+|\*\*+(?![\w(\\])|(?<!\S)\*(?=\S)|(?<=\S)\*(?=[\s.,;:!?)]|$)"
    r"|(?<!\w)__|__(?!\w)|`+|^[ \t]*#+[ \t]|^[ \t]*>[ \t]|[✅✓✔]",
    re.MULTILINE,
)
_MARKER = re.compile(r"^[ \t]*(?:(\d{1,2})[.)]|[-•])[ \t]+(?=\S)", re.MULTILINE)

Span = tuple[int, int]
"""Where a sentence begins and ends, in characters of its text."""


class Prose(NamedTuple):
    """A text, and the same with formulas and emphasis masked, character by character."""

    text: str
    masked: str
    formulas: dict[int, re.Match[str]]
    """Where each formula begins."""


def read_prose(text: str) -> Prose:
    r"""Mask the formulas, emphasis and list marks of a text.

    >>> prose = read_prose("So **it** is $x+1$.")
    >>> prose.masked.replace(MATHS, "m")
    'So   it   is mmmmm.'
    """
    formulas = {match.start(): match for match in _FORMULA.finditer(text)}
    pieces = []
    start = 0
    for match in formulas.values():
        pieces.append(text[start : match.start()].replace(MATHS, " "))
        pieces.append(MATHS * len(match[0]))
        start = match.end()
    pieces.append(text[start:].replace(MATHS, " "))
    masked = _EMPHASIS.sub(_blanks, "".join(pieces))
    return Prose(text, _without_list_marks(masked), formulas)


def _blanks(match: re.Match[str]) -> str:
    return " " * len(match[0])


def _without_list_marks(masked: str) -> str:
    """Blank out bullets, and the numbers of a list; a number without a neighbor is no list's."""
    numbers = {int(match[1]) for match in _MARKER.finditer(masked) if match[1]}

    def unmarked(match: re.Match[str]) -> str:
        if match[1] and numbers.isdisjoint((int(match[1]) - 1, int(match[1]) + 1)):
            return match[0]
        return _blanks(match)

    return _MARKER.sub(unmarked, masked)


_END = re.compile(
    r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!e\.g)(?<!i\.e)[.?;](?=\s|$)|!(?=\s*\Z|\s*\n|\s+[A-Z])|\n\s*"
)
# How a line ends that goes on: in a colon, a comma or a verb, or as the heading of an answer.
_GOES_ON = re.compile(
    r"(?:[:,=]|\b(?:is|are|be|get|have|equals|of)|^\s*(?:the )?(?:final |correct )?answer)\s*\Z",
    re.IGNORECASE | re.MULTILINE,
)


# Characters before a line break that show whether its line goes on.
_LINE_END = 40


def sentence_spans(prose: Prose) -> list[Span]:
    """Return where each sentence begins and ends, in order; what follows a colon belongs to it."""
    spans = []
    start = 0
    for match in _END.finditer(prose.masked):
        if match[0].startswith("\n"):
            line_end = max(start, match.start() - _LINE_END)
            if _is_wrapped(prose.masked, line_end, match):
                continue
        if prose.masked[start : match.start()].strip():
            spans.append((start, match.start()))
        start = match.end()
    if prose.masked[start:].strip():
        spans.append((start, len(prose.masked)))
    return spans


def _is_wrapped(masked: str, start: int, line_break: re.Match[str]) -> bool:
    """Whether a sentence goes on after the end of a line: in a formula, or in small letters."""
    before = masked[start : line_break.start()].rstrip()
    after = masked[line_break.end() : line_break.end() + 2]
    if not before or before[-1] in ".!?;":
        return False
    if _GOES_ON.search(before):
        return True
    if before[-1] == MATHS:
        return False
    # A small letter alone is a variable, and begins an equation.
    begins_with_a_word = len(after) == 2 and after.isalpha() and after.islower()
    return after[:1] == MATHS or begins_with_a_word
