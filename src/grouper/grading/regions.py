r"""Sets of numbers, written as intervals, unions or inequalities: `x > 3` and `(3, \infty)`.

Regions of one variable are compared piece by piece, ends and brackets; what has no pieces is left
to Math-Verify, whose yes must survive sampling. In a worker only.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import sympy
from math_verify import verify

from grouper.grading.expressions import expression_of
from grouper.grading.numerical import agree
from grouper.grading.structure import without_builder

_MEMBER = re.compile(r"^[A-Za-z] *\\in(?![A-Za-z])", re.ASCII)
_OR = re.compile(r",? or (?=\S)|\\cup(?![A-Za-z])")
_AND = re.compile(r",? and (?=\S)|\\cap(?![A-Za-z])")


class _Piece(NamedTuple):
    start: Any
    end: Any
    open_start: bool
    open_end: bool


def is_region(expression: Any) -> bool:
    """Whether a parsed expression is a set or a statement rather than a value."""
    if isinstance(expression, sympy.Expr):
        return False  # a symbol is a sympy Boolean too
    return isinstance(expression, (sympy.Set, sympy.logic.boolalg.Boolean, sympy.Tuple))


def same_regions(prediction: str, reference: str) -> tuple[bool, str]:
    """Whether two tidy texts say the same set of numbers, and why.

    Raises:
        UnreadError: one of them cannot be read.
    """
    prediction, reference = without_builder(prediction), without_builder(reference)
    given, expected = _region(prediction), _region(reference)
    if given is not None and expected is not None:
        (left_name, left), (right_name, right) = given, expected
        if left_name and right_name and left_name != right_name:
            return False, f"a region of {left_name}, of {right_name} is asked"
        same = _same_pieces(_pieces(left), _pieces(right))
        if same is not None:
            return same, "the same set" if same else "different sets"
    return _same_for_math_verify(*(_whole(text) for text in (prediction, reference)))


def _whole(text: str) -> Any:
    return expression_of(_MEMBER.sub("", text))


def _region(text: str) -> tuple[str, Any] | None:
    """(variable or "", set) of a text; None where it is not a set of real numbers."""
    for joint, join in ((_OR, sympy.Union), (_AND, sympy.Intersection)):
        parts = joint.split(text)
        if len(parts) == 1:
            continue
        regions = [_region(part.strip()) for part in parts]
        names = {region[0] for region in regions if region is not None} - {""}
        if None in regions or len(names) > 1:
            return None
        return "".join(names), join(*(region[1] for region in regions if region is not None))
    name = _MEMBER.match(text)
    expression = _whole(text)
    if isinstance(expression, sympy.Set):
        return name.group()[0] if name else "", expression
    if not is_region(expression) or len(expression.free_symbols) != 1:
        return None
    try:
        (symbol,) = expression.free_symbols
        return str(symbol), expression.as_set()
    except (ArithmeticError, AttributeError, TypeError, ValueError, NotImplementedError):
        return None


def _pieces(region: Any) -> list[_Piece] | None:
    """Intervals and points of a set, in order; None where it is made of something else."""
    parts = region.args if isinstance(region, sympy.Union) else (region,)
    pieces: list[_Piece] = []
    for part in parts:
        if isinstance(part, sympy.FiniteSet):
            pieces += [_Piece(member, member, False, False) for member in part]
        elif part == sympy.S.Reals:
            pieces.append(_Piece(-sympy.oo, sympy.oo, True, True))
        elif isinstance(part, sympy.Interval):
            pieces.append(_Piece(part.start, part.end, bool(part.left_open), bool(part.right_open)))
        elif part != sympy.S.EmptySet:
            return None
    try:
        return sorted(pieces, key=lambda piece: float(piece.start))
    except (TypeError, ValueError, OverflowError):
        return None


def _same_pieces(left: list[_Piece] | None, right: list[_Piece] | None) -> bool | None:
    if left is None or right is None:
        return None
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if (a.open_start, a.open_end) != (b.open_start, b.open_end):
            return False
        for mine, other in ((a.start, b.start), (a.end, b.end)):
            same = mine == other or agree(mine, other)
            if not same:
                return same
    return True


def _same_for_math_verify(prediction: Any, reference: Any) -> tuple[bool, str]:
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
