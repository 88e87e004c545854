r"""LaTeX to sympy, in a worker only: Math-Verify's parser, told what it would misread.

Before parsing, calculator notation becomes LaTeX, degrees inside functions become `\pi/180`, mixed
numbers become sums, and primes become part of a name. After it, decimals are exact fractions.
"""

from __future__ import annotations

import re
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import (  # type: ignore[import-untyped] # ships no types
    ConversionConfig,
    NormalizationConfig,
    _Latex2Sympy,
    latex2sympy,
    normalize_latex,
)
from math_verify.grader import should_treat_as_complex

from grouper.grading.normalise import braced

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


# The parser drops an index or a prime after anything but a name, as if it were not there.
_DROPPED = re.compile(r"[)\]}\d] ?[_']")
# And it takes `i(5)` for a function.
_UNIT_BEFORE_BRACKET = re.compile(r"(?<![A-Za-z\\_{])([ie]) ?(?=\()")


class UnreadError(Exception):
    """Math-Verify cannot read a text; `text` says which."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def expression_of(text: str) -> Any:
    """What Math-Verify's parser makes of one tidy expression.

    Raises:
        UnreadError: it cannot be read, or is nested too deeply for the parser.
    """
    latex = _parsed_latex(text)
    try:
        expression = latex2sympy(
            latex,
            is_real=not should_treat_as_complex(latex),
            normalization_config=_SPELLING,
            conversion_config=_READING,
        )
    except MemoryError:
        raise
    except Exception as error:  # the parser has many ways to refuse a text; all mean the same
        raise UnreadError(text) from error
    if isinstance(expression, sympy.Basic):
        floats = expression.atoms(sympy.Float)
        exact = {f: sympy.Rational(str(f)) for f in floats}
        units = {s: sympy.I for s in expression.free_symbols if s.name == "i"}
        expression = expression.xreplace({**exact, **units})
    return expression


def require_grammar(text: str) -> None:
    """See that a tidy expression follows the parser's grammar, and work nothing out.

    What it takes grows with the text and with nothing that the text means, so the outcome is the
    same on every machine: a tower of powers or a sum of a million terms is read like any other.

    Raises:
        UnreadError: it does not.
    """
    latex = normalize_latex(_parsed_latex(text), _SPELLING)
    try:
        _Latex2Sympy(config=_READING).create_parser(latex).math()
    except MemoryError:
        raise
    except Exception as error:  # as above: any error of the parser is a refusal
        raise UnreadError(text) from error


def _parsed_latex(text: str) -> str:
    latex = latex_of(text)
    if _DROPPED.search(latex):
        raise UnreadError(text)
    return latex


_PLAIN_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sqrt|pi|sin|cos|tan|cot|sec|csc|ln|log|exp|infinity"
    r"|theta)(?![A-Za-z])"
)
_MIXED = re.compile(r"(?<![\w.}^_])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}", re.ASCII)
# A letter with an accent, and with an index or none, is a name of its own.
_ACCENTED = re.compile(
    r"\\(d{1,3}ot|hat|bar|tilde) ?\{? ?([A-Za-z]) ?\}?(?: ?_ ?\{(\w+)\})?", re.ASCII
)
_POINT = re.compile(r"(?<=\d)\.(?![\d.])")
# `E_1` is no number, and `I_1` is not the imaginary unit that the parser takes it for.
_INDEXED_CONSTANT = re.compile(r"(?<![A-Za-z\\])([EeI]) ?_ ?\{(?=\w+\})", re.ASCII)
_PRIMED = re.compile(r"([A-Za-z])('+)", re.ASCII)
# The parser takes `2(3)` for two and three where nothing follows it.
_NUMBER_BEFORE_BRACKET = re.compile(r"(?<![\w.\\_^{])(\d+(?:\.\d+)?) ?(?=\()|(?<=\{)(\d+) ?(?=\()")


def latex_of(text: str) -> str:
    r"""Calculator notation as LaTeX: `sqrt(2)*x^(1/2)` is `\sqrt{2}\cdot x^{1/2}`.

    >>> latex_of("sqrt(2)*x^(1/2)")
    '\\sqrt{2}\\cdot x^{1/2}'
    >>> latex_of(r"\tan 15^\circ"), latex_of(r"1\frac12 x")
    ('\\tan \\left(\\frac{15\\pi}{180}\\right)', '\\left(1+\\frac{1}{2}\\right) x')
    """
    text = _PLAIN_FUNCTION.sub(r"\\\1 ", text).replace(r"\infinity", r"\infty")
    text = text.replace("**", "^").replace("*", r"\cdot ")
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")
    for opener in (r"\sqrt ", r"\sqrt", "^"):
        text = _braces_for_parentheses(text, opener)
    text = _ACCENTED.sub(r"\2_{\1\3}", _POINT.sub("", _with_radians(braced(text))))
    text = _INDEXED_CONSTANT.sub(r"Q_{\1", text)
    text = _summed(text)
    text = _NUMBER_BEFORE_BRACKET.sub(lambda m: rf"{m.group().rstrip()}\cdot ", text)
    text = _UNIT_BEFORE_BRACKET.sub(r"\1\\cdot ", text)
    return _PRIMED.sub(lambda m: f"{m[1]}_{{{'p' * len(m[2])}rime}}", text)


def _summed(text: str) -> str:
    """Mixed numbers as sums."""
    return _MIXED.sub(r"\\left(\1+\\frac{\2}{\3}\\right)", text)


def _braces_for_parentheses(text: str, opener: str) -> str:
    start = text.find(opener + "(")
    while start >= 0:
        begin = start + len(opener)
        end = _closing(text, begin)
        if end < 0:
            return text
        inside = text[begin + 1 : end]
        text = f"{text[:start]}{opener.strip()}{{{inside}}}{text[end + 1 :]}"
        start = text.find(opener + "(", start)
    return text


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`, or -1."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    return -1


_ANGULAR = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])|cis|e ?\^|\\exp")
_DEGREE = re.compile(r" ?\^ ?\{? ?\\circ ?\}?|\\circ(?![A-Za-z])| ?(?<=[\d)}\s])deg(?:rees?)?\b")
_OPERAND = re.compile(
    r"(?:\d+ ?)?\\frac\{[^{}]*\}\{[^{}]*\}$|\d+(?:\.\d+)?$|\.\d+$|\\?[A-Za-z]+$|\([^()]*\)$"
    r"|\{[^{}]*\}$"
)


def _with_radians(text: str) -> str:
    r"""Degrees as multiples of `\pi/180` in functions and beside `\pi`; elsewhere they are a unit.

    Raises:
        UnreadError: a degree sign after something that is no angle.
    """
    if not _ANGULAR.search(text) and r"\pi" not in text:
        return text
    while sign := _DEGREE.search(text):
        before = text[: sign.start()].rstrip()
        operand = _OPERAND.search(before)
        if operand is None:
            raise UnreadError(text)
        angle = operand.group()
        if angle[0] == "{":  # braces of a function's argument: `\sin{30}^\circ`
            angle = angle[1:-1]
        if not angle.replace(".", "").isdigit():
            angle = rf"\left({_summed(angle)}\right)"
        radians = rf"\left(\frac{{{angle}\pi}}{{180}}\right)"
        text = before[: operand.start()] + radians + text[sign.end() :]
    return text
