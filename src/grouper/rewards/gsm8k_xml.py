r"""System A: the granular rewards of GRPO on GSM8K, `<reasoning>` and `<answer>` tags on lines.

All take the tags from the prompt format. `variant: original` brings back the faults of the source:
its format patterns stop at a newline, it subtracts the trailing penalty twice, and it takes a text
without tags for an answer. It gives what the patterns and splits of the source give for every text,
in linear time.
"""

from __future__ import annotations

import re

from grouper.grading import extract
from grouper.rewards.base import RewardBuilder, RewardFunction
from grouper.rewards.building import (
    check_variant,
    nothing_or,
    per_answer,
    per_text,
    reward_builder,
    tags_of,
)
from grouper.rewards.format import tags_are_exact, tags_are_in_order
from grouper.types import AnswerFormat


@reward_builder
def xml_correctness(
    layout: AnswerFormat, *, value: float = 2.0, variant: str = "default"
) -> RewardFunction:
    """`value` where the text in the last answer tag equals the reference without its commas.

    Range 0 to `value`. `variant: original` takes what follows the last opening answer tag, whether
    it is closed or not, and the whole text where there is none. Source: system A.
    """
    original = check_variant(variant, "xml_correctness")

    def score(answer: str, reference: str) -> float:
        return value if answer == reference.strip().replace(",", "") else 0.0

    return per_answer(
        "xml_correctness", nothing_or(value), lambda text: _answer(text, layout, original), score
    )


@reward_builder
def xml_integer(
    layout: AnswerFormat, *, value: float = 0.5, variant: str = "default"
) -> RewardFunction:
    """`value` where the answer is all digits, 0 to 9; else 0.

    Range 0 to `value`. `variant: original` finds the answer as in `xml_correctness`, and takes
    digits of any script. Source: system A.
    """
    original = check_variant(variant, "xml_integer")

    def score(text: str) -> float:
        answer = _answer(text, layout, original) or ""
        return value if answer.isdigit() and (original or answer.isascii()) else 0.0

    return per_text("xml_integer", layout, nothing_or(value), score)


def _answer(text: str, layout: AnswerFormat, original: bool) -> str | None:
    if not original:
        return extract(text, layout.contract).answer
    _, _, answer_open, answer_close = tags_of(layout, "xml_correctness")
    return text.rpartition(answer_open)[2].partition(answer_close)[0].strip()


@reward_builder
def xml_strict_format(
    layout: AnswerFormat, *, value: float = 0.5, variant: str = "default"
) -> RewardFunction:
    """`value` where the whole completion is the tagged layout, every tag on a line of its own.

    Range 0 to `value`. A newline at the very end is free. `variant: original` wants that newline
    (its `$` lets a second one follow), and one line each of reasoning and answer.
    Source: system A.
    """
    tags = open_, close, answer_open, answer_close = tags_of(layout, "xml_strict_format")
    if check_variant(variant, "xml_strict_format"):
        one_line = _pattern(
            f"{open_}\n",
            "[^\n]*",
            f"\n{close}\n{answer_open}\n",
            "[^\n]*",
            f"\n{answer_close}\n",
            "\n?",
        )
        return per_text(
            "xml_strict_format",
            layout,
            nothing_or(value),
            lambda text: value if one_line.fullmatch(text) else 0.0,
        )

    def score(text: str) -> float:
        on_lines = (
            text.startswith(f"{open_}\n")
            and f"\n{close}\n{answer_open}\n" in text
            and text.endswith((f"\n{answer_close}", f"\n{answer_close}\n"))
        )
        return value if on_lines and tags_are_exact(text, tags) else 0.0

    return per_text("xml_strict_format", layout, nothing_or(value), score)


