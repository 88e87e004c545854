r"""Rewards for being right, for the layout, the length and the style of a completion.

`format_holds` says whether a completion is in its prompt's format, for rewards, metrics and filters
alike; what asks for more says so. Reasoning may run over several lines, and what the prompt has
already opened counts as written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field

from grouper.config.schema import Positive, PositiveFloat
from grouper.errors import RewardError
from grouper.grading import extract
from grouper.rewards.core import Completed, Variant, reward
from grouper.types import AnswerContract, AnswerFormat, AnswerKind, Verdict

Tags = tuple[str, str, str, str]
Unit = Literal["tokens", "characters", "words"]
NonPositive = Annotated[float, Field(le=0, description="a positive one would pay for repetition")]


@reward(0.0, "value", "timeout")
def correctness(
    done: Completed, *, value: float = 1.0, timeout: float | None = 0.0
) -> float | None:
    """`value` for a correct answer, 0 for any other; None where the reference cannot be read.

    Range 0 to `value`. An answer that the grader could not judge in time, or that crashed its
    worker, earns `timeout`: like any wrong answer unless the recipe says otherwise, and
    `timeout: null` takes the rollout out of its group.

    Uses the grades it is handed. Without them (inside TRL) it grades by itself, taking the
    references from `reference_answer`, `answer` or `solution`, whichever comes first.
    """
    if done.grade.verdict in (Verdict.TIMEOUT, Verdict.CRASH):
        return timeout
    return None if done.correct is None else value * done.correct


@reward(0.0, 1.0)
def accuracy(done: Completed, *, variant: Variant = "default") -> float | None:
    """1 for a correct answer, 0 for any other; None where the reference cannot be read.

    Range 0 to 1. `variant: original` pays 0.5 for every completion of an unreadable reference.
    Source: recipe `r1-zero-numina`.
    """
    if done.correct is None:
        return 0.5 if variant == "original" else None
    return float(done.correct)


# --- layout --------------------------------------------------------------------------------------


@cache
def with_tags(pattern: str, tags: Tags, flags: int = 0) -> re.Pattern[str]:
    """A pattern in which `{0}` to `{3}` stand for the tags of a format."""
    return re.compile(pattern.format(*map(re.escape, tags)), flags)


def format_holds(text: str, fmt: AnswerFormat) -> bool:
    """Whether a completion holds an answer where its prompt's format wants it, after its reasoning.

    That is where the grader reads the answer. With tags, both pairs must stand in order with only
    white space between them.

    Args:
        text: the completion, without what the prompt has already opened.
        fmt: the prompt format.
    """
    if extract(text, fmt.contract).answer is None:
        return False
    return fmt.tags is None or tags_are_in_order(fmt.prefix + text, fmt.tags)


def tags_are_in_order(text: str, tags: Tags) -> bool:
    """Whether both tag pairs occur, with only white space between the pairs."""
    _, opened, rest = text.partition(tags[0])
    between = with_tags(r"{1}\s*+{2}", tags).search(rest) if opened else None
    return between is not None and tags[3] in rest[between.end() :]


def read_tagged(text: str, tags: Tags) -> tuple[str, str] | None:
    """Reasoning and answer of a text that begins after its first tag and ends with its last.

    None where one of the other tags does not occur exactly once, or anything but white space
    stands between or after the pairs.
    """
    if tags[0] in text or any(text.count(tag) != 1 for tag in tags[1:]):
        return None
    found = with_tags(r"(.*){1}\s*+{2}(.*){3}\s*+", tags, re.DOTALL).fullmatch(text)
    return (found[1].strip(), found[2].strip()) if found else None


def tags_are_exact(text: str, tags: Tags) -> bool:
    """Whether a text is filled reasoning then a filled answer, each tag once, nothing outside."""
    before, opened, rest = text.partition(tags[0])
    inside = read_tagged(rest, tags) if opened and not before.strip() else None
    return inside is not None and all(inside)


@reward(0.0, "value", name="format", tags=True)
def strict_format(done: Completed, *, value: float = 1.0, variant: Variant = "default") -> float:
    """`value` where the format holds, each tag once, both filled, and nothing outside; else 0.

    Range 0 to `value`. `variant: original` allows tags that are empty or repeated, anything between
    them, and more lines after the closing answer tag, as the set-up behind r1-zero-numina does.
    """
    if variant == "original":
        # Atomic: the first place of the inner tags leaves most room, so no other is tried.
        published = r"{0}(?>.*?{1}\s*+{2}).*?{3}$"
        pattern = with_tags(published, done.tags, re.DOTALL | re.MULTILINE)
        return value if pattern.match(done.whole) else 0.0
    exact = tags_are_exact(done.whole, done.tags) and format_holds(done.text, done.format)
    return value if exact else 0.0


@reward(0.0, "value", tags=True)
def soft_format(done: Completed, *, value: float = 1.0) -> float:
    """`value` where the format holds: both tag pairs in order, and an answer; else 0.

    Range 0 to `value`.
    """
    return value if format_holds(done.text, done.format) else 0.0


@reward(0.0, "value", tags=True)
def tag_count(done: Completed, *, value: float = 1.0) -> float:
    """`value` times the share of the four tags that occur exactly once. Range 0 to `value`."""
    return value * sum(done.whole.count(tag) == 1 for tag in done.tags) / 4


@reward(0.0, "value")
def boxed_format(done: Completed, *, value: float = 1.0) -> float:
    r"""`value` where there is exactly one closed, filled `\boxed{}` before any next turn; else 0.

    Range 0 to `value`. For formats without tags.
    """
    markers = done.format.contract.turn_markers
    boxed = AnswerContract(kind=AnswerKind.BOXED, turn_markers=markers)
    single = len(re.findall(r"\\f?box(?:ed)?(?![A-Za-z])", done.whole)) == 1
    return value if single and extract(done.whole, boxed).answer is not None else 0.0


@reward(0.0, "value")
def think_format(done: Completed, *, value: float = 1.0) -> float:
    """`value` where the text is `<think>`, thoughts, `</think>` and then the answer; else 0.

    For models that answer freely after their thoughts: no answer tag is asked for, and both tags
    occur once, the first at the start (written by the model or opened by the prompt). Range 0 to
    `value`.
    """
    once = all(done.whole.count(tag) == 1 for tag in ("<think>", "</think>"))
    start, _, rest = done.whole.partition("<think>")
    thoughts, _, answer = rest.partition("</think>")
    filled = thoughts.strip() and answer.strip() and not start.strip()
    return value if once and filled else 0.0


# --- length and style ----------------------------------------------------------------------------


def units_of(done: Completed, unit: Unit) -> Sequence[Any]:
    """The tokens, characters or words of a completion.

    >>> from grouper.prompts import FORMATS
    >>> units_of(Completed(text="So 4", format=FORMATS["xml"]), "words")
    ['So', '4']
    """
    if unit == "tokens":
        if done.columns.get("completion_ids") is None:
            raise ValueError("it counts tokens and needs completion_ids; or set another unit")
        ids: Sequence[int] = done.columns["completion_ids"]
        return ids
    return done.text if unit == "characters" else done.text.split()


@reward("min_correct", "max_correct", "min_wrong", "max_wrong")
def cosine(
    done: Completed,
    *,
    min_correct: float = 0.8,
    max_correct: float = 1.0,
    min_wrong: float = -0.5,
    max_wrong: float = -0.1,
    scale: PositiveFloat = 1000.0,
    unit: Unit = "characters",
    variant: Variant = "default",
) -> float | None:
    """Accuracy scaled by length: right and short is best, wrong and short is worst.

    With p = min(1, length / `scale`), the length counted in `unit` (tokens, characters, words), and
    c = (1 + cos(pi p)) / 2, a correct completion earns `min_correct` + (`max_correct` -
    `min_correct`) c, a wrong one `max_wrong` - (`max_wrong` - `min_wrong`) c. Range `min_wrong` to
    `max_correct`: -0.5 to 1. None where the reference cannot be read. `variant: original` does not
    clamp p, so that values rise again beyond `scale`, and takes an unreadable reference for a wrong
    answer.
    Source: arXiv 2502.03373 in the form of recipe `r1-zero-numina`.
    """
    progress = len(units_of(done, unit)) / scale
    if variant == "default":
        if done.correct is None:
            return None
        progress = min(1.0, progress)
    part = (1 + math.cos(math.pi * progress)) / 2
    if done.correct:
        return min_correct + (max_correct - min_correct) * part
    return max_wrong - (max_wrong - min_wrong) * part


@reward(-0.5, 0.5)
def length(done: Completed, *, unit: Unit = "tokens") -> float | None:
    """Short among the completions of one prompt pays; a wrong one gains nothing by it.

    With l = 0.5 - (length - shortest) / (longest - shortest), counted in `unit` (tokens,
    characters, words), a correct completion earns l and a wrong one min(0, l); all 0 where all are
    of one length. Range -0.5 to 0.5; None where the reference cannot be read.
    Source: Kimi k1.5, arXiv 2501.12599, section 2.3.3.
    """
    size = len(units_of(done, unit))
    sizes = [len(units_of(other, unit)) for other in done.group]
    if done.correct is None:
        return None
    if min(sizes) == max(sizes):
        return 0.0
    value = 0.5 - (size - min(sizes)) / (max(sizes) - min(sizes))
    return value if done.correct else min(0.0, value)


@reward(-1.0, 0.0)
def soft_overlong(done: Completed, *, max_tokens: Positive, buffer_tokens: Positive) -> float:
    """0 up to `max_tokens` - `buffer_tokens`, falling in a line to -1 at `max_tokens` and beyond.

    Range -1 to 0. `max_tokens` is usually sampling.max_new_tokens.
    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    if buffer_tokens > max_tokens:
        raise RewardError(
            f"buffer_tokens is {buffer_tokens} with max_tokens {max_tokens}",
            where="rewards.soft_overlong.params",
            fix="Use 0 < buffer_tokens <= max_tokens.",
        )
    over = len(units_of(done, "tokens")) - (max_tokens - buffer_tokens)
    return max(-1.0, min(0.0, -over / buffer_tokens))


