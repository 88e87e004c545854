r"""Do two expressions have the same values? High-precision numbers judge, in a worker only.

With variables, both are evaluated at several points; without, once, and a yes is confirmed at a
hundred digits or more: `\sqrt{10^{40}+1}` and `10^{20}` agree to forty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import sympy

_DIGITS = 30
_CONFIRMING = 110
_SPARE = 30
"""Digits that may be lost in evaluation: agreement is asked of all but these."""
_MAX_DIGITS = 2_000
_COMMON_SIZE = 8
"""Digits of a number up to which 30 digits are far more than it takes."""
RELATIVE = sympy.Float("1e-20", _DIGITS)
TINY = sympy.Float("1e-90", _DIGITS)
# Real points of both signs and several sizes, one of them whole for floors and the like; no two
# symbols ever get the same value.
POINTS: tuple[tuple[str, ...], ...] = (
    ("1.3717421", "2.2360173", "0.7310585", "3.1723451", "1.9120042", "0.4112359"),
    ("0.2718301", "0.9172113", "4.1133207", "1.4571123", "0.6180339", "2.9991231"),
    ("-1.6180421", "0.5772156", "-2.3025123", "-0.8314472", "1.1123581", "-3.3311123"),
    ("7.3890112", "-5.4365332", "9.8696021", "-6.2831113", "8.1548123", "-7.7712349"),
    ("-0.3678123", "-1.2020569", "0.1592653", "2.6854520", "-4.6692016", "0.9159655"),
    ("2", "3", "5", "7", "11", "13"),
    ("12.182493", "23.140692", "17.283411", "31.006277", "19.739208", "41.341123"),
)


class Rounding(NamedTuple):
    """How a decimal reference may differ from the exact value."""

    decimals: int = -1
    """Digits after the point; -1 for an exact reference."""
    cut: bool = False
    """The digits go on: the value is beyond them, by less than one in the last place."""

    def allows(self, value: Any, reference: Any) -> bool:
        """Whether a real value may have been written so."""
        if self.decimals < 4:
            return False
        step = sympy.Rational(Fraction(1, 10**self.decimals))
        if self.cut:
            beyond = (value - reference) * (-1 if reference < 0 else 1)
            return bool(0 < beyond < step)
        return bool(abs(value - reference) <= step / 2)


def agree(prediction: Any, reference: Any, rounding: Rounding | None = None) -> bool | None:
    """Whether two expressions have the same values; None where they have none to compare."""
    rounding = rounding or Rounding()
    if isinstance(prediction, sympy.MatrixBase) or isinstance(reference, sympy.MatrixBase):
        return _agree_matrices(prediction, reference)
    if not (isinstance(prediction, sympy.Expr) and isinstance(reference, sympy.Expr)):
        return None
    if prediction.has(sympy.Derivative) or reference.has(sympy.Derivative):
        return bool(prediction == reference)  # `dy/dx` evaluates to nothing but 0
    prediction, reference = _real_roots(prediction, reference)
    return _agree_at_points(prediction, reference, rounding)


def _agree_at_points(prediction: Any, reference: Any, rounding: Rounding) -> bool | None:
    symbols = sorted(prediction.free_symbols | reference.free_symbols, key=str)
    if len(symbols) > len(POINTS[0]):
        return None
    digits = _DIGITS + _written_digits(prediction, reference)
    agreed = 0
    for point in points(symbols):
        left, right = value_at(prediction, point, digits), value_at(reference, point, digits)
        outcome = _close(left, right, rounding, digits, real=bool(symbols))
        if outcome is False:
            if symbols and _on_branches(point, prediction, reference):
                continue
            return False
        agreed += outcome is True
    if agreed < (3 if symbols else 1):
        return None
    return True if symbols else _confirmed(prediction, reference, rounding, digits)


def _on_branches(point: dict[Any, Any], *expressions: Any) -> bool:
    r"""Whether a root or logarithm of a negative number is taken at a point.

    There `\sqrt{x}\sqrt{y}` and `\sqrt{xy}` may differ, which are the same where both are real.
    """
    arguments = {
        power.base
        for side in expressions
        for power in side.atoms(sympy.Pow)
        if not power.exp.is_integer and power.base.free_symbols
    } | {log.args[0] for side in expressions for log in side.atoms(sympy.log)}
    values = [value_at(argument, point) for argument in arguments]
    return any(value is not None and value[1] == 0 and value[0] < 0 for value in values)


def _agree_matrices(prediction: Any, reference: Any) -> bool | None:
    shapes = getattr(prediction, "shape", None), getattr(reference, "shape", None)
    if None in shapes or shapes[0] != shapes[1]:
        return False
    cells = [agree(a, b) for a, b in zip(prediction, reference, strict=True)]
    return False if False in cells else None if None in cells else True


def _confirmed(prediction: Any, reference: Any, rounding: Rounding, digits: int) -> bool:
    """A yes about two constants, asked again with many more digits."""
    if prediction == reference:
        return True
    many = digits - _DIGITS + _CONFIRMING
    left, right = value_at(prediction, {}, many), value_at(reference, {}, many)
    return _close(left, right, rounding, many, real=False) is True


def _written_digits(*expressions: Any) -> int:
    """Digits beyond the usual that the numbers in both have: what they say must be seen."""
    sizes = [_bits(n) for side in expressions for n in side.atoms(sympy.Rational)]
    sizes += [
        min(_bits(power.base) * abs(int(power.exp)), 10 * _MAX_DIGITS)
        for side in expressions
        for power in side.atoms(sympy.Pow)  # the parser leaves `10^{-40}` as it stands
        if power.base.is_Rational and power.exp.is_Integer
    ]
    written = max(sizes, default=0) * 3 // 10
    return min(3 * written, _MAX_DIGITS) if written > _COMMON_SIZE else 0


def _bits(number: Any) -> int:
    return max(abs(int(number.p)), int(number.q)).bit_length()


def _real_roots(prediction: Any, reference: Any) -> tuple[Any, Any]:
    r"""Roots of odd degree are real (`\sqrt[3]{-8}` is -2) unless one side is complex anyway."""
    if prediction.has(sympy.I) or reference.has(sympy.I):
        return prediction, reference
    return prediction.replace(_is_odd_root, _real_root), reference.replace(_is_odd_root, _real_root)


def _is_odd_root(expression: Any) -> bool:
    if not isinstance(expression, sympy.Pow):
        return False
    base, exponent = expression.args
    return bool(
        exponent.is_Rational
        and exponent.q > 1
        and exponent.q % 2 == 1
        and not base.is_extended_nonnegative
    )


def _real_root(power: Any) -> Any:
    base, exponent = power.args
    size = sympy.Abs(base) ** exponent
    return size if exponent.p % 2 == 0 else sympy.sign(base) * size


def points(symbols: Sequence[Any]) -> Iterable[dict[Any, Any]]:
    """Values for the symbols, several times; one empty point without symbols."""
    if not symbols:
        return [{}]
    return [
        {symbol: sympy.Rational(value) for symbol, value in zip(symbols, point, strict=False)}
        for point in POINTS
    ]


def value_at(expression: Any, point: dict[Any, Any], digits: int = _DIGITS) -> Any:
    """(real, imaginary) of an expression's value, or None where it has no finite one."""
    try:
        if all(number.is_Integer for number in point.values()):
            value = sympy.N(expression.subs(point).doit(), digits, maxn=4 * digits)
        else:  # fractions put in exactly would be factored wherever they are exponents
            value = sympy.N(expression, digits, subs=point, maxn=4 * digits)
        if not value.is_number:
            value = sympy.N(expression.subs(point).doit(), digits)
        real, imaginary = value.as_real_imag()
        if not (real.is_Number and imaginary.is_Number and real.is_finite and imaginary.is_finite):
            return None
    except (ArithmeticError, AttributeError, TypeError, ValueError, NotImplementedError):
        return None
    return real, imaginary


@lru_cache(maxsize=64)
def _tolerances(digits: int) -> tuple[Any, Any]:
    """Relative, and absolute beside zero, where evaluation leaves noise of its precision."""
    if digits == _DIGITS:
        return RELATIVE, TINY
    ten = sympy.Float(10, digits)
    return ten ** (_SPARE - digits), ten ** (-3 * digits)


def _close(left: Any, right: Any, rounding: Rounding, digits: int, *, real: bool) -> bool | None:
    """Whether two values agree; with symbols, points where neither side is real say nothing."""
    if left is None or right is None:
        return None
    size = max(abs(x) for x in (*left, *right))
    relative, tiny = _tolerances(digits)
    near = all(abs(a - b) <= relative * size + tiny for a, b in zip(left, right, strict=True))
    if real and left[1] != 0 and right[1] != 0 and not near:
        return None  # two branches of a root or a logarithm
    if rounding.cut:
        return bool(left[1] == 0 and rounding.allows(left[0], right[0]))
    return near or bool(left[1] == 0 and rounding.allows(left[0], right[0]))
