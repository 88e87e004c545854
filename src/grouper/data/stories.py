"""Generated word problems of two to four steps in varied plain English, from a table of stories.

`stories.yaml` holds the stories and says how to write one. A problem takes a story, random names,
things and numbers, one of its texts with one wording of each part and, in a share of the problems,
a sentence with a number that nothing needs. Its solution names every step in words and as an
equation: `Pens in the boxes: 3*12=36 pens. Pens in all: 36+5=41 pens.`

The splits `sft` and `train` never use the stories that are held out. `validation` and `test` use
held-out and other stories equally often, so that their accuracy by subject (`seen story` and
`new story`) says whether the skill carries over. As in `arithmetic`, no question can be in two
splits.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, model_validator

from grouper.config.checks import validate_json
from grouper.config.schema import Fraction, Positive, Section, Seed
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
from grouper.errors import DataError
from grouper.files import load_table
from grouper.types import Problem

# The splits that held-out stories are for, and the share of their problems that use one.
HELD_OUT_SPLITS = ("validation", "test")
HELD_OUT_SHARE = 0.5
# A story without numbers within the limits after this many attempts counts as impossible under the
# options.
TRIALS = 1000

_EQUATION = re.compile(r"([a-z])=(\w+)([-+*/])(\w+)")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_PLACE = re.compile(r"\{(\w+)(?::([^{}]+))?\}")
_SENTENCE_START = re.compile(r"(^|[.?!] )([a-z])")


class Step(BaseModel, frozen=True, extra="forbid"):
    """One line of a worked solution."""

    equation: str
    """`x=a*b`: a result, two operands (letters or whole numbers) and one of + - * /."""
    words: str
    """The name of the result: `Pens left`."""
    unit: str = ""
    """The noun that follows the result; empty where there is none."""


class Distractor(BaseModel, frozen=True, extra="forbid"):
    """A sentence with a number `{n}` that the solution does not need."""

    text: str
    n: Numbers


class Story(BaseModel, frozen=True, extra="forbid"):
    """One story; `stories.yaml` describes the fields."""

    setting: str
    held_out: bool = False
    numbers: dict[str, Numbers]
    words: dict[str, str | tuple[str, ...]] = {}
    texts: tuple[str, ...]
    distractors: tuple[Distractor, ...]
    steps: tuple[Step, ...]


class Tables(BaseModel, frozen=True, extra="forbid"):
    """The contents of `stories.yaml`."""

    names: tuple[str, ...]
    words: dict[str, tuple[str, ...]]
    plurals: dict[str, str]
    spellings: dict[str, dict[int, str]]
    stories: dict[str, Story]


@cache
def tables() -> Tables:
    """Read the table of stories that ships with Grouper."""
    return Tables.model_validate(load_table("grouper.data", "stories.yaml"))


class StoriesOptions(Section):
    """`options` of the source `stories`."""

    count: Positive = 1000
    steps: tuple[int, ...] = Field((2, 2, 2, 2, 2, 2, 3, 3, 3, 4), strict=False)
    """Steps of a solution, 2 to 4. A number that is named twice is twice as frequent."""
    operations: str = SIGNS
    """Signs that the steps of a story may use; a story with another one is left out."""
    distractors: Fraction = 0.25
    """Share of the problems with a sentence whose number is not needed."""
    high: Positive = 100
    """Largest number in a question; a story has its own, mostly lower limits."""
    max_value: Positive = 200
    """Largest result of a step; every result is a whole number of at least 1."""
    seed: Seed | None = None
    """Left out: the run's seed."""

    @model_validator(mode="after")
    def _make_sense(self) -> StoriesOptions:
        if not self.steps:
            raise ValueError("steps is empty")
        available = sorted({len(story.steps) for story in tables().stories.values()})
        for count in self.steps:
            if count not in available:
                names = ", ".join(map(str, available))
                raise ValueError(f"there is no story of {count} steps, only of {names}")
        require_signs(self.operations)
        return self


def stories_options(options: Mapping[str, Any], *, where: str) -> StoriesOptions:
    """Check `options` strictly. Raises `ConfigError` with every problem found."""
    return validate_json(StoriesOptions, json.dumps(options), where=where, place=("options",))


