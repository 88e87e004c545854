"""Generated calculations of any length: `What is (47 + 12) * 3 - 8 / 4?`.

A problem is a tree of operations with whole numbers at its leaves. Parentheses stand only where the
precedence of + - * / would lead to another tree, so that a reader has to know it. The reference
answer is computed from the tree in integers; every intermediate result is a whole number within the
limits. The worked solution has one line per step; the column `marked_solution` has the same lines
with the marks of GSM8K: `47+12 = <<47+12=59>>59`.

Nothing here calls itself, and the work grows in proportion to the number of steps. As in
`arithmetic`, no question can be in two splits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field, model_validator

from grouper.config.checks import validate_json
from grouper.config.schema import MOST, Positive, Section, Seed
from grouper.data.generation import (
    SIGNS,
    Numbers,
    distinct_drafts,
    first_drafts,
    pick,
    pick_distinct,
    require_signs,
    require_split,
)
from grouper.types import Problem

# The longest calculation: a limit for typing errors, not of the method.
MOST_STEPS = 10_000
# Attempts after which a length counts as impossible under the options.
TRIALS = 100
# Attempts to find two numbers for an operation, before another operation is tried.
REDRAWS = 5
# The largest divisor that is looked for where a number has to divide a result: beyond it, divisors
# are rare, and the search would take longer than the rest.
LARGEST_DIVISOR = 20

PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


class CalculationOptions(Section):
    """`options` of the source `calculation`."""

    count: Positive = 1000
    steps: Annotated[Numbers, Field(strict=False)] = (2, 3, 4, 5)
    """Operations of a problem: `1..200`, `10..50 by 10` or a list. A number that is named twice is
    twice as frequent."""
    operations: str = SIGNS
    """Signs that a problem may use."""
    low: Positive = 2
    """Smallest number in a question."""
    high: Positive = 100
    """Largest number in a question."""
    min_value: Annotated[int, Field(ge=-MOST, le=MOST)] = 1
    """Smallest result of a step; below 0, results may be negative."""
    max_value: Positive = 1000
    """Largest result of a step."""
    seed: Seed | None = None
    """Left out: the run's seed."""

    @model_validator(mode="after")
    def _make_sense(self) -> CalculationOptions:
        if not self.steps:
            raise ValueError("steps is empty")
        for count in self.steps:
            if not 1 <= count <= MOST_STEPS:
                raise ValueError(f"steps has {count}, and a problem has 1 to {MOST_STEPS:,}")
        require_signs(self.operations)
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        if self.high > self.max_value:
            limits = f"max_value ({self.max_value}) is below high ({self.high})"
            raise ValueError(f"{limits}: raise max_value, or lower high")
        if self.min_value > self.max_value:
            limits = f"min_value ({self.min_value}) is above max_value ({self.max_value})"
            raise ValueError(limits)
        # The longest is the hardest, unless even a single step is impossible.
        for count in (min(self.steps), max(self.steps)):
            if not _is_possible(self, count):
                raise ValueError(
                    f"no calculation of {_steps(count)} was found whose results are all within "
                    f"{self.min_value} to {self.max_value}: raise max_value, lower high, allow "
                    "more operations, or lower steps"
                )
        return self


def calculation_options(options: Mapping[str, Any], *, where: str) -> CalculationOptions:
    """Check `options` strictly. Raises `ConfigError` with every problem found."""
    return validate_json(CalculationOptions, json.dumps(options), where=where, place=("options",))


def generate(options: CalculationOptions, *, split: str, seed: int) -> tuple[Problem, ...]:
    """Generate `options.count` problems with distinct questions, a function of the arguments alone.

    A longer set starts with the problems of a shorter one.

    Args:
        options: what to generate.
        split: one of `SPLITS`.
        seed: used where `options.seed` is not set.

    Raises:
        ConfigError: unknown split.
        DataError: the options allow fewer different questions than `count`.
    """
    require_split("calculation", split)
    if options.seed is not None:
        seed = options.seed
    draw = random.Random(f"grouper/calculation/{seed}/{split}/questions")
    name = f"calculation/{split}"
    drafts = first_drafts(
        distinct_drafts(
            lambda: pick(draw, options.steps),
            lambda count: _write_draft(options, count, draw),
            split=split,
        ),
        options.count,
        where=name,
        fix="Raise options.high or options.max_value, name more steps, or lower count.",
    )
    return tuple(_problem(f"{name}/{index}", draft) for index, draft in enumerate(drafts))


class _Draft(NamedTuple):
    question: str
    calculation: Calculation
    steps: int


