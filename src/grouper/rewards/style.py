"""Rewards for how a completion is written, whatever it says."""

from __future__ import annotations

import re

from grouper.errors import RewardError
from grouper.rewards.base import RewardBuilder, RewardFunction, RewardLayout
from grouper.rewards.building import per_text

__all__ = ["STYLE", "reasoning_steps", "repetition_penalty"]

_STEP = re.compile(
    r"\bStep \d+:|^[ \t]*\d+[.)][ \t]|^[ \t]*[-*•][ \t]|\b(?:First|Second|Next|Finally)\b",
    re.MULTILINE | re.ASCII,
)


def reasoning_steps(layout: RewardLayout, *, enough: int = 3) -> RewardFunction:
    r"""min(1, markers / `enough`).

    A marker is `Step 2:`, a numbered line, a bullet, or one of First, Second, Next, Finally.
    Range 0 to 1. Source: system E.

    >>> from grouper.types import AnswerContract, AnswerKind
    >>> layout = RewardLayout(contract=AnswerContract(kind=AnswerKind.BOXED), tags=None)
    >>> reasoning_steps(layout)(prompts=["q"], completions=["First, 2+2.\n- so 4\nFinally 4."])
    [1.0]
    """
    if enough < 1:
        raise RewardError(
            f"enough is {enough}", where="rewards.reasoning_steps.params", fix="Use 1 or more."
        )

    def score(text: str) -> float:
        return min(1.0, len(_STEP.findall(text)) / enough)

    return per_text("reasoning_steps", layout, (0.0, 1.0), score)


def repetition_penalty(
    layout: RewardLayout, *, n: int = 3, max_penalty: float = -0.1
) -> RewardFunction:
    """`max_penalty` (1 - different n-grams / n-grams), over lower-case words; 0 for a short text.

    Range `max_penalty` to 0. Source: arXiv 2502.03373 in the form of system E.

    Raises:
        RewardError: `max_penalty` is positive (it would pay for repetition), or n below 1.
    """
    if max_penalty > 0 or n < 1:
        raise RewardError(
            f"max_penalty is {max_penalty} and n is {n}",
            where="rewards.repetition_penalty.params",
            fix="A positive max_penalty rewards repetition: use 0 or less, and n 1 or more.",
        )

    def score(text: str) -> float:
        words = text.lower().split()
        grams = len(words) - n + 1
        if grams < 1:
            return 0.0
        different = len({tuple(words[i : i + n]) for i in range(grams)})
        # Adding 0.0 makes the -0.0 of a text without repetition 0.0.
        return max_penalty * (1 - different / grams) + 0.0

    return per_text("repetition_penalty", layout, (max_penalty, 0.0), score)


STYLE: dict[str, RewardBuilder] = {
    "reasoning_steps": reasoning_steps,
    "repetition_penalty": repetition_penalty,
}
