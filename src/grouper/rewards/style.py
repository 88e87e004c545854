"""Rewards for how a completion is written, whatever it says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grouper.errors import RewardError
from grouper.rewards.base import RewardBuilder, RewardFunction
from grouper.rewards.building import (
    Batch,
    check_unit,
    check_variant,
    per_batch,
    per_text,
    reward_builder,
    units_of,
)
from grouper.types import AnswerFormat

_STEP = re.compile(
    r"\bStep \d+:|^[ \t]*\d+[.)][ \t]|^[ \t]*[-*•][ \t]|\b(?:First|Second|Next|Finally)\b",
    re.MULTILINE | re.ASCII,
)
_STEP_ORIGINAL = re.compile(r"Step \d+:|^\d+\.|\n[-*]|(?:First|Second|Next|Finally),", re.MULTILINE)


@reward_builder
def reasoning_steps(
    layout: AnswerFormat, *, enough: int = 3, variant: str = "default"
) -> RewardFunction:
    r"""min(1, markers / `enough`).

    A marker is `Step 2:`, a numbered line, a bullet, or one of First, Second, Next, Finally.
    Range 0 to 1. `variant: original` wants no space after a number or bullet, so that the answers
    `45.` and `-45` on lines of their own count, and a comma after the words. Source: system E.

    >>> from grouper.types import AnswerContract, AnswerKind
    >>> layout = AnswerFormat(
    ...     name="t", template="{reasoning}{answer}",
    ...     contract=AnswerContract(kind=AnswerKind.BOXED))
    >>> reasoning_steps(layout)(prompts=["q"], completions=["First, 2+2.\n- so 4\nFinally 4."])
    [1.0]
    """
    if enough < 1:
        raise RewardError(
            f"enough is {enough}", where="rewards.reasoning_steps.params", fix="Use 1 or more."
        )

    marker = _STEP_ORIGINAL if check_variant(variant, "reasoning_steps") else _STEP

    def score(text: str) -> float:
        return min(1.0, len(marker.findall(text)) / enough)

    return per_text("reasoning_steps", layout, (0.0, 1.0), score)


@reward_builder
def repetition_penalty(
    layout: AnswerFormat,
    *,
    n: int = 3,
    max_penalty: float = -0.1,
    unit: str = "words",
    variant: str = "default",
) -> RewardFunction:
    """`max_penalty` (1 - different n-grams / n-grams); 0 for a text that is shorter than n.

    The n-grams are of `unit`: tokens, or lower-case characters or words. Range `max_penalty` to 0.
    `variant: original` is the same. Source: arXiv 2502.03373 in the form of system E.

    Raises:
        RewardError: `max_penalty` is positive (it would pay for repetition), or n below 1.
    """
    del layout
    check_unit(unit, "repetition_penalty")
    check_variant(variant, "repetition_penalty")
    if max_penalty > 0 or n < 1:
        raise RewardError(
            f"max_penalty is {max_penalty} and n is {n}",
            where="rewards.repetition_penalty.params",
            fix="A positive max_penalty rewards repetition: use 0 or less, and n 1 or more.",
        )

    def penalty(units: Sequence[Any]) -> float:
        grams = len(units) - n + 1
        if grams < 1:
            return 0.0
        different = len({tuple(units[i : i + n]) for i in range(grams)})
        # Adding 0.0 makes the -0.0 of a text without repetition 0.0.
        return max_penalty * (1 - different / grams) + 0.0

    def score(batch: Batch) -> list[float | None]:
        lower = replace(batch, texts=[text.lower() for text in batch.texts])
        return [penalty(units) for units in units_of(lower, unit)]

    return per_batch("repetition_penalty", (max_penalty, 0.0), score)


STYLE: dict[str, RewardBuilder] = {
    "reasoning_steps": reasoning_steps,
    "repetition_penalty": repetition_penalty,
}
