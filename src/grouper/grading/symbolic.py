r"""The symbolic rung, run inside a worker only: Math-Verify reads, high-precision numbers judge.

Symbolic equality tests say yes too easily (`1-1/e` and `1+1/e`, two unrelated equations) and no
too easily (`\sqrt{1/n}` and `1/\sqrt{n}`). So expressions are evaluated to 30 digits at several
points, and a difference or agreement there is final. Math-Verify's own verdict is asked where
numbers cannot be had, and its yes on relations and sets must survive sampling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import (  # type: ignore[import-untyped] # ships no types
    ConversionConfig,
    NormalizationConfig,
    latex2sympy,
)
from math_verify import verify
from math_verify.grader import should_treat_as_complex

from grouper.grading.equivalence import Equivalence, same_atoms, split_equation
from grouper.grading.normalise import braced, tidy
from grouper.grading.numerals import read_number, without_unit
from grouper.grading.rational import TooLargeError
from grouper.grading.structure import Kind, Node, compare, readings
from grouper.types import Verdict

__all__ = ["judge", "why_unreadable"]

_DIGITS = 30
_RELATIVE = sympy.Float("1e-20", _DIGITS)
_TINY = sympy.Float("1e-90", _DIGITS)
# Real points of both signs and several sizes; no two symbols ever get the same value.
_POINTS: tuple[tuple[str, ...], ...] = (
    ("1.3717421", "2.2360173", "0.7310585", "3.1723451", "1.9120042", "0.4112359"),
    ("0.2718301", "0.9172113", "4.1133207", "1.4571123", "0.6180339", "2.9991231"),
    ("-1.6180421", "0.5772156", "-2.3025123", "-0.8314472", "1.1123581", "-3.3311123"),
    ("7.3890112", "-5.4365332", "9.8696021", "-6.2831113", "8.1548123", "-7.7712349"),
    ("-0.3678123", "-1.2020569", "0.1592653", "2.6854520", "-4.6692016", "0.9159655"),
    ("12.182493", "23.140692", "17.283411", "31.006277", "19.739208", "41.341123"),
)
# Removal of units is off: it takes the b of `a + b + c` and the t of `8t` for units. So is the
# folding of variables to lower case: `R` and `r` are two radii.
_SPELLING = NormalizationConfig(
    basic_latex=True,
    units=False,
    malformed_operators=True,
    nits=False,
    boxed="none",
    equations=False,
)
_READING = ConversionConfig(lowercase_symbols=False)


class _UnreadError(Exception):
    """Math-Verify cannot read a text; `text` says which."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def judge(prediction: str, reference: str) -> Equivalence:
    r"""The verdict on a pair that the exact rungs passed on.

    >>> judge("1-1/e", "1+1/e").verdict.value
    'incorrect'
    >>> judge(r"\frac{1}{\sqrt{n}}", r"\sqrt{1/n}").verdict.value
    'correct'
    """
    left, right = tidy(prediction), tidy(reference)
    test = _AtomTest()
    outcomes = []
    for right_node in readings(right):
        for left_node in readings(left):
            try:
                outcome = compare(left_node, right_node, test)
                if outcome is None:
                    outcome = _same_sets(left, right, test)
            except TooLargeError:
                return _unread(prediction, "a number too large to write down")
            if outcome:
                return Equivalence(Verdict.CORRECT, "symbolic", test.reason)
            outcomes.append(outcome)
    return test.refusal(left, right)


def _unread(text: str, why: str) -> Equivalence:
    return Equivalence(Verdict.UNPARSEABLE, "symbolic", f"{text[:80]!r}: {why}")