@reward_builder
def xml_soft_format(
    layout: AnswerFormat, *, value: float = 0.5, variant: str = "default"
) -> RewardFunction:
    """`value` where both tag pairs occur in order with only white space between the pairs.

    Range 0 to `value`. `variant: original` wants them at the start, and one line each of
    reasoning and answer. Source: system A.
    """
    tags = open_, close, answer_open, answer_close = tags_of(layout, "xml_soft_format")
    boundary = re.compile(rf"(?={re.escape(close)}\s*({re.escape(answer_open)}))")

    def at_start(text: str) -> bool:
        """Whether the source's one pattern matches; it would backtrack over hostile text."""
        if not text.startswith(open_):
            return False
        begin = len(open_)
        line_end = _find(text, "\n", begin)
        closed = 0
        for found in boundary.finditer(text, begin):
            if found.start() > line_end:
                return False
            answer = found.end(1)
            if closed < answer:  # where the last search ended serves later boundaries too
                closed = _find(text, answer_close, answer)
            if closed == len(text):
                return False
            if closed <= (line_end if answer <= line_end else _find(text, "\n", answer)):
                return True
        return False

    original = check_variant(variant, "xml_soft_format")

    def score(text: str) -> float:
        return value if (at_start(text) if original else tags_are_in_order(text, tags)) else 0.0

    return per_text("xml_soft_format", layout, nothing_or(value), score)


def _find(text: str, part: str, start: int) -> int:
    """Where the part first occurs from `start` on; the length of the text where it does not."""
    at = text.find(part, start)
    return len(text) if at < 0 else at


def _pattern(*parts: str) -> re.Pattern[str]:
    """Literal texts with patterns between them: literal, pattern, literal, ..."""
    return re.compile(
        "".join(re.escape(part) if i % 2 == 0 else part for i, part in enumerate(parts))
    )


@reward_builder
def xml_tag_count(
    layout: AnswerFormat,
    *,
    value: float = 0.125,
    penalty: float = 0.001,
    variant: str = "default",
) -> RewardFunction:
    r"""`value` for each tag on a line of its own exactly once, less `penalty` a trailing character.

    The four are `<reasoning>\n`, `\n</reasoning>\n`, `\n<answer>\n` and `\n</answer>`. Trailing
    is what follows the first closing answer tag, one newline apart.

    Range: no lower end (the penalty grows with the text) to 4 `value`. `variant: original`
    subtracts twice: what follows the last `\n</answer>\n` (all of the text, where there is none),
    and what follows the last `\n</answer>` less one character. Source: system A.
    """
    open_, close, answer_open, answer_close = tags_of(layout, "xml_tag_count")
    wanted = (f"{open_}\n", f"\n{close}\n", f"\n{answer_open}\n", f"\n{answer_close}")
    twice = check_variant(variant, "xml_tag_count")

    def score(text: str) -> float:
        once = [text.count(tag) == 1 for tag in wanted]
        trailing = _trailing(text, answer_close)
        if twice:
            trailing = _trailing_twice(text, answer_close, opened=once[2], closed=once[3])
        return value * sum(once) - penalty * trailing

    return per_text("xml_tag_count", layout, (float("-inf"), 4 * value), score)


def _trailing(text: str, close: str) -> int:
    r"""Characters after the first `close`, one newline apart.

    >>> _trailing("4</a>", "</a>"), _trailing("4</a>\n", "</a>"), _trailing("4</a>\nso", "</a>")
    (0, 0, 2)
    """
    return len(text.partition(close)[2].removeprefix("\n"))


def _trailing_twice(text: str, close: str, *, opened: bool, closed: bool) -> int:
    # `split`, not `rpartition`: of two that share a newline it takes the first.
    first = len(text.rsplit(f"\n{close}\n", maxsplit=1)[-1]) if opened else 0
    second = len(text.rsplit(f"\n{close}", maxsplit=1)[-1]) - 1 if closed else 0
    return first + second


GSM8K_XML: dict[str, RewardBuilder] = {
    "xml_correctness": xml_correctness,
    "xml_integer": xml_integer,
    "xml_strict_format": xml_strict_format,
    "xml_soft_format": xml_soft_format,
    "xml_tag_count": xml_tag_count,
}
