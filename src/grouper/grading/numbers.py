r"""The number stage's reader: a text that is one exact number, with its unit, or nothing.

Integers, fractions, mixed numbers, decimals, repeating decimals, scientific notation, arithmetic,
percent, money, units, degrees, thousands separators, bases (`52_8`), number words.
All arithmetic is on `Fraction`, without sympy. The words and units are data: `units.json`.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from grouper.grading.normalize import braced, unmixed
from grouper.grading.patterns import PATTERNS

_DATA = json.loads(Path(__file__).with_name("units.json").read_text("utf-8"))


def _number_words() -> dict[str, int]:
    """Return number words, up to `ninety-nine`, with what they stand for."""
    values = {word: value for value, word in enumerate(_DATA["numbers"].split())}
    ones = list(values)[1:10]
    for number, tens in enumerate(_DATA["tens"].split(), start=2):
        values[tens] = 10 * number
        for one in ones:
            values[f"{tens}-{one}"] = 10 * number + values[one]
    return values


_WORDS = _number_words()


# --- units ---------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """What is measured, and how a value converts to the base unit of that kind.

    Two answers that both carry a known unit must measure the same and are compared in the base
    unit: 50 cents is 0.50 dollars, not 50 dollars. A unit on one side only is ignored.
    """

    kind: str
    factor: Fraction
    offset: Fraction = Fraction(0)
    """Added after the factor; only temperatures have one."""
    per: Unit | None = None
    """The denominator of a rate; a word that is not a known unit is its own kind."""

    def in_base(self, value: Fraction) -> Fraction:
        """Convert a value to base units."""
        below = self.per.factor if self.per else 1
        return value * self.factor / below + self.offset

    def __str__(self) -> str:
        return f"{self.kind} per {self.per.kind}" if self.per else self.kind


def _read_units() -> dict[str, Unit]:
    """Return the known units by name."""
    units: dict[str, Unit] = {}
    for kind, scales in _DATA["units"].items():
        for scale, names in scales.items():
            factor, _, offset = scale.partition("+")
            unit = Unit(kind, Fraction(factor), Fraction(offset or 0))
            units |= dict.fromkeys(names.split(), unit)
    return units


_UNITS = _read_units()
_RATES: dict[str, str] = _DATA["rates"]
_POWERS: dict[str, int] = _DATA["powers"]
_SCALES: dict[str, int] = _DATA["scales"]
# Words that turn "18 ..." into a sentence, another number or a choice rather than a quantity.
NOT_UNITS = frozenset([*_DATA["not units"].split(), *_WORDS, *_SCALES])
_MAX_WORDS = 4
_MARK_IN_A_UNIT = PATTERNS["mark in a unit"]
_PER = PATTERNS["per"]
_RAISED_UNIT = PATTERNS["raised unit"]


def find_unit(phrase: str) -> Unit | None:
    """Find the known unit that a phrase names; None for unknown ones ("apples").

    >>> find_unit("cm").factor, find_unit("apples")
    (Fraction(1, 100), None)
    >>> find_unit("square cm").kind, find_unit("m^2").kind, str(find_unit("miles per hour"))
    ('length^2', 'length^2', 'length per time')
    """
    phrase = " ".join(phrase.strip(" .").split())
    rate = _RATES.get(phrase.lower(), phrase)
    over, *below = _PER.split(rate, maxsplit=1)
    unit = _named(over)
    if unit is None or not below:
        return unit
    per = _named(below[0])
    if per is None:
        per = Unit(below[0].lower().removesuffix("s"), Fraction(1))
    return unit._replace(per=per)


def _named(name: str) -> Unit | None:
    """Find a unit that is not a rate, with its power (`m^2`, `square m`)."""
    power = 1
    words = name.split()
    raised = _RAISED_UNIT.fullmatch(name)
    if raised:
        power = int(raised[2])
        words = raised[1].split()
    for at in (0, -1):
        if len(words) < 2:
            break
        word = words[at].lower().strip(".")
        if word in _POWERS:
            power = _POWERS[word]
            del words[at]
    # `degrees C` is one word, and `h r` are two variables.
    separator = "" if words and len(words[0]) > 1 else " "
    joined = separator.join(words).strip(".")
    # `5 m` is metres and `5 M` is not.
    unit = _UNITS.get(joined if len(joined) == 1 else joined.lower())
    if unit is None or power == 1:
        return unit
    return Unit(f"{unit.kind}^{power}", unit.factor**power)


def matched(prediction: Unit, reference: Unit) -> tuple[Unit, Unit] | None:
    """Return the units by which two values become comparable; None if they measure other things.

    A bare degree sign may be an angle or a temperature, and what money is paid for may be left
    out (`$18` for 18 dollars per hour): there the values count as written.

    >>> matched(find_unit("km"), find_unit("kg")) is None
    True
    """
    if {prediction.kind, reference.kind} == {"angle", "temperature"}:
        degree = _UNITS["°"]
        return degree, degree
    are_money = prediction.kind == reference.kind == "money"
    if are_money and not (prediction.per and reference.per):
        return prediction._replace(per=None), reference._replace(per=None)
    if str(prediction) == str(reference):
        return prediction, reference
    return None


def _is_unit_phrase(phrase: str, *, spaced: bool) -> bool:
    """Return whether words after a number may be its unit; unspaced `5m` may be a product."""
    words = phrase.lower().replace("-", " ").replace("left over", "left").split()
    without_powers = [word for word in words if word not in _POWERS]
    if find_unit(phrase) is not None and NOT_UNITS.isdisjoint(without_powers):
        # `2nm` is a product far more often than a wavelength.
        is_long = len(phrase) > 1 and phrase != "nm"
        return spaced or is_long or not phrase.isascii()
    if not spaced or not 0 < len(words) <= _MAX_WORDS:
        return False
    if not NOT_UNITS.isdisjoint(words):
        return False
    # Words and rates (`miles/hour`), at least one of which no product of variables looks like: not
    # `xy`, `abc` or `x/y`.
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    has_word = False
    for word in words:
        letters = _MARK_IN_A_UNIT.sub("", word)
        if len(letters) < 2 or not letters.isalpha() or not letters.isascii():
            return False
        longest = max(_MARK_IN_A_UNIT.split(word), key=len)
        has_word = has_word or (len(longest) > 2 and longest not in alphabet)
    return has_word


_DEGREES = PATTERNS["degrees"]
_UNIT_IN_PARENTHESES = PATTERNS["unit in parentheses"]
_WITH_WORDS = PATTERNS["with words"]
_LETTER = PATTERNS["letter"]
_VARIABLE = PATTERNS["variable"]


@lru_cache(maxsize=8192)
def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""Split an expression into itself and the unit after it, None where that is not a known one.

    >>> split_unit(r"12\sqrt{13} feet")[0], split_unit(r"2 \sin x")
    ('12\\sqrt{13}', ('2 \\sin x', None))
    """
    with_degrees = _DEGREES.sub(" degrees ", text).strip()
    match = _WITH_WORDS.fullmatch(_UNIT_IN_PARENTHESES.sub(r"\1 \2", with_degrees))
    if match is None:
        return text, None
    expression, space, name = match.groups()
    phrase = name.partition("^")[0].strip()
    if not _is_unit_phrase(phrase, spaced=bool(space)):
        return text, None
    unit = find_unit(name)
    if unit and unit.kind == "angle" and _LETTER.search(expression.replace("frac", "")):
        return text, None  # `\cos 58 degrees` is not `\cos 58`
    if len(phrase) == 1 and _VARIABLE.search(expression):
        return text, None  # `\pi r^2 h` is no number of hours
    return expression, unit