def generate(options: StoriesOptions, *, split: str, seed: int) -> tuple[Problem, ...]:
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
    require_split("stories", split)
    if options.seed is not None:
        seed = options.seed
    draw = random.Random(f"grouper/stories/{seed}/{split}/questions")
    choices = _story_names(options, split)
    name = f"stories/{split}"
    drafts = first_drafts(
        distinct_drafts(
            lambda: _choose_story(options, choices, draw),
            lambda story_name: _write_draft(options, story_name, draw),
            split=split,
        ),
        options.count,
        where=name,
        fix="Raise options.high or options.max_value, name more steps, or lower count.",
    )
    return tuple(_problem(f"{name}/{index}", draft) for index, draft in enumerate(drafts))


class _Draft(NamedTuple):
    story: str
    question: str
    answer: int
    solution: str
    distractor: bool


def _problem(name: str, draft: _Draft) -> Problem:
    story = tables().stories[draft.story]
    answer = str(draft.answer)
    return Problem(
        id=name,
        question=draft.question,
        answer=answer,
        source="stories",
        solution=draft.solution,
        subject="new story" if story.held_out else "seen story",
        level=f"{len(story.steps)} steps",
        columns={
            "question": draft.question,
            "answer": answer,
            "solution": draft.solution,
            "template": draft.story,
            "setting": story.setting,
            "seen": not story.held_out,
            "steps": len(story.steps),
            "distractor": draft.distractor,
        },
    )


# --- choosing a story and its numbers ------------------------------------------------------------

StoryNames = dict[tuple[int, bool], tuple[str, ...]]
"""(Steps, held out) -> names of the stories."""


def _story_names(options: StoriesOptions, split: str) -> StoryNames:
    """Return the stories of this split that are possible under the options.

    Raises:
        DataError: none has that many steps.
    """
    names: StoryNames = {}
    for name, story in tables().stories.items():
        if story.held_out and split not in HELD_OUT_SPLITS:
            continue
        if not _signs(story) <= set(options.operations):
            continue
        if _is_possible(options, name):
            key = (len(story.steps), story.held_out)
            names[key] = (*names.get(key, ()), name)
    for count in options.steps:
        if (count, False) not in names and (count, True) not in names:
            raise DataError(
                f"no story of {count} steps has numbers that small",
                where=f"stories/{split}",
                fix="Raise options.high or options.max_value, allow more options.operations, or "
                "leave that number out of steps.",
            )
    return names


def _signs(story: Story) -> set[str]:
    """Return the signs of the steps of a story."""
    signs = set()
    for step in story.steps:
        _, _, sign, _ = parse_equation(step.equation)
        signs.add(sign)
    return signs


def _is_possible(options: StoriesOptions, name: str) -> bool:
    # Its own stream: whether a story is possible depends on the options alone, not on the seed.
    draw = random.Random(f"grouper/stories/possible/{name}")
    story = tables().stories[name]
    return any(draw_numbers(options, story, draw) is not None for _ in range(TRIALS))


def _choose_story(options: StoriesOptions, names: StoryNames, draw: random.Random) -> str:
    count = pick(draw, options.steps)
    held_out = draw.random() < HELD_OUT_SHARE
    # A split without held-out stories has only the other key.
    choices = names.get((count, held_out)) or names[count, not held_out]
    return pick(draw, choices)


def draw_numbers(
    options: StoriesOptions, story: Story, draw: random.Random
) -> dict[str, int] | None:
    """Draw the numbers of a story and work out its results.

    Returns:
        Letter -> number, the last one the answer; None where two numbers are equal, one is above
        the limits, a division leaves a remainder, or a result is below 1.
    """
    numbers = {letter: pick(draw, values) for letter, values in story.numbers.items()}
    # Equal numbers would make a problem degenerate: so much in 4 hours, how much in 4 hours?
    if max(numbers.values()) > options.high or len(set(numbers.values())) < len(numbers):
        return None
    for step in story.steps:
        result, left, sign, right = parse_equation(step.equation)
        value = _calculate(_operand(left, numbers), sign, _operand(right, numbers))
        if value is None or not 1 <= value <= options.max_value:
            return None
        numbers[result] = value
    return numbers


def parse_equation(text: str) -> tuple[str, str, str, str]:
    """Return result, left operand, sign and right operand.

    >>> parse_equation("x=a*7")
    ('x', 'a', '*', '7')
    """
    match = _EQUATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an equation like x=a*b")
    result, left, sign, right = match.groups()
    return result, left, sign, right


def _operand(text: str, numbers: Mapping[str, int]) -> int:
    return int(text) if text.isdigit() else numbers[text]


