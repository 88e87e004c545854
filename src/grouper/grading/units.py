"""Units of everyday problems: which words may follow a number, and which of them compare.

A unit is a pair (what it measures, factor to that kind's base unit). Two answers that both carry
a known unit must agree in kind, and are compared in the base unit: 50 cents is 0.50 dollars and
is not 50 dollars. A unit on one side only says nothing.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

__all__ = ["SCALES", "Unit", "find_unit", "is_unit_phrase", "powered"]


class Unit(NamedTuple):
    """What is measured, and the factor to its base unit."""

    kind: str
    factor: Fraction


def _units(kind: str, names: dict[str, str]) -> dict[str, Unit]:
    return {
        name: Unit(kind, Fraction(factor))
        for factor, spelled in names.items()
        for name in spelled.split()
    }


_UNITS: dict[str, Unit] = {
    **_units("money", {"1": "$ dollar dollars usd", "1/100": "cent cents ¢"}),
    **_units("euro", {"1": "€ euro euros"}),
    **_units("pound sterling", {"1": "£"}),
    **_units("angle", {"1": "degree degrees deg °"}),
    **_units(
        "length",
        {
            "1": "m meter meters metre metres",
            "1000": "km kilometer kilometers kilometre kilometres",
            "1/100": "cm centimeter centimeters centimetre centimetres",
            "1/1000": "mm millimeter millimeters millimetre millimetres",
            "0.0254": "in inch inches",
            "0.3048": "ft foot feet",
            "0.9144": "yd yard yards",
            "1609.344": "mi mile miles",
        },
    ),
    **_units(
        "mass",
        {
            "1": "g gram grams",
            "1000": "kg kilogram kilograms",
            "1/1000": "mg milligram milligrams",
            "0.45359237": "lb lbs pound pounds",
            "0.028349523125": "oz ounce ounces",
        },
    ),
    **_units(
        "time",
        {
            "1": "s sec second seconds",
            "60": "min mins minute minutes",
            "3600": "h hr hrs hour hours",
            "86400": "day days",
            "604800": "week weeks",
        },
    ),
    **_units("volume", {"1": "l liter liters litre litres", "1/1000": "ml milliliter milliliters"}),
    **_units("speed", {"1": "mph", "0.621371": "km/h kph kmh"}),
}

_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}

SCALES: dict[str, int] = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}

# Words that turn "18 ..." into a sentence or a choice rather than a quantity.
_SENTENCE_WORDS = """is are was be not no nor and or but than at least most more less if then
because so mod either isn't aren't wrong false maybe about approximately to through from plus minus
times divided over equals equal remainder sqrt root pi sin cos tan log ln exp choose unknown
infinity half halves quarter quarters third thirds dozen percent correct incorrect hundred thousand
million billion trillion am pm a.m p.m a.m. p.m."""
_NOT_UNITS = frozenset(_SENTENCE_WORDS.split())
_MAX_WORDS = 4


def find_unit(phrase: str) -> Unit | None:
    """The known unit that a phrase names; None for unknown ones ("apples").

    >>> find_unit("cm").factor, find_unit("apples")
    (Fraction(1, 100), None)
    >>> find_unit("square cm")
    Unit(kind='length to the power 2', factor=Fraction(1, 10000))
    """
    words = phrase.strip(" .").lower().split()
    power = _POWERS.get(words[0].strip("."), 1) if len(words) > 1 else 1
    unit = _UNITS.get("".join(words if power == 1 else words[1:]))
    return unit if unit is None or power == 1 else powered(unit, power)


def powered(unit: Unit, power: int) -> Unit:
    """The unit of an area or a volume."""
    return Unit(f"{unit.kind} to the power {power}", unit.factor**power)


def is_unit_phrase(phrase: str, *, spaced: bool) -> bool:
    """Whether words after a number may be its unit.

    Args:
        phrase: what follows the number.
        spaced: whether a space separates it; `5m` may be a product, `5 m` is metres.

    >>> is_unit_phrase("square feet", spaced=True), is_unit_phrase("or more", spaced=True)
    (True, False)
    >>> is_unit_phrase("x", spaced=True), is_unit_phrase("cm", spaced=False)
    (False, True)
    """
    words = phrase.lower().replace("-", " ").replace("left over", "left").split()
    if not words or len(words) > _MAX_WORDS or not _NOT_UNITS.isdisjoint(words):
        return False
    if find_unit(phrase) is not None:
        return spaced or len(phrase) > 1
    return spaced and all(_is_word(word) for word in words)


def _is_word(word: str) -> bool:
    """Letters of a word or of a rate (`miles/hour`), not a variable."""
    letters = word.replace("/", "").replace(".", "").replace("'", "")
    return len(letters) > 1 and letters.isalpha() and letters.isascii()
