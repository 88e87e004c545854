"""A rollout for people to read, without characters that would control their terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grouper.printable import printable
from grouper.types import Verdict

if TYPE_CHECKING:
    from grouper.types import Reward, RolloutGroup

# Number of last characters of a completion that are displayed: the answer is at the end.
END = 400


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
    if grade.verdict is Verdict.NO_ANSWER and rollout.completion.truncated:
        verdict = "truncated"
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

    >>> from grouper.types import Reward
    >>> components = {"right": 1.0, "form": None}
    >>> describe_reward(Reward(components=components, weights={"right": 2, "form": 0}))
    '2 (right 1, form not scored)'
    """
    components = ", ".join(f"{name} {_number(value)}" for name, value in reward.components.items())
    return f"{_number(reward.total)} ({components})"


def _number(value: float | None) -> str:
    return "not scored" if value is None else f"{value:g}"
