"""The call of a reward function: its arguments, its time limit, the numbers it may return."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import numbers
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

from grouper.config.schema import LARGEST, RewardConfig
from grouper.errors import RewardError
from grouper.rewards.user_code import describe_exception, shown
from grouper.types import Completion, Grade, Message, Problem, Prompt, Tally

logger = logging.getLogger(__name__)

Content = str | Sequence[Message]
"""A prompt or completion: messages in chat recipes, a string in plain-text ones."""

# Time that a canceled function has for its `finally` blocks.
GRACE_SECONDS = 1.0


RewardFunction = Callable[..., Any]
"""Scores a batch of completions, as TRL's do; every argument has one entry per completion.

In addition to `prompts` and `completions` it receives the parsed `answer`, `solution`,
`reference_answer`, `reference_solution` and `question`; `grades`, `finish_reasons` and
`completion_ids`; and every column of the source row under its own name, or as `source_<name>` where
that name is one of these.
It returns one number per completion; None means "not scored" and takes that rollout out of its
group.
"""


# --- its arguments -------------------------------------------------------------------------------


def arguments_of(
    problem: Problem, prompt: Prompt, completions: Sequence[Completion], grades: Sequence[Grade]
) -> dict[str, Any]:
    """Build the arguments that a reward function is called with, one entry per completion.

    The parsed fields of the problem win over columns of the source row: a column that has the
    name of one of them, or of another argument of the call, is passed as `source_<name>`.
    """
    n = len(completions)
    solution = problem.answer if problem.solution is None else problem.solution
    texts = [completion.text for completion in completions]
    prompt_content: Content = prompt.text
    completion_contents: list[Content] = [*texts]
    if prompt.messages is not None:
        prompt_content = list(prompt.messages)
        completion_contents = [[Message(role="assistant", content=text)] for text in texts]
    arguments: dict[str, list[Any]] = {
        "answer": [problem.answer] * n,
        "solution": [solution] * n,
        "reference_answer": [problem.answer] * n,
        "reference_solution": [problem.solution] * n,
        "question": [problem.question] * n,
        "prompts": [prompt_content] * n,
        "completions": completion_contents,
        "grades": list(grades),
        "finish_reasons": [completion.finish_reason for completion in completions],
        "completion_ids": [list(completion.token_ids) for completion in completions],
    }
    reserved_names = {*arguments, *RewardLog().arguments(), "self"}
    renamed_columns = {}
    other_columns = {}
    for name, value in problem.columns.items():
        if name in reserved_names:
            renamed_columns[f"source_{name}"] = [value] * n
        else:
            other_columns[name] = [value] * n
    # A column that is itself called `source_<name>` wins over a renamed one.
    return {**renamed_columns, **other_columns, **arguments}


def _own_copy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy lists and messages, so that no other reward sees what the function changes."""

    def copied(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [dict(item) if isinstance(item, dict) else item for item in value]

    return {name: [copied(value) for value in values] for name, values in arguments.items()}


@dataclass(slots=True, kw_only=True)
class RewardLog:
    """Records of scoring the groups of one step, or of an evaluation.

    >>> reward_log = RewardLog()
    >>> reward_log.arguments()["log_metric"]("words", 3)
    >>> reward_log.arguments()["log_metric"]("words", 4)
    >>> reward_log.tallies()["rewards/words"].mean
    3.5
    """

    place: str = ""
    """The step or evaluation; part of the key of a recorded value."""
    global_step: int = 0
    """Finished steps of GRPO; 0 if functions are tried before a run."""
    max_steps: int = 1
    """Steps of the phase; 1 where that is not known."""
    logged: list[tuple[str, float]] = field(default_factory=list)
    """Names and values that functions have logged."""
    groups: int = 0
    """Number of groups that have been scored."""
    events: list[str] = field(default_factory=list)
    """Failures, one line per function and group."""
    failures: dict[str, list[tuple[RewardError, Mapping[str, Any]]]] = field(default_factory=dict)
    """Function -> its errors, each with the arguments of the call."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that TRL passes once per batch.

        Every other argument has an entry per completion.
        """
        state = SimpleNamespace(global_step=self.global_step, max_steps=self.max_steps)
        return {
            "trainer_state": state,
            "log_metric": self._log_metric,
            # Records have no columns of the user's.
            "log_extra": lambda *_: None,
        }

    def tallies(self) -> dict[str, Tally]:
        """Return the logged values as the metrics `rewards/<name>`."""
        values_by_metric: dict[str, list[float]] = {}
        for name, value in self.logged:
            values_by_metric.setdefault(f"rewards/{name}", []).append(value)
        return {metric: Tally.of(values) for metric, values in values_by_metric.items()}

    def _log_metric(self, name: str, value: float) -> None:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, {number}): not a finite number")
        self.logged.append((str(name), number))


# --- the call ------------------------------------------------------------------------------------


