"""Reading plain decimal numbers, the way the rewards of systems C and D do: no units, no LaTeX."""

from __future__ import annotations

import math
import re

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
_MAX_CHARACTERS = 300
"""A longer literal is no answer, and above this a float overflows."""


def whole_number_text(text: str) -> float | None:
    """The number that a text is, commas and a dollar sign apart; None where it is anything else.

    >>> [whole_number_text(text) for text in (" $1,200.50 ", "7.", "1e3", "12 apples", "")]
    [1200.5, 7.0, 1000.0, None, None]
    """
    text = text.strip().removeprefix("$")
    if len(text) > _MAX_CHARACTERS or not _NUMBER.fullmatch(text):
        return None
    return _value(text)


def python_number(text: str) -> float | None:
    """The number that Python's `float` reads in a text, infinite ones included; None: it refuses.

    >>> [python_number(text) for text in ("7.", "1e3", "-inf", "1,200", "$5")]
    [7.0, 1000.0, -inf, None, None]
    """
    try:
        return float(text)
    except ValueError:
        return None


def first_number(text: str) -> float | None:
    """The first number in a text.

    >>> first_number("x = -3.5, or 7"), first_number("none")
    (-3.5, None)
    """
    found = _NUMBER.search(text)
    if found is None or found.end() - found.start() > _MAX_CHARACTERS:
        return None
    return _value(found.group())


def _value(literal: str) -> float | None:
    value = float(literal.replace(",", ""))
    return value if math.isfinite(value) else None


def within(value: float, reference: float, share: float) -> bool:
    """Whether `value` is at most `share` of the reference away from it.

    >>> within(90, 100, 0.1), within(89, 100, 0.1), within(-90, -100, 0.1), within(0.1, 0, 0.1)
    (True, False, True, False)
    """
    return abs(value - reference) <= share * abs(reference) * (1 + 1e-12)
