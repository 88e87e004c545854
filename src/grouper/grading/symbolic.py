r"""The symbolic stage and the worker that runs it: Math-Verify reads, high-precision numbers judge.

Symbolic equality tests accept too much (`1-1/e` for `1+1/e`, two unrelated equations) and too
little (`\sqrt{1/n}` for `1/\sqrt{n}`). So expressions are evaluated at several points, and the
values decide; Math-Verify only parses.

`python -P -m grouper.grading.symbolic PARENT_PID MEMORY_MB` is one worker: it reads one JSON
request per line from standard input and writes one JSON reply per line, within its limits of
memory and CPU time.

    {"prediction": "2\\sqrt{3}", "reference": "\\sqrt{12}", "seconds": 2.0}
    {"verdict": "correct", "reason": "the same values", "seconds": 0.01}

A request without a prediction asks whether the reference can be read.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import sympy
from latex2sympy2_extended import (  # type: ignore[import-untyped] # ships no types
    latex2sympy2 as parser,
)

from grouper.grading.answers import Statement, read, read_reference
from grouper.grading.chains import Chain
from grouper.grading.equivalence import Comparison, Equivalence, Outcome
from grouper.grading.normalize import braced, unmixed
from grouper.grading.numbers import ROUNDED_FROM, TooLargeError, matched
from grouper.grading.patterns import PATTERNS
from grouper.grading.shapes import Node, without_builder
from grouper.grading.values import Value
from grouper.types import Verdict


class UnreadError(Exception):
    """Math-Verify cannot read a text; `text` says which."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def judge(prediction: str, reference: str) -> Equivalence:
    r"""The verdict on a pair that the exact stages passed on.

    >>> judge("1-1/e", "1+1/e").verdict.value
    'incorrect'
    >>> judge(r"\frac{1}{\sqrt{n}}", r"\sqrt{1/n}").verdict.value
    'correct'
    """
    answer = read(prediction).statement
    expected = read_reference(reference).statement
    comparison = _Symbolic()
    try:
        if comparison.statements(answer, expected):
            return Equivalence(Verdict.CORRECT, "symbolic", comparison.reason)
    except (TooLargeError, RecursionError):
        return _unread(answer.text, "a number too large to write down, or nested too deeply")
    return _refusal(comparison, answer.text, expected.text)


def _refusal(comparison: _Symbolic, prediction: str, reference: str) -> Equivalence:
    """Not correct: because it differs, or because one side could not be read."""
    for text in sorted(comparison.unread):
        if text in reference and text not in prediction and not _is_prose(text):
            why = f"the reference cannot be read: {text[:80]!r}"
            return Equivalence(Verdict.NOT_SCORED, "symbolic", why)
    for text in sorted(comparison.unread):
        if text in prediction:
            return _unread(text, "cannot be read as mathematics")
    return Equivalence(Verdict.INCORRECT, "symbolic", comparison.refusal or "not equal")


def _unread(text: str, why: str) -> Equivalence:
    return Equivalence(Verdict.UNPARSEABLE, "symbolic", f"{text[:80]!r}: {why}")


class _Symbolic(Comparison):
    """A comparison that also parses and evaluates, and therefore always decides."""

    def __init__(self) -> None:
        super().__init__()
        self.unread: set[str] = set()

    def chains(self, answer: Chain, reference: Chain) -> bool | None:
        try:
            return super().chains(answer, reference)
        except UnreadError as error:
            self.unread.add(error.text)
            return False

    def values(self, answer: Value, reference: Value) -> Outcome:
        outcome, reason = super().values(answer, reference)
        if outcome is not None:
            return outcome, reason
        if refused := _refused(answer.core, reference.core):
            return False, refused
        return _same_expressions(answer, reference)

    def sides(self, value: Value, known_value: Value) -> bool | None:
        r"""Where a constant may be rounded, too: `25\pi = 78.5`.

        A constant side is false only if that is certain: not if it cannot be read, nor in
        `\sin 30 = 0.5`, which omits its degrees.
        """
        same = super().sides(value, known_value)
        if same is not None:
            return same
        constant = not value.variables
        if constant and _CONVENTION.search(value.text):
            return True
        try:
            rounded_from = 1 if constant else ROUNDED_FROM
            return _same_expressions(value, known_value, rounded_from)[0]
        except UnreadError:
            return constant

    def equations(self, answer: Chain, reference: Chain) -> Outcome:
        """Whether each pair of neighboring sides has the difference of its pair, or a multiple."""
        sides = answer.sides
        expected = reference.sides
        if len(sides) != len(expected):
            return False, "an equation of another number of sides"
        pairs = zip(sides, sides[1:], expected, expected[1:], strict=False)
        # The least of them is one that differs, if any does.
        return min(_in_proportion(*map(expression_of, pair)) for pair in pairs)

    def regions(self, answer: Statement, reference: Statement) -> bool:
        try:
            same, reason = _same_regions(answer.text, reference.text)
        except UnreadError as error:
            self.unread.add(error.text)
            return False
        self.reason = reason
        self.refusal = reason
        return same


