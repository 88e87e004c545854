"""Parts that the sources share: options, splits by the hash of a question, random choices.

Only `random.Random(text).random()` is used for choices: its stream for a text seed is the same in
every Python 3 release.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Protocol, TypeVar

from pydantic import BeforeValidator

from grouper.errors import ConfigError, DataError, did_you_mean

SPLITS = ("train", "sft", "validation", "test")
# Attempts without a new question after which the space of questions counts as exhausted.
PATIENCE = 20_000
# The signs that a step may have.
SIGNS = "+-*/"

_RANGE = re.compile(r"(\d{1,6})\.\.(\d{1,6})(?: by ([1-9]\d*))?")

Choice = TypeVar("Choice")


def _possible_values(text: object) -> object:
    """Read `2..12`, `10..90 by 5` or a list as the numbers it stands for."""
    match = _RANGE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return text
    low, high, step = match.groups()
    return tuple(range(int(low), int(high) + 1, int(step or 1)))


Numbers = Annotated[tuple[int, ...], BeforeValidator(_possible_values)]


def require_signs(operations: str) -> None:
    """Raise `ValueError` where the option `operations` is empty or has more than signs."""
    if not operations:
        raise ValueError("operations is empty")
    for sign in operations:
        if sign not in SIGNS:
            names = ", ".join(SIGNS)
            raise ValueError(f"there is no operation {sign!r}, only {names}")


class Draft(Protocol):
    """A problem before it has a number in its split."""

    @property
    def question(self) -> str:
        """The text whose hash decides the split."""
        ...


AnyDraft = TypeVar("AnyDraft", bound=Draft)


def split_of(question: str) -> str:
    """Return the one split that this question text belongs to, an equal share to each."""
    digest = hashlib.sha256(question.encode()).digest()
    return SPLITS[digest[0] % len(SPLITS)]


def require_split(source: str, split: str) -> None:
    """Raise `ConfigError` where a generated source has no such split."""
    if split not in SPLITS:
        raise ConfigError(
            f"{source} has no split {split!r}", where="data", fix=did_you_mean(split, SPLITS)
        )


def distinct_drafts(
    choose: Callable[[], Choice], write: Callable[[Choice], AnyDraft | None], *, split: str
) -> Iterator[AnyDraft]:
    """Yield drafts of this split without repeats, until `PATIENCE` attempts in a row fail.

    Args:
        choose: returns the choice behind the next draft, such as its story.
        write: writes a draft for a choice, or returns None where its numbers do not fit.
        split: one of `SPLITS`.
    """
    questions: set[str] = set()
    misses = 0
    choice = choose()
    while misses < PATIENCE:
        # A failed attempt keeps its choice: else choices with narrow ranges would become rare.
        draft = write(choice)
        if draft is None or draft.question in questions or split_of(draft.question) != split:
            misses += 1
            continue
        misses = 0
        choice = choose()
        questions.add(draft.question)
        yield draft


def first_drafts(drafts: Iterator[AnyDraft], count: int, *, where: str, fix: str) -> list[AnyDraft]:
    """Return the first `count` drafts.

    Args:
        drafts: different drafts, whose number may be limited.
        count: the number of drafts.
        where: the set that they are for, for errors.
        fix: advice for getting more of them, for errors.

    Raises:
        DataError: there are fewer.
    """
    first = list(islice(drafts, count))
    if len(first) < count:
        raise DataError(
            f"only {len(first)} different questions were found for {count} problems",
            where=where,
            fix=fix,
        )
    return first


def pick(draw: random.Random, choices: Sequence[Choice]) -> Choice:
    """Return one of the choices, each equally likely."""
    return choices[int(draw.random() * len(choices))]


def pick_distinct(draw: random.Random, choices: Sequence[Choice], count: int) -> list[Choice]:
    """Return `count` of the choices, none of them twice."""
    remaining = list(choices)
    return [remaining.pop(int(draw.random() * len(remaining))) for _ in range(count)]