def begin(
    config: RewardConfig,
    function: RewardFunction,
    arguments: Mapping[str, Any],
    reward_log: RewardLog | None = None,
) -> tuple[Callable[[], list[float | None]], bool]:
    """Call a function with one batch; an async one runs on until its values are needed.

    Args:
        config: the reward in the recipe.
        function: sync or async. A sync one runs in the caller's thread and cannot be stopped when
            its time is over; the log then warns of it.
        arguments: the result of `arguments_of`.
        reward_log: receive the values that a user's function logs; without them these are lost.

    Returns:
        A function that waits for the values and returns them, and whether the reward function is
        still running. Waiting raises a `RewardError` if the reward function raised (`SystemExit`
        and the like included, Ctrl-C not), was stopped (the cause is then a `TimeoutError`), or
        returned something else than one finite number in its stated range (`bounds`), or None, per
        completion.
    """
    name = reward_label(config.name)
    seconds = config.timeout_seconds
    timer = threading.Timer(seconds, logger.warning, (_SLOW, name, seconds))
    timer.daemon = True
    returned: Any = None
    raised: BaseException | None = None
    try:
        if getattr(function, "ours", False):
            # A built-in reward waits for nothing, logs nothing and changes nothing: it needs
            # neither a timer nor a copy.
            returned = function(**arguments)
        else:
            timer.start()
            batch_arguments = (reward_log or RewardLog()).arguments()
            returned = function(**_own_copy(arguments), **batch_arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
        raised = error
    finally:
        timer.cancel()
    still_running = inspect.isawaitable(returned)
    wait = started(returned, seconds) if still_running else lambda: (returned, raised)

    def wait_for_values() -> list[float | None]:
        answer, error = wait()
        if isinstance(error, (KeyboardInterrupt, RewardError)):
            raise error
        if isinstance(error, StoppedError):
            raise RewardError(
                f"the reward {name!r} did not return within {seconds:g} s",
                where="rewards",
                fix="Give what it waits for a time limit of its own, or set timeout_seconds.",
            ) from error
        if error is not None:
            raise RewardError(
                f"the reward {name!r} raised {describe_exception(error)}",
                where="rewards",
                fix=f"It was given the columns {', '.join(sorted(arguments))}.",
            ) from error
        values = answer.tolist() if hasattr(answer, "tolist") else answer
        expected = len(arguments["completions"])
        if not isinstance(values, (list, tuple)) or len(values) != expected:
            size = f" of {len(values)}" if isinstance(values, (list, tuple)) else ""
            raise RewardError(
                f"the reward {name!r} returned {shown(answer)}, a "
                f"{type(answer).__name__}{size}, for {expected} completions",
                where="rewards",
                fix="Return a list with one number (or None: not scored) per completion.",
            )
        bounds = getattr(function, "bounds", None) or (-math.inf, math.inf)
        return [_number(config, value, row, bounds) for row, value in enumerate(values)]

    return wait_for_values, still_running


_SLOW = (
    "the reward %r has been running for %g s. Only an async function can be stopped; "
    "Ctrl-C twice ends the run"
)


def reward_label(name: str) -> str:
    """Return the short name under which a reward is recorded.

    >>> reward_label("rewards/mine.py:brevity"), reward_label("format")
    ('brevity', 'format')
    """
    return name.rpartition(":")[2]


def _number(
    config: RewardConfig, value: Any, row: int, bounds: tuple[float, float]
) -> float | None:
    """Return one value as a float; never -0.0.

    Raises:
        RewardError: the value is no number, or is out of range.
    """
    if value is None:
        return None
    if getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    name = reward_label(config.name)
    weight = config.weight
    size: Any = math.nan
    if isinstance(value, numbers.Real):
        size = abs(value)
    # Written with `not`, so that NaN is refused as well.
    if not size <= LARGEST / max(1.0, abs(weight)):
        weighted = f", which has the weight {weight:g}" if size <= LARGEST else ""
        raise RewardError(
            f"the reward {name!r} returned {shown(value)} for completion {row}{weighted}",
            where="rewards",
            fix=f"Return numbers that with the weight go from {-LARGEST:g} to {LARGEST:g} (beyond, "
            "a difference of 0.1 is lost and sums overflow), or None for a completion that cannot "
            "be scored.",
        )
    lowest = bounds[0]
    highest = bounds[1]
    if not lowest - 1e-9 <= value <= highest + 1e-9:
        raise RewardError(
            f"the reward {name!r} returned {value} for completion {row}, outside its range "
            f"{lowest:g} to {highest:g}",
            where="rewards",
            fix="Correct the function or the `bounds` it states.",
        )
    return float(value) + 0.0


# --- async functions -----------------------------------------------------------------------------


class StoppedError(TimeoutError):
    """Error of a function that was stopped; a plain `TimeoutError` may be the function's own."""


def started(
    awaitable: Awaitable[Any], seconds: float
) -> Callable[[], tuple[Any, BaseException | None]]:
    """Let an async function run, also where an event loop is already running.

    All run in one event loop in a thread of its own, so that a client which belongs to a loop
    (an HTTP session) can be kept from one group to the next, as it can in TRL.

    Returns:
        A function that waits and returns the result and None, or None and the exception: a
        `StoppedError` where it took longer than `seconds`. A function that blocks the loop, or
        cannot be canceled, is left behind with its loop, and the next call starts another loop.
    """

    async def outcome() -> tuple[Any, BaseException | None]:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await awaitable, None
        except TimeoutError as error:
            return None, StoppedError() if limit.expired() else error
        except BaseException as error:  # noqa: BLE001 - it would end the loop
            return None, error

    loop = _loop_of(os.getpid())
    future = asyncio.run_coroutine_threadsafe(outcome(), loop)

    def wait() -> tuple[Any, BaseException | None]:
        try:
            return future.result(seconds + GRACE_SECONDS)
        except TimeoutError:
            # Another wait may have replaced the loop already: keep that one.
            if _loop_of(os.getpid()) is loop:
                _loop_of.cache_clear()
            loop.call_soon_threadsafe(loop.stop)
            return None, StoppedError()

    return wait


@cache
def _loop_of(pid: int) -> asyncio.AbstractEventLoop:
    """Start the loop of this process: a forked child does not inherit its parent's thread."""
    loop = asyncio.new_event_loop()
    name = f"async rewards of {pid}"
    threading.Thread(target=_serve, args=(loop,), name=name, daemon=True).start()
    return loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run until the loop is stopped, whatever its tasks raise."""
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # asyncio hands on these two
            continue
        return
