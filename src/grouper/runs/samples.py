"""A rollout for people to read, without characters that would control their terminal."""

from __future__ import annotations

import re

from grouper.types import Reward, RolloutGroup

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# Characters of a completion that are shown: its end, where the answer is.
END = 400


def printable(text: str) -> str:
    r"""Text that a model or a file wrote, with control characters as escapes.

    Line breaks and tabs stay; direction marks and lone surrogates are escaped, too.

    >>> print(printable("red \x1b[31m\tand\nplain"))
    red \x1b[31m   and
    plain
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def format_sample(group: RolloutGroup, step: int) -> str:
    """Question, end of the completion, answer, verdict and reward of a group's first rollout.

    Args:
        group: the rollouts of one problem, of which there is at least one.
        step: the GRPO step, counted from 1.

    Returns:
        Several lines, without control characters.
    """
    rollout = group.rollouts[0]
    text, grade = rollout.completion.text, rollout.grade
    verdict = grade.verdict.value.replace("_", " ")
    lines = (
        f"Sample of grpo step {step} ({group.problem.id})",
        f"Question: {group.problem.question}",
        f"Completion: {text if len(text) <= END else f'... {text[-END:]}'}",
        f"Answer: {grade.extracted or 'none'}",
        f"Verdict: {verdict}, the reference is {group.problem.answer}",
        f"Reward: {in_words(rollout.reward)}",
    )
    return printable("\n".join(lines))


def in_words(reward: Reward) -> str:
    """The total and each part of a reward.

    >>> in_words(Reward(components={"right": 1.0, "form": None}, weights={"right": 2, "form": 0}))
    '2 (right 1, form not scored)'
    """
    parts = ", ".join(f"{name} {_number(value)}" for name, value in reward.components.items())
    return f"{_number(reward.total)} ({parts})"


def _number(value: float | None) -> str:
    return "not scored" if value is None else f"{value:g}"
