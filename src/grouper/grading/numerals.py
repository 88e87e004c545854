r"""The number rung's reader: a text that is one exact number, with its unit, or nothing.

Integers, fractions, mixed numbers, decimals, repeating decimals, scientific notation, percent,
money, units, degrees, thousands separators, bases (`52_8`), numbers in words.

A decimal that goes on (`0.333...`) is exact where its digits repeat beyond doubt. Otherwise
(`3.14159...`) it names no number: only a range that starts at the digits shown.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from grouper.grading.normalise import braced
from grouper.grading.number_words import CARDINALS, SCALES, read_words, spoken_sign
from grouper.grading.quantities import read_compound
from grouper.grading.rational import Rational, evaluate
from grouper.grading.units import Unit, find_unit, is_unit_phrase, matched, powered


class Number(NamedTuple):
    """One exact number as written."""

    value: Fraction
    unit: Unit | None = None
    percent: bool = False
    decimals: int = -1
    """Digits after the point of a plain decimal; -1 for everything else."""
    base: int = 10
    digits: str = ""
    """As written, where a base is given."""
    undone: bool = False
    """Arithmetic was left to be done: `12+7`."""
    open: bool = False
    """Only the first `decimals` digits after the point are given: `3.14159...`."""


_MAX_DIGITS = 1_000
_MAX_EXPONENT = 2_000
_PLAIN = re.compile(r"([-+]?)(\d*)(?:\.(\d*))?(?:[eE]([-+]?\d+))?", re.ASCII)
_THOUSANDS = re.compile(
    r"[-+]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?|[-+]?[1-9]\d{0,2}(?:\.\d{3}){2,}(?:,\d+)?"
    r"|[-+]?[1-9]\d{0,2}(?:\.\d{3})+,\d+",
    re.ASCII,
)
_REPEATING = re.compile(
    r"([-+]?)(\d*)\.(\d*?)(?:\\(?:overline|bar)\{?(\d+)\}?|\((\d+)\)|((?:\\dot\{?\d\}?)(?:(?:\d*)"
    r"\\dot\{?\d\}?)?))",
    re.ASCII,
)
_ELLIPSIS = re.compile(r"([-+]?)(\d*)\.(\d+) ?\.\.\.", re.ASCII)
_BASED = re.compile(
    r"(-?)([0-9A-Za-z]+)(?:\.([0-9A-Za-z]+))? ?_ ?(?:\{? ?(\d{1,2}|[a-z]{3,7}) ?\}?)", re.ASCII
)
_CURRENCY = re.compile(r"([-+]?)\s*(\\\$|[$€£])\s*(.*)", re.DOTALL)
_PERCENT = re.compile(r"(.*?)\s*(?:%|percent|per cent|pct)", re.DOTALL | re.IGNORECASE)
_DEGREES = re.compile(r"(.*?[\d})])\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\circ)\s*(.*)", re.DOTALL)
_DEGREE_SCALES = {"": "degrees", "C": "celsius", "F": "fahrenheit"}
_TRAILING_WORDS = re.compile(
    r"(.*?[\d})!])(\s*)([A-Za-z][A-Za-z/.' -]*)(?:\s*\^\s*\{?\s*([23])\s*\}?)?",
    re.DOTALL | re.ASCII,
)


@lru_cache(maxsize=8192)
def read_number(text: str) -> Number | None:
    r"""The number a tidy text spells, or None.

    Raises:
        TooLargeError: a power or factorial too large to write down.

    >>> read_number("-15\\frac{3}{5}").value
    Fraction(-78, 5)
    >>> read_number(r"\$1,234.50").value, read_number("40%").percent
    (Fraction(2469, 2), True)
    >>> read_number("x+1") is None
    True
    """
    plain = _plain(text)
    if plain is not None:
        return plain
    unsigned = spoken_sign(text)
    if unsigned is not None:
        # "negative -5" says it twice.
        number = None if unsigned[:1] in "+-−" else read_number(unsigned)
        return number if number is None else number._replace(value=-number.value)
    if not text or not ((text[-1].isascii() or text[-1] == "¢") and any(c.isdigit() for c in text)):
        spoken = read_words(text)
        return None if spoken is None else Number(spoken)
    compound = read_compound(text)
    if compound is not None:
        return Number(compound.value, unit=compound.unit)
    return _based(text) or _with_unit(text) or _bare(text)


def _plain(text: str) -> Number | None:
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    sign, whole, part, exponent = match.groups()
    if not (whole or part) or len(text) > _MAX_DIGITS:
        return None
    if exponent is not None and abs(int(exponent)) > _MAX_EXPONENT:
        return None
    value = Fraction(int(whole + (part or "")) if part else int(whole))
    shift = int(exponent or 0) - len(part or "")
    value *= Fraction(10) ** shift
    decimals = len(part) if part and exponent is None else -1
    return Number(-value if sign == "-" else value, decimals=decimals)


def _based(text: str) -> Number | None:
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    sign, whole, part, written = match.groups()
    part = part or ""
    base = int(written) if written.isdigit() else CARDINALS.get(written, 0)
    if not 2 <= base <= 36 or len(whole + part) > 200 or (whole + part).isalpha():
        return None  # `a_{12}` is a variable
    try:
        value = Fraction(int(whole + part, base), base ** len(part))
    except ValueError:  # a digit the base does not have
        return None
    digits = f"{sign}{whole}.{part}" if part else sign + whole
    return Number(-value if sign else value, base=base, digits=digits.upper())


def _with_unit(text: str) -> Number | None:
    """A number with a currency sign before it, or a percent sign, degrees or words after it."""
    text = _without_parentheses(text)
    if match := _CURRENCY.fullmatch(text):
        sign, symbol, rest = match.groups()
        number = read_number(sign + rest.lstrip("+") if not rest.startswith("-") else rest)
        unit = find_unit(symbol.lstrip("\\"))
        # "$5 dollars" and "-$-5" say no more than once what they say.
        return None if number is None or number.percent else number._replace(unit=unit)
    if match := _PERCENT.fullmatch(text):
        number = _bare(match.group(1))
        return None if number is None else number._replace(percent=True, decimals=-1)
    if match := _DEGREES.fullmatch(text):
        scale = match.group(2).strip()
        number = _bare(match.group(1))
        unit = find_unit(_DEGREE_SCALES.get(scale, f"degrees {scale}"))
        return None if number is None or unit is None else number._replace(unit=unit)
    return _with_words(text)


def _with_words(text: str) -> Number | None:
    match = _TRAILING_WORDS.fullmatch(text)
    if match is None:
        return None
    core, gap, phrase, power = match.groups()
    number = _bare(core)
    if number is None:
        return None
    first, _, rest = phrase.strip().partition(" ")
    if first.lower() in SCALES:
        number = number._replace(value=number.value * SCALES[first.lower()], decimals=-1)
        return number if not rest or is_unit_phrase(rest, spaced=True) else None
    if not is_unit_phrase(phrase.strip(), spaced=bool(gap)):
        return None
    unit = find_unit(phrase)
    if unit is not None and power:
        unit = powered(unit, int(power))
    return number._replace(unit=unit)


_IN_PARENTHESES = re.compile(r"(.*[\d})!%]) ?\(([A-Za-z][A-Za-z /.'-]*)\)", re.DOTALL | re.ASCII)


def _without_parentheses(text: str) -> str:
    """`9 (apples)` as `9 apples`; what may be a product stays."""
    match = _IN_PARENTHESES.fullmatch(text)
    if match is None or not is_unit_phrase(match[2].strip(), spaced=True):
        return text
    return f"{match[1]} {match[2]}"


_EXPRESSION_UNIT = re.compile(
    r"(.*(?:[\d})!]|\\pi|(?<![A-Za-z])pi))\s+([A-Za-z][A-Za-z/.' -]+)(?:\^\s*\{?\s*([23])\s*\}?)?",
    re.DOTALL | re.ASCII,
)


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""An expression without the words of a unit after it, and the unit where it is a known one.

    >>> split_unit(r"12\sqrt{13} feet")[0], split_unit(r"2 \sin x")
    ('12\\sqrt{13}', ('2 \\sin x', None))
    """
    match = _EXPRESSION_UNIT.fullmatch(_without_parentheses(text))
    if match is None or not is_unit_phrase(match.group(2).strip(), spaced=True):
        return text, None
    core, phrase, power = match.groups()
    unit = find_unit(phrase)
    if unit is not None and unit.kind == "angle" and "\\" in core:
        return text, None  # `\cos 58 degrees` is not `\cos 58`
    return core, powered(unit, int(power)) if unit is not None and power else unit


