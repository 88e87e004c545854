"""What a reward is: one function of one `Completed`; and the stack of a recipe's rewards."""

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
from grouper.files import append_line, reading, whole_lines
from grouper.grading import extract
from grouper.grading.pool import shared_grader
from grouper.rewards.calling import (
    Content,
    Notes,
    RewardFunction,
    arguments_of,
    begin,
    code_fingerprints,
    load_user_object,
    reward_label,
    shown,
)
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
    """What was sampled."""
    format: AnswerFormat
    columns: Mapping[str, Any] = field(default_factory=dict)
    """This completion's entry of every other argument (see `calling.RewardFunction`)."""
    group: Sequence[Completed] = field(default=(), repr=False)
    """All completions of the same prompt, this one among them."""

    @property
    def whole(self) -> str:
        """The text after what the prompt has already opened (`<think>`)."""
        return self.format.prefix + self.text

    @property
    def answer(self) -> str | None:
        """The answer in the place where the prompt's format wants it, or None."""
        return extract(self.text, self.format.contract).answer

    @cached_property
    def reference(self) -> str:
        r"""The reference answer alone, even if the column is a worked solution."""
        for name in ("reference_answer", "answer", "solution"):
            if self.columns.get(name) is not None:
                return _final_answer(str(self.columns[name]))
        raise ValueError("this reward needs a column reference_answer, answer or solution")

    @property
    def grade(self) -> Grade:
        """The grade from the stack; without one (inside TRL) the reward grades by itself."""
        given: Grade | None = self.columns.get("grades")
        if given is not None:
            return given
        for one in self.group:
            _ = one.grading  # all of them side by side
        return self.grading.result()

    @cached_property
    def grading(self) -> Future[Grade]:
        """The future grade of the shared grader."""
        return shared_grader(self.format.contract).submit(self.text, self.reference)

    @property
    def correct(self) -> bool | None:
        """Whether the answer is right; None where the reference cannot be read."""
        return None if self.grade.verdict is Verdict.NOT_SCORED else self.grade.correct

    @property
    def tags(self) -> tuple[str, str, str, str]:
        """Reasoning open and close, answer open and close."""
        if self.format.tags is None:
            raise ValueError(f"the prompt format {self.format.name} has no tags")
        return self.format.tags


def _final_answer(reference: str) -> str:
    r"""The answer alone of a worked solution (`... #### 72`, `\boxed{72}`)."""
    if "####" in reference:
        return reference.rpartition("####")[2].strip()
    boxed = extract(reference, AnswerContract(kind=AnswerKind.BOXED)).answer
    return reference if boxed is None else boxed


def text_of(completion: Content) -> str:
    """The assistant's text, in either shape.

    >>> text_of("4"), text_of([{"role": "assistant", "content": "5"}])
    ('4', '5')
    """
    if isinstance(completion, str):
        return completion
    return "".join(str(message["content"] or "") for message in completion)


# --- one reward ----------------------------------------------------------------------------------

Variant = Literal["default", "original"]
"""`original`: as the published function has it, faults included."""

Score = Callable[..., Any]
"""`score(completed, **params)`: a number, None for "not scored", or an awaitable of either."""

REWARDS: dict[str, Rule] = {}
"""Built-in rewards by name."""