# --- numbers -------------------------------------------------------------------------------------


class Number(NamedTuple):
    """One exact number as written."""

    value: Fraction
    unit: Unit | None = None
    percent: bool = False
    decimals: int = -1
    """Digits after the point of a plain decimal; -1 for everything else."""
    digits: Fraction | str | None = None
    """With a base, as in `52_8`: its digits read in base ten, or as written if some are letters."""
    unevaluated: bool = False
    """It is unevaluated arithmetic: `12+7`."""


_MAX_DIGITS = 1_000
_MAX_EXPONENT = 2_000
_PLAIN_NUMBER = PATTERNS["plain number"]
_THOUSANDS = PATTERNS["thousands"]
_GROUPED_DIGITS = PATTERNS["grouped digits"]
_REPEATING_DECIMAL = PATTERNS["repeating decimal"]
_NO_DIGIT = PATTERNS["no digit"]
_NUMBER_WITH_BASE = PATTERNS["number with base"]
_SIGN_IN_WORDS = PATTERNS["sign in words"]
_CURRENCY = PATTERNS["currency"]
_PERCENT = PATTERNS["percent"]
_PER_IN_AN_AMOUNT = PATTERNS["per in an amount"]
_SPOKEN_WORD = PATTERNS["spoken word"]


@lru_cache(maxsize=8192)
def read_number(text: str) -> Number | None:
    r"""Read the number that a tidy text spells; None if it spells none.

    Raises:
        TooLargeError: a power or factorial too large to write down.

    >>> read_number("-15\\frac{3}{5}").value, read_number("twenty-one").value
    (Fraction(-78, 5), Fraction(21, 1))
    >>> read_number(r"\$1,234.50").value, read_number("40%").percent
    (Fraction(2469, 2), True)
    >>> read_number("x+1") is None
    True
    """
    sign = _SIGN_IN_WORDS.match(text)
    if sign:
        number = read_number(text[sign.end() :])
        return number and number._replace(value=-number.value)
    if not any(character.isdigit() for character in text):
        value, other_words = _in_words(text)
        if value is None or other_words:
            return None
        return Number(Fraction(value))
    currency = _CURRENCY.fullmatch(text)
    if currency:
        before, symbol, rest = currency.groups()
        # "$5 dollars" is as good as "$5", and "$5/hour" is "$5 per hour".
        amount = _PER_IN_AN_AMOUNT.sub(" per ", rest)
        number = read_number(before + amount)
        return number and number._replace(unit=find_unit(symbol))
    percent = _PERCENT.fullmatch(text)
    if percent:
        number = _bare(percent[1])
        return number and number._replace(percent=True, decimals=-1)
    return _based(text) or _with_words(text) or _bare(text)