def _bare(text: str) -> Number | None:
    """A number without unit, in any notation."""
    text = text.strip()
    plain = _plain(text)
    if plain is not None:
        return plain
    if match := _REPEATING.fullmatch(text):
        return _repeating(match)
    if match := _ELLIPSIS.fullmatch(text):
        return _going_on(match)
    if _THOUSANDS.fullmatch(text):
        european = text.count(".") > 1 or ("." in text and text.rfind(",") > text.find("."))
        if european:
            text = text.replace(".", "").replace(",", ".")
        return _plain(text.replace(",", "").replace(" ", ""))
    ungrouped = re.sub(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?!\d)", _joined, text)
    result: Rational | None = evaluate(braced(ungrouped.replace(" x 10", r"\times 10")))
    return None if result is None else Number(result.value, undone=result.undone)


def _joined(match: re.Match[str]) -> str:
    return match.group().replace(",", "")


def _repeating(match: re.Match[str]) -> Number:
    sign, whole, fixed, *blocks = match.groups()
    block = "".join(c for c in next(filter(None, blocks)) if c.isdigit())
    return Number(_recurring(sign, whole, fixed, block))


def _recurring(sign: str, whole: str, fixed: str, block: str) -> Fraction:
    value = Fraction(int((whole or "0") + fixed), 10 ** len(fixed))
    value += Fraction(int(block), 10 ** len(fixed) * (10 ** len(block) - 1))
    return -value if sign == "-" else value


