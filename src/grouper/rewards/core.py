"""Definition of a reward, a function of one `Completed`; and the stack of a recipe's rewards."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import threading
import typing
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial, update_wrapper, wraps
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import create_model

from grouper.config.checks import validate_json
from grouper.config.credentials import expanded
from grouper.config.schema import RewardConfig, Section
from grouper.errors import GrouperError, RewardError, raise_all
from grouper.files import append_line, read_errors_as, whole_lines
from grouper.grading import extract
from grouper.grading.pool import shared_grader
from grouper.rewards.call import (
    Content,
    RewardFunction,
    RewardLog,
    arguments_of,
    begin,
    reward_label,
)
from grouper.rewards.user_code import code_fingerprints, load_user_object, shown
from grouper.types import (
    AnswerContract,
    AnswerFormat,
    AnswerKind,
    Completion,
    Grade,
    Problem,
    Prompt,
    Reward,
    Verdict,
)

# A share of fewer groups means little: a step with fewer counts as this many.
FEWEST = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Completed:
    r"""One completion as a reward sees it.

    >>> from grouper.prompts import FORMATS
    >>> done = Completed(
    ...     text="<reasoning>2+2</reasoning><answer>4</answer>", format=FORMATS["xml"],
    ...     columns={"answer": "2+2=4\n#### 4"})
    >>> done.answer, done.reference, done.grade.correct, done.tags[2:]
    ('4', '4', True, ('<answer>', '</answer>'))
    """

    text: str
    """The sampled text."""
    format: AnswerFormat
    columns: Mapping[str, Any] = field(default_factory=dict)
    """This completion's entry of every other argument (see `call.RewardFunction`)."""
    group: Sequence[Completed] = field(default=(), repr=False)
    """All completions of the same prompt, including this one."""

    @property
    def whole(self) -> str:
        """The text, preceded by the tag that the prompt has already opened (`<think>`)."""
        return self.format.prefix + self.text

    @property
    def answer(self) -> str | None:
        """The answer in the place where the prompt's format wants it, or None.

        Where that is a program, what it has printed.
        """
        if self.format.contract.kind is AnswerKind.PROGRAM:
            return self.grade.extracted
        return extract(self.text, self.format.contract).answer

    @cached_property
    def reference(self) -> str:
        r"""The reference answer alone, even if the column is a worked solution."""
        for name in ("reference_answer", "answer", "solution"):
            column = self.columns.get(name)
            if column is not None:
                return _final_answer(str(column))
        raise ValueError("this reward needs a column reference_answer, answer or solution")

    @property
    def grade(self) -> Grade:
        """The grade from the stack; without one (inside TRL) the reward grades by itself."""
        grade: Grade | None = self.columns.get("grades")
        if grade is not None:
            return grade
        # Submit the whole group first, so that its completions are graded in parallel.
        for completed in self.group:
            _ = completed.grading
        return self.grading.result()

    @cached_property
    def grading(self) -> Future[Grade]:
        """The future grade of the shared grader."""
        return shared_grader(self.format.contract).submit(self.text, self.reference)

    @property
    def correct(self) -> bool | None:
        """The grade as true or false; None where the reference cannot be read."""
        if self.grade.verdict is Verdict.NOT_SCORED:
            return None
        return self.grade.correct

    @property
    def tags(self) -> tuple[str, str, str, str]:
        """Reasoning open and close, answer open and close."""
        if self.format.tags is None:
            raise ValueError(f"the prompt format {self.format.name} has no tags")
        return self.format.tags


def _final_answer(reference: str) -> str:
    r"""Extract the answer of a worked solution (`... #### 72`, `\boxed{72}`)."""
    if "####" in reference:
        return reference.rpartition("####")[2].strip()
    boxed = extract(reference, AnswerContract(kind=AnswerKind.BOXED)).answer
    return reference if boxed is None else boxed


def text_of(completion: Content) -> str:
    """Return the assistant's text of a completion in either shape.

    >>> text_of("4"), text_of([{"role": "assistant", "content": "5"}])
    ('4', '5')
    """
    if isinstance(completion, str):
        return completion
    return "".join(str(message["content"] or "") for message in completion)


# --- one reward ----------------------------------------------------------------------------------

Variant = Literal["default", "original"]
"""`original`: the published function, its bugs included."""

Score = Callable[..., Any]
"""`score(completed, **params)`: a number, None for "not scored", or an awaitable of either."""

REWARDS: dict[str, Rule] = {}
"""Built-in rewards by name."""


