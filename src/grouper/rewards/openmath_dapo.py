"""System D: exact and approximate format, and two ladders for how close the answer is.

With the default numbers the total is -6.5 to +12.5; with `variant: original` -7.5 to +13.5.
Closeness pays here, also for wrong answers: see the probes this stack fails.
"""

from __future__ import annotations

from grouper.rewards.base import RewardBuilder, RewardFunction, RewardLayout
from grouper.rewards.building import (
    Tags,
    check_variant,
    nothing_or,
    per_answer,
    per_text,
    tags_of,
)
from grouper.rewards.numeric import first_number, whole_number_text, within

__all__ = [
    "OPENMATH_DAPO",
    "dapo_answer",
    "dapo_approximate_format",
    "dapo_exact_format",
    "dapo_number",
]


def dapo_exact_format(layout: RewardLayout, *, value: float = 3.0) -> RewardFunction:
    """`value` where the text is reasoning, its closing tag, and a filled solution tag; else 0.

    The opening tag counts as given by the prompt: it may stand at the start or be missing. White
    space between the tags is allowed, text is not. Range 0 to `value`. Source: system D.
    """
    open_, close, answer_open, answer_close = tags_of(layout, "dapo_exact_format")

    def score(text: str) -> float:
        text = text.removeprefix(layout.prefix).lstrip().removeprefix(open_)
        if any(text.count(tag) != 1 for tag in (close, answer_open, answer_close)):
            return 0.0
        _, _, rest = text.partition(close)
        between, _, rest = rest.partition(answer_open)
        answer, found, after = rest.partition(answer_close)
        exact = found and answer.strip() and not between.strip() and not after.strip()
        return value if exact and open_ not in text else 0.0

    return per_text("dapo_exact_format", layout, nothing_or(value), score)


def dapo_approximate_format(
    layout: RewardLayout, *, once: float = 0.5, otherwise: float = -1.0
) -> RewardFunction:
    """For each tag but the opening one: `once` where it occurs exactly once, else `otherwise`.

    Range 3 `otherwise` to 3 `once`: -3 to 1.5. Source: system D.
    """
    tags = tags_of(layout, "dapo_approximate_format")[1:]
    low, high = sorted((3 * once, 3 * otherwise))

    def score(text: str) -> float:
        return sum(once if text.count(tag) == 1 else otherwise for tag in tags)

    return per_text("dapo_approximate_format", layout, (low, high), score)


def dapo_answer(
    layout: RewardLayout,
    *,
    equal: float = 5.0,
    equal_but_for_space: float = 3.5,
    within_10: float = 2.0,
    within_20: float = 1.5,
    wrong: float | None = None,
    variant: str = "default",
) -> RewardFunction:
    """The first of: equal text, equal but for space, a number within 10 %, 20 %; else `wrong`.

    Range `wrong` to `equal`: -2 to 5; `variant: original` has `wrong` at -2.5. Source: system D.
    """
    tags = tags_of(layout, "dapo_answer")
    original = check_variant(variant, "dapo_answer")
    lowest = (-2.5 if original else -2.0) if wrong is None else wrong
    values = (equal, equal_but_for_space, within_10, within_20, lowest)

    def score(answer: str, reference: str) -> float:
        if answer == reference:
            return equal
        if "".join(answer.split()) == "".join(reference.split()):
            return equal_but_for_space
        steps = ((0.1, within_10), (0.2, within_20))
        return _closeness(whole_number_text(answer), reference, steps, lowest)

    return per_answer(
        "dapo_answer",
        (min(values), max(values)),
        lambda text: _in_solution(text, tags),
        score,
        missing=lowest,
    )


def dapo_number(
    layout: RewardLayout,
    *,
    equal: float | None = None,
    within_10: float = 2.5,
    within_20: float = 1.5,
    wrong: float | None = None,
    variant: str = "default",
) -> RewardFunction:
    """The first number in the solution tag: equal within 1e-6, within 10 %, 20 %; else `wrong`.

    Range `wrong` to `equal`: -1.5 to 3; `variant: original` has -2 to 4. Source: system D.
    """
    tags = tags_of(layout, "dapo_number")
    original = check_variant(variant, "dapo_number")
    highest = (4.0 if original else 3.0) if equal is None else equal
    lowest = (-2.0 if original else -1.5) if wrong is None else wrong
    values = (highest, within_10, within_20, lowest)

    def score(answer: str, reference: str) -> float:
        number, wanted = first_number(answer), whole_number_text(reference)
        if number is not None and wanted is not None and abs(number - wanted) <= 1e-6:
            return highest
        return _closeness(number, reference, ((0.1, within_10), (0.2, within_20)), lowest)

    return per_answer(
        "dapo_number",
        (min(values), max(values)),
        lambda text: _in_solution(text, tags),
        score,
        missing=lowest,
    )


def _closeness(
    number: float | None,
    reference: str,
    steps: tuple[tuple[float, float], ...],
    otherwise: float,
) -> float:
    """The value of the first (share, value) of `steps` that the number is within."""
    wanted = whole_number_text(reference)
    if number is None or wanted is None:
        return otherwise
    return next((value for share, value in steps if within(number, wanted, share)), otherwise)


def _in_solution(text: str, tags: Tags) -> str | None:
    """What the last solution tag holds, white space included; None where it is not closed."""
    _, found, rest = text.rpartition(tags[2])
    answer, closed, _ = rest.partition(tags[3])
    return answer if found and closed else None


OPENMATH_DAPO: dict[str, RewardBuilder] = {
    "dapo_exact_format": dapo_exact_format,
    "dapo_approximate_format": dapo_approximate_format,
    "dapo_answer": dapo_answer,
    "dapo_number": dapo_number,
}