def read_counted(text: str) -> Number | None:
    """Read the number of a tidy text that counts things in words: 16 of `sixteen apples`.

    >>> read_counted("sixteen apples").value, read_counted("sixteen hundredths")
    (Fraction(16, 1), None)
    """
    value, rest = _in_words(text)
    phrase = " ".join(rest)
    if value is None or not _is_unit_phrase(phrase, spaced=True):
        return None
    return Number(Fraction(value), unit=find_unit(phrase))


def _in_words(text: str) -> tuple[int | None, list[str]]:
    """Read the number that the first words of a text say; return it and the words after it.

    >>> _in_words("one hundred and twenty-one"), _in_words("two lines"), _in_words("twenty twelve")
    ((121, []), (2, ['lines']), (20, ['twelve']))
    """
    words = _SPOKEN_WORD.findall(text.lower())
    if len(words) > 1 and words[0] == "a" and words[1] in _SCALES:
        words[0] = "one"
    # In "two thousand and five", 2,000 is the total once "thousand" has been read.
    total = 0
    current = 0
    last_scale = 10**18
    end = 0
    for word, next_word in itertools.zip_longest(words, words[1:], fillvalue=""):
        number = _WORDS.get(word)
        scale = _SCALES.get(word, 0)
        if number is not None and (current % 100 == 0 or _fits(current, number)):
            current += number
        elif scale == 100 and 0 < current < 100:
            current *= scale
        elif scale > 100 and current > 0 and scale < last_scale:
            total += current * scale
            current = 0
            last_scale = scale
        elif not (word == "and" and total + current >= 100 and next_word in _WORDS):
            break
        end += 1
    value = total + current if end else None
    return value, words[end:]


def _fits(tens: int, ones: int) -> bool:
    """Return whether a number of one digit goes on after a multiple of ten: `twenty one`."""
    return tens % 100 >= 20 and tens % 10 == 0 and 1 <= ones <= 9


def _plain(text: str) -> Number | None:
    match = _PLAIN_NUMBER.fullmatch(text)
    if match is None:
        return None
    whole, part, exponent = match.groups()
    if not (whole or part) or len(text) > _MAX_DIGITS:
        return None
    if abs(int(exponent or 0)) > _MAX_EXPONENT:
        return None
    decimals = len(part) if part and exponent is None else -1
    return Number(Fraction(text), decimals=decimals)


def _with_words(text: str) -> Number | None:
    """Read a number with a scale (`1.45 million`), a unit or other words after it."""
    match = _WITH_WORDS.fullmatch(text)
    if match:
        first, _, rest = match[3].partition(" ")
        scale = _SCALES.get(first.lower())
        if scale:
            if rest and not _is_unit_phrase(rest, spaced=True):
                return None
            number = _bare(match[1])
            return number and number._replace(value=number.value * scale, decimals=-1)
    core, unit = split_unit(text)
    if core == text:
        return None
    number = _bare(core)
    return number and number._replace(unit=unit)