def reward(*ends: float | str, **options: Any) -> Callable[[Score], Rule]:
    """Make a decorator that turns a function of one `Completed` into a reward.

    A recipe may set the function's further parameters, which are checked by their annotations.

    Args:
        ends: values, and names of parameters that are values: the reward pays from the lowest to
            the highest of them. None: no range is stated or checked.
        options: as `Rule` has them.

    >>> @reward(0, "most")
    ... def brief(done, *, most=1.0):
    ...     return most / (1 + len(done.text))
    >>> from grouper.prompts import FORMATS
    >>> function = brief(FORMATS["xml"], most=2.0)
    >>> function(prompts=["q", "q"], completions=["", "4"]), function.bounds
    ([2.0, 1.0], (0, 2.0))
    """
    return lambda score: Rule(score, ends, **options)


@dataclass(eq=False)
class Rule:
    """A decorated function; given a prompt format and parameters, it returns what TRL takes.

    Args:
        score: scores one completion.
        ends: as `reward` has them.
        name: the name in recipes and records; by default that of the function.
        times: the reward is a sum of this many of the values in `ends`.
        tags: whether it needs a prompt format with tags.
        original: the defaults that differ with `variant: original`.
    """

    score: Score
    ends: Sequence[float | str]
    name: str = ""
    times: int = 1
    tags: bool = False
    original: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        update_wrapper(self, self.score)
        self.__name__ = self.name or self.score.__name__
        self.ours = self.score.__module__.startswith("grouper.rewards.")
        if self.ours:
            REWARDS[self.__name__] = self

    def __call__(self, fmt: AnswerFormat, **params: Any) -> RewardFunction:
        """Bind the reward to a prompt format and parameters.

        Raises:
            ConfigError: an unknown or missing parameter, or an impossible value.
            RewardError: the reward needs tags and the format has none.
        """
        name = self.__name__
        if params.get("variant") == "original":
            params = {**self.original, **params}
        where = f"rewards.{name}.params"
        values = dict(validate_json(self._parameters, json.dumps(params), where=where))
        if self.tags and fmt.tags is None:
            raise RewardError(
                f"the reward {name!r} needs a prompt format with tags",
                where="rewards",
                fix="Use a tagged prompt.format, or boxed_format as the reward.",
            )
        return _BoundReward(self, fmt, values, self._bounds(values))

    def _bounds(self, values: Mapping[str, Any]) -> tuple[float, float] | None:
        """Return the lowest and highest value with these parameters, if they are stated."""
        ends = []
        for end in self.ends:
            value = values[end] if isinstance(end, str) else end
            if value is not None:
                ends.append(self.times * value)
        if not ends:
            return None
        return min(ends), max(ends)

    @cached_property
    def _parameters(self) -> type[Section]:
        """A section with the parameters that a recipe may set."""
        parameters = list(inspect.signature(self.score).parameters.values())[1:]
        hints = typing.get_type_hints(self.score, include_extras=True)
        fields: dict[str, Any] = {}
        for parameter in parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            default = parameter.default
            if default is parameter.empty:
                default = ...  # pydantic's sign for a required field
            fields[parameter.name] = (hints.get(parameter.name, Any), default)
        return create_model(self.__name__, __base__=Section, **fields)

    def __reduce__(self) -> str:
        return self.score.__qualname__


@dataclass(eq=False)
class _BoundReward:
    """A reward with its prompt format and parameters, as a recipe or TRL calls it."""

    rule: Rule
    format: AnswerFormat
    params: Mapping[str, Any]
    bounds: tuple[float, float] | None

    def __post_init__(self) -> None:
        self.__name__ = self.rule.__name__
        self.ours = self.rule.ours

    def __call__(self, *, completions: Sequence[Content], **columns: Any) -> Any:
        """Return one value per completion, or an awaitable of all where the function is async."""
        groups: dict[str, list[Completed]] = {}
        batch = []
        for row, completion in enumerate(completions):
            row_columns = {
                name: column[row] if isinstance(column, (list, tuple)) else column
                for name, column in columns.items()
            }
            group = groups.setdefault(str(row_columns["prompts"]), [])
            done = Completed(
                text=text_of(completion), format=self.format, columns=row_columns, group=group
            )
            # Every completion refers to the list of its group, which grows until the loop ends.
            group.append(done)
            batch.append(done)
        values = [self.rule.score(done, **self.params) for done in batch]
        if any(inspect.isawaitable(value) for value in values):
            return _gather(values)
        return values