class _AtomTest:
    """Two atoms through all rungs, remembering what could not be read."""

    def __init__(self) -> None:
        self.reason = "not equal"
        self.unread: set[str] = set()

    def __call__(self, prediction: str, reference: str) -> bool | None:
        outcome, reason = same_atoms(prediction, reference)
        if outcome is None:
            try:
                outcome, reason = _same_expressions(prediction, reference)
            except _UnreadError as error:
                self.unread.add(error.text)
                return False
        self.reason = reason or self.reason
        return outcome

    def refusal(self, prediction: str, reference: str) -> Equivalence:
        """Not correct: because it differs, or because one side could not be read."""
        for text in sorted(self.unread):
            if text in reference and text not in prediction and not _is_prose(text):
                why = f"the reference cannot be read: {text[:80]!r}"
                return Equivalence(Verdict.NOT_SCORED, "symbolic", why)
        for text in sorted(self.unread):
            if text in prediction:
                return _unread(text, "cannot be read as mathematics")
        return Equivalence(Verdict.INCORRECT, "symbolic", self.reason)


def why_unreadable(reference: str) -> str | None:
    """Why a reference cannot be read or does not equal itself, every rung tried; None if it can."""
    reasons = [_node_problem(node) for node in readings(tidy(reference))]
    return reasons[0] if all(reasons) else None


def _node_problem(node: Node) -> str | None:
    if node.kind is not Kind.ATOM:
        return next((why for item in node.items if (why := _node_problem(item))), None)
    if read_number(node.text) is not None or _is_prose(node.text):
        return None
    _, value = split_equation(node.text)
    if read_number(value) is not None:
        return None
    try:
        same, why = _same_expressions(node.text, node.text)
    except _UnreadError as error:
        return f"{error.text[:80]!r} cannot be read as mathematics"
    return None if same else f"it does not equal itself ({why})"


_PROSE = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]{3,}(?![A-Za-z({^])", re.ASCII)
_CLOCK = re.compile(r"\d{1,2}:\d\d.*|\d{1,2} ?[apAP]\.? ?[mM]\.?|\d+(?:st|nd|rd|th)", re.ASCII)


def _is_prose(text: str) -> bool:
    """Words, clock times and ordinals: the text rung is all they need."""
    return bool(_PROSE.search(text) or _CLOCK.fullmatch(text))


# --- expressions -------------------------------------------------------------------------------


def _same_expressions(prediction: str, reference: str) -> tuple[bool, str]:
    left_name, left = split_equation(without_unit(prediction))
    right_name, right = split_equation(without_unit(reference))
    if left_name and right_name:
        return _same_equations((left_name, left), (right_name, right))
    if right_name and not _is_name(right_name):
        return False, "the reference is an equation, the answer is not"
    if left != right and _INDEXED_NUMBER.search(f"{left} {right}"):
        return False, "a number in a base that cannot be read"
    expected, given = _expression(right), _expression(left)
    if _is_logical(expected) or _is_logical(given):
        return _same_regions(given, expected)
    number = read_number(right)
    decimals = number.decimals if number is not None else -1
    agreed = _agree(given, expected, decimals)
    if agreed is not None:
        return agreed, "equal at every point tried" if agreed else "different values"
    yes = _says_yes(given, expected)
    return yes, f"{'' if yes else 'not '}equal for Math-Verify; no numbers to check it with"


# The parser drops the base of `204_{six}`.
_INDEXED_NUMBER = re.compile(r"(?<![A-Za-z_\\\d{])\d+ ?_", re.ASCII)


def _is_name(text: str) -> bool:
    return re.fullmatch(r"\\?[A-Za-z]+(?:_\{?\w+\}?|'|\([\w, ]*\))*", text) is not None


_PLAIN_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|cot|sec|csc|ln|log|exp|infinity|theta)(?![A-Za-z])"
)


def latex_of(text: str) -> str:
    r"""Calculator notation as LaTeX: `sqrt(2)*x^(1/2)` is `\sqrt{2}\cdot x^{1/2}`.

    >>> latex_of("sqrt(2)*x^(1/2)")
    '\\sqrt{2}\\cdot x^{1/2}'
    """
    text = _PLAIN_FUNCTION.sub(r"\\\1 ", text).replace(r"\infinity", r"\infty")
    text = text.replace("**", "^").replace("*", r"\cdot ")
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ")
    for opener in (r"\sqrt ", r"\sqrt", "^"):
        text = _braces_for_parentheses(text, opener)
    return braced(text)


