"""Compound quantities: one amount said in two or three units, the larger first.

`5 feet 3 inches`, `18 dollars and 50 cents`, `1 hour, 30 minutes`, `5'3"`. All units must be known,
of one kind, and each smaller than the one before; anything else is a list or a sentence.
"""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from grouper.grading.units import Unit, find_unit


class Compound(NamedTuple):
    """An amount in the unit that was said first."""

    value: Fraction
    unit: Unit


_MARKS = {"'": "feet", "''": "inches", '"': "inches"}
_NUMBER = r"\d{1,3}(?:,\d{3}){1,6}|\d{1,20}"
_PART = re.compile(
    rf"(\\?\$)? ?({_NUMBER})((?:\.\d{{1,20}})?)(?: ?((?!and\b)[A-Za-z]{{1,12}}\.?|¢|''|'|\"))?",
    re.ASCII,
)
_JOINT = re.compile(r",? and |, ?| ?")
_MAX_PARTS = 4
_MAX_LENGTH = 120


@lru_cache(maxsize=8192)
def read_compound(text: str) -> Compound | None:
    """The amount that a tidy text says in several units, or None.

    >>> read_compound("5 feet 3 inches").value
    Fraction(21, 4)
    >>> read_compound("18 dollars and 50 cents").value
    Fraction(37, 2)
    >>> read_compound("3 boys and 4 girls") is None, read_compound("5 cm, 3 cm") is None
    (True, True)
    """
    if len(text) > _MAX_LENGTH:
        return None
    parts: list[Compound] = []
    at = 0
    while at < len(text):
        match = _PART.match(text, at)
        part = None if match is None else _part(match)
        if match is None or part is None or len(parts) == _MAX_PARTS:
            return None
        parts.append(part)
        at = match.end()
        if at < len(text):
            joint = _JOINT.match(text, at)
            at = joint.end() if joint is not None else at
    return _sum(parts)


def _part(match: re.Match[str]) -> Compound | None:
    dollars, whole, decimals, name = match.groups()
    word = "dollars" if dollars and not name else _MARKS.get(name or "", name or "")
    unit = find_unit(word)
    if unit is None or unit.per or unit.offset or (dollars and unit.kind != "money"):
        return None
    return Compound(Fraction(whole.replace(",", "") + decimals), unit)


def _sum(parts: list[Compound]) -> Compound | None:
    units = [part.unit for part in parts]
    falling = all(a.kind == b.kind and a.factor > b.factor for a, b in itertools.pairwise(units))
    if len(parts) < 2 or not falling:
        return None
    total = sum((part.value * part.unit.factor for part in parts), start=Fraction(0))
    return Compound(total / units[0].factor, units[0])