def _based(text: str) -> Number | None:
    match = _NUMBER_WITH_BASE.fullmatch(text)
    if match is None:
        return None
    sign, whole, part, written = match.groups("")
    base = int(written) if written.isdigit() else _WORDS.get(written, 0)
    digits = whole + part
    if not 2 <= base <= 36 or len(digits) > 200 or digits.isalpha():
        return None  # `a_{12}` is a variable
    try:
        value = Fraction(int(sign + digits, base), base ** len(part))
    except ValueError:  # a digit the base does not have
        return None
    plain = _plain(f"{sign}{whole}.{part}")
    return Number(value, digits=plain.value if plain else whole.upper())


def _bare(text: str) -> Number | None:
    """Read a number without unit, in any notation."""
    text = text.strip()
    plain = _plain(text)
    if plain:
        return plain
    repeating = _REPEATING_DECIMAL.fullmatch(text)
    if repeating:
        sign, whole, fixed, *blocks = repeating.groups("")
        block = _NO_DIGIT.sub("", "".join(blocks))
        scale = 10 ** len(fixed)
        value = Fraction(int((whole or "0") + fixed), scale)
        value += Fraction(int(block), scale * (10 ** len(block) - 1))
        return Number(-value if sign == "-" else value)
    thousands = _THOUSANDS.fullmatch(text)
    if thousands:
        if thousands["european"]:
            text = text.replace(".", "").replace(",", ".")
        return _plain(text.replace(",", "").replace(" ", ""))
    arithmetic = ungrouped(text).replace(" x 10", r"\times 10")
    return _evaluated(braced(arithmetic))


def ungrouped(text: str) -> str:
    """Delete the commas between thousands from a text; `0,125` has none.

    >>> ungrouped("1,234 + 5,000 = 6,234"), ungrouped("(1, 234)"), ungrouped("0,125")
    ('1234 + 5000 = 6234', '(1, 234)', '0,125')
    """
    return _GROUPED_DIGITS.sub(lambda match: match[0].replace(",", ""), text)


# --- the same number -----------------------------------------------------------------------------

# A reference with this many decimals is read as rounded; with fewer it is exact.
ROUNDED_FROM = 4


def same_number(prediction: Number, reference: Number) -> tuple[bool, str]:
    """Return whether two numbers are the same answer, and why.

    Units are compared if both sides have a known one. A percent sign on one side only may have been
    left out or written as a fraction. A base on one side only: the digits are compared.

    >>> same_number(read_number("1/3"), read_number("0.3333"))
    (True, 'equal to the 4 decimals of the reference')
    >>> same_number(read_number("50 cents"), read_number("0.50 dollars"))[0]
    True
    """
    if prediction.unevaluated and not reference.unevaluated:
        return False, "the arithmetic is left to be done"
    if (prediction.digits is None) != (reference.digits is None):
        given_digits = prediction.digits or prediction.value
        expected_digits = reference.digits or reference.value
        return given_digits == expected_digits, "bases compared by their digits"
    if prediction.digits != reference.digits:
        return False, "another base"
    if prediction.unit and reference.unit and prediction.unit != reference.unit:
        units = matched(prediction.unit, reference.unit)
        if units is None:
            return False, f"{prediction.unit} against {reference.unit}"
        unit, reference_unit = units
        # A converted decimal is no longer rounded to the decimals it was written with.
        prediction = prediction._replace(value=unit.in_base(prediction.value), decimals=-1)
        reference = reference._replace(value=reference_unit.in_base(reference.value), decimals=-1)
    if prediction.percent != reference.percent:
        given = prediction.value
        expected = reference.value
        # "40%" for 40 answers "what percent?"; "0.5%" for 0.5 is another number.
        as_written = given == expected and (reference.percent or abs(expected) >= 1)
        converted = given * 100 if reference.percent else given / 100
        return as_written or converted == expected, "a percent sign on one side"
    return _same_value(prediction, reference)


