"""System D: exact and approximate format, and two ladders for how close the answer is.

With the default numbers the total is -6.5 to +12.5; with `variant: original` -7.5 to +13.5.
Closeness pays here, also for wrong answers: see the probes this stack fails.

`variant: original` reads the first solution tag and numbers as Python's `float` does, and knows
nothing of what the prompt has opened. It gives what the patterns of the source give for every text,
in linear time.
"""

from __future__ import annotations

import re

from grouper.rewards.base import RewardBuilder, RewardFunction
from grouper.rewards.building import (
    Tags,
    check_variant,
    nothing_or,
    per_answer,
    per_completion,
    per_text,
    reward_builder,
    tags_of,
)
from grouper.rewards.numeric import first_number, python_number, whole_number_text, within
from grouper.types import AnswerFormat


@reward_builder
def dapo_exact_format(
    layout: AnswerFormat, *, value: float = 3.0, variant: str = "default"
) -> RewardFunction:
    """`value` where the text is reasoning, its closing tag, and a filled solution tag; else 0.

    The opening tag counts as given by the prompt: it may stand at the start or be missing. White
    space between the tags is allowed, text is not. Range 0 to `value`. `variant: original` wants
    the opening tag in the completion, and allows anything between the tags and tags repeated.
    Source: system D.
    """
    tags = open_, close, answer_open, answer_close = tags_of(layout, "dapo_exact_format")
    if check_variant(variant, "dapo_exact_format"):
        return per_completion(
            "dapo_exact_format",
            nothing_or(value),
            lambda text: value if _pattern_matches(text, tags) else 0.0,
        )

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


def _pattern_matches(text: str, tags: Tags) -> bool:
    """Whether the tags occur in order, the first and the last at the ends, both pairs filled.

    The earliest place of each tag leaves most room for the others, so no other is tried.
    """
    open_, close, answer_open, answer_close = tags
    text = text.strip()
    if not text.startswith(open_) or not text.endswith(answer_close):
        return False
    at = text.find(close, len(open_) + 1)
    start = text.find(answer_open, at + len(close)) if at >= 0 else -1
    return start >= 0 and start + len(answer_open) < len(text) - len(answer_close)


@reward_builder
def dapo_approximate_format(
    layout: AnswerFormat,
    *,
    once: float = 0.5,
    otherwise: float = -1.0,
    variant: str = "default",
) -> RewardFunction:
    """For each tag but the opening one: `once` where it occurs exactly once, else `otherwise`.

    Range 3 `otherwise` to 3 `once`: -3 to 1.5. `variant: original` is the same.
    Source: system D.
    """
    tags = tags_of(layout, "dapo_approximate_format")[1:]
    check_variant(variant, "dapo_approximate_format")
    low, high = sorted((3 * once, 3 * otherwise))

    def score(text: str) -> float:
        return sum(once if text.count(tag) == 1 else otherwise for tag in tags)

    return per_text("dapo_approximate_format", layout, (low, high), score)


@reward_builder
def dapo_answer(
    layout: AnswerFormat,
    *,
    equal: float = 5.0,
    equal_but_for_space: float = 3.5,
    within_10: float = 2.0,
    within_20: float = 1.5,
    wrong: float | None = None,
    variant: str = "default",
) -> RewardFunction:
    """The first of: equal text, equal but for space inside, a number within 10 %, 20 %; `wrong`.

    White space around the answer is free. Range `wrong` to `equal`: -2 to 5. `variant: original`
    pays -2.5 for a wrong answer, -2 without a solution tag, and `equal` for any zero where the
    reference is one. Source: system D.
    """
    tags = tags_of(layout, "dapo_answer")
    original = check_variant(variant, "dapo_answer")
    lowest = (-2.5 if original else -2.0) if wrong is None else wrong
    missing = -2.0 if wrong is None else wrong
    steps = (within_10, within_20)

    def score(answer: str, reference: str) -> float:
        answer, reference = answer.strip(), reference.strip()
        if answer == reference:
            return equal
        if original:
            if answer.replace(" ", "") == reference.replace(" ", ""):
                return equal_but_for_space
            given, wanted = python_number(answer), python_number(reference)
            return _by_ratio(given, wanted, (equal, *steps, lowest))
        if "".join(answer.split()) == "".join(reference.split()):
            return equal_but_for_space
        return _closeness(whole_number_text(answer), reference, steps, lowest)

    return per_answer(
        "dapo_answer",
        _range(equal, equal_but_for_space, *steps, lowest, missing),
        lambda text: _first_solution(text, tags) if original else _in_solution(text, tags),
        score,
        missing=missing,
    )


@reward_builder
def dapo_number(
    layout: AnswerFormat,
    *,
    equal: float | None = None,
    within_10: float = 2.5,
    within_20: float = 1.5,
    wrong: float | None = None,
    variant: str = "default",
) -> RewardFunction:
    """The first number in the solution tag: equal within 1e-6, within 10 %, 20 %; else `wrong`.

    Range `wrong` to `equal`: -1.5 to 3. `variant: original` pays 4 for an equal number, -2 for a
    wrong one, and -1.5 where there is no tag or no number. Source: system D.
    """
    tags = tags_of(layout, "dapo_number")
    original = check_variant(variant, "dapo_number")
    highest = (4.0 if original else 3.0) if equal is None else equal
    lowest = (-2.0 if original else -1.5) if wrong is None else wrong
    missing = -1.5 if wrong is None else wrong
    steps = (within_10, within_20)

    def score(answer: str, reference: str) -> float:
        if original:
            found = _NUMBER.search(answer)
            number, wanted = python_number(found[0] if found else ""), python_number(reference)
            if number is None or wanted is None:
                return missing
        else:
            number, wanted = first_number(answer), whole_number_text(reference)
        if number is not None and wanted is not None and abs(number - wanted) <= 1e-6:
            return highest
        if original:
            return _by_ratio(number, wanted, (lowest, *steps, lowest))
        return _closeness(number, reference, steps, lowest)

    return per_answer(
        "dapo_number",
        _range(highest, *steps, lowest, missing),
        lambda text: _first_solution(text, tags) if original else _in_solution(text, tags),
        score,
        missing=missing,
    )


_NUMBER = re.compile(r"[-+]?\d*\.?\d+")


def _range(*values: float) -> tuple[float, float]:
    return min(values), max(values)


def _by_ratio(
    given: float | None, wanted: float | None, values: tuple[float, float, float, float]
) -> float:
    """Of `values`: zero for zero, a ratio within 0.9 to 1.1, within 0.8 to 1.2, anything else."""
    zero, near, far, otherwise = values
    if given is None or wanted is None:
        return otherwise
    if wanted == 0:
        return zero if given == 0 else otherwise
    ratio = given / wanted
    if 0.9 <= ratio <= 1.1:
        return near
    return far if 0.8 <= ratio <= 1.2 else otherwise


def _first_solution(text: str, tags: Tags) -> str | None:
    """What the first solution tag holds; None where it is not closed."""
    _, found, rest = text.partition(tags[2])
    answer, closed, _ = rest.partition(tags[3])
    return answer if found and closed else None


def _closeness(
    number: float | None,
    reference: str,
    steps: tuple[float, float],
    otherwise: float,
) -> float:
    """The first of `steps` where the number is within 10 %, the second within 20 %."""
    wanted = whole_number_text(reference)
    if number is None or wanted is None:
        return otherwise
    shares = zip((0.1, 0.2), steps, strict=True)
    return next((value for share, value in shares if within(number, wanted, share)), otherwise)


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
