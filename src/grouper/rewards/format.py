r"""Rewards for the layout of a completion, whatever it says.

All patterns let reasoning run over several lines and count what the prompt has already opened
(`layout.prefix`) as written. Nothing here looks at the answer's value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from grouper.errors import RewardError
from grouper.grading import extract
from grouper.rewards.base import Content, RewardBuilder, RewardFunction, RewardLayout, texts_of
from grouper.types import AnswerContract, AnswerKind

__all__ = ["FORMAT", "boxed_format", "soft_format", "strict_format", "tag_count"]


def strict_format(layout: RewardLayout, *, value: float = 1.0) -> RewardFunction:
    """`value` where the whole completion is reasoning then answer, each tag once; else 0."""
    tags = _tags(layout, "format")

    def score(text: str) -> float:
        if any(text.count(tag) != 1 for tag in tags):
            return 0.0
        # Splitting is linear; a pattern with two lazy parts would not be on hostile input.
        parts = []
        for tag in tags:
            part, found, text = text.partition(tag)
            if not found:
                return 0.0
            parts.append(part.strip())
        before, reasoning, between, answer = parts
        outside = before or between or text.strip()
        return value if reasoning and answer and not outside else 0.0

    return _per_text(layout, score)


def soft_format(layout: RewardLayout, *, value: float = 1.0) -> RewardFunction:
    """`value` where both tag pairs occur in order with only white space between them; else 0."""
    open_, close, answer_open, answer_close = _tags(layout, "soft_format")

    def score(text: str) -> float:
        start = text.find(open_)
        end = _pair_boundary(text, start + len(open_), close, answer_open) if start >= 0 else -1
        return value if end >= 0 and text.find(answer_close, end) >= 0 else 0.0

    return _per_text(layout, score)


def _pair_boundary(text: str, start: int, close: str, answer_open: str) -> int:
    """Index after the first `close` + white space + `answer_open` from `start` on, or -1."""
    at = text.find(close, start)
    while at >= 0:
        after = at + len(close)
        rest = len(text[after : after + 200].lstrip())
        begin = min(after + 200, len(text)) - rest
        if text.startswith(answer_open, begin):
            return begin + len(answer_open)
        at = text.find(close, after)
    return -1


def tag_count(layout: RewardLayout, *, value: float = 1.0) -> RewardFunction:
    """`value` times the share of the four tags that occur exactly once.

    >>> from grouper.types import AnswerContract, AnswerKind
    >>> layout = RewardLayout(
    ...     contract=AnswerContract(kind=AnswerKind.TAG, open="<a>", close="</a>"),
    ...     tags=("<t>", "</t>", "<a>", "</a>"), prefix="<t>")
    >>> tag_count(layout)(prompts=["q"], completions=["x</t><a>4</a></a>"])
    [0.75]
    """
    tags = _tags(layout, "tag_count")
    return _per_text(layout, lambda text: value * sum(text.count(tag) == 1 for tag in tags) / 4)


def boxed_format(layout: RewardLayout, *, value: float = 1.0) -> RewardFunction:
    r"""`value` where there is exactly one closed, filled `\boxed{}` before any next turn."""
    contract = AnswerContract(kind=AnswerKind.BOXED, turn_markers=layout.contract.turn_markers)

    def score(text: str) -> float:
        single = len(_BOXES.findall(text)) == 1
        return value if single and extract(text, contract).answer is not None else 0.0

    return _per_text(layout, score)


_BOXES = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])")


def _tags(layout: RewardLayout, name: str) -> tuple[str, str, str, str]:
    if layout.tags is None:
        raise RewardError(
            f"the reward {name!r} needs a prompt format with tags",
            where="rewards",
            fix="Use a tagged prompt.format, or boxed_format as the reward.",
        )
    return layout.tags


def _per_text(layout: RewardLayout, score: Callable[[str], float]) -> RewardFunction:
    def function(
        *, prompts: Sequence[Content], completions: Sequence[Content], **columns: Any
    ) -> list[float | None]:
        del prompts, columns
        return [score(layout.prefix + text) for text in texts_of(completions)]

    return function


FORMAT: dict[str, RewardBuilder] = {
    "format": strict_format,
    "soft_format": soft_format,
    "tag_count": tag_count,
    "boxed_format": boxed_format,
}
