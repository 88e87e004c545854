"""The rewards of a recipe, run over one group and checked on the way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grouper.config import RewardConfig
from grouper.errors import GrouperError, RewardError, raise_all
from grouper.rewards.base import RewardFunction, RewardLayout
from grouper.rewards.calling import DEFAULT_SECONDS, arguments_of, call, shown
from grouper.rewards.failures import FailureRate
from grouper.rewards.registry import find_reward, reward_label
from grouper.types import Completion, FinishReason, Grade, Problem, Prompt, Reward, Verdict

__all__ = ["RewardStack", "build_rewards"]

DEFAULT_LIMIT = float(RewardConfig.model_fields["max_failure_rate"].default)


class RewardStack:
    """Named, weighted reward functions.

    Args:
        functions: (name, weight, function), each name once.
        limits: by name, the share of the recent groups a function may fail on.
        seconds: by name, how long a function may take for a group.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, float, RewardFunction]],
        limits: Mapping[str, float] | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self.names = tuple(name for name, _, _ in functions)
        self.weights = {name: weight for name, weight, _ in functions}
        self._functions = {name: function for name, _, function in functions}
        self._rates = {n: FailureRate((limits or {}).get(n, DEFAULT_LIMIT)) for n in self.names}
        self._seconds = dict(seconds or {})
        self._events: list[str] = []

    def for_measuring(self) -> RewardStack:
        """The same functions with counts of their own, which never stop anything."""
        functions = [(name, self.weights[name], self._functions[name]) for name in self.names]
        return RewardStack(functions, dict.fromkeys(self.names, 1.0), self._seconds)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and highest total; None where a function does not state its range."""
        low = high = 0.0
        for name, weight in self.weights.items():
            if weight == 0:
                continue
            stated = getattr(self._functions[name], "bounds", None)
            if stated is None:
                return None
            ends = sorted(weight * end for end in stated)
            low, high = low + ends[0], high + ends[1]
        return low, high

    @property
    def failures(self) -> dict[str, int]:
        """How many groups each function has failed on."""
        return {name: rate.failures for name, rate in self._rates.items()}

    def state(self) -> dict[str, Any]:
        """The counts of failures, as JSON values: what a checkpoint keeps, by function."""
        return {name: rate.state() for name, rate in self._rates.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting failures from a `state`; a function that it does not name starts anew."""
        for name, rate in self._rates.items():
            if name in state:
                rate.load_state(state[name])

    def take_events(self) -> tuple[str, ...]:
        """What failed since this was last asked, one line each."""
        events, self._events = tuple(self._events), []
        return events

    def score(
        self,
        *,
        problem: Problem,
        prompt: Prompt,
        completions: Sequence[Completion],
        grades: Sequence[Grade],
    ) -> list[Reward]:
        """One reward a completion of one prompt, in order.

        A function that fails leaves None ("not scored") for this group; it is counted in
        `failures` and told in `take_events`.

        Raises:
            RewardError: a function has failed on more than its `max_failure_rate` of the recent
                groups; the input that it failed on is shown.
            ValueError: not one grade a completion.
        """
        if len(completions) != len(grades):
            raise ValueError(f"{len(completions)} completions but {len(grades)} grades")
        arguments = arguments_of(problem, prompt, completions, grades)
        columns = {name: self._contained(name, arguments, problem) for name in self.names}
        return [
            Reward(
                components={name: columns[name][row] for name in self.names}, weights=self.weights
            )
            for row in range(len(completions))
        ]

    def check(self, *, problem: Problem | None = None, prompt: Prompt | None = None) -> None:
        """Try every function on one problem, twice: shape, finiteness, range and determinism.

        Args:
            problem: an example whose columns the functions will see; a made-up one if left out.
            prompt: its prompt.

        Raises:
            RewardError: everything that is wrong, all functions in one message.
        """
        problem = problem or Problem(id="check/0", question="What is 2+2?", answer="4", source="")
        prompt = prompt or Prompt(problem_id=problem.id, text=problem.question, token_ids=(0,))
        completions, grades = _examples(problem)
        arguments = arguments_of(problem, prompt, completions, grades)
        problems: list[GrouperError] = []
        for name in self.names:
            try:
                first, second = (self._call(name, arguments) for _ in range(2))
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

    def _call(self, name: str, arguments: dict[str, Any]) -> list[float | None]:
        seconds = self._seconds.get(name, DEFAULT_SECONDS)
        return call(name, self._functions[name], arguments, seconds=seconds)

    def _contained(
        self, name: str, arguments: dict[str, Any], problem: Problem
    ) -> list[float | None]:
        rate = self._rates[name]
        try:
            values = self._call(name, arguments)
        except RewardError as error:
            too_many = rate.add(failed=True)
            told = f"{error.what} ({rate.failures} of {rate.groups} groups so far)"
            self._events.append(f"rewards/failed on {problem.id}: {told}")
            if too_many:
                raise RewardError(
                    told,
                    where=f"rewards.{name}",
                    fix=f"{self._culprit(name, arguments, error)} {error.fix} (More than "
                    f"max_failure_rate, {rate.limit:g}, of the recent groups failed.)",
                ) from error
            return [None] * len(arguments["completions"])
        rate.add(failed=False)
        return values

    def _culprit(self, name: str, arguments: dict[str, Any], error: RewardError) -> str:
        """The first completion that fails when it is tried alone."""
        first = f"the first is {shown(arguments['completions'][0])}."
        if isinstance(error.__cause__, TimeoutError):  # each try could take as long again
            return f"It fails on this group, of whose completions {first}"
        for row in range(len(arguments["completions"])):
            alone = {column: [values[row]] for column, values in arguments.items()}
            try:
                self._call(name, alone)
            except RewardError:
                return (
                    f"It fails on the completion {shown(alone['completions'][0])} "
                    f"to {shown(alone['prompts'][0])}."
                )
        return f"It fails on this group, but on none of its completions alone; {first}"


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
    return RewardStack(
        functions,
        {reward_label(c.name): c.max_failure_rate for c in configs},
        {reward_label(c.name): c.timeout_seconds for c in configs},
    )


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
