r"""Exact arithmetic on numbers as people write them, with no sympy and no surprises.

A small recursive-descent reader over `Fraction`: signs, sums, products, quotients, powers,
factorials, `\frac`, mixed numbers, perfect roots. Anything else is "not mine" (None), and a
number too large to write down is `TooLarge` before any work is done on it.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import NamedTuple

_MAX_BITS = 40_000
_MAX_FACTORIAL = 3_000
_MAX_DEPTH = 40
_MAX_TOKENS = 400
_TOKEN = re.compile(r"\s*(\\[A-Za-z]+|\d+(?:\.\d*)?|\.\d+|\*\*|[-+*/^!(){}\[\]])", re.ASCII)
_TIMES = frozenset({"*", r"\times", r"\cdot"})
_OVER = frozenset({"/", r"\div"})


class Rational(NamedTuple):
    """A value, and whether arithmetic was left to be done (`12+7`, `6*7`; not `3/4`, `2^5`)."""

    value: Fraction
    undone: bool


class TooLargeError(Exception):
    """A power or factorial whose digits nobody could write down."""


class _NotMineError(Exception):
    """Something this reader does not know; another rung may."""


def evaluate(text: str) -> Rational | None:
    r"""The exact value of a tidy text, or None where it is not a plain number.

    Raises:
        TooLargeError: `9^{9^{9^9}}`, `100000!`.

    >>> evaluate(r"1\frac{4}{5}")
    Rational(value=Fraction(9, 5), undone=False)
    >>> evaluate("12+7")
    Rational(value=Fraction(19, 1), undone=True)
    >>> evaluate("2x") is None
    True
    """
    tokens = _tokens(text)
    if tokens is None:
        return None
    reader = _Reader(tokens)
    try:
        value = reader.sum(0)
    except (_NotMineError, ZeroDivisionError):
        return None
    return Rational(value, reader.undone) if reader.at == len(tokens) else None


def _tokens(text: str) -> list[str] | None:
    tokens: list[str] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) >= _MAX_TOKENS:
            return None
        tokens.append("^" if match.group(1) == "**" else match.group(1))
        at = match.end()
    return tokens or None


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """`base ** exponent` where the result is rational and can be written down."""
    if exponent.denominator != 1:
        root = _root(base, exponent.denominator)
        return power(root, Fraction(exponent.numerator))
    if base in (0, 1, -1) or exponent == 0:
        if base == 0 and exponent <= 0:
            raise _NotMineError
        return base ** (int(exponent) % 2) if base == -1 else base ** min(int(abs(exponent)), 1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > _MAX_BITS:
        raise TooLargeError
    return base ** int(exponent)


def _root(value: Fraction, degree: int) -> Fraction:
    """The exact root, where there is one."""
    if value < 0 or degree > 64:
        raise _NotMineError
    parts = [_integer_root(n, degree) for n in (value.numerator, value.denominator)]
    return Fraction(parts[0], parts[1])


def _integer_root(value: int, degree: int) -> int:
    if degree == 2:
        guess = math.isqrt(value)
    elif value.bit_length() < 900:
        guess = round(value ** (1 / degree))
    else:
        raise _NotMineError
    if guess**degree != value:
        raise _NotMineError
    return guess


class _Reader:
    """One pass over the tokens; a method a grammar rule, each returning its value."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0
        self.undone = False

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, expected: str) -> None:
        if self.peek() != expected:
            raise _NotMineError
        self.at += 1

    def sum(self, depth: int) -> Fraction:
        if depth > _MAX_DEPTH:
            raise _NotMineError
        value = self.product(depth)
        while (operator := self.peek()) in ("+", "-"):
            self.at += 1
            term = self.product(depth)
            value = _fits(value + term if operator == "+" else value - term)
            self.undone = True
        return value

    def product(self, depth: int) -> Fraction:
        value, powered = self.signed(depth)
        products = False
        while True:
            operator = self.peek()
            if operator in _TIMES or operator == "(" or self._follows_fraction():
                self.at += operator in _TIMES
                factor, with_power = self.signed(depth)
                value, powered, products = _fits(value * factor), powered or with_power, True
            elif operator in _OVER:
                self.at += 1
                divisor, with_power = self.signed(depth)
                value, powered = _fits(value / divisor), powered or with_power
            else:
                break
        # `3*2^5` and `1.5*10^3` are ways to write a number; `6*7` is a sum left to be done.
        self.undone |= products and not powered
        return value

    def _follows_fraction(self) -> bool:
        return self.peek() == r"\frac" and self.tokens[self.at - 1] in (")", "}")

    def signed(self, depth: int) -> tuple[Fraction, bool]:
        sign = 1
        while self.peek() in ("+", "-"):
            sign *= -1 if self.peek() == "-" else 1
            self.at += 1
        value, powered = self.raised(depth)
        return sign * value, powered

    def raised(self, depth: int) -> tuple[Fraction, bool]:
        if depth > _MAX_DEPTH:
            raise _NotMineError
        value = self.primary(depth)
        powered = False
        while self.peek() == "!":
            self.at += 1
            value, powered = Fraction(_factorial(value)), True
        if self.peek() == "^":
            self.at += 1
            exponent, _ = self.signed(depth + 1)
            value, powered = power(value, exponent), True
        return value, powered

    def primary(self, depth: int) -> Fraction:
        token = self.peek()
        self.at += 1
        if token[:1].isdigit() or token[:1] == ".":
            return self.mixed(Fraction(token), integer=token.isdigit(), depth=depth)
        if token in ("(", "{"):
            value = self.sum(depth + 1)
            self.take(")" if token == "(" else "}")
            return value
        if token == r"\frac":
            return self.quotient(depth)
        if token == r"\sqrt":
            degree = Fraction(2)
            if self.peek() == "[":
                self.at += 1
                degree = self.sum(depth + 1)
                self.take("]")
            if degree.denominator != 1 or degree < 2:
                raise _NotMineError
            return _root(self.group(depth), int(degree))
        raise _NotMineError

    def mixed(self, whole: Fraction, *, integer: bool, depth: int) -> Fraction:
        r"""A whole number with a fraction after it: `1\frac{4}{5}`, `1 4/5`."""
        if integer and self.peek() == r"\frac":
            self.at += 1
            return whole + self.quotient(depth)
        rest = self.tokens[self.at : self.at + 3]
        if (
            integer
            and len(rest) == 3
            and rest[1] == "/"
            and rest[0].isdigit()
            and rest[2].isdigit()
        ):
            self.at += 3
            return whole + Fraction(int(rest[0]), int(rest[2]))
        return whole

    def quotient(self, depth: int) -> Fraction:
        numerator = self.group(depth)
        return _fits(numerator / self.group(depth))

    def group(self, depth: int) -> Fraction:
        self.take("{")
        value = self.sum(depth + 1)
        self.take("}")
        return value


def _factorial(value: Fraction) -> int:
    if value.denominator != 1 or value < 0:
        raise _NotMineError
    if value > _MAX_FACTORIAL:
        raise TooLargeError
    return math.factorial(int(value))


def _fits(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 2 * _MAX_BITS:
        raise TooLargeError
    return value