# --- what is not compared as values, though the parser reads it ----------------------------------

_CONVENTION = PATTERNS["convention"]
_NAME_OR_BASE = PATTERNS["name or base"]
_QUESTION = PATTERNS["question"]
_FUNCTION = PATTERNS["function"]
_UNEVALUATED = PATTERNS["unevaluated"]


def _refused(answer: Value, reference: Value) -> str | None:
    r"""Why an answer is wrong whatever its value: `\sum_{k=1}^{10} k` for 55, `19+0\pi` for 19."""
    if _QUESTION.search(answer.text) and not _QUESTION.search(reference.text):
        return "a sum, integral, limit or the like is left to be worked out"
    if _NAME_OR_BASE.search(answer.text) or _NAME_OR_BASE.search(reference.text):
        return "names and bases are compared as text"
    number = reference.number
    may_be_rounded = number is not None and number.decimals >= ROUNDED_FROM
    if reference.variables or may_be_rounded:
        return None
    is_unfinished = bool(_UNEVALUATED.search(braced(answer.text)) or answer.variables)
    has_new_function = bool(_FUNCTION.search(answer.text) and not _FUNCTION.search(reference.text))
    if has_new_function or (number is not None and is_unfinished):
        return "the reference is a number; the answer has a variable, a function or arithmetic"
    return None


# --- references ----------------------------------------------------------------------------------


def why_unreadable(reference: str) -> str | None:
    """Why a reference cannot be read; None if it can. Only its spelling counts, never the time."""
    statement = read_reference(reference).statement.bare
    if statement.congruence:
        return None
    problems = [_problem(node) for node in statement.readings]
    if not all(problems):
        return None
    return problems[0]


def _problem(reading: Node) -> str | None:
    """Why the first value of a reading that the parser refuses cannot be read; or None."""
    for chain in reading.chains:
        for value in chain.values:
            if not value.is_number and not _is_prose(value.text):
                try:
                    _require_grammar(value.core.text)
                except UnreadError as error:
                    return f"{error.text[:80]!r} cannot be read as mathematics"
    return None


_PROSE = PATTERNS["prose"]
_TIME_OR_ORDINAL = PATTERNS["time or ordinal"]
_FORMULA_SIGN = PATTERNS["formula sign"]


def _is_prose(text: str) -> bool:
    """Words, clock times and ordinals: the text stage is all they need."""
    if _TIME_OR_ORDINAL.fullmatch(text):
        return True
    return bool(_PROSE.search(text)) and not _FORMULA_SIGN.search(text)


# --- LaTeX to sympy ------------------------------------------------------------------------------

# Removal of units is off: it takes the b of `a + b + c` and the t of `8t` for units. So is the
# folding of variables to lower case: `R` and `r` are two radii.
_SPELLING = parser.NormalizationConfig(units=False, boxed="none")
_READING = parser.ConversionConfig(lowercase_symbols=False)