def _calculate(left: int, sign: str, right: int) -> int | None:
    """Return the value, or None for a division with a remainder."""
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    quotient, remainder = divmod(left, right)
    return None if remainder else quotient


# --- writing -------------------------------------------------------------------------------------


def _write_draft(options: StoriesOptions, name: str, draw: random.Random) -> _Draft | None:
    """Write one problem of this story, or return None where its numbers do not fit."""
    story = tables().stories[name]
    numbers = draw_numbers(options, story, draw)
    if numbers is None:
        return None
    words = _draw_words(story, draw)
    text = pick(draw, story.texts)
    has_distractor = draw.random() < options.distractors
    distractor = pick(draw, story.distractors)
    passages = text.split("{extra}")
    position = 1 + int(draw.random() * (len(passages) - 1))
    if has_distractor:
        unused = [n for n in distractor.n if n <= options.high and n not in numbers.values()]
        if not unused:
            return None
        numbers["n"] = pick(draw, unused)
        passages.insert(position, distractor.text)
    question = _render(" ".join(passages), words, numbers, draw)
    lines = []
    for step in story.steps:
        line = _solution_line(step, numbers)
        lines.append(_render(line, words, numbers, draw))
    last_result, _, _, _ = parse_equation(story.steps[-1].equation)
    return _Draft(
        story=name,
        question=question,
        answer=numbers[last_result],
        solution=" ".join(lines),
        distractor=has_distractor,
    )


def _draw_words(story: Story, draw: random.Random) -> dict[str, str]:
    """Choose three names `p`, `q`, `r` and the story's words, none of them twice."""
    words = dict(zip("pqr", pick_distinct(draw, tables().names, 3), strict=True))
    for name, source in story.words.items():
        choices = tables().words[source] if isinstance(source, str) else source
        unused = [word for word in choices if word not in words.values()]
        words[name] = pick(draw, unused)
    return words


def _solution_line(step: Step, numbers: Mapping[str, int]) -> str:
    """Return `Pens left: 36-5=31 {x:pen}.`, still with places for words."""
    result, left, sign, right = parse_equation(step.equation)
    calculation = f"{_operand(left, numbers)}{sign}{_operand(right, numbers)}"
    if step.unit:
        return f"{step.words}: {calculation}={{{result}:{step.unit}}}."
    return f"{step.words}: {calculation}={numbers[result]}."


def _render(
    text: str, words: Mapping[str, str], numbers: Mapping[str, int], draw: random.Random
) -> str:
    """Choose one of each `[a|b]`, fill in the `{places}`, and begin sentences with capitals."""
    match = _CHOICE.search(text)
    while match is not None:
        chosen = pick(draw, match[1].split("|"))
        text = text[: match.start()] + chosen + text[match.end() :]
        match = _CHOICE.search(text)
    text = _PLACE.sub(lambda match: _fill(match[1], match[2], words, numbers), text)
    text = " ".join(text.split())
    return _SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), text)


def _fill(name: str, form: str | None, words: Mapping[str, str], numbers: Mapping[str, int]) -> str:
    """Return the text of one place: `{a}`, `{a:box}`, `{c:percent}`, `{item}` or `{item:s}`."""
    spellings = tables().spellings
    if name not in numbers:
        return _word(words[name], form)
    number = numbers[name]
    if form is None:
        return str(number)
    if form in spellings:
        return spellings[form][number]
    noun = words.get(form, form)
    if number != 1:
        noun = plural(noun)
    return f"{number} {noun}"


def _word(word: str, form: str | None) -> str:
    """Return a word, its plural (`s`), or the word with its article (`a`)."""
    if form == "s":
        return plural(word)
    if form == "a":
        article = "an" if word[0] in "aeiou" else "a"
        return f"{article} {word}"
    return word


def plural(noun: str) -> str:
    """Return the plural of a noun, of its head where an `of` follows.

    >>> [plural(noun) for noun in ("pen", "red box", "bag of flour", "cherry", "loaf", "toy")]
    ['pens', 'red boxes', 'bags of flour', 'cherries', 'loaves', 'toys']
    """
    head, of, contents = noun.partition(" of ")
    adjectives, space, word = head.rpartition(" ")
    if word in tables().plurals:
        word = tables().plurals[word]
    elif word.endswith(("s", "x", "ch", "sh")):
        word += "es"
    elif word.endswith("y") and word[-2] not in "aeiou":
        word = f"{word[:-1]}ies"
    else:
        word += "s"
    return f"{adjectives}{space}{word}{of}{contents}"
