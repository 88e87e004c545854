r"""Units of everyday problems: which words may follow a number, and which of them compare.

A unit says what it measures and its factor to that kind's base unit. Two answers that both carry
a known unit must measure the same, and are compared in the base unit: 50 cents is 0.50 dollars and
is not 50 dollars, 18 km/h is 5 m/s and is not 18 m/s. A unit on one side only says nothing.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from grouper.grading.number_words import CARDINALS, SCALES


class Unit(NamedTuple):
    """What is measured, and how a value becomes one in base units."""

    kind: str
    factor: Fraction
    offset: Fraction = Fraction(0)
    """Added after the factor: only temperatures start elsewhere."""
    per: str = ""
    """What the unit is a rate over; a word that is no known unit stands for itself."""
    per_factor: Fraction = Fraction(1)

    def in_base(self, value: Fraction) -> Fraction:
        """The value in base units."""
        return value * self.factor / self.per_factor + self.offset


def _units(kind: str, names: dict[str, str]) -> dict[str, Unit]:
    return {
        name: Unit(kind, Fraction(factor))
        for factor, spelled in names.items()
        for name in spelled.split()
    }


_ANGLE = "angle"
_TEMPERATURE = "temperature"
_AREA = "length to the power 2"
_VOLUME = "length to the power 3"
_HOUR = Fraction(3600)
_UNITS: dict[str, Unit] = {
    **_units("money", {"1": "$ dollar dollars usd", "1/100": "cent cents ¢"}),
    **_units("euro", {"1": "€ euro euros"}),
    **_units("pound sterling", {"1": "£"}),
    **_units("yen", {"1": "¥ yen"}),
    **_units("rupee", {"1": "₹ rupee rupees"}),
    **_units(_ANGLE, {"1": "degree degrees deg °"}),
    **_units("angle in radians", {"1": "rad rads radian radians"}),
    **_units(
        "length",
        {
            "1": "m meter meters metre metres",
            "1000": "km kilometer kilometers kilometre kilometres",
            "1/100": "cm centimeter centimeters centimetre centimetres",
            "1/1000": "mm millimeter millimeters millimetre millimetres",
            "0.0254": "in inch inches",
            "0.3048": "ft foot feet",
            "0.9144": "yd yds yard yards",
            "1609.344": "mi mile miles",
        },
    ),
    **_units(
        "mass",
        {
            "1": "g gm gram grams",
            "1000": "kg kgs kilogram kilograms",
            "1/1000": "mg milligram milligrams",
            "0.45359237": "lb lbs pound pounds",
            "0.028349523125": "oz ounce ounces",
        },
    ),
    **_units(
        "time",
        {
            "1": "s sec secs second seconds",
            "60": "min mins minute minutes",
            "3600": "h hr hrs hour hours",
            "86400": "day days",
            "604800": "week weeks",
        },
    ),
    # A month has no fixed number of days, so these two kinds do not convert.
    **_units("months", {"1": "month months", "12": "year years", "120": "decade decades"}),
    **_units(
        _VOLUME,
        {
            "1/1000": "l liter liters litre litres",
            "1/1000000": "ml milliliter milliliters millilitre millilitres",
            "0.003785411784": "gal gallon gallons",
            "0.000946352946": "quart quarts",
            "0.000473176473": "pint pints",
        },
    ),
    **_units(_AREA, {"4046.8564224": "acre acres", "10000": "hectare hectares"}),
    "mph": Unit("length", Fraction("1609.344"), per="time", per_factor=_HOUR),
    **{
        name: Unit("length", Fraction(1000), per="time", per_factor=_HOUR)
        for name in ("kph", "kmh", "kmph")
    },
    **{
        name: Unit(_TEMPERATURE, Fraction(1), Fraction("273.15"))
        for name in ("degreesc", "degreescelsius", "degreecelsius", "celsius")
    },
    **{
        name: Unit(_TEMPERATURE, Fraction(5, 9), Fraction("459.67") * Fraction(5, 9))
        for name in ("degreesf", "degreesfahrenheit", "degreefahrenheit", "fahrenheit")
    },
    **{name: Unit(_TEMPERATURE, Fraction(1)) for name in ("kelvin", "kelvins")},
}
# `5 m` is metres and `5 M` is not.
_SMALL_LETTERS = frozenset({"m", "g", "s", "h"})

_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3}

# Words that turn "18 ..." into a sentence, another number or a choice rather than a quantity.
_SENTENCE_WORDS = """is are was be not no nor and or but than at least most more less if then
because so mod modulo either isn't aren't wrong false maybe about approximately to through from plus
minus negative point times divided over equals equal remainder sqrt root pi sin cos tan log ln exp
choose unknown infinity half halves quarter quarters third thirds fourth fourths fifth fifths sixth
sixths seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth
thousandths squared cubed doubled tripled halved factorial dozen dozens percent percents correct
incorrect hundreds thousands millions billions trillion trillions am pm a.m p.m a.m. p.m."""
_NOT_UNITS = frozenset([*_SENTENCE_WORDS.split(), *CARDINALS, *SCALES])
_MAX_WORDS = 4


def find_unit(phrase: str) -> Unit | None:
    """The known unit that a phrase names; None for unknown ones ("apples").

    >>> find_unit("cm").factor, find_unit("apples")
    (Fraction(1, 100), None)
    >>> find_unit("square cm").kind, find_unit("miles per hour") == find_unit("mph")
    ('length to the power 2', True)
    """
    phrase = " ".join(phrase.strip(" .").split())
    over, *rest = _PER.split(phrase, maxsplit=1)
    unit = _named(over)
    if unit is None or not rest or unit.per:
        return unit if not rest else None
    below = _named(rest[0])
    if below is not None:
        return unit._replace(per=below.kind, per_factor=below.factor)
    return unit._replace(per=rest[0].lower().removesuffix("s"))


_PER = re.compile(r" ?/ ?| per ", re.IGNORECASE)


def _named(name: str) -> Unit | None:
    """A unit that is no rate, with the power it is said with."""
    words = name.strip(" .").split()
    power = 1
    if len(words) > 1:
        if power_before := _POWERS.get(words[0].lower().strip(".")):
            power, words = power_before, words[1:]
        elif power_after := _POWERS_AFTER.get(words[-1].lower()):
            power, words = power_after, words[:-1]
    joined = "".join(words)
    if joined.lower() in _SMALL_LETTERS and not joined.islower():
        return None
    unit = _UNITS.get(joined.lower())
    return unit if unit is None or power == 1 else powered(unit, power)


def powered(unit: Unit, power: int) -> Unit:
    """The unit of an area or a volume; of a rate, what stands below is raised (`m/s^2`)."""
    if unit.per:
        raised = f"{unit.per} to the power {power}"
        return unit._replace(per=raised, per_factor=unit.per_factor**power)
    return Unit(f"{unit.kind} to the power {power}", unit.factor**power)


def matched(prediction: Unit, reference: Unit) -> tuple[Unit, Unit] | None:
    """The two units by which two values become comparable; None where they measure other things.

    A bare degree sign may be an angle or a temperature, and what money is paid for may be left
    out (`$18` for 18 dollars per hour): there the values count as written.

    >>> matched(find_unit("km"), find_unit("kg")) is None
    True
    """
    if {prediction.kind, reference.kind} == {_ANGLE, _TEMPERATURE}:
        return _UNITS["°"], _UNITS["°"]
    if prediction.kind != reference.kind:
        return None
    if prediction.per == reference.per:
        return prediction, reference
    if prediction.kind == "money" and not (prediction.per and reference.per):
        return _UNITS["$"]._replace(factor=prediction.factor), _UNITS["$"]._replace(
            factor=reference.factor
        )
    return None


def is_unit_phrase(phrase: str, *, spaced: bool) -> bool:
    """Whether words after a number may be its unit.

    Args:
        phrase: what follows the number.
        spaced: whether a space separates it; `5m` may be a product, `5 m` is metres.

    >>> is_unit_phrase("square feet", spaced=True), is_unit_phrase("or more", spaced=True)
    (True, False)
    >>> is_unit_phrase("x", spaced=True), is_unit_phrase("cm", spaced=False)
    (False, True)
    >>> is_unit_phrase("xy", spaced=True), is_unit_phrase("abc", spaced=True)
    (False, False)
    """
    words = phrase.lower().replace("-", " ").replace("left over", "left").split()
    if find_unit(phrase) is not None and _NOT_UNITS.isdisjoint({*words} - {*_POWERS_AFTER}):
        return spaced or len(phrase) > 1
    if not words or len(words) > _MAX_WORDS or not _NOT_UNITS.isdisjoint(words):
        return False
    return spaced and all(map(_is_word, words)) and any(map(_is_noun, words))


def _is_word(word: str) -> bool:
    """Letters of a word or of a rate (`miles/hour`), not a variable."""
    letters = word.replace("/", "").replace(".", "").replace("'", "")
    return len(letters) > 1 and letters.isalpha() and letters.isascii()


def _is_noun(word: str) -> bool:
    """A word that no product of variables would look like: not `xy`, `abc` or `x/y`."""
    longest = max(re.split(r"[/.']", word), key=len)
    return len(longest) > 2 and longest not in "abcdefghijklmnopqrstuvwxyz"
