"""Generated word problems in small whole numbers, for runs without any file or network.

A solution names every step (`6*4=24. 24+10=34.`). With `rushed`, some worked solutions stop one
step early and give that value as the answer: a deliberate error, which SFT copies and GRPO
can remove. The reference answer is always right; the answer of the demonstration is the column
`demonstrated_answer`.

No question can be in two splits, whatever the seeds, counts and kinds: the hash of its text
decides which split it belongs to.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, model_validator

from grouper.config.checks import validate_json
from grouper.config.schema import Fraction, Positive, Section, Seed
from grouper.data.generation import (
    distinct_drafts,
    first_drafts,
    pick,
    pick_distinct,
    require_split,
)
from grouper.errors import did_you_mean
from grouper.files import load_table
from grouper.types import Problem

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


class _Kind(BaseModel, frozen=True):
    label: str
    """The subject of its problems, for people."""
    text: str
    steps: tuple[str, ...]
    """`a+b` and the like: a to d are operands, x and y the results of earlier steps."""


class _Words(BaseModel, frozen=True):
    names: tuple[str, ...]
    items: tuple[str, ...]
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    kinds: dict[str, _Kind]


@cache
def _words() -> _Words:
    return _Words.model_validate(load_table("grouper.data", "arithmetic.json"))


def kinds() -> tuple[str, ...]:
    """Return the names of the problem kinds, as `options.kinds` takes them."""
    return tuple(_words().kinds)


class ArithmeticOptions(Section):
    """`options` of the source `arithmetic`."""

    count: Positive = 1000
    kinds: tuple[str, ...] = Field(default_factory=kinds, strict=False)
    low: Positive = 2
    """Smallest operand."""
    high: Positive = 10
    """Largest operand."""
    max_value: Positive = 25
    """Every intermediate value and answer is in 1..max_value."""
    rushed: dict[str, Fraction] = Field(default_factory=dict)
    """Kind -> probability that the worked solution stops one step early, with a wrong answer."""
    seed: Seed | None = None
    """Left out: the run's seed."""

    @model_validator(mode="after")
    def _make_sense(self) -> ArithmeticOptions:
        if not self.kinds:
            raise ValueError("kinds is empty")
        for name in (*self.kinds, *self.rushed):
            if name not in kinds():
                raise ValueError(f"there is no kind {name!r}. {did_you_mean(name, kinds())}")
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        for name in self.rushed:
            if len(_words().kinds[name].steps) == 1:
                raise ValueError(f"kind {name!r} has one step, so it cannot be rushed")
        return self


def arithmetic_options(options: Mapping[str, Any], *, where: str) -> ArithmeticOptions:
    """Check `options` strictly. Raises `ConfigError` with every problem found."""
    return validate_json(ArithmeticOptions, json.dumps(options), where=where, place=("options",))


def generate(options: ArithmeticOptions, *, split: str, seed: int) -> tuple[Problem, ...]:
    """Generate `options.count` problems with distinct questions, from the arguments alone.

    A longer set starts with the problems of a shorter one, and `rushed` changes no question.

    Args:
        options: what to generate.
        split: one of `SPLITS`.
        seed: used where `options.seed` is not set.

    Raises:
        ConfigError: unknown split.
        DataError: the options allow fewer different questions than `count`.
    """
    require_split("arithmetic", split)
    seed = seed if options.seed is None else options.seed
    name = f"arithmetic/{split}"
    drafts = first_drafts(
        _distinct_drafts(options, split, seed),
        options.count,
        where=name,
        fix="Raise options.high or options.max_value, name more kinds, or lower count.",
    )
    problems = []
    for index, draft in enumerate(drafts):
        solution_steps = draft.steps
        draw = _random(seed, split, f"rushed/{index}")
        if draw.random() < options.rushed.get(draft.kind_name, 0.0):
            solution_steps = draft.steps[:-1]
        problems.append(_problem(f"{name}/{index}", draft, solution_steps))
    return tuple(problems)


class _Draft(NamedTuple):
    kind_name: str
    question: str
    steps: tuple[str, ...]
    """The steps with their numbers: `6*4=24`."""


def _problem(name: str, draft: _Draft, solution_steps: tuple[str, ...]) -> Problem:
    """Make a problem whose worked solution has these steps."""
    solution = " ".join(f"{step}." for step in solution_steps)
    count = len(draft.steps)
    answer = _result(draft.steps[-1])
    return Problem(
        id=name,
        question=draft.question,
        answer=answer,
        source="arithmetic",
        solution=solution,
        subject=_words().kinds[draft.kind_name].label,
        level=f"{count} step{'s' if count > 1 else ''}",
        columns={
            "question": draft.question,
            "answer": answer,
            "solution": solution,
            "demonstrated_answer": _result(solution_steps[-1]),
            "kind": draft.kind_name,
            "steps": count,
        },
    )


def _result(step: str) -> str:
    """Return the result of a step: `24` of `6*4=24`."""
    _, _, result = step.partition("=")
    return result


def _random(seed: int, split: str, purpose: str) -> random.Random:
    # Only `.random()` is used: its stream for a text seed is the same in every Python 3 release.
    return random.Random(f"grouper/arithmetic/{seed}/{split}/{purpose}")


def _distinct_drafts(options: ArithmeticOptions, split: str, seed: int) -> Iterator[_Draft]:
    """Yield drafts of this split without repeats, every kind equally likely."""
    draw = _random(seed, split, "questions")
    return distinct_drafts(
        lambda: pick(draw, options.kinds),
        lambda kind_name: _draw_draft(options, kind_name, draw),
        split=split,
    )


def _draw_draft(options: ArithmeticOptions, kind_name: str, draw: random.Random) -> _Draft | None:
    """Write a draft of this kind, or return None where a value leaves the allowed range."""
    words = _words()
    problem_kind = words.kinds[kind_name]
    span = options.high - options.low + 1
    values = {letter: options.low + int(draw.random() * span) for letter in "abcd"}
    steps = _solve(problem_kind, values, options.max_value)
    if steps is None:
        return None
    p, q, r = pick_distinct(draw, words.names, 3)
    gain, gain2 = pick_distinct(draw, words.gains, 2)
    loss, loss2 = pick_distinct(draw, words.losses, 2)
    items = pick(draw, words.items)
    question = problem_kind.text.format(
        p=p, q=q, r=r, gain=gain, gain2=gain2, loss=loss, loss2=loss2, items=items, **values
    )
    return _Draft(kind_name=kind_name, question=question, steps=steps)


def _solve(
    problem_kind: _Kind, operands: Mapping[str, int], max_value: int
) -> tuple[str, ...] | None:
    """Return the steps with their numbers, or None where a value leaves 1..max_value."""
    values = dict(operands)
    lines = []
    for result, step in zip("xyz", problem_kind.steps, strict=False):
        # A step is `a+b`: two letters around a sign.
        left = values[step[0]]
        sign = step[1]
        right = values[step[2]]
        value = OPERATIONS[sign](left, right)
        if not 1 <= value <= max_value:
            return None
        values[result] = value
        lines.append(f"{left}{sign}{right}={value}")
    return tuple(lines)