@lru_cache(maxsize=512)
def expression_of(text: str) -> Any:
    """What Math-Verify's parser makes of one tidy expression; decimals are exact fractions.

    Raises:
        UnreadError: it cannot be read, or is nested too deeply for the parser.
    """
    reading = partial(
        parser.latex2sympy,
        is_real=True,  # on both sides alike: a complex `x` is another symbol than a real one
        normalization_config=_SPELLING,
        conversion_config=_READING,
    )
    expression = _read(text, reading)
    if isinstance(expression, sympy.Basic):
        exact = {f: sympy.Rational(str(f)) for f in expression.atoms(sympy.Float)}
        units = {s: sympy.I for s in expression.free_symbols if s.name == "i"}
        expression = expression.xreplace({**exact, **units})
    return expression


def _require_grammar(text: str) -> None:
    """Check a tidy expression against the parser's grammar, without evaluating it.

    The cost depends on the length of the text and not on its meaning, so the outcome is the same on
    every machine: a tower of powers or a sum of a million terms is read like any other.

    Raises:
        UnreadError: it does not.
    """
    reader = parser._Latex2Sympy(config=_READING)  # noqa: SLF001 - its grammar, without the rest
    _read(text, lambda latex: reader.create_parser(parser.normalize_latex(latex, _SPELLING)).math())


def _read(text: str, read: Callable[[str], Any]) -> Any:
    """What `read` makes of a tidy text, given it as LaTeX.

    Raises:
        UnreadError: it refuses the text.
    """
    try:
        return read(latex_of(text))
    except MemoryError:
        raise
    except Exception as error:  # the parser has many ways to refuse a text; all mean the same
        raise UnreadError(text) from error


_PLAIN_FUNCTION = PATTERNS["plain function"]
_ARGUMENT_IN_PARENTHESES = PATTERNS["argument in parentheses"]
_SPELLED_OUT = tuple(
    (re.compile(pattern, re.ASCII), replacement)
    for pattern, replacement in (
        # A point without decimals: `5.` is `5`.
        (r"(?<=\d)\.(?![\d.])", ""),
        # A factorial is raised to a power as a whole: `3!^2`.
        (r"(\d+|(?<![A-Za-z\\])[A-Za-z])! ?(?=\^)", r"(\1!)"),
        # `1/2 x` is half of x, `4/3\pi` a multiple of `\pi`, and `2/5i` one of the imaginary unit;
        # the parser divides by all that stands beside the number below.
        (r"(?<![\w.)}/^!])(?<!\d )(\d+)/(\d+)(?= [A-Za-z\\(]|\\pi|i\b)", r"\\frac{\1}{\2} "),
        # A letter with an accent, with an index or none, is a name of its own, and so is `E_1`:
        # no number, as `I_1` is not the imaginary unit that the parser takes it for.
        (r"\\(d{1,3}ot|hat|bar|tilde) ?\{? ?([A-Za-z]) ?\}?(?: ?_ ?\{(\w+)\})?", r"\2_{\1\3}"),
        (r"(?<![A-Za-z\\])([EeI]) ?_ ?\{(?=\w+\})", r"Q_{\1"),
        # The parser takes `2(3)` for two and three where nothing follows, `i(5)` for a function.
        (r"(?<![\w.\\_^])(\d+(?:\.\d+)?) ?(?=\()", r"\1\\cdot "),
        (r"(?<![A-Za-z\\_{])([ie]) ?(?=\()", r"\1\\cdot "),
        # Primes are part of a name: `y''` and `y'`.
        (r"([A-Za-z])''", r"\1_{pprime}"),
        (r"([A-Za-z])'", r"\1_{prime}"),
    )
)
_DROPPED_INDEX = PATTERNS["dropped index"]