# One to three digits said three times, or more digits from the point on said twice: the digits of
# e (2.718281828...) repeat 1828 and are no repeating decimal.
_CYCLE = re.compile(r"(\d*?)(\d{1,3}?)\2\2+|()(\d{4,}?)\4+", re.ASCII)


def _going_on(match: re.Match[str]) -> Number:
    """`0.1666...` repeats; `3.14159...` is some number that begins so."""
    sign, whole, part = match.groups()
    if len(part) <= _MAX_TAIL and (cycle := _CYCLE.fullmatch(part)):
        fixed, block = (cycle[1], cycle[2]) if cycle[2] else (cycle[3], cycle[4])
        return Number(_recurring(sign, whole, fixed, block))
    value = Fraction(int((whole or "0") + part), 10 ** len(part))
    return Number(-value if sign == "-" else value, decimals=len(part), open=True)


_MAX_TAIL = 60


# A reference with this many decimals is read as rounded; with fewer it is exact.
ROUNDED_FROM = 4


def same_number(prediction: Number, reference: Number) -> tuple[bool, str]:
    """Whether two numbers are the same answer, and why.

    Units are compared where both sides have a known one; a percent sign on one side only may have
    been left out or spelled as a fraction; a base on one side only compares the digits.

    >>> same_number(read_number("1/3"), read_number("0.3333"))
    (True, 'equal to the 4 decimals of the reference')
    >>> same_number(read_number("50 cents"), read_number("0.50 dollars"))[0]
    True
    """
    if prediction.open or reference.open:
        return _same_beginning(prediction, reference)
    if prediction.base != reference.base:
        return _same_digits(prediction, reference), "bases compared by their digits"
    converted = _in_one_unit(prediction, reference)
    if isinstance(converted, str):
        return False, converted
    prediction, reference = converted
    if prediction.percent != reference.percent:
        return _same_percent(prediction, reference), "a percent sign on one side"
    if prediction.undone and not reference.undone:
        return False, "the arithmetic is left to be done"
    return _same_value(prediction, reference)


def _in_one_unit(prediction: Number, reference: Number) -> tuple[Number, Number] | str:
    """Both numbers in base units where both have a unit; why not, where these do not compare."""
    mine, asked = prediction.unit, reference.unit
    if mine is None or asked is None or mine == asked:
        return prediction, reference
    units = matched(mine, asked)
    if units is None:
        return f"{_said(mine)} against {_said(asked)}"
    # A converted decimal is no longer rounded to the decimals it was written with.
    return (
        prediction._replace(value=units[0].in_base(prediction.value), decimals=-1),
        reference._replace(value=units[1].in_base(reference.value), decimals=-1),
    )


def _said(unit: Unit) -> str:
    return f"{unit.kind} per {unit.per}" if unit.per else unit.kind


def _same_beginning(prediction: Number, reference: Number) -> tuple[bool, str]:
    """A number that goes on: digits that were cut off are never taken for none."""
    if prediction.open:
        same = prediction == reference
        return same, "the same digits" if same else "the digits go on and are not given"
    beyond = abs(prediction.value) - abs(reference.value)
    same = (
        reference.decimals >= ROUNDED_FROM
        and (prediction.value < 0) == (reference.value < 0)
        and 0 < beyond < Fraction(1, 10**reference.decimals)
        and not (prediction.unit or prediction.percent or prediction.undone)
    )
    return same, f"compared with the {reference.decimals} decimals that are given"


def _same_value(prediction: Number, reference: Number) -> tuple[bool, str]:
    if prediction.value == reference.value:
        return True, "equal numbers"
    if reference.decimals >= ROUNDED_FROM:
        half = Fraction(1, 2 * 10**reference.decimals)
        if abs(prediction.value - reference.value) <= half:
            return True, f"equal to the {reference.decimals} decimals of the reference"
    elif _computed(prediction, reference):
        return True, f"equal to {_COMPUTED} digits or more"
    return False, "different numbers"


_COMPUTED = 12


def _computed(prediction: Number, reference: Number) -> bool:
    """Whether a decimal is what a computer prints for a fraction: 12 right digits or more."""
    if prediction.decimals < 0 or reference.decimals >= 0 or reference.value.denominator == 1:
        return False
    digits = len(str(abs(int(prediction.value * 10**prediction.decimals))))
    if digits < _COMPUTED or (prediction.value < 0) != (reference.value < 0):
        return False
    last = Fraction(10) ** (digits - prediction.decimals - _COMPUTED)
    return -last / 2 <= abs(reference.value) - abs(prediction.value) < last


def _same_percent(prediction: Number, reference: Number) -> bool:
    if reference.percent:
        return prediction.value in (reference.value, reference.value / 100)
    # "40%" for 40 answers "what percent?"; "0.5%" for 0.5 is another number.
    same_digits = prediction.value == reference.value and abs(reference.value) >= 1
    return same_digits or prediction.value / 100 == reference.value


def _same_digits(prediction: Number, reference: Number) -> bool:
    if prediction.digits and reference.digits:
        return prediction.value == reference.value
    based, plain = (prediction, reference) if prediction.digits else (reference, prediction)
    as_decimal = _plain(based.digits)
    return as_decimal is not None and as_decimal.value == plain.value
