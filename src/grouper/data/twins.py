r"""Twins: the same problem with other numbers, and the answer that its own solution then gives.

A model that has learned a test set by heart solves its problems and not their twins (GSM-Symbolic,
arXiv 2410.05229). The reference of a twin is computed by the steps that are marked in the worked
solution, `<<48/2=24>>`. That is done only where the original's numbers prove that these steps are
all there is: every operand is a number of the question, the result of an earlier step, or one of a
few constants whose word stands in the question; no two of these have the same value; and the last
step is the answer. Otherwise there is no twin.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from grouper.programs.from_marks import MARK, NUMBER, evaluate_expression, tidy_expression

# A whole number as it stands in a question, perhaps with commas between thousands.
_WRITTEN = re.compile(r"(?<![\w.,/])(?:\d{1,3}(?:,\d{3})+|\d+)(?![.,]?\d|\w)")
# What makes a number in a question stand for another one in the solution: a share, an ordinal, a
# time of day, a part of a fraction or of a date.
_SPECIAL_AFTER = re.compile(
    r"\s*(?:%|percent|per cent|/|:|th\b|st\b|nd\b|rd\b|a\.?m\.?\b|p\.?m\.?\b|times\b)",
    re.IGNORECASE,
)
# Values of units, which a solution uses although they are in no question. They are never changed,
# so that it does not matter where they come from.
_UNITS = frozenset(map(Fraction, (7, 10, 12, 24, 30, 52, 60, 100, 365, 1000)))
# Words in a question that stand for a constant in the solution.
_WORDS: Mapping[Fraction, str] = {
    Fraction(2): "twice|double|doubled|half|two|pair|pairs|both",
    Fraction(3): "three|thrice|triple|tripled|third|thirds",
    Fraction(4): "four|quarter|quarters|fourth|fourths",
    Fraction(5): "five|fifth|fifths",
    Fraction(6): "six|sixth",
    Fraction(8): "eight|eighth",
    Fraction(9): "nine",
}
# A number of the question, or the result of a step, in an expression.
_NAME = re.compile(r"(?:given|step)_\d+")
# Denominators of numbers that decimals write exactly, and shortly.
_DECIMAL = frozenset((1, 2, 4, 5, 10, 20, 25, 50, 100))
# Tries to find numbers with which everything stays whole and positive.
_TRIES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """A problem with other numbers."""

    question: str
    answer: str
    solution: str
    """The steps that compute the answer, one a line, with marks as the original has them."""
    changed: Mapping[str, str]
    """Number in the original -> number in the twin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Number:
    """A number of the question that may be changed."""

    start: int
    """Its first character in the question."""
    end: int
    value: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step of the solution."""

    name: str
    expression: str
    """Over the names of numbers and of earlier steps."""
    value: Fraction
    """In the original."""


def make_twin(question: str, solution: str, answer: str, key: int) -> Twin | None:
    r"""Change the numbers of a problem, or return None where that cannot be proved right.

    Args:
        question: of the original.
        solution: with marks.
        answer: the reference of the original.
        key: which twin; equal keys give equal ones.

    >>> twin = make_twin("Ann has 14 pens and buys 5 boxes of 8 pens. How many has she?",
    ...     "5*8=<<5*8=40>>40\n14+40=<<14+40=54>>54", "54", key=1)
    >>> twin.question, twin.answer
    ('Ann has 15 pens and buys 6 boxes of 10 pens. How many has she?', '75')
    """
    numbers = _changeable_numbers(question)
    steps = _read_steps(question, solution, answer, numbers)
    if steps is None:
        return None
    used_names = set()
    for step in steps:
        used_names.update(_NAME.findall(step.expression))
    names_to_change = [name for name in numbers if name in used_names]
    if not names_to_change:
        return None
    generator = random.Random(f"twin/{key}/{question}")
    for _ in range(_TRIES):
        values = {name: number.value for name, number in numbers.items()}
        for name in names_to_change:
            values[name] = _similar_number(values[name], generator)
        twin = _write_twin(question, steps, numbers, values, answer)
        if twin is not None:
            return twin
    return None


# --- reading the original ------------------------------------------------------------------------


def _changeable_numbers(question: str) -> dict[str, _Number]:
    """Return name -> number, of whole numbers that occur once and stand for themselves."""
    all_values = _values_in(question)
    numbers: dict[str, _Number] = {}
    for match in _WRITTEN.finditer(question):
        value = Fraction(match[0].replace(",", ""))
        if all_values.count(value) > 1 or value <= 1 or value in _UNITS:
            continue
        if _SPECIAL_AFTER.match(question, match.end()):
            continue
        name = f"given_{len(numbers)}"
        numbers[name] = _Number(start=match.start(), end=match.end(), value=value)
    return numbers


def _values_in(question: str) -> list[Fraction]:
    return [Fraction(digits) for digits in NUMBER.findall(question.replace(",", ""))]


def _is_in_words(value: Fraction, question: str) -> bool:
    words = _WORDS.get(value)
    if words is None:
        return False
    return re.search(rf"\b(?:{words})\b", question, re.IGNORECASE) is not None


class _Meanings:
    """What an operand of a solution may stand for, by its value.

    Args:
        question: of the original.
        numbers: those that may be changed.
    """

    def __init__(self, question: str, numbers: Mapping[str, _Number]) -> None:
        self._numbers = {number.value: name for name, number in numbers.items()}
        self._results: dict[Fraction, str] = {}
        constants = {*_values_in(question), *_UNITS}
        constants.update(value for value in _WORDS if _is_in_words(value, question))
        self._constants = constants - self._numbers.keys()
        # Of a number that the question also has in words, it is not known which is meant.
        self._doubtful = {value for value in self._numbers if _is_in_words(value, question)}
        self._computed_by_head = _computed_by_head(self._numbers)

    def name(self, digits: str) -> str | None:
        """Return the one name of a number, or its digits where it is a constant; None: doubtful."""
        value = Fraction(digits)
        if value in self._doubtful:
            return None
        if value in self._computed_by_head and value not in self._results:
            return None
        names = []
        if value in self._numbers:
            names.append(self._numbers[value])
        if value in self._results:
            names.append(self._results[value])
        if value in self._constants:
            names.append(digits)
        return names[0] if len(names) == 1 else None

    def add_result(self, value: Fraction, name: str) -> None:
        """Give the result of a step a name; an operand of a value that had one is doubtful now."""
        if value in {*self._numbers, *self._results, *self._constants}:
            self._doubtful.add(value)
        self._results[value] = name


def _computed_by_head(values: Collection[Fraction]) -> set[Fraction]:
    """Return what a solution may have computed of two changeable numbers without a mark.

    An operand of such a value could be that result, also where the question has the number.
    """
    results = set()
    for first in values:
        # "3 times as many" makes four parts in all.
        results |= {first + 1, first - 1}
        for second in values:
            if first != second:
                results |= {first + second, first - second, first * second, first / second}
    return results


def _read_steps(
    question: str, solution: str, answer: str, numbers: Mapping[str, _Number]
) -> list[_Step] | None:
    """Return the steps of a solution over names, or None where an operand is not explained."""
    meanings = _Meanings(question, numbers)
    steps: list[_Step] = []
    for written, stated in MARK.findall(solution):
        expression = tidy_expression(written)
        value = evaluate_expression(expression, {}, Fraction)
        # Rounded values would be rounded otherwise with other numbers.
        if value is None or value != evaluate_expression(tidy_expression(stated), {}, Fraction):
            return None
        names: dict[str, str] = {}
        for digits in NUMBER.findall(expression):
            name = meanings.name(digits)
            if name is None:
                return None
            names[digits] = name
        over_names = _with_names(expression, names)
        step = _Step(name=f"step_{len(steps) + 1}", expression=over_names, value=value)
        meanings.add_result(value, step.name)
        steps.append(step)
    reference = evaluate_expression(tidy_expression(answer), {}, Fraction)
    if not steps or steps[-1].value != reference:
        return None
    return steps if _all_lead_to_the_last(steps) else None


def _with_names(expression: str, names: Mapping[str, str]) -> str:
    return NUMBER.sub(lambda match: names[match[0]], expression)


def _all_lead_to_the_last(steps: Sequence[_Step]) -> bool:
    """Tell whether the result of every step is used, so that none was left unmarked."""
    used_names = set()
    for step in steps:
        used_names.update(_NAME.findall(step.expression))
    return all(step.name in used_names for step in steps[:-1])


# --- writing the twin ----------------------------------------------------------------------------


def _similar_number(value: Fraction, generator: random.Random) -> Fraction:
    """Return another whole number of about the same size, two at least."""
    low = max(2, int(value * 7 / 10))
    high = max(low + 3, int(value * 14 / 10))
    # `random()` is the same in every release of Python.
    return Fraction(low + int(generator.random() * (high - low + 1)))


def _write_twin(
    question: str,
    steps: Sequence[_Step],
    numbers: Mapping[str, _Number],
    values: Mapping[str, Fraction],
    answer: str,
) -> Twin | None:
    """Write the twin with these numbers, or return None where they do not fit the story.

    Args:
        question: of the original.
        steps: of the original.
        numbers: of the original that may be changed.
        values: those in their places, by name.
        answer: of the original, which the twin must not have.
    """
    computed = _compute(steps, values)
    if computed is None:
        return None
    original = {name: number.value for name, number in numbers.items()}
    for step in steps:
        original[step.name] = step.value
    # Numbers of the question that stay as they are keep their places in the order, too.
    for place, value in enumerate(_values_in(question)):
        if value not in original.values():
            original[f"fixed_{place}"] = value
            computed[f"fixed_{place}"] = value
    result = computed[steps[-1].name]
    if result.denominator not in _DECIMAL or _digits(result) == answer.strip():
        return None
    if not _same_order(original, computed):
        return None
    text, changed = _replace_numbers(question, numbers, values)
    lines = [_write_step(step, computed) for step in steps]
    return Twin(question=text, answer=_digits(result), solution="\n".join(lines), changed=changed)


def _compute(steps: Sequence[_Step], values: Mapping[str, Fraction]) -> dict[str, Fraction] | None:
    """Return the value of every name; None: a step is no longer positive, or whole as it was."""
    computed = dict(values)
    for step in steps:
        result = evaluate_expression(step.expression, computed, Fraction)
        if result is None or result <= 0:
            return None
        was_whole = step.value.denominator == 1
        is_whole = result.denominator == 1
        if is_whole != was_whole:
            return None
        computed[step.name] = result
    return computed


def _same_order(before: Mapping[str, Fraction], after: Mapping[str, Fraction]) -> bool:
    """Tell whether each number is above, below or equal to each other one as it was."""
    for first in before:
        for second in before:
            was_below = before[first] < before[second]
            is_below = after[first] < after[second]
            if is_below != was_below:
                return False
    return True


def _replace_numbers(
    question: str, numbers: Mapping[str, _Number], values: Mapping[str, Fraction]
) -> tuple[str, dict[str, str]]:
    """Return the question with these values, and number before -> number after."""
    text = question
    changed = {}
    last_first = sorted(numbers.items(), key=lambda item: -item[1].start)
    for name, number in last_first:
        before = question[number.start : number.end]
        value = int(values[name])
        after = f"{value:,}" if "," in before else str(value)
        if after != before:
            changed[before] = after
            text = text[: number.start] + after + text[number.end :]
    return text, changed


def _write_step(step: _Step, values: Mapping[str, Fraction]) -> str:
    """Write a step with its numbers, marked as the original's are."""
    shown = _NAME.sub(lambda match: _digits(values[match[0]]), step.expression)
    result = _digits(values[step.name])
    return f"{shown} = <<{shown}={result}>>{result}"


def _digits(value: Fraction) -> str:
    """Write a number: whole, or as a decimal.

    >>> _digits(Fraction(7, 2)), _digits(Fraction(12))
    ('3.5', '12')
    """
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.6f}".rstrip("0")