async def _gather(values: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*values)


# --- a recipe's rewards --------------------------------------------------------------------------


def find_reward(config: RewardConfig, fmt: AnswerFormat) -> RewardFunction:
    """Find the function that a recipe names, and set its parameters.

    Raises:
        GrouperError: no such name, file, module or function, or a parameter it does not have or
            that refers to a variable of the environment which is not set.
    """
    params = expanded(config.params, where=f"rewards.{config.name}.params", error=RewardError)
    function = REWARDS.get(config.name) or load_user_object(
        config.name, kind="reward", where="rewards", error=RewardError, known=REWARDS
    )
    if isinstance(function, Rule):
        return function(fmt, **params)
    try:
        parameter_kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # some functions written in C have no signature
        parameter_kinds = []
    if inspect.Parameter.VAR_KEYWORD not in parameter_kinds:
        raise RewardError(
            f"the reward function {config.name!r} takes no **kwargs",
            where="rewards",
            fix="Every column of the data is passed by name: declare those you use and add "
            "**kwargs, as in `def f(prompts, completions, answer, **kwargs)`. A function of one "
            "completion needs the decorator `grouper.reward`.",
        )
    return _with_params(function, params) if params else function


def _with_params(function: Callable[..., Any], params: Mapping[str, Any]) -> RewardFunction:
    """Set a function's parameters, which win over a column of the same name."""

    @wraps(function)  # copies the function's attributes, of which `bounds` may be one
    def with_params(**columns: Any) -> Any:
        renamed = {f"source_{name}": columns[name] for name in params if name in columns}
        return function(**{**renamed, **columns, **params})

    return with_params


def build_rewards(configs: Sequence[RewardConfig], fmt: AnswerFormat) -> RewardStack:
    """Build the stack of a recipe's `rewards` section.

    Raises:
        GrouperError: every unknown name, parameter, file or function, in one message.
    """
    functions: dict[str, tuple[RewardConfig, RewardFunction]] = {}
    errors: list[GrouperError] = []
    for config in configs:
        label = reward_label(config.name)
        if label in functions:
            errors.append(
                RewardError(f"two rewards are called {label!r}", where="rewards", fix="Rename one.")
            )
        try:
            functions[label] = (config, find_reward(config, fmt))
        except GrouperError as error:
            errors.append(error)
    raise_all(errors)
    return RewardStack(list(functions.values()))


# Completions that async functions are called with at one time, of one group at least.
AT_ONCE = 32

# Waits for the values of one function, and returns one per completion.
_WaitForValues = Callable[[], list[float | None]]


class Group(NamedTuple):
    """Completions of one prompt, to be rewarded together."""

    problem: Problem
    """The problem whose columns the functions see."""
    prompt: Prompt
    completions: Sequence[Completion]
    grades: Sequence[Grade]
    """One per completion."""