def latex_of(text: str) -> str:
    r"""Calculator notation as LaTeX: `sqrt(2)*x^(1/2)` is `\sqrt{2}\cdot x^{1/2}`.

    Raises:
        UnreadError: the parser would misread it.

    >>> latex_of("sqrt(2)*x^(1/2)")
    '\\sqrt{2}\\cdot x^{1/2}'
    >>> latex_of(r"\tan 15^\circ"), latex_of(r"1\frac12 x")
    ('\\tan \\left(\\frac{\\left(15\\right)\\pi}{180}\\right)', '(1+\\frac{1}{2}) x')
    """
    latex = _PLAIN_FUNCTION.sub(r"\\\1 ", text).replace(r"\infinity", r"\infty")
    latex = latex.replace("**", "^").replace("*", r"\cdot ")
    while (opened := _ARGUMENT_IN_PARENTHESES.sub(r"\1{\2}", latex)) != latex:
        latex = opened
    latex = _with_radians(unmixed(braced(latex)), text)
    for pattern, replacement in _SPELLED_OUT:
        latex = pattern.sub(replacement, latex)
    if _DROPPED_INDEX.search(latex):
        raise UnreadError(text)
    return latex


_ANGULAR_FUNCTION = PATTERNS["angular function"]
_DEGREE_SIGN = PATTERNS["degree sign"]


def _with_radians(latex: str, text: str) -> str:
    r"""Degrees as multiples of `\pi/180` in functions and beside `\pi`, elsewhere a unit."""

    def radians(match: re.Match[str]) -> str:
        if not match[1]:
            raise UnreadError(text)  # after something that is no angle
        # The braces of a function's argument: `\sin{30}^\circ`.
        angle = match[1][1:-1] if match[1][0] == "{" else match[1]
        return rf"\left(\frac{{\left({angle}\right)\pi}}{{180}}\right)"

    return _DEGREE_SIGN.sub(radians, latex) if _ANGULAR_FUNCTION.search(latex) else latex


# --- values --------------------------------------------------------------------------------------


def _same_expressions(
    answer: Value, reference: Value, rounded_from: int = ROUNDED_FROM
) -> tuple[bool, str]:
    """Compare values as expressions; a decimal reference may be rounded from so many decimals on.

    Raises:
        UnreadError: one of them cannot be read.
        TooLargeError: one of them is a number too large to write down.
    """
    number = reference.core.number
    expression = expression_of(answer.core.text)
    expected = expression_of(reference.core.text)
    if _is_region(expected) or _is_region(expression):
        return _same_regions(answer.core.text, reference.core.text)
    units = answer.unit and reference.unit and matched(answer.unit, reference.unit)
    if units:
        expression *= sympy.Rational(units[0].factor / units[1].factor)
    decimals = number.decimals if number and number.decimals >= rounded_from else -1
    agreed = _agree(expression, expected, decimals)
    if agreed is False and _is_printed(answer.core, expected):
        return True, "equal to 12 digits or more"
    if agreed is None:
        return False, "no values to compare"
    return agreed, "the same values" if agreed else "different values"


# Digits from which a decimal is what a computer prints for an irrational number.
_PRINTED = 12


def _is_printed(answer: Value, reference: Any) -> bool:
    """Whether a decimal is a constant to all of its 12 or more digits, rounded or cut."""
    number = answer.number
    if number is None or number.decimals <= 0 or not isinstance(reference, sympy.Expr):
        return False
    digits = len(str(abs(int(number.value * 10**number.decimals))))
    if not _PRINTED <= digits <= _CONFIRMING // 2 or reference.free_symbols:
        return False
    value = _value_at(reference, {}, _CONFIRMING)
    if value is None or value[1] != 0 or reference.is_rational:
        return False
    written = sympy.Rational(number.value.numerator, number.value.denominator)
    cut = abs(value[0]) - abs(written)
    last = sympy.Rational(10) ** (digits - number.decimals - _PRINTED)
    return bool(abs(value[0] - written) < last and cut >= -last / 2)


def _in_proportion(*sides: Any) -> tuple[bool, str]:
    """Two equations are one when their differences of sides are in constant proportion."""
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return False, "equations that cannot be compared"
    left = sides[0] - sides[1]
    right = sides[2] - sides[3]
    symbols = sorted(left.free_symbols, key=str)
    if sympy.Add(left, -right) == 0:
        return True, "the same equation"
    digits = _DIGITS + _written_digits(left, right)
    points = _points(symbols) if symbols else ()
    for point in points:
        a = _value_at(left, point, digits)
        b = _value_at(right, point, digits)
        if a and b and a[1] == b[1] == 0 and min(abs(a[0]), abs(b[0])) > _TINY:
            same = bool(_agree(left, right * (a[0] / b[0])))
            return same, "the same equation" if same else "different equations"
    return False, "equations that could not be compared at any point"