def _same_value(prediction: Number, reference: Number) -> tuple[bool, str]:
    error = abs(prediction.value - reference.value)
    if error == 0:
        return True, "equal numbers"
    digits = reference.decimals
    if digits >= ROUNDED_FROM and error * 2 * 10**digits <= 1:
        return True, f"equal to the {digits} decimals of the reference"
    if digits < 0 < prediction.decimals and reference.value.denominator > 1:
        # So a computer prints a fraction, rounded or cut; an integer it prints as one.
        count = len(str(abs(int(prediction.value * 10**prediction.decimals))))
        last = Fraction(10) ** (count - prediction.decimals - 12)
        cut = abs(reference.value) - abs(prediction.value)
        if count >= 12 and error < last and cut >= -last / 2:
            return True, "equal to 12 digits or more"
    return False, "different numbers"


# --- arithmetic ----------------------------------------------------------------------------------

_MAX_BITS = 40_000
_MAX_FACTORIAL = 3_000
_MAX_DEPTH = 40
_MAX_TOKENS = 400
_TOKEN = PATTERNS["token"]
_SPACED_MIXED_NUMBER = PATTERNS["spaced mixed number"]
_JUXTAPOSED = PATTERNS["juxtaposed"]
_ARITHMETIC = PATTERNS["arithmetic"]
_PRODUCT_SIGN = PATTERNS["product sign"]
_PYTHON = {
    "^": "**", "{": "(", "}": ")", "!": "[0]", r"\times": "*", r"\cdot": "*", r"\div": "/",
    r"\frac": "frac", r"\sqrt": "sqrt",
}  # fmt: skip


class TooLargeError(Exception):
    """A power or factorial with too many digits to write down: `9^{9^{9^9}}`, `100000!`."""


def is_number(text: str) -> bool:
    """Return whether a tidy text spells one exact number, however large.

    >>> [is_number(text) for text in ("1,234", "2^{100000}", "x")]
    [True, True, False]
    """
    try:
        return read_number(text) is not None
    except TooLargeError:
        return True