def reward(*ends: float | str, **options: Any) -> Callable[[Score], Rule]:
    """A decorator: a function of one `Completed` becomes a reward.

    Its further parameters are those a recipe may set, checked by their annotations.

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
        original: with `variant: original`, the defaults that differ.
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
        """The reward in a prompt format, with parameters.

        Raises:
            ConfigError: an unknown or missing parameter, or an impossible value.
            RewardError: the reward needs tags and the format has none.
        """
        name, originally = self.__name__, params.get("variant") == "original"
        given = {**(self.original if originally else {}), **params}
        where, text = f"rewards.{name}.params", json.dumps(given)
        values = dict(validate_json(self._parameters, text, where=where))
        if self.tags and fmt.tags is None:
            raise RewardError(
                f"the reward {name!r} needs a prompt format with tags",
                where="rewards",
                fix="Use a tagged prompt.format, or boxed_format as the reward.",
            )
        ends = [values[end] if isinstance(end, str) else end for end in self.ends]
        known = [self.times * end for end in ends if end is not None]
        return _InFormat(self, fmt, values, (min(known), max(known)) if known else None)

    @cached_property
    def _parameters(self) -> type[Section]:
        parameters = list(inspect.signature(self.score).parameters.values())[1:]
        hints = typing.get_type_hints(self.score, include_extras=True)
        fields: dict[str, Any] = {
            p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default)
            for p in parameters
            if p.kind is not p.VAR_KEYWORD
        }
        return create_model(self.__name__, __base__=Section, **fields)

    def __reduce__(self) -> str:
        return self.score.__qualname__


@dataclass(eq=False)
class _InFormat:
    """A reward in a prompt format, with its parameters: what a recipe or TRL calls."""

    rule: Rule
    format: AnswerFormat
    params: Mapping[str, Any]
    bounds: tuple[float, float] | None

    def __post_init__(self) -> None:
        self.__name__, self.ours = self.rule.__name__, self.rule.ours

    def __call__(self, *, completions: Sequence[Content], **columns: Any) -> Any:
        """One value per completion, or an awaitable of all where the function is async."""
        groups: dict[str, list[Completed]] = {}
        batch = []
        for row, completion in enumerate(completions):
            own = {
                name: entry[row] if isinstance(entry, (list, tuple)) else entry
                for name, entry in columns.items()
            }
            group = groups.setdefault(str(own["prompts"]), [])
            text = text_of(completion)
            batch.append(Completed(text=text, format=self.format, columns=own, group=group))
            group.append(batch[-1])
        values = [self.rule.score(done, **self.params) for done in batch]
        return _together(values) if any(map(inspect.isawaitable, values)) else values


async def _together(values: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*values)


# --- a recipe's rewards --------------------------------------------------------------------------


def find_reward(config: RewardConfig, fmt: AnswerFormat) -> RewardFunction:
    """The function a recipe names, with its parameters set.

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
        kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # some functions written in C have no signature
        kinds = []
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        raise RewardError(
            f"the reward function {config.name!r} takes no **kwargs",
            where="rewards",
            fix="Every column of the data is passed by name: declare those you use and add "
            "**kwargs, as in `def f(prompts, completions, answer, **kwargs)`. A function of one "
            "completion needs the decorator `grouper.reward`.",
        )
    return _with_params(function, params) if params else function


def _with_params(function: Callable[..., Any], params: Mapping[str, Any]) -> RewardFunction:
    """The function with its parameters set, which win over a column of the same name."""

    @wraps(function)  # the function's own attributes come along: `bounds` is one
    def given(**columns: Any) -> Any:
        moved = {f"source_{name}": columns[name] for name in params if name in columns}
        return function(**{**moved, **columns, **params})

    return given


def build_rewards(configs: Sequence[RewardConfig], fmt: AnswerFormat) -> RewardStack:
    """The stack of a recipe's `rewards` section.

    Raises:
        GrouperError: every unknown name, parameter, file or function, in one message.
    """
    functions: dict[str, tuple[RewardConfig, RewardFunction]] = {}
    problems: list[GrouperError] = []
    for config in configs:
        label = reward_label(config.name)
        if label in functions:
            problems.append(
                RewardError(f"two rewards are called {label!r}", where="rewards", fix="Rename one.")
            )
        try:
            functions[label] = (config, find_reward(config, fmt))
        except GrouperError as error:
            problems.append(error)
    raise_all(problems)
    return RewardStack(list(functions.values()))


# Completions that async functions are called with at one time, of one group at least.
AT_ONCE = 32

_Values = Callable[[], list[float | None]]


class Group(NamedTuple):
    """Completions of one prompt, to be rewarded together."""

    problem: Problem
    """Whose columns the functions see."""
    prompt: Prompt
    completions: Sequence[Completion]
    grades: Sequence[Grade]
    """One per completion."""