class RewardStack:
    """Named, weighted reward functions.

    Args:
        functions: pairs of an entry of the recipe and its function, no two of one name.
    """

    def __init__(self, functions: Sequence[tuple[RewardConfig, RewardFunction]]) -> None:
        self._functions: dict[str, tuple[RewardConfig, RewardFunction]] = {}
        self.weights: dict[str, float] = {}
        # Functions that are not deterministic, with what their values depend on besides the
        # question: parameters and source code.
        self._varying: dict[str, list[Any]] = {}
        for config, function in functions:
            name = reward_label(config.name)
            self._functions[name] = (config, function)
            self.weights[name] = config.weight
            if not config.deterministic:
                self._varying[name] = [config.params, code_fingerprints([config.name])]
        # The file in which their values are recorded.
        self._file: Path | None = None
        # Validation and rollouts may be scored in threads at the same time; functions need not be
        # thread-safe.
        self._one_at_a_time = threading.RLock()
        # Step or evaluation -> key -> a function that waits for the recorded row.
        self._answers: dict[str, dict[str, Callable[[], dict[str, Any]]]] = defaultdict(dict)

    @property
    def ours(self) -> bool:
        """True if all are built in: pure functions, which another process may call."""
        return all(getattr(function, "ours", False) for _, function in self._functions.values())

    def remember(self, path: Path) -> None:
        """Record the values of functions that vary in a file, and reuse the recorded ones.

        A line is written as soon as the values arrive, in the order of the groups. A resumed run
        samples the completions of an unfinished step again, which are the same, and reads their
        values from this file.
        """
        self._file = path
        fix = "Restore the file, or delete it: they are then called again."
        with read_errors_as(path, "what rewards have answered cannot be read", fix):
            for row in whole_lines(path):
                self._answers[row["place"]][row["key"]] = partial(dict, row)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and highest total; None where a function does not state its range."""
        ranges = []
        for config, function in self._functions.values():
            if not config.weight:
                continue
            bounds = getattr(function, "bounds", None)
            if not bounds:
                return None
            ranges.append([config.weight * end for end in bounds])
        return sum(map(min, ranges)), sum(map(max, ranges))

    def score(self, group: Group, reward_log: RewardLog | None = None) -> list[Reward]:
        """Score one group, as `score_all` does."""
        (rewards,) = self.score_all([group], reward_log)
        return rewards

    def score_all(
        self, groups: Iterable[Group], reward_log: RewardLog | None = None
    ) -> Iterator[list[Reward]]:
        """Yield the rewards of each group in order, one per completion.

        Args:
            groups: taken one by one: while async functions are running, they are called with the
                next ones, up to `AT_ONCE` completions at a time.
            reward_log: the records of the step. They receive the failure of a function, whose
                component is then None ("not scored") for this group.

        Raises:
            RewardError: a function failed, and there is no `reward_log`.
            RunFolderError: the values of a function cannot be written.
            ValueError: not one grade per completion.
        """
        pending: deque[tuple[Group, Callable[[], list[Reward]]]] = deque()
        for group in groups:
            pending.append((group, self._begin_group(group, reward_log)))
            while sum(len(waiting.completions) for waiting, _ in pending) >= AT_ONCE:
                _, wait_for_rewards = pending.popleft()
                yield wait_for_rewards()
        for _, wait_for_rewards in pending:
            yield wait_for_rewards()

    def _begin_group(
        self, group: Group, reward_log: RewardLog | None
    ) -> Callable[[], list[Reward]]:
        """Call all functions with a group; return a function that waits for its rewards."""
        n = len(group.completions)
        if n != len(group.grades):
            raise ValueError("not one grade per completion")
        arguments = arguments_of(*group)
        with self._one_at_a_time:
            waits = {name: self._begin(name, arguments, reward_log) for name in self._functions}

        def wait_for_rewards() -> list[Reward]:
            values = {}
            for name, wait_for_values in waits.items():
                try:
                    values[name] = wait_for_values()
                except RewardError as error:
                    if reward_log is None:
                        raise
                    reward_log.events.append(f"rewards/failed on {group.problem.id}: {error.what}")
                    reward_log.failures.setdefault(name, []).append((error, arguments))
                    values[name] = [None] * n
            if reward_log is not None:
                reward_log.groups += 1
            rewards = []
            for row in range(n):
                components = {name: column[row] for name, column in values.items()}
                rewards.append(Reward(components=components, weights=self.weights))
            return rewards

        return wait_for_rewards

    def end_step(self, reward_log: RewardLog) -> None:
        """Stop the run if a function failed too often in a step; else drop the recorded values.

        They are not needed again, and a long run has many.

        Raises:
            RewardError: a function failed on more than its `max_failure_rate` of a step's groups,
                of which fewer than `FEWEST` count as that many; the message shows the input.
        """
        for name, failures in reward_log.failures.items():
            config, _ = self._functions[name]
            limit = config.max_failure_rate
            if len(failures) > limit * max(FEWEST, reward_log.groups):
                error, arguments = failures[0]
                raise RewardError(
                    f"{error.what} ({len(failures)} of the step's {reward_log.groups} groups)",
                    where=f"rewards.{name}",
                    fix=f"{self._culprit(name, arguments, error)} {error.fix} (More than "
                    f"max_failure_rate, {limit:g}, of the step's groups failed.)",
                ) from error
        self._answers.pop(reward_log.place, None)

    def _culprit(self, name: str, arguments: Mapping[str, Any], error: RewardError) -> str:
        """Write a sentence that shows the first completion that fails when it is tried alone."""
        first = f"the first is {shown(arguments['completions'][0])}."
        if isinstance(error.__cause__, TimeoutError):  # each try could take as long again
            return f"It fails on this group, of whose completions {first}"
        for row in range(len(arguments["completions"])):
            row_arguments = {column: [values[row]] for column, values in arguments.items()}
            try:
                wait_for_values, _ = begin(*self._functions[name], row_arguments)
                wait_for_values()
            except RewardError:
                return (
                    f"It fails on the completion {shown(row_arguments['completions'][0])} "
                    f"to {shown(row_arguments['prompts'][0])}."
                )
        return f"It fails on this group, but on none of its completions alone; {first}"

    def _begin(
        self, name: str, arguments: Mapping[str, Any], reward_log: RewardLog | None
    ) -> _WaitForValues:
        """Call one function; one that varies is called once per question and run."""
        config, function = self._functions[name]
        if self._file is None or reward_log is None or name not in self._varying:
            wait_for_values, _ = begin(config, function, arguments, reward_log)
            return wait_for_values
        texts = [arguments[column] for column in ("prompts", "completions", "answer")]
        question = json.dumps([reward_log.place, name, self._varying[name], texts])
        key = hashlib.sha256(question.encode()).hexdigest()
        answers = self._answers[reward_log.place]
        if key not in answers:
            row = {"key": key, "reward": name, "place": reward_log.place}
            call_log = replace(reward_log, logged=[])
            wait_for_values, still_running = begin(config, function, arguments, call_log)
            answers[key] = cache(partial(self._record, row, wait_for_values, call_log))
            if not still_running:
                # Written now: a kill while other functions run must not lose it.
                answers[key]()

        def wait_for_recorded_values() -> list[float | None]:
            row = answers[key]()
            reward_log.logged += [(metric, value) for metric, value in row["logged"]]
            if "failed" in row:
                what, fix = row["failed"]
                raise RewardError(what, where="rewards", fix=fix)
            values: list[float | None] = row["values"]
            return values

        return wait_for_recorded_values

    def _record(
        self, row: dict[str, Any], wait_for_values: _WaitForValues, call_log: RewardLog
    ) -> dict[str, Any]:
        """Wait for the values of a function; write them to the file before they are used."""
        assert self._file is not None
        try:
            row["values"] = wait_for_values()
        except RewardError as error:
            row["failed"] = [error.what, error.fix]
        row["logged"] = call_log.logged
        with self._one_at_a_time:
            append_line(self._file, row)
        return row

    def check(
        self,
        *,
        problem: Problem,
        prompt: Prompt,
        right: str,
    ) -> list[str]:
        """Try every function on one problem, twice: shape, finiteness, range and determinism.

        Args:
            problem: an example whose columns the functions will see.
            prompt: its prompt.
            right: a completion that answers the problem with its reference, as the prompt's
                format wants it.

        Returns:
            A warning for each function of the user's that pays `right` its minimum, or that may
            answer the same input differently.

        Raises:
            RewardError: everything that is wrong, all functions in one message.
        """
        completions, grades = _examples(right)
        arguments = arguments_of(problem, prompt, completions, grades)
        errors: list[GrouperError] = []
        warnings = [
            f"the reward {name!r} is declared as not deterministic: another run will differ; this "
            "one records its values, and reads them when it is resumed"
            for name in self._varying
        ]
        for name, (config, function) in self._functions.items():
            try:
                wait_for_values, _ = begin(config, function, arguments)
                first = wait_for_values()
                second = first
                if config.deterministic:
                    wait_for_values, _ = begin(config, function, arguments)
                    second = wait_for_values()
            except RewardError as error:
                errors.append(error)
                continue
            if first != second:
                errors.append(
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
        raise_all(errors)
        return warnings

    def _pays_least(self, name: str, values: Sequence[float | None]) -> bool:
        """Tell whether a user's function pays the right completion no more than the others."""
        config, function = self._functions[name]
        right_value, *wrong_values = values
        numbers = [value for value in wrong_values if value is not None]
        if getattr(function, "ours", False) or right_value is None or not numbers:
            return False
        bounds = getattr(function, "bounds", None)
        lowest = bounds[0] if bounds else min(numbers)
        return config.weight >= 0 and right_value <= lowest


def _examples(right: str) -> tuple[list[Completion], list[Grade]]:
    """Make a right, a wrong, an empty and a rambling completion, with their grades."""
    verdicts = {
        right: Verdict.CORRECT,
        "no idea": Verdict.INCORRECT,
        "": Verdict.NO_ANSWER,
        "\n".join([right] * 3): Verdict.INCORRECT,
    }
    grades = [
        Grade(verdict=verdict, extracted=text or None, stage="text", reason="an example")
        for text, verdict in verdicts.items()
    ]
    return [completed(text) for text in verdicts], grades


def completed(text: str) -> Completion:
    """Make a completion of about four characters per token, finished by a stop token."""
    token_ids = (0,) * (len(text) // 4 + 1)
    return Completion.bare(token_ids, text)
