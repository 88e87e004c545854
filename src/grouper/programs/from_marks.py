"""Programs from worked solutions whose arithmetic is marked: `48/2 = <<48/2=24>>24` of GSM8K.

A mark holds an expression and its value. Each becomes a line of Python, under its sentence as a
comment; a number that an earlier line computed becomes the name of that line. Nothing is run here:
values are computed as fractions, from the syntax tree.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeVar

MARK = re.compile(r"<<([^<>=]*)=([^<>]*)>>")
# A mark in a sentence, with an equals sign that leads to it and the value that it repeats.
_VALUE = re.compile(r"(?P<equals>\s*=\s*[$€£]?\s*)?<<[^<>=]*=[^<>]*>>(?:[$€£]?-?[\d,]*\.?\d+%?)?")
NUMBER = re.compile(r"(?<![\w.])(?:\d+(?:\.\d+)?|\.\d+)(?!\w|\.\d)")
_NAME = re.compile(r"(?:step|given)_\d+")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)%")
# What an expression is made of once it is tidy, and how long it may be.
_PLAIN = re.compile(r"[\d.+\-*/() ]{1,100}")
# A value in a mark may be rounded: relative to it.
_ROUNDED = Fraction(1, 100)

Number = TypeVar("Number", Fraction, float)

_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def program_from_marks(solution: str, question: str, answer: str) -> str | None:
    r"""Write a program that computes what a solution marks, or None where that does not add up.

    Args:
        solution: the worked solution, with marks.
        question: its numbers stay numbers in the program, whatever lines compute the same.
        answer: the reference, which the program has to print.

    >>> print(program_from_marks(
    ...     "Half is 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72",
    ...     "She sold 48 clips, then half as many. How many in all?", "72"))
    # Half is 48/2 clips.
    step_1 = 48/2
    # In all 48+step_1.
    step_2 = 48+step_1
    print(step_2)
    """
    given = {Fraction(digits) for digits in NUMBER.findall(question.replace(",", ""))}
    named: dict[Fraction, str] = {}
    exact: dict[str, Fraction] = {}
    floating: dict[str, float] = {}
    lines = []

    def as_name(number: re.Match[str]) -> str:
        value = Fraction(number[0])
        return number[0] if value in given else named.get(value, number[0])

    for sentence in solution.split("\n"):
        marks = MARK.findall(sentence)
        if marks:
            lines.append(f"# {NUMBER.sub(as_name, _comment(sentence, len(exact)))}")
        for written, stated in marks:
            expression = NUMBER.sub(as_name, tidy_expression(written))
            name = f"step_{len(exact) + 1}"
            value = evaluate_expression(expression, exact, Fraction)
            claimed = evaluate_expression(tidy_expression(stated), {}, Fraction)
            if value is None or claimed is None or not _is_rounded(value, claimed):
                return None
            exact[name] = value
            floating[name] = evaluate_expression(expression, floating, float) or 0.0
            named[claimed] = name
            lines.append(f"{name} = {expression}")
    wanted = evaluate_expression(tidy_expression(answer), {}, Fraction)
    if not exact or list(exact.values())[-1] != wanted:
        return None
    # Floating point may miss the last digit.
    is_exact = Fraction(floating[name]) == wanted
    lines.append(f"print({name})" if is_exact else f"print(round({name}, 6))")
    return "\n".join(lines)


def _comment(sentence: str, steps: int) -> str:
    """Return a sentence without the values that its program computes.

    An expression that is written out stays without its value, `48/2` of `48/2 = 24`; elsewhere the
    name of the line stands for the value.

    Args:
        sentence: with marks.
        steps: lines of the program so far.
    """

    def shortened(found: re.Match[str]) -> str:
        nonlocal steps
        steps += 1
        return "" if found["equals"] else f"step_{steps}"

    return _VALUE.sub(shortened, sentence).strip()


def tidy_expression(text: str) -> str:
    """Return an expression as Python would have it: no commas, currencies or per cent signs."""
    for sign, replacement in ((",", ""), ("$", ""), ("x", "*"), ("\u00d7", "*"), ("\u00f7", "/")):
        text = text.replace(sign, replacement)
    return _PERCENT.sub(r"(\1/100)", text).strip()


def evaluate_expression(
    expression: str, names: Mapping[str, Number], kind: Callable[[str], Number]
) -> Number | None:
    """Compute an expression of numbers, names, four operations and brackets; None: it is not one.

    Args:
        expression: tidy.
        names: values of the names in it.
        kind: of numbers, made of their digits.
    """

    def value_of(node: ast.expr) -> Number:
        match node:
            case ast.Name():
                return names[node.id]
            case ast.Constant():
                return kind(ast.get_source_segment(expression, node) or "")
            case ast.UnaryOp(op=ast.USub()):
                return -value_of(node.operand)
            case ast.BinOp() if type(node.op) in _OPERATIONS:
                result: Number = _OPERATIONS[type(node.op)](
                    value_of(node.left), value_of(node.right)
                )
                return result
            case _:
                raise ValueError(ast.dump(node))

    if not _PLAIN.fullmatch(_NAME.sub("0", expression)):
        return None
    try:
        return value_of(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, OverflowError):
        return None


def _is_rounded(value: Fraction, claimed: Fraction) -> bool:
    """Tell whether a stated value is the computed one, or that rounded."""
    return abs(value - claimed) <= _ROUNDED * abs(value)
