"""A rollout for people to read, without characters that would control their terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grouper.types import Reward, RolloutGroup

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# Number of last characters of a completion that are displayed: the answer is at the end.
END = 400


def printable(text: str) -> str:
    r"""Escape the control characters of a text that comes from a model or a file.

    Line breaks and tabs stay; direction marks and lone surrogates are escaped, too.

    >>> print(printable("red \x1b[31m\tand\nplain"))
    red \x1b[31m   and
    plain
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def format_sample(group: RolloutGroup, step: int) -> str:
    """Format the first rollout of a group: question, completion, answer, verdict and reward.

    Args:
        group: the rollouts of one problem, of which there is at least one.
        step: the GRPO step, counted from 1.

    Returns:
        Several lines, without control characters.
    """
    rollout = group.rollouts[0]
    grade = rollout.grade
    text = rollout.completion.text
    if len(text) > END:
        text = f"... {text[-END:]}"
    verdict = grade.verdict.value.replace("_", " ")
    lines = (
        f"Sample of grpo step {step} ({group.problem.id})",
        f"Question: {group.problem.question}",
        f"Completion: {text}",
        f"Answer: {grade.extracted or 'none'}",
        f"Verdict: {verdict}, the reference is {group.problem.answer}",
        f"Reward: {describe_reward(rollout.reward)}",
    )
    return printable("\n".join(lines))


def describe_reward(reward: Reward) -> str:
    """Describe a reward: its total and each component.

    >>> components = {"right": 1.0, "form": None}
    >>> describe_reward(Reward(components=components, weights={"right": 2, "form": 0}))
    '2 (right 1, form not scored)'
    """
    components = ", ".join(f"{name} {_number(value)}" for name, value in reward.components.items())
    return f"{_number(reward.total)} ({components})"


def _number(value: float | None) -> str:
    return "not scored" if value is None else f"{value:g}"