def _braces_for_parentheses(text: str, opener: str) -> str:
    start = text.find(opener + "(")
    while start >= 0:
        begin = start + len(opener)
        depth = 0
        for at in range(begin, len(text)):
            depth += (text[at] == "(") - (text[at] == ")")
            if depth == 0:
                inside = text[begin + 1 : at]
                text = f"{text[:start]}{opener.strip()}{{{inside}}}{text[at + 1 :]}"
                break
        else:
            return text
        start = text.find(opener + "(", start)
    return text


def _expression(text: str) -> Any:
    """What Math-Verify's parser makes of one expression; decimals as exact fractions."""
    latex = latex_of(text)
    try:
        expression = latex2sympy(
            latex,
            is_real=not should_treat_as_complex(latex),
            normalization_config=_SPELLING,
            conversion_config=_READING,
        )
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the parser has many ways to refuse a text; all mean the same
        raise _UnreadError(text) from error
    if isinstance(expression, sympy.Basic):
        floats = expression.atoms(sympy.Float)
        exact = {f: sympy.Rational(str(f)) for f in floats}
        units = {s: sympy.I for s in expression.free_symbols if s.name == "i"}
        expression = expression.xreplace({**exact, **units})
    return expression


def _says_yes(prediction: Any, reference: Any) -> bool:
    """Math-Verify's own verdict; its yes on infinities is worthless (`oo - 1` is `oo`)."""
    if prediction.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        return bool(prediction == reference)
    return bool(verify(reference, prediction, timeout_seconds=None))


def _agree(prediction: Any, reference: Any, decimals: int) -> bool | None:
    """Whether two expressions have the same values; None where they have none to compare."""
    if isinstance(prediction, sympy.MatrixBase) or isinstance(reference, sympy.MatrixBase):
        return _agree_matrices(prediction, reference)
    if not (isinstance(prediction, sympy.Expr) and isinstance(reference, sympy.Expr)):
        return None
    symbols = sorted(prediction.free_symbols | reference.free_symbols, key=str)
    if len(symbols) > len(_POINTS[0]):
        return None
    agreed = 0
    for point in _points(symbols):
        left, right = _value(prediction, point), _value(reference, point)
        outcome = _close(left, right, decimals, real=bool(symbols))
        if outcome is False:
            return False
        agreed += outcome is True
    return True if agreed >= (3 if symbols else 1) else None


def _agree_matrices(prediction: Any, reference: Any) -> bool | None:
    shapes = getattr(prediction, "shape", None), getattr(reference, "shape", None)
    if None in shapes or shapes[0] != shapes[1]:
        return False
    cells = [_agree(a, b, -1) for a, b in zip(prediction, reference, strict=True)]
    return False if False in cells else None if None in cells else True


def _points(symbols: Sequence[Any]) -> Iterable[dict[Any, Any]]:
    if not symbols:
        return [{}]
    return [
        {symbol: sympy.Rational(value) for symbol, value in zip(symbols, point, strict=False)}
        for point in _POINTS
    ]


def _value(expression: Any, point: dict[Any, Any]) -> Any:
    """A complex number of 30 digits, or None."""
    try:
        value = sympy.N(expression.subs(point) if point else expression.doit(), _DIGITS)
        value = value if value.is_number else sympy.N(value.doit(), _DIGITS)
        real, imaginary = value.as_real_imag()
        if not (real.is_Number and imaginary.is_Number and real.is_finite and imaginary.is_finite):
            return None
    except (ArithmeticError, AttributeError, TypeError, ValueError, NotImplementedError):
        return None
    return real, imaginary


