"""The rewards of a recipe, run over one group and checked on the way out."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grouper.config import RewardConfig
from grouper.errors import GrouperError, RewardError, raise_all
from grouper.rewards.base import Content, RewardFunction, RewardLayout
from grouper.rewards.registry import find_reward, reward_label
from grouper.types import Completion, FinishReason, Grade, Message, Problem, Prompt, Reward, Verdict

__all__ = ["RewardStack", "build_rewards"]


class RewardStack:
    """Named, weighted reward functions.

    Args:
        functions: (name, weight, function), each name once.
    """

    def __init__(self, functions: Sequence[tuple[str, float, RewardFunction]]) -> None:
        self.names = tuple(name for name, _, _ in functions)
        self.weights = {name: weight for name, weight, _ in functions}
        self._functions = {name: function for name, _, function in functions}

    def score(
        self,
        *,
        problem: Problem,
        prompt: Prompt,
        completions: Sequence[Completion],
        grades: Sequence[Grade],
    ) -> list[Reward]:
        """One reward a completion of one prompt, in order.

        Raises:
            RewardError: a function raised, or returned something else than one finite number or
                None a completion; it is named, with what it returned.
            ValueError: not one grade a completion.
        """
        if len(completions) != len(grades):
            raise ValueError(f"{len(completions)} completions but {len(grades)} grades")
        arguments = _arguments(problem, prompt, completions, grades)
        columns = {name: self._run(name, arguments) for name in self.names}
        return [
            Reward(
                components={name: columns[name][row] for name in self.names}, weights=self.weights
            )
            for row in range(len(completions))
        ]

    def check(self, *, problem: Problem | None = None, prompt: Prompt | None = None) -> None:
        """Try every function on one problem, twice: shape, finiteness and determinism.

        Args:
            problem: an example whose columns the functions will see; a made-up one if left out.
            prompt: its prompt.

        Raises:
            RewardError: everything that is wrong, all functions in one message.
        """
        problem = problem or Problem(id="check/0", question="What is 2+2?", answer="4", source="")
        prompt = prompt or Prompt(problem_id=problem.id, text=problem.question, token_ids=(0,))
        completions, grades = _examples(problem)
        arguments = _arguments(problem, prompt, completions, grades)
        problems: list[GrouperError] = []
        for name in self.names:
            try:
                first, second = self._run(name, arguments), self._run(name, arguments)
            except RewardError as error:
                problems.append(error)
                continue
            if first != second:
                problems.append(
                    RewardError(
                        f"the reward {name!r} gave {first} and then {second} for the same input",
                        where="rewards",
                        fix="A reward must be a function of its input: seed or remove what varies.",
                    )
                )
        raise_all(problems)

    def _run(self, name: str, arguments: dict[str, Any]) -> list[float | None]:
        try:
            returned: Any = self._functions[name](**arguments)
            if inspect.isawaitable(returned):
                returned = _awaited(returned)
        except Exception as error:  # a user's function may raise anything; it is named
            raise RewardError(
                f"the reward {name!r} raised {type(error).__name__}: {error}",
                where="rewards",
                fix=f"It was given the columns {', '.join(sorted(arguments))}.",
            ) from error
        return _validated(name, returned, len(arguments["completions"]))


def build_rewards(configs: Sequence[RewardConfig], layout: RewardLayout) -> RewardStack:
    """The stack of a recipe's `rewards` section.

    Raises:
        RewardError: every unknown name, parameter, file or function, in one message.
    """
    functions: list[tuple[str, float, RewardFunction]] = []
    problems: list[GrouperError] = []
    for config in configs:
        label = reward_label(config.name)
        try:
            functions.append((label, config.weight, find_reward(config, layout)))
        except RewardError as error:
            problems.append(error)
        if [name for name, _, _ in functions].count(label) > 1:
            problems.append(
                RewardError(f"two rewards are called {label!r}", where="rewards", fix="Rename one.")
            )
    raise_all(problems)
    return RewardStack(functions)


def _arguments(
    problem: Problem, prompt: Prompt, completions: Sequence[Completion], grades: Sequence[Grade]
) -> dict[str, Any]:
    """Everything a reward function is called with, one entry a completion."""
    n = len(completions)
    asked: Content = prompt.text if prompt.messages is None else list(prompt.messages)
    aliases = {
        "answer": problem.answer,
        "solution": problem.answer if problem.solution is None else problem.solution,
        "reference_answer": problem.answer,
        "reference_solution": problem.solution,
        "question": problem.question,
    }
    columns = {name: [value] * n for name, value in {**aliases, **problem.columns}.items()}
    return {
        **columns,
        "prompts": [asked] * n,
        "completions": [_content(c, chat=prompt.messages is not None) for c in completions],
        "grades": list(grades),
        "finish_reasons": [c.finish_reason for c in completions],
        "completion_ids": [list(c.token_ids) for c in completions],
    }


def _content(completion: Completion, *, chat: bool) -> Content:
    if not chat:
        return completion.text
    return [Message(role="assistant", content=completion.text)]


def _validated(name: str, returned: Any, expected: int) -> list[float | None]:
    """The values as floats; tensors and arrays are accepted through `tolist`."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, (list, tuple)) or len(values) != expected:
        size = f" of {len(values)}" if isinstance(values, (list, tuple)) else ""
        raise RewardError(
            f"the reward {name!r} returned {_shown(returned)}, a {type(returned).__name__}{size}, "
            f"for {expected} completions",
            where="rewards",
            fix="Return a list with one number (or None: not scored) a completion.",
        )
    return [_number(name, value, row) for row, value in enumerate(values)]


def _number(name: str, value: Any, row: int) -> float | None:
    if value is None:
        return None
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(
            f"the reward {name!r} returned {_shown(value)} for completion {row}",
            where="rewards",
            fix="Return finite numbers, or None for a completion that cannot be scored.",
        )
    return float(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _awaited(awaitable: Any) -> Any:
    """The result of an async reward, also where an event loop is already running."""

    async def wait() -> Any:
        return await awaitable

    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(asyncio.run, wait()).result()


def _examples(problem: Problem) -> tuple[list[Completion], list[Grade]]:
    """A right, a wrong and an empty completion."""
    texts = (problem.answer, "no idea", "")
    verdicts = (Verdict.CORRECT, Verdict.INCORRECT, Verdict.NO_ANSWER)
    completions = [
        Completion(
            token_ids=(0,),
            logprobs=(0.0,),
            text=text,
            finish_reason=FinishReason.STOP_TOKEN,
            policy_version=0,
        )
        for text in texts
    ]
    grades = [
        Grade(verdict=verdict, extracted=text or None, rung="text", reason="an example")
        for text, verdict in zip(texts, verdicts, strict=True)
    ]
    return completions, grades
