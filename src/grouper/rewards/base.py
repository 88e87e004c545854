"""What a reward function is: the keyword signature of TRL, so functions plug in both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from grouper.types import AnswerContract, Message

__all__ = ["Content", "RewardBuilder", "RewardFunction", "RewardLayout", "texts_of"]

Content = str | Sequence[Message]
"""A prompt or completion: messages in chat recipes, a string in plain-text ones."""


class RewardFunction(Protocol):
    """Scores a batch of completions; every argument is a list with one entry a completion.

    Beside `prompts` and `completions` it is given every column of the source row under its own
    name; `answer`, `solution`, `reference_answer`, `reference_solution` and `question` where no
    column has that name; `grades`, `finish_reasons` and `completion_ids`. It returns one number a
    completion; None means "not scored" and takes that rollout out of its group.
    """

    def __call__(
        self, *, prompts: Sequence[Content], completions: Sequence[Content], **columns: Any
    ) -> Sequence[float | None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardLayout:
    """The prompt format, as far as rewards need it.

    Example: `RewardLayout(contract=contract, tags=("<think>", "</think>", "<answer>",
    "</answer>"), prefix="<think>")`.
    """

    contract: AnswerContract
    tags: tuple[str, str, str, str] | None
    """Reasoning open and close, answer open and close; None for a format without tags."""
    prefix: str = ""
    """The part of the assistant's turn that the prompt has already opened: counted as written."""


RewardBuilder = Callable[..., RewardFunction]
"""`builder(layout, **params)`: its keyword parameters are what a recipe may set."""


def texts_of(completions: Sequence[Content]) -> list[str]:
    """The assistant's text of each completion, in either shape.

    >>> texts_of(["4", [{"role": "assistant", "content": "5"}]])
    ['4', '5']
    """
    return [
        completion
        if isinstance(completion, str)
        else "".join(str(message["content"] or "") for message in completion)
        for completion in completions
    ]
