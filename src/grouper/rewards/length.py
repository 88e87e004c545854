"""Rewards that look at how long a completion is."""

from __future__ import annotations

import math

from grouper.errors import RewardError
from grouper.rewards.base import RewardBuilder, RewardFunction
from grouper.rewards.building import (
    Batch,
    check_unit,
    check_variant,
    grades_of,
    per_batch,
    reward_builder,
    units_of,
)
from grouper.types import AnswerFormat, Grade, Verdict


@reward_builder
def cosine(
    layout: AnswerFormat,
    *,
    min_correct: float = 0.8,
    max_correct: float = 1.0,
    min_wrong: float = -0.5,
    max_wrong: float = -0.1,
    scale: float = 1000.0,
    unit: str = "characters",
    variant: str = "default",
) -> RewardFunction:
    """Accuracy scaled by length: right and short is best, wrong and short is worst.

    With p = min(1, length / `scale`), the length counted in `unit` (tokens, characters, words), and
    c = (1 + cos(pi p)) / 2, a correct completion earns `min_correct` + (`max_correct` -
    `min_correct`) c, a wrong one `max_wrong` - (`max_wrong` - `min_wrong`) c. Range `min_wrong` to
    `max_correct`: -0.5 to 1. None where the reference cannot be read. `variant: original` does not
    clamp p, so that values rise again beyond `scale`, and takes an unreadable reference for a wrong
    answer.
    Source: arXiv 2502.03373 in the form of system E.
    """
    original = check_variant(variant, "cosine")
    check_unit(unit, "cosine")
    if scale <= 0:
        raise RewardError(f"scale is {scale}", where="rewards.cosine.params", fix="Use above 0.")

    def score(batch: Batch) -> list[float | None]:
        sizes = [len(units) for units in units_of(batch, unit)]
        return [value(*pair) for pair in zip(grades_of(layout, batch), sizes, strict=True)]

    def value(grade: Grade, size: int) -> float | None:
        if grade.verdict is Verdict.NOT_SCORED and not original:
            return None
        progress = size / scale
        part = (1 + math.cos(math.pi * (progress if original else min(1.0, progress)))) / 2
        if grade.correct:
            return min_correct + (max_correct - min_correct) * part
        return max_wrong - (max_wrong - min_wrong) * part

    values = (min_correct, max_correct, min_wrong, max_wrong)
    return per_batch("cosine", (min(values), max(values)), score)


@reward_builder
def length(layout: AnswerFormat, *, unit: str = "tokens") -> RewardFunction:
    """Short among the completions of one prompt pays; a wrong one gains nothing by it.

    With l = 0.5 - (length - shortest) / (longest - shortest), counted in `unit` (tokens,
    characters, words), a correct completion earns l and a wrong one min(0, l); all 0 where all are
    of one length. Range -0.5 to 0.5; None where the reference cannot be read.
    Source: Kimi k1.5, arXiv 2501.12599, section 2.3.3.
    """
    check_unit(unit, "length")

    def score(batch: Batch) -> list[float | None]:
        sizes = [len(units) for units in units_of(batch, unit)]
        spans: dict[str, tuple[int, int]] = {}
        for prompt, size in zip(batch.prompts, sizes, strict=True):
            low, high = spans.get(str(prompt), (size, size))
            spans[str(prompt)] = min(low, size), max(high, size)
        return [
            _length_value(grade, size, *spans[str(prompt)])
            for grade, size, prompt in zip(
                grades_of(layout, batch), sizes, batch.prompts, strict=True
            )
        ]

    return per_batch("length", (-0.5, 0.5), score)


def _length_value(grade: Grade, size: int, shortest: int, longest: int) -> float | None:
    if grade.verdict is Verdict.NOT_SCORED:
        return None
    if shortest == longest:
        return 0.0
    value = 0.5 - (size - shortest) / (longest - shortest)
    return value if grade.correct else min(0.0, value)


@reward_builder
def soft_overlong(layout: AnswerFormat, *, max_tokens: int, buffer_tokens: int) -> RewardFunction:
    """0 up to `max_tokens` - `buffer_tokens`, falling in a line to -1 at `max_tokens` and beyond.

    Range -1 to 0. `max_tokens` is usually sampling.max_new_tokens.
    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    del layout
    if not 0 < buffer_tokens <= max_tokens:
        raise RewardError(
            f"buffer_tokens is {buffer_tokens} with max_tokens {max_tokens}",
            where="rewards.soft_overlong.params",
            fix="Use 0 < buffer_tokens <= max_tokens.",
        )

    def score(batch: Batch) -> list[float | None]:
        free = max_tokens - buffer_tokens
        sizes = [len(tokens) for tokens in units_of(batch, "tokens")]
        return [max(-1.0, min(0.0, (free - size) / buffer_tokens)) for size in sizes]

    return per_batch("soft_overlong", (-1.0, 0.0), score)


LENGTH: dict[str, RewardBuilder] = {
    "cosine": cosine,
    "length": length,
    "soft_overlong": soft_overlong,
}