_STEP = re.compile(
    r"\bStep \d+:|^[ \t]*\d+[.)][ \t]|^[ \t]*[-*•][ \t]|\b(?:First|Second|Next|Finally)\b",
    re.MULTILINE | re.ASCII,
)
_STEP_ORIGINAL = re.compile(r"Step \d+:|^\d+\.|\n[-*]|(?:First|Second|Next|Finally),", re.MULTILINE)


@reward(0.0, 1.0)
def reasoning_steps(
    done: Completed, *, enough: Positive = 3, variant: Variant = "default"
) -> float:
    """min(1, markers / `enough`).

    A marker is `Step 2:`, a numbered line, a bullet, or one of First, Second, Next, Finally.
    Range 0 to 1. `variant: original` wants no space after a number or bullet, so that the answers
    `45.` and `-45` on lines of their own count, and a comma after the words.
    Source: recipe `r1-zero-numina`.
    """
    marker = _STEP_ORIGINAL if variant == "original" else _STEP
    return min(1.0, len(marker.findall(done.whole)) / enough)


@reward("max_penalty", 0.0)
def repetition_penalty(
    done: Completed,
    *,
    n: Positive = 3,
    max_penalty: NonPositive = -0.1,
    unit: Unit = "words",
    variant: Variant = "default",
) -> float:
    """`max_penalty` (1 - different n-grams / n-grams); 0 for a text that is shorter than n.

    The n-grams are of `unit`: tokens, or lower-case characters or words. Range `max_penalty` to 0.
    `variant: original` is the same.
    Source: arXiv 2502.03373 in the form of recipe `r1-zero-numina`.
    """
    del variant
    units = units_of(done, unit)
    units = units if unit == "tokens" else [part.lower() for part in units]
    grams = [tuple(units[i : i + n]) for i in range(len(units) - n + 1)]
    share = len(set(grams)) / len(grams) if grams else 1.0
    return max_penalty * (1 - share) + 0.0  # never -0.0
