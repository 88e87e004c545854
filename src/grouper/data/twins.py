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

# A number as it stands in a question, with its thousands.
_WRITTEN = re.compile(r"(?<![\w.,/])\d{1,3}(?:,\d{3})+(?![\w.])|(?<![\w.,/])\d+(?![\w.]*\d|\w)")
# What makes a number in a question stand for another one in the solution: a share, an ordinal, a
# time of day, a part of a fraction or of a date.
_SPECIAL_AFTER = re.compile(
    r"\s*(?:%|percent|per cent|/|:|th\b|st\b|nd\b|rd\b|a\.?m\.?\b|p\.?m\.?\b|times\b)",
    re.IGNORECASE,
)
# Values of units, which a solution uses although they are in no question: they are never changed,
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


@dataclass(frozen=True, slots=True)
class _Step:
    """A line of the solution: an expression over names, and its value in the original."""

    expression: str
    name: str
    value: Fraction


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
    numbers = _changeable(question)
    steps = _steps(question, solution, answer, numbers)
    if steps is None:
        return None
    used = {name for step in steps for name in re.findall(r"given_\d+", step.expression)}
    changed_names = [name for name in numbers if name in used]
    if not changed_names:
        return None
    generator = random.Random(f"twin/{key}/{question}")
    for _ in range(_TRIES):
        values = {name: Fraction(numbers[name].value) for name in numbers}
        for name in changed_names:
            values[name] = _near(values[name], generator)
        twin = _written(question, steps, numbers, values, answer)
        if twin is not None:
            return twin
    return None


@dataclass(frozen=True, slots=True)
class _Number:
    """A number of the question that may be changed."""

    start: int
    end: int
    value: int


def _changeable(question: str) -> dict[str, _Number]:
    """Return name -> number, of whole numbers that occur once and stand for themselves."""
    all_values = _values_in(question)
    numbers: dict[str, _Number] = {}
    for match in _WRITTEN.finditer(question):
        value = int(match[0].replace(",", ""))
        stands_for_itself = _SPECIAL_AFTER.match(question, match.end()) is None
        is_alone = all_values.count(Fraction(value)) == 1
        if stands_for_itself and is_alone and value > 1 and Fraction(value) not in _UNITS:
            numbers[f"given_{len(numbers)}"] = _Number(match.start(), match.end(), value)
    return numbers


def _values_in(question: str) -> list[Fraction]:
    return [Fraction(digits) for digits in NUMBER.findall(question.replace(",", ""))]


class _Meanings:
    """What an operand of a solution may stand for, by its value.

    Args:
        question: of the original.
        numbers: those that may be changed.
    """

    def __init__(self, question: str, numbers: Mapping[str, _Number]) -> None:
        self._given = {Fraction(number.value): name for name, number in numbers.items()}
        self._by_head = _computed_by_head(self._given)
        self._results: dict[Fraction, str] = {}
        self._constants = {*_values_in(question), *_UNITS}
        for value, words in _WORDS.items():
            if re.search(rf"\b(?:{words})\b", question, re.IGNORECASE):
                self._constants.add(value)
        # Of a number that the question also has in words, it is not known which is meant.
        self._doubtful = {value for value in self._given if self._is_in_words(value, question)}
        self._constants -= self._given.keys()

    @staticmethod
    def _is_in_words(value: Fraction, question: str) -> bool:
        words = _WORDS.get(value)
        return words is not None and bool(re.search(rf"\b(?:{words})\b", question, re.IGNORECASE))

    def name(self, digits: str) -> str | None:
        """Return the one name of a number, or its digits where it is a constant; None: doubtful."""
        value = Fraction(digits)
        if value in self._doubtful:
            return None
        names = [known[value] for known in (self._given, self._results) if value in known]
        if value in self._constants:
            names.append(digits)
        if len(names) != 1 or (value in self._by_head and value not in self._results):
            return None
        return names[0]

    def add_result(self, value: Fraction, name: str) -> None:
        """Give the result of a step a name; an operand of a value that had one is doubtful now."""
        known = {*self._given, *self._results, *self._constants}
        if value in known:
            self._doubtful.add(value)
        self._results[value] = name


