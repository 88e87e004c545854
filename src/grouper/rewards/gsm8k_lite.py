"""System C: correctness, a numeric answer, and the share of tags that are present."""

from __future__ import annotations

from grouper.grading import extract
from grouper.rewards.base import RewardBuilder, RewardFunction, RewardLayout
from grouper.rewards.building import nothing_or, per_answer, per_text, tags_of
from grouper.rewards.numeric import whole_number_text
from grouper.types import AnswerContract, AnswerKind

__all__ = ["GSM8K_LITE", "lite_correctness", "lite_numeric", "lite_tags_present"]


def lite_correctness(
    layout: RewardLayout, *, value: float = 1.0, tolerance: float = 1e-6
) -> RewardFunction:
    """`value` where answer and reference are the same text, or numbers within `tolerance`.

    The answer is what the format's contract finds, else what follows `####`, else the whole text.
    Range 0 to `value`. Source: system C.
    """

    def score(answer: str, reference: str) -> float:
        if answer == reference.strip():
            return value
        given, wanted = whole_number_text(answer), whole_number_text(reference)
        close = given is not None and wanted is not None and abs(given - wanted) <= tolerance
        return value if close else 0.0

    return per_answer(
        "lite_correctness", nothing_or(value), lambda text: _answer(text, layout), score
    )


def lite_numeric(layout: RewardLayout, *, value: float = 0.1) -> RewardFunction:
    """`value` where the answer (found as in `lite_correctness`) is a number; else 0.

    Range 0 to `value`. Source: system C.
    """

    def score(text: str) -> float:
        return 0.0 if whole_number_text(_answer(text, layout)) is None else value

    return per_text("lite_numeric", layout, nothing_or(value), score)


_HASHES = AnswerContract(kind=AnswerKind.HASHES)


def _answer(text: str, layout: RewardLayout) -> str:
    for contract in (layout.contract, _HASHES):
        found = extract(text, contract).answer
        if found is not None:
            return found
    return text.strip()


def lite_tags_present(layout: RewardLayout, *, value: float = 0.1) -> RewardFunction:
    """`value` times the share of the four tags that occur, however often.

    Range 0 to `value`. Source: system C.
    """
    tags = tags_of(layout, "lite_tags_present")

    def score(text: str) -> float:
        return value * sum(tag in text for tag in tags) / len(tags)

    return per_text("lite_tags_present", layout, nothing_or(value), score)


GSM8K_LITE: dict[str, RewardBuilder] = {
    "lite_correctness": lite_correctness,
    "lite_numeric": lite_numeric,
    "lite_tags_present": lite_tags_present,
}