def _problem(name: str, draft: _Draft) -> Problem:
    answer = str(draft.calculation.value)
    lines = []
    marked_lines = []
    for step in _in_order(draft.calculation):
        equation = _equation(step)
        lines.append(f"{equation} = {step.value}")
        marked_lines.append(f"{equation} = <<{equation}={step.value}>>{step.value}")
    solution = "\n".join(lines)
    return Problem(
        id=name,
        question=draft.question,
        answer=answer,
        source="calculation",
        solution=solution,
        level=_steps(draft.steps),
        columns={
            "question": draft.question,
            "answer": answer,
            "solution": solution,
            "marked_solution": "\n".join(marked_lines),
            "steps": draft.steps,
        },
    )


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


# --- choosing the operations and numbers ---------------------------------------------------------


class Calculation(NamedTuple):
    """An operation on numbers or on the results of other operations."""

    left: Operand
    sign: str
    right: Operand
    value: int


Operand = int | Calculation


def _write_draft(options: CalculationOptions, count: int, draw: random.Random) -> _Draft | None:
    """Write a problem of `count` steps, or return None where no operation fitted two results."""
    calculation = draw_calculation(options, count, draw)
    if calculation is None:
        return None
    question = f"What is {write_calculation(calculation)}?"
    return _Draft(question=question, calculation=calculation, steps=count)


def _is_possible(options: CalculationOptions, count: int) -> bool:
    # Its own stream: whether a length is possible depends on the options alone, not on the seed.
    draw = random.Random(f"grouper/calculation/possible/{count}")
    return any(draw_calculation(options, count, draw) is not None for _ in range(TRIALS))


def draw_calculation(
    options: CalculationOptions, count: int, draw: random.Random
) -> Calculation | None:
    """Draw a calculation of `count` operations, whose results are all within the limits.

    The shape is drawn first, then signs and numbers from the leaves to the root.

    Returns:
        The calculation; None where no operation fits two results that were drawn.
    """
    # A number is None until the operation around it is chosen.
    operands: list[Calculation | None] = []
    for is_operation in _draw_shape(count, draw):
        if not is_operation:
            operands.append(None)
            continue
        right = operands.pop()
        left = operands.pop()
        calculation = _draw_operation(options, left, right, draw)
        if calculation is None:
            return None
        operands.append(calculation)
    return operands.pop()


def _draw_shape(count: int, draw: random.Random) -> list[bool]:
    """Draw a tree of `count` operations.

    Each operation gives a uniformly random number of the operations below it to its left side, so
    that the depth grows with the logarithm of `count` on average.

    Returns:
        The nodes, each after those below it: true is an operation, false a number.
    """
    root_first = []
    waiting = [count]
    while waiting:
        remaining = waiting.pop()
        root_first.append(remaining > 0)
        if remaining > 0:
            left = int(draw.random() * remaining)
            right = remaining - 1 - left
            # The right side comes off first: reversed, the left one is the first.
            waiting += [left, right]
    return root_first[::-1]


def _draw_operation(
    options: CalculationOptions,
    left: Calculation | None,
    right: Calculation | None,
    draw: random.Random,
) -> Calculation | None:
    """Draw a sign, and numbers for the sides that are None; None: no sign fits."""
    for sign in pick_distinct(draw, options.operations, len(options.operations)):
        calculation = _draw_operands(options, left, sign, right, draw)
        if calculation is None:
            # The sides may change places: 8 - 5 is within the limits where 5 - 8 is not.
            calculation = _draw_operands(options, right, sign, left, draw)
        if calculation is not None:
            return calculation
    return None


def _draw_operands(
    options: CalculationOptions,
    left: Calculation | None,
    sign: str,
    right: Calculation | None,
    draw: random.Random,
) -> Calculation | None:
    """Draw numbers for the sides that are None; None: no result is within the limits."""
    if left is not None and right is not None:
        return _operation(options, left, sign, right)
    if left is not None:
        numbers = _right_numbers(options, left.value, sign)
        return _operation(options, left, sign, pick(draw, numbers)) if numbers else None
    if right is not None:
        numbers = _left_numbers(options, sign, right.value)
        return _operation(options, pick(draw, numbers), sign, right) if numbers else None
    return _draw_two_numbers(options, sign, draw)


def _draw_two_numbers(
    options: CalculationOptions, sign: str, draw: random.Random
) -> Calculation | None:
    for _ in range(REDRAWS):
        right = pick(draw, range(options.low, options.high + 1))
        numbers = _left_numbers(options, sign, right)
        if numbers:
            return _operation(options, pick(draw, numbers), sign, right)
    return None