def _evaluated(text: str) -> Number | None:
    r"""Evaluate arithmetic on plain numbers exactly; None where there is anything else.

    Sums and products have the grammar of Python's, so its parser reads them, from names made of the
    digits (`n1_5` is 1.5) and a few signs. Only the syntax tree is looked at; nothing is run.

    >>> _evaluated(r"1\frac{4}{5}").value, _evaluated("12+7").unevaluated, _evaluated("2x")
    (Fraction(9, 5), True, None)
    """
    arithmetic = _arithmetic_of(text)
    if arithmetic is None:
        return None
    try:
        value = _value(arithmetic.tree)
    except (ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return Number(value, unevaluated=arithmetic.unevaluated)


class _Arithmetic(NamedTuple):
    """Arithmetic that Python's parser has read."""

    tree: ast.expr
    unevaluated: bool
    """It is more than a way to write a number: `12+7`."""


def _arithmetic_of(text: str) -> _Arithmetic | None:
    with_fractions = _SPACED_MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)
    text = _JUXTAPOSED.sub(r"\g<power>*", with_fractions)
    spelled = unmixed(text)
    tokens = _TOKEN.findall(spelled)
    if _TOKEN.sub("", spelled).strip() or len(tokens) > _MAX_TOKENS:
        return None
    openings = sum(token in ("(", "{", "[", "^", "**") for token in tokens)
    if openings > _MAX_DEPTH:
        return None
    names = []
    for token in tokens:
        if token[0] in ".0123456789":
            names.append(f"n{token.replace('.', '_')}")
        else:
            names.append(_PYTHON.get(token, token))
    try:
        tree = ast.parse(" ".join(names), mode="eval").body
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    # `3*2^5` and `1.5*10^3` are ways to write a number; `6*7` and `6*7*1^2` are left to be done.
    product = len(_PRODUCT_SIGN.findall(text)) > text.count("^") + text.count("**")
    return _Arithmetic(tree, bool(product or _ARITHMETIC.search(text)))


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Name(id=name) if name.startswith("n"):
            value = Fraction(name[1:].replace("_", "."))
        case ast.UnaryOp(op=sign, operand=operand):
            value = _value(operand) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left=left, op=sign, right=right):
            value = _OPERATORS[type(sign)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id="sqrt"), args=[inside]):
            value = _root(_value(inside), Fraction(2))
        case ast.Call(func=ast.Subscript(value=ast.Name(id="sqrt"), slice=degree), args=[inside]):
            value = _root(_value(inside), _value(degree))
        case ast.Call(func=ast.Call(func=ast.Name(id="frac"), args=[top]), args=[bottom]):
            value = _value(top) / _value(bottom)
        case ast.Subscript(value=inside, slice=ast.Constant(value=0)):
            value = _factorial(_value(inside))
        case _:
            raise ValueError("not arithmetic; another stage may know it")
    if _bits(value) > 2 * _MAX_BITS:
        raise TooLargeError
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Compute `base ** exponent` where the result is rational and can be written down."""
    base = _root(base, Fraction(exponent.denominator))
    times = exponent.numerator
    if base == 0 and times <= 0:
        raise ValueError("not a number")
    if abs(base) not in (0, 1) and _bits(base) * abs(times) > _MAX_BITS:
        raise TooLargeError
    return base**times


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
}


def _root(value: Fraction, degree: Fraction) -> Fraction:
    """Compute the exact root, where there is one."""
    if degree == 1:
        return value
    is_supported = degree.denominator == 1 and 2 <= degree <= 64 and value >= 0
    if not is_supported or (degree > 2 and _bits(value) > 900):
        raise ValueError("not a root that is worked out here")
    n = int(degree)
    root = Fraction(_integer_root(value.numerator, n), _integer_root(value.denominator, n))
    if root**n != value:
        raise ValueError("not a rational number")
    return root


def _integer_root(value: int, n: int) -> int:
    """Compute the n-th root of an integer, rounded where it is none."""
    return math.isqrt(value) if n == 2 else round(value ** (1 / n))


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise ValueError("not a factorial")
    if value > _MAX_FACTORIAL:
        raise TooLargeError
    return Fraction(math.factorial(int(value)))


# --- numbers too large to write down --------------------------------------------------------------

# Safe primes: a power of a number repeats only after half as many steps, so that two expressions
# with the same remainders for both are the same number, but for one chance in 10^70.
_PRIMES = (60000000000000000000000000000000028427, 140000000000000000000000000000000224919)
_MAX_EXPONENT_BITS = 1_000


class LargeNumber(NamedTuple):
    """A number that cannot be written down: `2^{100000} - 1`."""

    remainders: tuple[int, ...]
    """Remainders by each of two large primes; equal for equal numbers."""
    unevaluated: bool = False


@lru_cache(maxsize=1024)
def read_large(text: str) -> LargeNumber | None:
    r"""Read a tidy text that is arithmetic with powers as its remainders; None if it is not.

    >>> read_large("4^{50000}").remainders == read_large("2^{100000}").remainders
    True
    >>> read_large("2^{100000}").remainders == read_large("2^{100000} + 1").remainders
    False
    """
    core = split_unit(text)[0]
    arithmetic = _arithmetic_of(braced(ungrouped(core)))
    if arithmetic is None:
        return None
    try:
        remainders = tuple(_remainder(arithmetic.tree, prime) for prime in _PRIMES)
    except (ValueError, ZeroDivisionError, RecursionError, MemoryError, TooLargeError):
        return None
    return LargeNumber(remainders, arithmetic.unevaluated)


def _remainder(node: ast.expr, prime: int) -> int:
    """Compute the remainder of an expression; of a fraction, of its numerator times the inverse."""
    match node:
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            times = _value(exponent)
            if times.denominator != 1 or times.numerator.bit_length() > _MAX_EXPONENT_BITS:
                raise ValueError("not a power that is worked out here")
            return pow(_remainder(base, prime), times.numerator, prime)
        case ast.BinOp(left=left, op=sign, right=right):
            return _REMAINDERS[type(sign)](_remainder(left, prime), _remainder(right, prime), prime)
        case ast.Call(func=ast.Call(func=ast.Name(id="frac"), args=[top]), args=[bottom]):
            return _remainder(top, prime) * pow(_remainder(bottom, prime), -1, prime) % prime
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_remainder(operand, prime) % prime
    value = _value(node)
    return value.numerator * pow(value.denominator, -1, prime) % prime


_REMAINDERS: dict[type[ast.operator], Callable[[int, int, int], int]] = {
    ast.Add: lambda left, right, prime: (left + right) % prime,
    ast.Sub: lambda left, right, prime: (left - right) % prime,
    ast.Mult: lambda left, right, prime: left * right % prime,
    ast.Div: lambda left, right, prime: left * pow(right, -1, prime) % prime,
}


def same_large(prediction: LargeNumber, reference: LargeNumber) -> tuple[bool, str]:
    """Return whether two numbers, too large to be written down, are the same; and why."""
    if prediction.unevaluated and not reference.unevaluated:
        return False, "the arithmetic is left to be done"
    same = prediction.remainders == reference.remainders
    return same, "equal numbers" if same else "different numbers"