_DIGITS = 30
_CONFIRMING = 110
_MAX_DIGITS = 2_000
# Digits of a number up to which 30 digits are far more than it takes.
_COMMON_SIZE = 8
_TINY = sympy.Float("1e-90", _DIGITS)
# Real points of both signs and several sizes, one of them whole for floors and the like. Of more
# symbols the next ones get the same values times 17, and so on: no two ever have the same one.
_POINTS: tuple[tuple[str, ...], ...] = (
    ("1.3717421", "2.2360173", "0.7310585", "3.1723451", "1.9120042", "0.4112359"),
    ("0.2718301", "0.9172113", "4.1133207", "1.4571123", "0.6180339", "2.9991231"),
    ("-1.6180421", "0.5772156", "-2.3025123", "-0.8314472", "1.1123581", "-3.3311123"),
    ("7.3890112", "-5.4365332", "9.8696021", "-6.2831113", "8.1548123", "-7.7712349"),
    ("-0.3678123", "-1.2020569", "0.1592653", "2.6854520", "-4.6692016", "0.9159655"),
    ("2", "3", "5", "7", "11", "13"),
    ("12.182493", "23.140692", "17.283411", "31.006277", "19.739208", "41.341123"),
)


def _agree(prediction: Any, reference: Any, decimals: int = -1) -> bool | None:
    r"""Whether two expressions have the same values; None if there are none to compare.

    With variables they are evaluated at several points to 30 digits; without, once, to 110 or
    more: `\sqrt{10^{40}+1}` and `10^{20}` agree to forty.

    Raises:
        TooLargeError: digits that count would be past those that are worked out.
    """
    if not (isinstance(prediction, sympy.Expr) and isinstance(reference, sympy.Expr)):
        return None
    if prediction == reference:
        return None if prediction.has(sympy.nan, sympy.zoo) else True
    if not (prediction.has(sympy.I) or reference.has(sympy.I)):
        prediction = _with_real_roots(prediction)
        reference = _with_real_roots(reference)
    symbols = sorted(prediction.free_symbols | reference.free_symbols, key=str)
    try:
        written = _written_digits(prediction, reference)
    except TooLargeError:
        if sympy.Add(prediction, -reference) == 0:  # the same terms in another order
            return True
        raise
    digits = (_DIGITS if symbols else _CONFIRMING) + written
    agreed = 0
    for point in _points(symbols):
        left = _value_at(prediction, point, digits)
        right = _value_at(reference, point, digits)
        more = 0 if symbols else _digits_before_point(left, right, digits)
        if more:
            digits += 2 * more
            left = _value_at(prediction, point, digits)
            right = _value_at(reference, point, digits)
        outcome = _close(left, right, decimals, digits, real=bool(symbols))
        if outcome is False and not (symbols and _on_branches(point, prediction, reference)):
            return False
        agreed += outcome is True
    return True if agreed >= (3 if symbols else 1) else None