def _value(operand: Operand) -> int:
    return operand.value if isinstance(operand, Calculation) else operand


def _right_numbers(options: CalculationOptions, left: int, sign: str) -> Sequence[int]:
    """Return numbers of a question that can stand to the right of a value."""
    if sign == "+":
        return range(options.low, min(options.high, options.max_value - left) + 1)
    if sign == "-":
        return range(options.low, min(options.high, left - options.min_value) + 1)
    if sign == "*":
        return _factors(options, left)
    divisors = range(max(2, options.low), min(options.high, LARGEST_DIVISOR) + 1)
    return [divisor for divisor in divisors if left % divisor == 0]


def _left_numbers(options: CalculationOptions, sign: str, right: int) -> Sequence[int]:
    """Return numbers of a question that can stand to the left of a value."""
    if sign == "+":
        return range(options.low, min(options.high, options.max_value - right) + 1)
    if sign == "-":
        smallest = max(options.low, right + options.min_value)
        largest = min(options.high, right + options.max_value)
        return range(smallest, largest + 1)
    if sign == "*":
        return _factors(options, right)
    if right < 2:
        return ()
    # Twice the divisor at least, since 7 / 7 is hardly a calculation.
    smallest_quotient = max(2, -(-options.low // right))
    return range(smallest_quotient * right, options.high + 1, right)


def _factors(options: CalculationOptions, value: int) -> Sequence[int]:
    """Return numbers of a question whose product with a value is within the limits."""
    if value == 0:
        return ()
    limit = options.max_value // value if value > 0 else options.min_value // value
    return range(max(2, options.low), min(options.high, limit) + 1)


def _operation(
    options: CalculationOptions, left: Operand, sign: str, right: Operand
) -> Calculation | None:
    """Compute an operation; None: its result is not whole, not within the limits, or trivial.

    Multiplying by 0 or 1, dividing by 1 and dividing 0 would say nothing about a reader.
    """
    a = _value(left)
    b = _value(right)
    if sign == "+":
        result = a + b
    elif sign == "-":
        result = a - b
    elif sign == "*":
        if min(abs(a), abs(b)) < 2:
            return None
        result = a * b
    else:
        if abs(b) < 2 or a == 0 or a % b != 0:
            return None
        result = a // b
    if not options.min_value <= result <= options.max_value:
        return None
    return Calculation(left, sign, right, result)


# --- writing -------------------------------------------------------------------------------------


def write_calculation(calculation: Calculation) -> str:
    """Write a calculation with the parentheses that it needs to be read as the same tree.

    >>> sum_of_two = Calculation(47, "+", 12, 59)
    >>> write_calculation(Calculation(sum_of_two, "*", 3, 177))
    '(47 + 12) * 3'
    >>> product = Calculation(8, "*", 4, 32)
    >>> write_calculation(Calculation(product, "-", sum_of_two, -27))
    '8 * 4 - (47 + 12)'
    """
    parts = []
    waiting: list[str | Operand] = [calculation]
    while waiting:
        item = waiting.pop()
        if not isinstance(item, Calculation):
            parts.append(str(item))
            continue
        precedence = PRECEDENCE[item.sign]
        pieces: list[str | Operand] = [
            *_enclosed(item.left, precedence),
            f" {item.sign} ",
            # A right side of the same precedence would otherwise be read after the left one.
            *_enclosed(item.right, precedence + 1),
        ]
        waiting += reversed(pieces)
    return "".join(parts)


def _enclosed(operand: Operand, precedence: int) -> list[str | Operand]:
    """Return an operand, in parentheses where its sign has less than this precedence."""
    if isinstance(operand, Calculation) and PRECEDENCE[operand.sign] < precedence:
        return ["(", operand, ")"]
    return [operand]


def _in_order(calculation: Calculation) -> list[Calculation]:
    """Return all operations, each after those that it needs, from left to right."""
    root_first = []
    waiting = [calculation]
    while waiting:
        step = waiting.pop()
        root_first.append(step)
        sides = (step.left, step.right)
        waiting += [operand for operand in sides if isinstance(operand, Calculation)]
    return root_first[::-1]


def _equation(step: Calculation) -> str:
    """Return a step without its result: `47+12`, or `3-(-5)` after a negative result."""
    right = _value(step.right)
    shown = f"({right})" if right < 0 else str(right)
    return f"{_value(step.left)}{step.sign}{shown}"