class RewardStack:
    """Named, weighted reward functions.

    Args:
        functions: each with its entry of the recipe, no two of one name.
    """

    def __init__(self, functions: Sequence[tuple[RewardConfig, RewardFunction]]) -> None:
        self._functions = {reward_label(config.name): (config, f) for config, f in functions}
        self.weights = {name: config.weight for name, (config, _) in self._functions.items()}
        self._file: Path | None = None
        # Validation and rollouts may be scored in threads at the same time; functions need not be
        # thread-safe.
        self._one_at_a_time = threading.RLock()
        self._answers: dict[str, dict[str, Callable[[], dict[str, Any]]]] = defaultdict(dict)
        """Step or evaluation -> key -> what waits for the recorded row."""
        # What their values depend on besides the question.
        self._varying = {
            reward_label(c.name): [c.params, code_fingerprints([c.name])]
            for c, _ in functions
            if not c.deterministic
        }

    @property
    def ours(self) -> bool:
        """Whether all are built in: pure functions, which another process may call."""
        return all(getattr(function, "ours", False) for _, function in self._functions.values())

    def remember(self, path: Path) -> None:
        """Record the values of functions that vary in a file, and do not call them for those again.

        A line is written as soon as the values arrive, in the order of the groups. A resumed run
        draws the completions of an unfinished step again, which are the same, and finds their
        values here.
        """
        self._file = path
        fix = "Restore the file, or delete it: they are then asked again."
        with reading(path, "what rewards have answered cannot be read", fix):
            for row in whole_lines(path):
                self._answers[row["place"]][row["key"]] = partial(dict, row)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and highest total; None where a function does not state its range."""
        parts = [
            (c.weight, getattr(f, "bounds", None)) for c, f in self._functions.values() if c.weight
        ]
        ends = [[weight * end for end in stated] for weight, stated in parts if stated]
        if len(ends) < len(parts):
            return None
        return sum(map(min, ends)), sum(map(max, ends))

    def score(self, group: Group, notes: Notes | None = None) -> list[Reward]:
        """As `score_all`, of one group."""
        (rewards,) = self.score_all([group], notes)
        return rewards

    def score_all(
        self, groups: Iterable[Group], notes: Notes | None = None
    ) -> Iterator[list[Reward]]:
        """Yield the rewards of each group in order, one per completion.

        Args:
            groups: taken one by one: while async functions are waited for, they are called with
                the next ones, up to `AT_ONCE` completions at a time.
            notes: of the step. A function that fails is noted there, and its component is None
                ("not scored") for this group.

        Raises:
            RewardError: a function failed, and there are no notes.
            RunFolderError: what a function answered cannot be written.
            ValueError: not one grade per completion.
        """
        begun: deque[tuple[Group, Callable[[], list[Reward]]]] = deque()
        for group in groups:
            begun.append((group, self._begin_group(group, notes)))
            while sum(len(one.completions) for one, _ in begun) >= AT_ONCE:
                yield begun.popleft()[1]()
        for _, wait in begun:
            yield wait()

    def _begin_group(self, group: Group, notes: Notes | None) -> Callable[[], list[Reward]]:
        if len(group.completions) != len(group.grades):
            raise ValueError("not one grade per completion")
        arguments = arguments_of(*group)
        with self._one_at_a_time:
            values = {name: self._begin(name, arguments, notes) for name in self._functions}

        def rewards() -> list[Reward]:
            columns = {}
            for name, wait in values.items():
                try:
                    columns[name] = wait()
                except RewardError as error:
                    if notes is None:
                        raise
                    notes.events.append(f"rewards/failed on {group.problem.id}: {error.what}")
                    notes.failures.setdefault(name, []).append((error, arguments))
                    columns[name] = [None] * len(group.completions)
            if notes is not None:
                notes.groups += 1
            return [
                Reward(components={n: columns[n][row] for n in columns}, weights=self.weights)
                for row in range(len(group.completions))
            ]

        return rewards

    def end_step(self, notes: Notes) -> None:
        """Stop the run if a function failed too often in a step; else forget what they answered.

        Nobody asks for these values again, and a long run has many.

        Raises:
            RewardError: it failed on more than its `max_failure_rate` of a step's groups, of
                which fewer than `FEWEST` count as that many; the input it failed on is shown.
        """
        for name, failures in notes.failures.items():
            limit, (error, arguments) = self._functions[name][0].max_failure_rate, failures[0]
            if len(failures) > limit * max(FEWEST, notes.groups):
                raise RewardError(
                    f"{error.what} ({len(failures)} of the step's {notes.groups} groups)",
                    where=f"rewards.{name}",
                    fix=f"{self._culprit(name, arguments, error)} {error.fix} (More than "
                    f"max_failure_rate, {limit:g}, of the step's groups failed.)",
                ) from error
        self._answers.pop(notes.place, None)

    def _culprit(self, name: str, arguments: Mapping[str, Any], error: RewardError) -> str:
        """A sentence that shows the first completion that fails when it is tried alone."""
        first = f"the first is {shown(arguments['completions'][0])}."
        if isinstance(error.__cause__, TimeoutError):  # each try could take as long again
            return f"It fails on this group, of whose completions {first}"
        for row in range(len(arguments["completions"])):
            alone = {column: [values[row]] for column, values in arguments.items()}
            try:
                begin(*self._functions[name], alone)[0]()
            except RewardError:
                return (
                    f"It fails on the completion {shown(alone['completions'][0])} "
                    f"to {shown(alone['prompts'][0])}."
                )
        return f"It fails on this group, but on none of its completions alone; {first}"

    def _begin(self, name: str, arguments: Mapping[str, Any], notes: Notes | None) -> _Values:
        """Call one function; one that varies is called once per question and run."""
        if self._file is None or notes is None or name not in self._varying:
            return begin(*self._functions[name], arguments, notes)[0]
        group = [arguments[part] for part in ("prompts", "completions", "answer")]
        question = json.dumps([notes.place, name, self._varying[name], group])
        key = hashlib.sha256(question.encode()).hexdigest()
        answers = self._answers[notes.place]
        if key not in answers:
            row = {"key": key, "reward": name, "place": notes.place}
            own = replace(notes, logged=[])
            values, goes_on = begin(*self._functions[name], arguments, own)
            answers[key] = cache(partial(self._recorded, row, values, own))
            if not goes_on:  # a kill while others are waited for must not lose it
                answers[key]()

        def read() -> list[float | None]:
            row = answers[key]()
            notes.logged += [(metric, value) for metric, value in row["logged"]]
            if "failed" in row:
                raise RewardError(row["failed"][0], where="rewards", fix=row["failed"][1])
            values: list[float | None] = row["values"]
            return values

        return read

    def _recorded(self, row: dict[str, Any], values: _Values, own: Notes) -> dict[str, Any]:
        """The row with what a function has answered, which is in the file before it is used."""
        assert self._file is not None
        try:
            row["values"] = values()
        except RewardError as error:
            row["failed"] = [error.what, error.fix]
        row["logged"] = own.logged
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
        problems: list[GrouperError] = []
        warnings = [
            f"the reward {name!r} is declared as not deterministic: another run will differ; this "
            "one records its values, and reads them when it is resumed"
            for name in self._varying
        ]
        for name, part in self._functions.items():
            try:
                first = begin(*part, arguments)[0]()
                second = begin(*part, arguments)[0]() if part[0].deterministic else first
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
        """Whether a user's function pays the right completion no more than the others."""
        (config, function), (right, *others) = self._functions[name], values
        known = [value for value in others if value is not None]
        if getattr(function, "ours", False) or right is None or not known:
            return False
        lowest = (getattr(function, "bounds", None) or (min(known),))[0]
        return config.weight >= 0 and right <= lowest


def _examples(right: str) -> tuple[list[Completion], list[Grade]]:
    """A right, a wrong, an empty and a rambling completion."""
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
    """A made-up completion of about four characters per token, finished by a stop token."""
    return Completion.bare((0,) * (len(text) // 4 + 1), text)
