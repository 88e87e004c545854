"""Building blocks: a score of one text, answer or grade becomes a reward function of a batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from grouper.config.schema import GradingConfig
from grouper.errors import RewardError
from grouper.grading import Grader, extract
from grouper.rewards.base import Content, RewardBuilder, RewardFunction, texts_of
from grouper.types import AnswerContract, AnswerFormat, AnswerKind, Grade

Tags = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a reward function was called with."""

    prompts: Sequence[Content]
    texts: Sequence[str]
    """The completions' texts, without what the prompt had opened."""
    columns: Mapping[str, Any]


class BuiltReward:
    """A reward function with the name and range that it states.

    Args:
        name: how it is recorded; also its `__name__`, which TRL reports it by.
        bounds: the lowest and highest value it can give.
        score: the values of a batch.
    """

    def __init__(
        self,
        name: str,
        bounds: tuple[float, float],
        score: Callable[[Batch], list[float | None]],
    ) -> None:
        self.__name__ = name
        self.bounds = bounds
        self._score = score
        self.origin: tuple[RewardBuilder, AnswerFormat, dict[str, Any]] | None = None
        """The builder that made it and what it was called with; set by `reward_builder`."""

    def __call__(
        self, /, *, prompts: Sequence[Content], completions: Sequence[Content], **columns: Any
    ) -> list[float | None]:
        return self._score(Batch(prompts, texts_of(completions), columns))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.origin is None:
            raise pickle.PicklingError(f"the reward {self.__name__!r} was made without its builder")
        return _built_again, self.origin


def reward_builder(build: RewardBuilder) -> RewardBuilder:
    """A builder whose rewards can be pickled: a copy is built again from the same parameters."""

    @wraps(build)
    def remembered(layout: AnswerFormat, **params: Any) -> RewardFunction:
        reward = build(layout, **params)
        assert isinstance(reward, BuiltReward)
        reward.origin = (remembered, layout, params)
        return reward

    return remembered


def _built_again(
    build: RewardBuilder, layout: AnswerFormat, params: dict[str, Any]
) -> RewardFunction:
    return build(layout, **params)


def nothing_or(value: float) -> tuple[float, float]:
    """The range of a reward that is 0 or up to `value`, which may be negative.

    >>> nothing_or(2.0), nothing_or(-1.0)
    ((0.0, 2.0), (-1.0, 0.0))
    """
    return min(value, 0.0), max(value, 0.0)


def per_batch(
    name: str, bounds: tuple[float, float], score: Callable[[Batch], list[float | None]]
) -> RewardFunction:
    """A reward that compares the completions of a batch."""
    return BuiltReward(name, bounds, score)


def per_text(
    name: str, layout: AnswerFormat, bounds: tuple[float, float], score: Callable[[str], float]
) -> RewardFunction:
    """A reward of the whole text, what the prompt has opened included."""
    return BuiltReward(name, bounds, lambda b: [score(layout.prefix + text) for text in b.texts])


def per_completion(
    name: str, bounds: tuple[float, float], score: Callable[[str], float]
) -> RewardFunction:
    """A reward of the text that was sampled, without what the prompt has opened."""
    return BuiltReward(name, bounds, lambda b: [score(text) for text in b.texts])


def per_answer(
    name: str,
    bounds: tuple[float, float],
    find: Callable[[str], str | None],
    score: Callable[[str, str], float],
    *,
    missing: float = 0.0,
) -> RewardFunction:
    """A reward of (answer, reference); `missing` where `find` sees no answer in the text."""

    def batch(b: Batch) -> list[float | None]:
        answers = [find(text) for text in b.texts]
        return [
            missing if answer is None else score(answer, reference)
            for answer, reference in zip(answers, references_of(b.columns), strict=True)
        ]

    return BuiltReward(name, bounds, batch)


def per_grade(
    name: str,
    layout: AnswerFormat,
    bounds: tuple[float, float],
    score: Callable[[Grade, str], float | None],
) -> RewardFunction:
    """A reward of (grade, text)."""

    def batch(b: Batch) -> list[float | None]:
        return [score(g, text) for g, text in zip(grades_of(layout, b), b.texts, strict=True)]

    return BuiltReward(name, bounds, batch)


def grades_of(layout: AnswerFormat, batch: Batch) -> Sequence[Grade]:
    """The grades the stack passes; without them (inside TRL) the rewards grade by themselves."""
    grades: Sequence[Grade] | None = batch.columns.get("grades")
    if grades is not None:
        return grades
    return _grader(layout.contract).grade(batch.texts, references_of(batch.columns))


@cache
def _grader(contract: AnswerContract) -> Grader:
    return Grader(contract, GradingConfig())


def references_of(columns: Mapping[str, Any]) -> list[str]:
    r"""The references: of `reference_answer`, `answer` or `solution`, whichever comes first.

    >>> references_of({"answer": ["2 + 2 = 4\n#### 4", "5"], "other": None})
    ['4', '5']
    """
    for name in ("reference_answer", "answer", "solution"):
        if columns.get(name) is not None:
            return [_final_answer(str(reference)) for reference in columns[name]]
    raise ValueError("this reward needs a column reference_answer, answer or solution")


def _final_answer(reference: str) -> str:
    r"""The answer alone where a worked solution (`... #### 72`, `\boxed{72}`) is the reference."""
    if "####" in reference:
        return reference.rpartition("####")[2].strip()
    boxed = extract(reference, AnswerContract(kind=AnswerKind.BOXED)).answer
    return reference if boxed is None else boxed


def tags_of(layout: AnswerFormat, name: str) -> Tags:
    """Reasoning open and close, answer open and close.

    Raises:
        RewardError: the prompt format has no tags.
    """
    if layout.tags is None:
        raise RewardError(
            f"the reward {name!r} needs a prompt format with tags",
            where="rewards",
            fix="Use a tagged prompt.format, or boxed_format as the reward.",
        )
    return layout.tags


def check_variant(variant: str, name: str) -> bool:
    """Whether the behaviour of the system that a reward comes from is asked for, faults included.

    Raises:
        RewardError: neither `default` nor `original`.
    """
    if variant not in ("default", "original"):
        raise RewardError(
            f"{variant!r} is no variant of the reward {name!r}",
            where=f"rewards.{name}.params.variant",
            fix="Use default or original.",
        )
    return variant == "original"


UNITS = ("tokens", "characters", "words")
"""What lengths and n-grams are counted in."""


def check_unit(unit: str, name: str) -> None:
    """Refuse a unit that there is not.

    Raises:
        RewardError: it is none of `UNITS`.
    """
    if unit not in UNITS:
        raise RewardError(
            f"{unit!r} is not a unit of the reward {name!r}",
            where=f"rewards.{name}.params.unit",
            fix=f"Use {', '.join(UNITS[:-1])} or {UNITS[-1]}.",
        )


def units_of(batch: Batch, unit: str) -> list[Sequence[Any]]:
    """The tokens, characters or words of each completion.

    Raises:
        ValueError: the function was not passed the tokens (`completion_ids`).

    >>> units_of(Batch(["q"], ["So 4"], {"completion_ids": [[7, 8, 9]]}), "words")
    [['So', '4']]
    """
    if unit == "characters":
        return list(batch.texts)
    if unit == "words":
        return [text.split() for text in batch.texts]
    ids: Sequence[Sequence[int]] | None = batch.columns.get("completion_ids")
    if ids is None:
        raise ValueError("a reward that counts tokens needs completion_ids; or set another unit")
    return list(ids)