def _digits_before_point(left: Any, right: Any, digits: int) -> int:
    """Digits before the point of two values, where they are most of those worked out; else 0.

    Raises:
        TooLargeError: `e^{100000}`, of which a difference of one would not be seen.
    """
    parts = [*(left or ()), *(right or ())]
    largest = max(map(abs, parts), default=0)
    if largest < 10 ** (digits // 3):
        return 0
    size = int(sympy.N(sympy.log(largest, 10), 10))
    if size > _MAX_DIGITS:
        raise TooLargeError
    return size


def _points(symbols: Sequence[Any]) -> Iterable[dict[Any, Any]]:
    """Values for the symbols, several times; one empty point without symbols."""
    if not symbols:
        return [{}]
    points = []
    for numbers in _POINTS:
        point = {}
        for place, symbol in enumerate(symbols):
            # With more symbols than numbers they begin again, far from where they were.
            scale = 17 ** (place // len(numbers))
            point[symbol] = sympy.Rational(numbers[place % len(numbers)]) * scale
        points.append(point)
    return points


def _value_at(expression: Any, point: dict[Any, Any], digits: int = _DIGITS) -> Any:
    """(real, imaginary) of an expression's value, or None where it has no finite one."""
    try:
        if all(number.is_Integer for number in point.values()):
            value = sympy.N(expression.subs(point).doit(), digits, maxn=4 * digits)
        else:  # fractions put in exactly would be factored wherever they are exponents
            value = sympy.N(expression, digits, subs=point, maxn=4 * digits)
        real, imaginary = value.as_real_imag()
        if not (real.is_Number and imaginary.is_Number and real.is_finite and imaginary.is_finite):
            return None
    except (ArithmeticError, AttributeError, TypeError, ValueError, NotImplementedError):
        return None
    return real, imaginary


def _close(left: Any, right: Any, decimals: int, digits: int, *, real: bool) -> bool | None:
    """Whether two values agree; with symbols, None where neither side is real."""
    if left is None or right is None:
        return None
    ten = sympy.Float(10, digits)
    # All but a third of the digits must agree, and zero up to the noise of its evaluation.
    allowed = max(abs(x) for x in (*left, *right)) / ten ** (2 * digits // 3) + ten ** (-3 * digits)
    near = all(abs(a - b) <= allowed for a, b in zip(left, right, strict=True))
    if near or (real and left[1] != 0 and right[1] != 0):
        return near or None  # or two branches of a root or a logarithm
    step = sympy.Rational(1, 2 * 10**decimals) if decimals > 0 else -1
    return bool(left[1] == 0 and abs(left[0] - right[0]) <= step)


def _on_branches(point: dict[Any, Any], *expressions: Any) -> bool:
    r"""Whether a root or logarithm of a negative number is taken at a point.

    There `\sqrt{x}\sqrt{y}` and `\sqrt{xy}` may differ, although they agree where both are real.
    """
    arguments = set()
    for side in expressions:
        for power in side.atoms(sympy.Pow):
            if not power.exp.is_integer and power.base.free_symbols:
                arguments.add(power.base)
        for logarithm in side.atoms(sympy.log):
            arguments.add(logarithm.args[0])
    values = [_value_at(argument, point) for argument in arguments]
    return any(value is not None and value[1] == 0 and value[0] < 0 for value in values)


def _written_digits(*expressions: Any) -> int:
    """Extra digits of precision for the numbers written in both, so that every digit counts.

    Raises:
        TooLargeError: they have more digits than are ever worked out, as `2^{20000}` has.
    """
    sizes = []
    for side in expressions:
        sizes += [_bits(number) for number in side.atoms(sympy.Rational)]
        for power in side.atoms(sympy.Pow):  # the parser leaves `10^{-40}` as it stands
            if power.base.is_Rational and power.exp.is_Integer:
                bits = _bits(power.base) * abs(int(power.exp))
                sizes.append(min(bits, 10 * _MAX_DIGITS))
    written = max(sizes, default=0) * 3 // 10
    if written > 2 * _MAX_DIGITS // 3:
        raise TooLargeError
    return min(3 * written, _MAX_DIGITS) if written > _COMMON_SIZE else 0


def _bits(number: Any) -> int:
    return max(abs(int(number.p)), int(number.q)).bit_length()


def _with_real_roots(expression: Any) -> Any:
    r"""Roots of odd degree are real: `\sqrt[3]{-8}` is -2."""

    def is_odd_root(part: Any) -> Any:
        return part.is_Pow and part.exp.is_Rational and part.exp.q > 1 and part.exp.q % 2 == 1

    def real_root(power: Any) -> Any:
        return sympy.real_root(power.base, power.exp.q) ** power.exp.p

    return expression.replace(is_odd_root, real_root)


# --- regions -------------------------------------------------------------------------------------

_MEMBER = PATTERNS["member"]


def _stated(*regions: Any) -> Any:
    """Conditions one after another: all of them hold; or one of them, where all cannot."""
    both = sympy.Intersection(*regions)
    return sympy.Union(*regions) if both.is_empty else both


# `x < 1 or x > 3`; `x > 1 and x < 3`; and `x > 1, x < 3`: outside the brackets of an interval a
# comma is followed by another condition.
_JOINTS = (
    (re.compile(r",? or (?=\S)|\\cup(?![A-Za-z])"), sympy.Union),
    (re.compile(r",? and (?=\S)|\\cap(?![A-Za-z])"), sympy.Intersection),
    (re.compile(r",(?=[^,()\[\]]*(?:[<>]|\\(?:[lg]e|ne)(?![A-Za-z])))"), _stated),
)


def _is_region(expression: Any) -> bool:
    """Whether a parsed expression is a set or a statement rather than a value."""
    if isinstance(expression, sympy.Expr):
        return False  # a symbol is a sympy Boolean too
    return isinstance(expression, (sympy.Set, sympy.logic.boolalg.Boolean, sympy.Tuple))


def _same_regions(prediction: str, reference: str) -> tuple[bool, str]:
    """Whether two tidy texts describe the same set of numbers of one variable; and why.

    Raises:
        UnreadError: one of them cannot be read.
    """
    given = _region(without_builder(prediction))
    # Most wrong answers are no region at all, and a reference that is one takes long to parse.
    if given is None or (expected := _region(without_builder(reference))) is None:
        return False, "a set that is not made of intervals"
    if given[0] and expected[0] and given[0] != expected[0]:
        return False, f"a region of {given[0]} instead of {expected[0]}"
    same = bool(given[1].doit() == expected[1].doit())
    return same, "the same set" if same else "different sets"


def _region(text: str) -> tuple[str, Any] | None:
    """(variable or "", set) of a text; None where it is not a set of real numbers."""
    for joint, join in _JOINTS:
        parts = joint.split(text)
        if len(parts) > 1:
            regions = [_region(part.strip()) for part in parts]
            names = {region[0] for region in regions if region is not None} - {""}
            if None in regions or len(names) > 1:
                return None
            return "".join(names), join(*(region[1] for region in regions if region is not None))
    name = _MEMBER.match(text)
    expression = expression_of(_MEMBER.sub("", text))
    if isinstance(expression, sympy.Set):
        return name[1] if name else "", expression
    if not _is_region(expression) or len(expression.free_symbols) != 1:
        return None
    try:
        (symbol,) = expression.free_symbols
        return str(symbol), expression.as_set()
    except (ArithmeticError, AttributeError, TypeError, ValueError, NotImplementedError):
        return None


# --- the worker ----------------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1


def serve(parent: int, megabytes: int) -> int:
    """Answer requests until standard input closes; returns the exit status.

    Args:
        parent: process id of the trainer.
        megabytes: memory that this process may take.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if sys.platform == "linux":  # elsewhere the closed input and the deadline do it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it is dead already
            return 1
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit it; the deadline holds
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    # Libraries print; keep it out of the protocol.
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")  # line by line
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # Of processor time; then SIGPROF ends the process, with a parent or without one.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        started = time.process_time()
        try:
            verdict, _, reason, _ = _answer(request)
        except (MemoryError, RecursionError) as error:
            reply = {"verdict": "crash", "reason": type(error).__name__}
            print(json.dumps({**reply, "seconds": time.process_time() - started}), file=replies)
            return 1  # what ran out of memory may have left the libraries in any state
        except Exception as error:  # noqa: BLE001 - sympy raises anything on odd input; data, not a bug
            verdict = Verdict.UNPARSEABLE
            reason = f"{type(error).__name__}: {error}"[:200]
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply = {"verdict": verdict.value, "reason": reason}
        print(json.dumps({**reply, "seconds": time.process_time() - started}), file=replies)
    return 0


def _answer(request: dict[str, Any]) -> Equivalence:
    if request["prediction"] is not None:
        return judge(request["prediction"], request["reference"])
    why = why_unreadable(request["reference"])
    verdict = Verdict.CORRECT if why is None else Verdict.NOT_SCORED
    return Equivalence(verdict, "symbolic", why or "readable")


if __name__ == "__main__":
    sys.exit(serve(*map(int, sys.argv[1:])))