def _steps(
    question: str, solution: str, answer: str, numbers: Mapping[str, _Number]
) -> list[_Step] | None:
    """Return the steps of a solution over names, or None where an operand is not explained."""
    meanings = _Meanings(question, numbers)
    steps: list[_Step] = []
    for written, stated in MARK.findall(solution):
        expression = tidy_expression(written)
        names = {digits: meanings.name(digits) for digits in NUMBER.findall(expression)}
        value = evaluate_expression(expression, {}, Fraction)
        # Rounded values would be rounded otherwise with other numbers.
        is_exact = value == evaluate_expression(tidy_expression(stated), {}, Fraction)
        if value is None or not is_exact or None in names.values():
            return None
        step = _Step(_over_names(expression, names), f"step_{len(steps) + 1}", value)
        meanings.add_result(value, step.name)
        steps.append(step)
    wanted = evaluate_expression(tidy_expression(answer), {}, Fraction)
    if not steps or steps[-1].value != wanted or not _all_lead_to_the_last(steps):
        return None
    return steps


def _over_names(expression: str, names: Mapping[str, str | None]) -> str:
    return NUMBER.sub(lambda match: names[match[0]] or "", expression)


def _computed_by_head(values: Collection[Fraction]) -> set[Fraction]:
    """Return what a solution may have computed of two changeable numbers without a mark.

    An operand of such a value could be that result, also where the question has the number.
    """
    found = set()
    for first in values:
        # "3 times as many" makes four parts in all.
        found |= {first + 1, first - 1}
        for second in values:
            if first != second:
                found |= {first + second, first - second, first * second, first / second}
    return found


def _all_lead_to_the_last(steps: Sequence[_Step]) -> bool:
    """Tell whether the result of every step is used, so that none was left unmarked."""
    used = {name for step in steps for name in re.findall(r"step_\d+", step.expression)}
    return all(step.name in used for step in steps[:-1])


def _near(value: Fraction, generator: random.Random) -> Fraction:
    """Return another whole number of about the same size, two at least."""
    low = max(2, int(value * 7 / 10))
    high = max(low + 3, int(value * 14 / 10))
    # `random()` is the same in every release of Python.
    return Fraction(low + int(generator.random() * (high - low + 1)))


def _written(
    question: str,
    steps: Sequence[_Step],
    numbers: Mapping[str, _Number],
    values: Mapping[str, Fraction],
    answer: str,
) -> Twin | None:
    """Write the twin with these numbers, or return None where they do not fit the story."""
    computed = _computed(steps, values)
    if computed is None:
        return None
    original = {name: Fraction(number.value) for name, number in numbers.items()}
    original |= {step.name: step.value for step in steps}
    # Numbers of the question that stay as they are keep their places in the order, too.
    for place, value in enumerate(_values_in(question)):
        if value not in original.values():
            original[f"fixed_{place}"] = value
            computed[f"fixed_{place}"] = value
    last = computed[steps[-1].name]
    is_decimal = last.denominator in _DECIMAL
    if not _same_order(original, computed) or not is_decimal or _digits(last) == answer.strip():
        return None
    text = question
    changed = {}
    for name, number in sorted(numbers.items(), key=lambda item: -item[1].start):
        before = question[number.start : number.end]
        after = str(int(values[name]))
        if "," in before:
            after = f"{int(values[name]):,}"
        if after != before:
            changed[before] = after
            text = text[: number.start] + after + text[number.end :]
    lines = [_line(step, computed) for step in steps]
    return Twin(question=text, answer=_digits(last), solution="\n".join(lines), changed=changed)


# Denominators of numbers that decimals write exactly, and shortly.
_DECIMAL = frozenset((1, 2, 4, 5, 10, 20, 25, 50, 100))


def _computed(steps: Sequence[_Step], values: Mapping[str, Fraction]) -> dict[str, Fraction] | None:
    """Return the value of every name; None: a step is no longer positive, or whole as it was."""
    known = dict(values)
    for step in steps:
        result = evaluate_expression(step.expression, known, Fraction)
        was_whole = step.value.denominator == 1
        if result is None or result <= 0 or (result.denominator == 1) != was_whole:
            return None
        known[step.name] = result
    return known


def _same_order(before: Mapping[str, Fraction], after: Mapping[str, Fraction]) -> bool:
    """Tell whether each number is above, below or equal to each other one as it was."""
    names = [*before]
    return all(
        (before[first] < before[second]) == (after[first] < after[second])
        for first in names
        for second in names
    )


def _line(step: _Step, values: Mapping[str, Fraction]) -> str:
    """Write a step with its numbers, marked as the original's are."""
    shown = re.sub(r"[a-z]+_\d+", lambda match: _digits(values[match[0]]), step.expression)
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
