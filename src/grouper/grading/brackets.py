"""Brackets: how deep they are nested, and what stands between separators outside of them."""

from __future__ import annotations

import re

from grouper.grading.patterns import PATTERNS

# Brackets in brackets; parsing time grows with the depth, and no answer needs as many.
MAX_NESTING = 16

CONJUNCTION = PATTERNS["conjunction"]
EQUALS = PATTERNS["equals"]
COLON = PATTERNS["colon"]
LISTED = PATTERNS["listed"]

_BRACKET = PATTERNS["bracket"]


def depths(text: str) -> tuple[int, int]:
    """Return the (lowest, deepest) nesting of brackets.

    The lowest is negative if one closes before it opens.

    >>> depths("f(x, (1, 2))"), depths(")(")
    ((0, 2), (-1, 0))
    """
    depth = 0
    lowest = 0
    deepest = 0
    for match in _BRACKET.finditer(text):
        if match.group() in "([{":
            depth += 1
        else:
            depth -= 1
        lowest = min(lowest, depth)
        deepest = max(deepest, depth)
    return lowest, deepest


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split at separators outside brackets: not at the comma of `f(x, y)`.

    Args:
        text: a tidy text.
        separator: one of the four above, which match brackets, too.

    >>> split("f(x, y), 2", LISTED)
    ['f(x, y)', ' 2']
    """
    parts = []
    depth = 0
    start = 0
    for match in separator.finditer(text):
        if match.group() in ("(", "[", "{"):
            depth += 1
        elif match.group() in (")", "]", "}"):
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]
