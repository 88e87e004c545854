"""Calling a reward function: what it is given, and what it may return."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import numbers
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from grouper.config.schema import LARGEST, RewardConfig
from grouper.errors import RewardError
from grouper.rewards.awaiting import StoppedError, awaited
from grouper.rewards.base import Content, RewardFunction
from grouper.rewards.building import BuiltReward
from grouper.rewards.onlooking import WHOLE, Notes
from grouper.rewards.user_code import line_of_users
from grouper.types import Completion, Grade, Message, Problem, Prompt

logger = logging.getLogger(__name__)

DEFAULT_SECONDS = float(RewardConfig.model_fields["timeout_seconds"].default)

_SINGULAR = {
    "prompts": "prompt",
    "completions": "completion",
    "grades": "grade",
    "finish_reasons": "finish_reason",
}


def arguments_of(
    problem: Problem, prompt: Prompt, completions: Sequence[Completion], grades: Sequence[Grade]
) -> dict[str, Any]:
    """Everything a reward function is called with, one entry per completion.

    The parsed fields of the problem win over columns of the source row: a column that has the
    name of one of them, or of another argument of the call, is passed as `source_<name>`.
    """
    n = len(completions)
    asked: Content = prompt.text if prompt.messages is None else list(prompt.messages)
    fields = {
        "answer": problem.answer,
        "solution": problem.answer if problem.solution is None else problem.solution,
        "reference_answer": problem.answer,
        "reference_solution": problem.solution,
        "question": problem.question,
    }
    ours = {
        **{name: [value] * n for name, value in fields.items()},
        "prompts": [asked] * n,
        "completions": [_content(c, chat=prompt.messages is not None) for c in completions],
        "grades": list(grades),
        "finish_reasons": [c.finish_reason for c in completions],
        "completion_ids": [list(c.token_ids) for c in completions],
    }
    taken = {*ours, *_SINGULAR.values(), *WHOLE, "self"}
    columns = {name: value for name, value in problem.columns.items() if name not in taken}
    for name in taken & problem.columns.keys():
        columns.setdefault(f"source_{name}", problem.columns[name])
    return {**{name: [value] * n for name, value in columns.items()}, **ours}


def _content(completion: Completion, *, chat: bool) -> Content:
    if not chat:
        return completion.text
    return [Message(role="assistant", content=completion.text)]


def _own_copy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Lists and messages of the function's own: what it changes in them, no other reward sees."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [dict(item) if isinstance(item, dict) else item for item in value]

    return {name: [fresh(value) for value in values] for name, values in arguments.items()}


def call(
    name: str,
    function: RewardFunction,
    arguments: Mapping[str, Any],
    *,
    seconds: float = DEFAULT_SECONDS,
    notes: Notes | None = None,
) -> list[float | None]:
    """The values of one batch.

    Args:
        name: what the function is called in messages.
        function: sync or async. A sync one runs in the caller's thread.
        arguments: what `arguments_of` makes.
        seconds: an async function is stopped after as many; a sync one cannot be, and is warned
            of in the log.
        notes: keeps what a user's function logs; left out: nobody does.

    Raises:
        RewardError: the function raised (`SystemExit` and the like included, Ctrl-C not), was
            stopped (the cause is then a `TimeoutError`), or returned something else than one
            finite number in its stated range (`bounds`), or None, a completion.
    """
    # Built-in rewards use neither.
    whole = {} if isinstance(function, BuiltReward) else (notes or Notes()).arguments()
    try:
        with _told_when_slow(name, function, seconds):
            returned: Any = function(**_own_copy(arguments), **whole)
        if inspect.isawaitable(returned):
            returned = awaited(returned, seconds)
    except KeyboardInterrupt:
        raise
    except StoppedError as error:
        raise RewardError(
            f"the reward {name!r} did not return within {seconds:g} s",
            where="rewards",
            fix="Give what it waits for a time limit of its own, or set timeout_seconds.",
        ) from error
    except BaseException as error:  # a user's function may raise anything; it is named
        raise RewardError(
            f"the reward {name!r} raised {type(error).__name__}: {error}{line_of_users(error)}",
            where="rewards",
            fix=f"It was given the columns {', '.join(sorted(arguments))}.",
        ) from error
    values = _validated(name, returned, len(arguments["completions"]))
    _check_bounds(name, getattr(function, "bounds", None), values)
    return values


@contextmanager
def _told_when_slow(name: str, function: RewardFunction, seconds: float) -> Iterator[None]:
    """Warn once where a user's function is still running after `seconds`."""
    if isinstance(function, BuiltReward):  # they wait for nothing, and a thread has its price
        yield
        return
    warning = (
        "the reward %r has been running for %g s. Only an async function can be stopped; "
        "Ctrl-C twice ends the run"
    )
    timer = threading.Timer(seconds, logger.warning, (warning, name, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def one_by_one(function: Callable[..., Any]) -> RewardFunction:
    """A reward function of one completion (`completion`, `answer`, ...) as one of a batch.

    Every argument is the entry of one completion; `prompts`, `completions`, `grades` and
    `finish_reasons` come in the singular, and those of `WHOLE` as they are. An async function runs
    for all of them together.

    >>> def brevity(completion, answer, **kwargs):
    ...     return len(answer) / len(completion)
    >>> one_by_one(brevity)(prompts=["q", "q"], completions=["4", "4444"], answer=["4", "4"])
    [1.0, 0.25]
    """

    @wraps(function)
    def batch(**arguments: Any) -> Any:
        plural = [name for name in _SINGULAR if name in arguments]
        whole = {name: arguments[name] for name in WHOLE if name in arguments}
        others = [name for name in arguments if name not in plural and name not in whole]
        values = [
            function(
                **{name: arguments[name][row] for name in others if name not in _SINGULAR.values()},
                **{_SINGULAR[name]: arguments[name][row] for name in plural},
                **whole,
            )
            for row in range(len(arguments["completions"]))
        ]
        return _together(values) if any(map(inspect.isawaitable, values)) else values

    return batch


async def _together(values: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*values)


def _validated(name: str, returned: Any, expected: int) -> list[float | None]:
    """The values as floats; tensors and arrays are accepted through `tolist`."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, (list, tuple)) or len(values) != expected:
        size = f" of {len(values)}" if isinstance(values, (list, tuple)) else ""
        raise RewardError(
            f"the reward {name!r} returned {shown(returned)}, a {type(returned).__name__}{size}, "
            f"for {expected} completions",
            where="rewards",
            fix="Return a list with one number (or None: not scored) a completion.",
        )
    return [_number(name, value, row) for row, value in enumerate(values)]


def _number(name: str, value: Any, row: int) -> float | None:
    if value is None:
        return None
    value = value.item() if hasattr(value, "item") else value
    size: Any = abs(value) if isinstance(value, numbers.Real) else math.nan
    if not size <= LARGEST:  # NaN is not, either
        raise RewardError(
            f"the reward {name!r} returned {shown(value)} for completion {row}",
            where="rewards",
            fix=f"Return numbers from {-LARGEST:g} to {LARGEST:g} (beyond, a difference of 0.1 is "
            "lost and sums overflow), or None for a completion that cannot be scored.",
        )
    return float(value) + 0.0  # never -0.0


def _check_bounds(
    name: str, bounds: tuple[float, float] | None, values: Sequence[float | None]
) -> None:
    if bounds is None:
        return
    low, high = bounds
    for row, value in enumerate(values):
        if value is not None and not low - 1e-9 <= value <= high + 1e-9:
            raise RewardError(
                f"the reward {name!r} returned {value} for completion {row}, outside its range "
                f"{low:g} to {high:g}",
                where="rewards",
                fix="Correct the function or the `bounds` it states.",
            )


def shown(value: Any) -> str:
    """A value as text, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = f"a {type(value).__name__} too long to be shown"
    return text if len(text) <= 120 else text[:117] + "..."
