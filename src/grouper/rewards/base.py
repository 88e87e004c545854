"""What a reward function is: the keyword signature of TRL, so functions plug in both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from grouper.types import Message

Content = str | Sequence[Message]
"""A prompt or completion: messages in chat recipes, a string in plain-text ones."""


class RewardFunction(Protocol):
    """Scores a batch of completions; every argument is a list with one entry per completion.

    Beside `prompts` and `completions` it is given the parsed `answer`, `solution`,
    `reference_answer`, `reference_solution` and `question`; `grades`, `finish_reasons` and
    `completion_ids`; and every column of the source row under its own name, or as `source_<name>`
    where that name is one of these. It returns one number per completion; None means "not scored"
    and takes that rollout out of its group.
    """

    def __call__(
        self, /, *, prompts: Sequence[Content], completions: Sequence[Content], **columns: Any
    ) -> Sequence[float | None]: ...


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
