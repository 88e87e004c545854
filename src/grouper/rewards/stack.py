"""The rewards of a recipe, run over one group and checked on the way out."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from grouper.config.schema import LARGEST, RewardConfig
from grouper.errors import GrouperError, RewardError, raise_all
from grouper.rewards.base import RewardFunction
from grouper.rewards.building import BuiltReward
from grouper.rewards.calling import DEFAULT_SECONDS, arguments_of, call, shown
from grouper.rewards.onlooking import Notes, TrainerState
from grouper.rewards.registry import find_reward, reward_label
from grouper.types import (
    AnswerFormat,
    Completion,
    FinishReason,
    Grade,
    Problem,
    Prompt,
    Reward,
    Tally,
    Verdict,
)

DEFAULT_LIMIT = float(RewardConfig.model_fields["max_failure_rate"].default)
# How many groups back the rate of failures looks.
WINDOW = 100
# A rate over fewer groups says nothing: until then they are counted as this many.
START = 20


class FailureRate:
    """Failures of one reward function.

    Args:
        limit: the share of the recent groups that may fail; 0 stops at the first failure, and 1
            never stops.

    >>> rate = FailureRate(0.1)
    >>> [rate.add(failed=True) for _ in range(3)]
    [False, False, True]
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.failures = 0
        """Of all groups so far."""
        self.groups = 0
        self._recent: deque[bool] = deque(maxlen=WINDOW)

    def add(self, *, failed: bool) -> bool:
        """Count one group; whether the failures are now too many."""
        self.groups += 1
        self.failures += failed
        self._recent.append(failed)
        return sum(self._recent) > self.limit * max(START, len(self._recent))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON values."""
        return {"failures": self.failures, "groups": self.groups, "recent": list(self._recent)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a `state`; the limit stays as it is."""
        self.failures, self.groups = state["failures"], state["groups"]
        self._recent = deque(state["recent"], maxlen=WINDOW)


class RewardStack:
    """Named, weighted reward functions.

    Args:
        functions: (name, weight, function), each name once.
        limits: by name, the share of the recent groups a function may fail on.
        seconds: by name, how long a function may take for a group.
        varying: the functions that may answer the same input differently.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, float, RewardFunction]],
        limits: Mapping[str, float] | None = None,
        seconds: Mapping[str, float] | None = None,
        varying: Collection[str] = (),
    ) -> None:
        self.names = tuple(name for name, _, _ in functions)
        self.weights = {name: weight for name, weight, _ in functions}
        self._functions = {name: function for name, _, function in functions}
        self._rates = {n: FailureRate((limits or {}).get(n, DEFAULT_LIMIT)) for n in self.names}
        self._seconds = dict(seconds or {})
        self._varying = frozenset(varying)
        self._events: list[str] = []
        self._notes = Notes()

    def for_measuring(self) -> RewardStack:
        """The same functions with counts of their own, which never stop anything."""
        functions = [(name, self.weights[name], self._functions[name]) for name in self.names]
        return RewardStack(functions, dict.fromkeys(self.names, 1.0), self._seconds, self._varying)

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

    def begin_step(self, step: int, total: int) -> None:
        """Tell users' functions how far training is, and forget what they logged before.

        Args:
            step: finished steps.
            total: steps of the phase.
        """
        self._notes = Notes(TrainerState(global_step=step, max_steps=total))

    def logged(self) -> dict[str, Tally]:
        """What users' functions have logged in this step, as metrics."""
        return self._notes.tallies()

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

    def check(
        self,
        *,
        problem: Problem | None = None,
        prompt: Prompt | None = None,
        right: str | None = None,
    ) -> list[str]:
        """Try every function on one problem, twice: shape, finiteness, range and determinism.

        Args:
            problem: an example whose columns the functions will see; a made-up one if left out.
            prompt: its prompt.
            right: a completion that answers the problem with its reference, as the prompt's
                format wants it; the bare reference if left out.

        Returns:
            A warning for each function of the user's that pays `right` its minimum, or that may
            answer the same input differently.

        Raises:
            RewardError: everything that is wrong, all functions in one message.
        """
        problem = problem or Problem(id="check/0", question="What is 2+2?", answer="4", source="")
        prompt = prompt or Prompt(problem_id=problem.id, text=problem.question, token_ids=(0,))
        completions, grades = _examples(problem.answer if right is None else right)
        arguments = arguments_of(problem, prompt, completions, grades)
        problems: list[GrouperError] = []
        warnings = [
            f"the reward {name!r} is declared as not deterministic: the run cannot be repeated, "
            "nor continued exactly"
            for name in self.names
            if name in self._varying
        ]
        for name in self.names:
            try:
                first = self._call(name, arguments)
                second = first if name in self._varying else self._call(name, arguments)
            except RewardError as error:
                problems.append(error)
                continue
            if first != second:
                problems.append(
                    RewardError(
                        f"the reward {name!r} gave {first} and then {second} for the same input",
                        where="rewards",
                        fix="A reward must be a function of its input: seed or remove what "
                        "varies, or declare it with `deterministic: false`.",
                    )
                )
            elif self._pays_least(name, first):
                warnings.append(
                    f"the reward {name!r} pays {first[0]:g} for a right completion of "
                    f"{problem.id}, and no less for a text without an answer, an empty one, or "
                    "the same one three times: does it look for another layout, or compare with "
                    f"another column? The completion: {shown(completions[0].text)}; `answer` was "
                    f"{shown(problem.answer)}."
                )
        raise_all(problems)
        return warnings

    def _pays_least(self, name: str, values: Sequence[float | None]) -> bool:
        """Whether a user's function pays the first of some values, and none below it."""
        right, *others = values
        bounds = getattr(self._functions[name], "bounds", None)
        known = [value for value in others if value is not None]
        if isinstance(self._functions[name], BuiltReward) or right is None or not known:
            return False
        lowest = min(known) if bounds is None else bounds[0]
        return self.weights[name] >= 0 and right <= lowest

    def _call(
        self, name: str, arguments: dict[str, Any], notes: Notes | None = None
    ) -> list[float | None]:
        seconds = self._seconds.get(name, DEFAULT_SECONDS)
        values = call(name, self._functions[name], arguments, seconds=seconds, notes=notes)
        weight = self.weights[name]
        for value in values:
            if value is not None and abs(weight * value) > LARGEST:
                raise RewardError(
                    f"the reward {name!r} returned {value:g}, which its weight {weight:g} makes "
                    f"more than {LARGEST:g}",
                    where="rewards",
                    fix="Use a smaller weight: beyond, a difference of 0.1 is lost.",
                )
        return values

    def _contained(
        self, name: str, arguments: dict[str, Any], problem: Problem
    ) -> list[float | None]:
        rate = self._rates[name]
        try:
            values = self._call(name, arguments, self._notes)
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


def build_rewards(configs: Sequence[RewardConfig], layout: AnswerFormat) -> RewardStack:
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
        [reward_label(c.name) for c in configs if not c.deterministic],
    )


def _examples(right: str) -> tuple[list[Completion], list[Grade]]:
    """A right, a wrong, an empty and a rambling completion."""
    texts = (right, "no idea", "", "\n".join([right] * 3))
    verdicts = (Verdict.CORRECT, Verdict.INCORRECT, Verdict.NO_ANSWER, Verdict.INCORRECT)
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
