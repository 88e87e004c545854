r"""Rewards for the layout of a completion, whatever it says.

`format_holds` says whether a completion is in its prompt's format, for rewards, metrics and filters
alike; what asks for more says so. All patterns let reasoning run over several lines and count as
written what the prompt has already opened (`layout.prefix`). Nothing here looks at the answer's
value.
"""

from __future__ import annotations

import re

from grouper.grading import extract
from grouper.rewards.base import RewardBuilder, RewardFunction
from grouper.rewards.building import (
    Tags,
    check_variant,
    nothing_or,
    per_completion,
    per_text,
    reward_builder,
    tags_of,
)
from grouper.types import AnswerContract, AnswerFormat, AnswerKind


def format_holds(text: str, layout: AnswerFormat) -> bool:
    """Whether a completion holds an answer where its prompt's format wants it, after its reasoning.

    That is where the grader reads the answer. With tags, both pairs must stand in order with only
    white space between them.

    Args:
        text: the completion, without what the prompt has already opened.
        layout: the prompt format.
    """
    if extract(text, layout.contract).answer is None:
        return False
    return layout.tags is None or tags_are_in_order(layout.prefix + text, layout.tags)


@reward_builder
def strict_format(
    layout: AnswerFormat, *, value: float = 1.0, variant: str = "default"
) -> RewardFunction:
    """`value` where the format holds, each tag once, both filled, and nothing outside; else 0.

    Range 0 to `value`. `variant: original` allows tags that are empty or repeated, anything between
    them, and more lines after the closing answer tag, as the set-up behind r1-zero-numina does.
    """
    tags = tags_of(layout, "format")
    original = check_variant(variant, "format")

    def score(text: str) -> float:
        whole = layout.prefix + text
        if original:
            return value if _pattern_matches(whole, tags) else 0.0
        return value if tags_are_exact(whole, tags) and format_holds(text, layout) else 0.0

    return per_completion("format", nothing_or(value), score)


def _pattern_matches(text: str, tags: Tags) -> bool:
    """Whether both pairs stand in order from the start, and a closing tag ends a line.

    Of several places for the inner tags the first leaves most room, so no other is tried.
    """
    _, close, answer_open, answer_close = map(re.escape, tags)
    boundary = re.compile(rf"{close}\s*{answer_open}").search(text, len(tags[0]))
    if not text.startswith(tags[0]) or boundary is None:
        return False
    return re.compile(rf"{answer_close}$", re.MULTILINE).search(text, boundary.end()) is not None


@reward_builder
def think_format(layout: AnswerFormat, *, value: float = 1.0) -> RewardFunction:
    r"""`value` where the text is `<think>`, thoughts, `</think>` and then the answer; else 0.

    For models that answer freely after their thoughts: no answer tag is asked for, and both tags
    occur once, the first at the start (written by the model or opened by the prompt). Range 0 to
    `value`.

    >>> from grouper.types import AnswerContract, AnswerKind
    >>> layout = AnswerFormat(
    ...     name="t", template="{reasoning}{answer}",
    ...     contract=AnswerContract(kind=AnswerKind.BOXED))
    >>> texts = ["<think>2+2</think>\n4", "so </think> 4", "<think>2+2</think>", "4"]
    >>> think_format(layout)(prompts=["q"] * 4, completions=texts)
    [1.0, 0.0, 0.0, 0.0]
    """

    def score(text: str) -> float:
        start, opened, rest = text.partition("<think>")
        thoughts, closed, answer = rest.partition("</think>")
        once = text.count("<think>") == text.count("</think>") == 1
        filled = bool(thoughts.strip() and answer.strip() and not start.strip())
        return value if opened and closed and once and filled else 0.0

    return per_text("think_format", layout, nothing_or(value), score)


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


@reward_builder
def soft_format(layout: AnswerFormat, *, value: float = 1.0) -> RewardFunction:
    """`value` where the format holds: both tag pairs in order, and an answer; else 0.

    Range 0 to `value`.
    """
    tags_of(layout, "soft_format")

    def score(text: str) -> float:
        return value if format_holds(text, layout) else 0.0

    return per_completion("soft_format", nothing_or(value), score)


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


@reward_builder
def tag_count(layout: AnswerFormat, *, value: float = 1.0) -> RewardFunction:
    """`value` times the share of the four tags that occur exactly once. Range 0 to `value`.

    >>> from grouper.types import AnswerContract, AnswerKind
    >>> layout = AnswerFormat(
    ...     name="t", template="{reasoning}{answer}",
    ...     contract=AnswerContract(kind=AnswerKind.TAG, open="<a>", close="</a>"),
    ...     tags=("<t>", "</t>", "<a>", "</a>"), prefix="<t>")
    >>> tag_count(layout)(prompts=["q"], completions=["x</t><a>4</a></a>"])
    [0.75]
    """
    tags = tags_of(layout, "tag_count")

    def score(text: str) -> float:
        return value * sum(text.count(tag) == 1 for tag in tags) / 4

    return per_text("tag_count", layout, nothing_or(value), score)


@reward_builder
def boxed_format(layout: AnswerFormat, *, value: float = 1.0) -> RewardFunction:
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
    "think_format": think_format,
}
