r"""Rewards for the layout of a completion, whatever it says.

All patterns let reasoning run over several lines and count what the prompt has already opened
(`layout.prefix`) as written. Nothing here looks at the answer's value.
"""

from __future__ import annotations

import re

from grouper.grading import extract
from grouper.rewards.base import RewardBuilder, RewardFunction, RewardLayout
from grouper.rewards.building import Tags, nothing_or, per_text, tags_of
from grouper.types import AnswerContract, AnswerKind

__all__ = [
    "FORMAT",
    "boxed_format",
    "soft_format",
    "strict_format",
    "tag_count",
    "tags_are_exact",
    "tags_are_in_order",
]


def strict_format(layout: RewardLayout, *, value: float = 1.0) -> RewardFunction:
    """`value` where the whole completion is reasoning then answer, each tag once; else 0.

    Range 0 to `value`.
    """
    tags = tags_of(layout, "format")

    def score(text: str) -> float:
        return value if tags_are_exact(text, tags) else 0.0

    return per_text("format", layout, nothing_or(value), score)


def tags_are_exact(text: str, tags: Tags) -> bool:
    """Whether a text is filled reasoning then a filled answer, each tag once, nothing outside."""
    if any(text.count(tag) != 1 for tag in tags):
        return False
    # Splitting is linear; a pattern with two lazy parts would not be on hostile input.
    parts = []
    for tag in tags:
        part, found, text = text.partition(tag)
        if not found:
            return False
        parts.append(part.strip())
    before, reasoning, between, answer = parts
    return bool(reasoning and answer and not (before or between or text.strip()))


def soft_format(layout: RewardLayout, *, value: float = 1.0) -> RewardFunction:
    """`value` where both tag pairs occur in order with only white space between them; else 0.

    Range 0 to `value`.
    """
    tags = tags_of(layout, "soft_format")

    def score(text: str) -> float:
        return value if tags_are_in_order(text, tags) else 0.0

    return per_text("soft_format", layout, nothing_or(value), score)


def tags_are_in_order(text: str, tags: Tags) -> bool:
    """Whether both tag pairs occur, with only white space between the pairs."""
    open_, close, answer_open, answer_close = tags
    start = text.find(open_)
    end = _pair_boundary(text, start + len(open_), close, answer_open) if start >= 0 else -1
    return end >= 0 and text.find(answer_close, end) >= 0


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
    """`value` times the share of the four tags that occur exactly once. Range 0 to `value`.

    >>> from grouper.types import AnswerContract, AnswerKind
    >>> layout = RewardLayout(
    ...     contract=AnswerContract(kind=AnswerKind.TAG, open="<a>", close="</a>"),
    ...     tags=("<t>", "</t>", "<a>", "</a>"), prefix="<t>")
    >>> tag_count(layout)(prompts=["q"], completions=["x</t><a>4</a></a>"])
    [0.75]
    """
    tags = tags_of(layout, "tag_count")

    def score(text: str) -> float:
        return value * sum(text.count(tag) == 1 for tag in tags) / 4

    return per_text("tag_count", layout, nothing_or(value), score)


def boxed_format(layout: RewardLayout, *, value: float = 1.0) -> RewardFunction:
    r"""`value` where there is exactly one closed, filled `\boxed{}` before any next turn; else 0.

    Range 0 to `value`. For formats without tags.
    """
    contract = AnswerContract(kind=AnswerKind.BOXED, turn_markers=layout.contract.turn_markers)

    def score(text: str) -> float:
        single = len(_BOXES.findall(text)) == 1
        return value if single and extract(text, contract).answer is not None else 0.0

    return per_text("boxed_format", layout, nothing_or(value), score)


_BOXES = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])")

FORMAT: dict[str, RewardBuilder] = {
    "format": strict_format,
    "soft_format": soft_format,
    "tag_count": tag_count,
    "boxed_format": boxed_format,
}
