"""System C: correctness, a numeric answer, and the share of tags that are present."""

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
from grouper.rewards.numeric import python_number, whole_number_text
from grouper.types import AnswerContract, AnswerFormat, AnswerKind


@reward_builder
def lite_correctness(
    layout: AnswerFormat,
    *,
    value: float = 1.0,
    tolerance: float = 1e-6,
    variant: str = "default",
) -> RewardFunction:
    """`value` where answer and reference are the same text, or numbers within `tolerance`.

    The answer is what the format's contract finds, else what follows `####`, else the whole text.
    Range 0 to `value`. `variant: original` takes the first answer tag, in capitals, too, and reads
    numbers as Python's `float` does: no commas, no dollar sign. Source: system C.
    """
    original = check_variant(variant, "lite_correctness")
    read = python_number if original else whole_number_text

    def score(answer: str, reference: str) -> float:
        if answer == reference.strip():
            return value
        given, wanted = read(answer), read(reference)
        close = given is not None and wanted is not None and abs(given - wanted) <= tolerance
        return value if close else 0.0

    return per_answer(
        "lite_correctness", nothing_or(value), lambda text: _answer(text, layout, original), score
    )


@reward_builder
def lite_numeric(
    layout: AnswerFormat, *, value: float = 0.1, variant: str = "default"
) -> RewardFunction:
    """`value` where the answer (found and read as in `lite_correctness`) is a number; else 0.

    Range 0 to `value`. Source: system C.
    """
    original = check_variant(variant, "lite_numeric")
    read = python_number if original else whole_number_text

    def score(text: str) -> float:
        return 0.0 if read(_answer(text, layout, original)) is None else value

    return per_text("lite_numeric", layout, nothing_or(value), score)


_HASHES = AnswerContract(kind=AnswerKind.HASHES)
_AFTER_HASHES = re.compile(r"####\s*(.*)")


def _answer(text: str, layout: AnswerFormat, original: bool) -> str:
    if original:
        return _first_answer(text, layout)
    for contract in (layout.contract, _HASHES):
        found = extract(text, contract).answer
        if found is not None:
            return found
    return text.strip()


def _first_answer(text: str, layout: AnswerFormat) -> str:
    """In the first pair of answer tags, else after the first `####`, else the whole text."""
    _, _, answer_open, answer_close = tags_of(layout, "lite_correctness")
    opened = _any_case(answer_open).search(text)
    closed = _any_case(answer_close).search(text, opened.end()) if opened else None
    if opened and closed:
        return text[opened.end() : closed.start()].strip()
    hashes = _AFTER_HASHES.search(text)
    return (hashes[1] if hashes else text).strip()


def _any_case(tag: str) -> re.Pattern[str]:
    return re.compile(re.escape(tag), re.IGNORECASE)


@reward_builder
def lite_tags_present(
    layout: AnswerFormat, *, value: float = 0.1, variant: str = "default"
) -> RewardFunction:
    """`value` times the share of the four tags that occur, however often.

    Range 0 to `value`. `variant: original` counts tags in capitals, too. Source: system C.
    """
    tags = tags_of(layout, "lite_tags_present")
    original = check_variant(variant, "lite_tags_present")

    def score(text: str) -> float:
        if original:
            return value * sum(_any_case(tag).search(text) is not None for tag in tags) / len(tags)
        return value * sum(tag in text for tag in tags) / len(tags)

    return per_text("lite_tags_present", layout, nothing_or(value), score)


GSM8K_LITE: dict[str, RewardBuilder] = {
    "lite_correctness": lite_correctness,
    "lite_numeric": lite_numeric,
    "lite_tags_present": lite_tags_present,
}