def _close(left: Any, right: Any, decimals: int, *, real: bool) -> bool | None:
    """Whether two values agree; with symbols, points where neither side is real say nothing."""
    if left is None or right is None:
        return None
    size = max(abs(x) for x in (*left, *right))
    if real and left[1] != 0 and right[1] != 0 and not _parts_close(left, right, size):
        return None  # two branches of a root or a logarithm
    if _parts_close(left, right, size):
        return True
    if decimals >= 4 and left[1] == 0:
        return bool(abs(left[0] - right[0]) <= sympy.Rational(Fraction(1, 2 * 10**decimals)))
    return False


def _parts_close(left: Any, right: Any, size: Any) -> bool:
    return all(abs(a - b) <= _RELATIVE * size + _TINY for a, b in zip(left, right, strict=True))


# --- equations, relations and sets -------------------------------------------------------------


def _same_equations(prediction: tuple[str, str], reference: tuple[str, str]) -> tuple[bool, str]:
    """Two equations are one when their differences of sides are in constant proportion."""
    given = _expression(prediction[0]), _expression(prediction[1])
    expected = _expression(reference[0]), _expression(reference[1])
    if not all(isinstance(side, sympy.Expr) for side in (*given, *expected)):
        return False, "equations that cannot be compared"
    left, right = given[0] - given[1], expected[0] - expected[1]
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if left.free_symbols != right.free_symbols or len(symbols) > len(_POINTS[0]):
        return False, "equations in other variables"
    ratios = []
    for point in _points(symbols):
        a, b = _value(left, point), _value(right, point)
        if a is None or b is None or a[1] != 0 or b[1] != 0 or abs(b[0]) < _TINY:
            continue
        ratios.append(a[0] / b[0])
    if len(ratios) < 3 or abs(ratios[0]) < _TINY:
        return False, "equations that could not be compared at enough points"
    same = all(abs(ratio - ratios[0]) <= _RELATIVE * abs(ratios[0]) for ratio in ratios)
    return same, "the same equation" if same else "different equations"


def _is_logical(expression: Any) -> bool:
    if isinstance(expression, sympy.Expr):
        return False  # a symbol is a sympy Boolean too
    return isinstance(expression, (sympy.Set, sympy.logic.boolalg.Boolean, sympy.Tuple))


_MEMBER = re.compile(r"^[A-Za-z] *\\in(?![A-Za-z])", re.ASCII)


def _same_sets(prediction: str, reference: str, test: _AtomTest) -> bool | None:
    """Shapes that differ on paper: `x > 3` against `(3, oo)`."""
    try:
        regions = (_expression(_MEMBER.sub("", text)) for text in (prediction, reference))
        same, test.reason = _same_regions(*regions)
    except _UnreadError as error:
        test.unread.add(error.text)
        return False
    return same


def _same_regions(prediction: Any, reference: Any) -> tuple[bool, str]:
    yes = verify(reference, prediction, allow_set_relation_comp=True, timeout_seconds=None)
    if not yes:
        return False, "not the same set for Math-Verify"
    if not _same_members(prediction, reference):
        return False, "Math-Verify says the same set, but their members differ"
    return True, "the same set"


def _same_members(prediction: Any, reference: Any) -> bool:
    """Membership at, beside and far from every number in either, for sets of one variable."""
    numbers = {
        n for side in (prediction, reference) for n in side.atoms(sympy.Number) if n.is_finite
    }
    step = sympy.Rational(1, 1000)
    around = [n + d for n in sorted(numbers)[:12] for d in (-step, 0, step)]
    for value in (*around, sympy.Integer(-1000), sympy.Rational(1, 7), sympy.Integer(1000)):
        left, right = _contains(prediction, value), _contains(reference, value)
        if left is not None and right is not None and left != right:
            return False
    return True


def _contains(region: Any, value: Any) -> bool | None:
    try:
        if isinstance(region, sympy.Set):
            outcome = region.contains(value)
        elif len(region.free_symbols) == 1:
            outcome = region.subs(next(iter(region.free_symbols)), value)
        else:
            return None
    except (ArithmeticError, AttributeError, TypeError, ValueError, NotImplementedError):
        return None
    return bool(outcome) if outcome in (sympy.true, sympy.false) else None
