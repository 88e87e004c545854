"""The user's own code: found by name, called with a time limit, its results checked."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import logging
import math
import numbers
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from grouper.config.schema import LARGEST, RewardConfig
from grouper.errors import ConfigError, GrouperError, RewardError, did_you_mean
from grouper.types import Completion, Grade, Message, Problem, Prompt, Tally

logger = logging.getLogger(__name__)

Content = str | Sequence[Message]
"""A prompt or completion: messages in chat recipes, a string in plain-text ones."""

# Time that a cancelled function has for its `finally` blocks.
GRACE_SECONDS = 1.0


RewardFunction = Callable[..., Any]
"""Scores a batch of completions, as TRL's do; every argument has one entry per completion.

Beside `prompts` and `completions` it is given the parsed `answer`, `solution`, `reference_answer`,
`reference_solution` and `question`; `grades`, `finish_reasons` and `completion_ids`; and every
column of the source row under its own name, or as `source_<name>` where that name is one of these.
It returns one number per completion; None means "not scored" and takes that rollout out of its
group.
"""


# --- found by name -------------------------------------------------------------------------------

_OURS = f"{Path(__file__).parents[1]}/"
_INSTALLED = tuple(
    sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)


def load_user_object(
    full_name: str, *, kind: str, where: str, error: type[GrouperError], known: Iterable[str] = ()
) -> Any:
    """The callable that the user named.

    Args:
        full_name: `path/to/file.py:name` or `package.module:name`.
        kind: what it should be (`reward`, `tracker`), for messages.
        where: the recipe key, for messages.
        error: the class of what is raised.
        known: names of Grouper's own, one of which may be meant.

    Raises:
        GrouperError: of class `error`: no such file, module or name, or loading it failed.
    """
    place, _, name = full_name.rpartition(":")
    is_file = place.endswith(".py")
    if not place:
        own = "Your own function is named `path/to/file.py:function`."
        raise error(
            f"there is no {kind} {full_name!r}",
            where=where,
            fix=f"{did_you_mean(full_name, known)} {own}".lstrip(),
        )
    if is_file and not Path(place).is_file():
        raise error(
            f"there is no file {place}",
            where=where,
            fix=f"The {kind} {full_name!r} is looked for from {Path.cwd()}.",
        )
    try:
        module = _module(place)
    except KeyboardInterrupt:
        raise
    except BaseException as raised:  # a user's module may raise anything; it is reported as theirs
        what, fix = in_words(raised), ""
        if is_file:
            what = f"{place} cannot be loaded: {what}"
        else:
            what = str(raised) if isinstance(raised, ImportError) else what
            what = f"the module {place} of a {kind} cannot be imported: {what}"
            fix = f"Install it, or name a file: `path/to/file.py:{name}`."
        raise error(what, where=where, fix=fix) from raised
    found = getattr(module, name, None)
    if not callable(found):
        public = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        fix = did_you_mean(name, public)
        raise error(f"{place} has no function {name!r}", where=where, fix=fix)
    return found


def _module(place: str) -> ModuleType:
    """A file as a module, loaded again once it is edited; or a module by its name.

    Modules are looked for in the working directory as well, which a console script does not search.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: what is installed wins
        importlib.invalidate_caches()
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path, stat = Path(place).resolve(), Path(place).stat()
    label = re.sub(r"\W", "_", f"grouper {path.as_posix()} {stat.st_mtime_ns} {stat.st_size}")
    if label in sys.modules:
        return sys.modules[label]
    spec = importlib.util.spec_from_file_location(label, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[label] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:  # a half-loaded module is forgotten, whatever stopped it
        del sys.modules[label]
        raise
    return module


def load_hook(full_name: str) -> Callable[[Any], Any]:
    """The user's function that is called with the report of each step.

    Raises:
        ConfigError: there is none of that name, or it cannot be called with one argument.
    """
    function: Callable[[Any], Any] = load_user_object(
        full_name, kind="hook", where="hooks", error=ConfigError
    )
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"the hook {full_name!r} cannot be called with a report: {error}",
            where="hooks",
            fix="It is given one argument, as in `def f(report)`.",
        ) from error
    except ValueError:
        pass  # some functions written in C have no signature
    return function


def code_fingerprints(full_names: Iterable[str]) -> dict[str, str]:
    """The user's file -> hash of its source, for everything that the named objects run.

    That is the file or module of each name, and what it imports from its own folder or below;
    installed packages have versions instead.

    Args:
        full_names: as `load_user_object` takes them; one without a colon is built in, and one
            that cannot be loaded has none.
    """
    found: dict[Path, str] = {}
    for name in full_names:
        if ":" in name:
            try:
                load_user_object(name, kind="", where="", error=GrouperError)
            except GrouperError:
                continue  # refused with its own message where it is built
            _add_sources(_module(name.rpartition(":")[0]), found)
    here = Path.cwd()
    return {
        str(path.relative_to(here) if path.is_relative_to(here) else path): mark
        for path, mark in sorted(found.items())
    }


def _add_sources(module: ModuleType, found: dict[Path, str]) -> None:
    """Add a module's file and, in turn, those of what it imported from beside it."""
    path = Path(getattr(module, "__file__", None) or "").resolve()
    if path in found or path.suffix != ".py" or "site-packages" in path.parts:
        return
    found[path] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    for value in list(vars(module).values()):
        name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
        other = sys.modules.get(name) if isinstance(name, str) else None
        file = getattr(other, "__file__", None)
        if other is not None and file and Path(file).resolve().is_relative_to(path.parent):
            _add_sources(other, found)


def in_words(raised: BaseException) -> str:
    """`ValueError: no unit (my_rewards.py, line 12, in brevity)`: what a user's code raised, where.

    The innermost line that is neither Grouper's nor of Python or an installed package, or else
    the innermost that is not Grouper's; without it if there is none.
    """
    what = f"{type(raised).__name__}: {_text(raised, str)}"
    frames = [(f.f_code, line) for f, line in traceback.walk_tb(raised.__traceback__)]
    others = [(c, line) for c, line in frames if not c.co_filename.startswith((_OURS, "<"))]
    theirs = [(c, line) for c, line in others if not c.co_filename.startswith(_INSTALLED)]
    if not others:
        return what
    code, line = (theirs or others)[-1]
    return f"{what} ({Path(code.co_filename).name}, line {line}, in {code.co_name})"


# --- its arguments -------------------------------------------------------------------------------


def arguments_of(
    problem: Problem, prompt: Prompt, completions: Sequence[Completion], grades: Sequence[Grade]
) -> dict[str, Any]:
    """Everything a reward function is called with, one entry per completion.

    The parsed fields of the problem win over columns of the source row: a column that has the
    name of one of them, or of another argument of the call, is passed as `source_<name>`.
    """
    n, chat = len(completions), prompt.messages is not None
    text_or_messages: Content = prompt.text if prompt.messages is None else list(prompt.messages)
    texts = [c.text for c in completions]
    ours: dict[str, list[Any]] = {
        "answer": [problem.answer] * n,
        "solution": [problem.answer if problem.solution is None else problem.solution] * n,
        "reference_answer": [problem.answer] * n,
        "reference_solution": [problem.solution] * n,
        "question": [problem.question] * n,
        "prompts": [text_or_messages] * n,
        "completions": [[Message(role="assistant", content=t)] if chat else t for t in texts],
        "grades": list(grades),
        "finish_reasons": [c.finish_reason for c in completions],
        "completion_ids": [list(c.token_ids) for c in completions],
    }
    taken, columns = {*ours, *Notes().arguments(), "self"}, problem.columns
    given = {f"source_{name}": columns[name] for name in columns if name in taken}
    given |= {name: value for name, value in columns.items() if name not in taken}
    return {**{name: [value] * n for name, value in given.items()}, **ours}


def _own_copy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of lists and messages, so that no other reward sees what the function changes."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [dict(item) if isinstance(item, dict) else item for item in value]

    return {name: [fresh(value) for value in values] for name, values in arguments.items()}


@dataclass(slots=True, kw_only=True)
class Notes:
    """What is recorded while the groups of one step, or of an evaluation, are scored.

    >>> notes = Notes()
    >>> notes.arguments()["log_metric"]("words", 3)
    >>> notes.arguments()["log_metric"]("words", 4)
    >>> notes.tallies()["rewards/words"].mean
    3.5
    """

    place: str = ""
    """The step or evaluation; part of the key of a recorded value."""
    global_step: int = 0
    """Finished steps of GRPO; 0 if functions are tried before a run."""
    max_steps: int = 1
    """Steps of the phase; 1 where that is not known."""
    logged: list[tuple[str, float]] = field(default_factory=list)
    """What functions have logged."""
    groups: int = 0
    """How many have been scored."""
    events: list[str] = field(default_factory=list)
    """What failed, one line per function and group."""
    failures: dict[str, list[tuple[RewardError, Mapping[str, Any]]]] = field(default_factory=dict)
    """Function -> what it failed with, and the arguments it was given."""

    def arguments(self) -> dict[str, Any]:
        """What TRL passes once per batch; everything else has an entry per completion."""
        state = SimpleNamespace(global_step=self.global_step, max_steps=self.max_steps)
        return {
            "trainer_state": state,
            "log_metric": self._log_metric,
            "log_extra": lambda *_: None,  # records have no columns of the user's
        }

    def tallies(self) -> dict[str, Tally]:
        """What functions have logged, as the metrics `rewards/<name>`."""
        values: dict[str, list[float]] = {}
        for name, value in self.logged:
            values.setdefault(f"rewards/{name}", []).append(value)
        return {name: Tally.of(found) for name, found in values.items()}

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
    notes: Notes | None = None,
) -> tuple[Callable[[], list[float | None]], bool]:
    """Call a function with one batch; an async one goes on by itself until its values are wanted.

    Args:
        config: the reward in the recipe.
        function: sync or async. A sync one runs in the caller's thread and cannot be stopped when
            its time is over; the log then warns of it.
        arguments: what `arguments_of` makes.
        notes: keeps what a user's function logs; without them it is lost.

    Returns:
        What waits for the values, and gives them or raises a `RewardError`: the function raised
        (`SystemExit` and the like included, Ctrl-C not), was stopped (the cause is then a
        `TimeoutError`), or returned something else than one finite number in its stated range
        (`bounds`), or None, per completion. And whether the function still goes on.
    """
    name, seconds = reward_label(config.name), config.timeout_seconds
    timer = threading.Timer(seconds, logger.warning, (_SLOW, name, seconds))
    timer.daemon = True
    returned: Any = None
    raised: BaseException | None = None
    try:
        if getattr(function, "ours", False):
            # It waits for nothing, logs nothing and changes nothing.
            returned = function(**arguments)
        else:
            timer.start()
            returned = function(**_own_copy(arguments), **(notes or Notes()).arguments())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
        raised = error
    finally:
        timer.cancel()
    goes_on = inspect.isawaitable(returned)
    wait = started(returned, seconds) if goes_on else lambda: (returned, raised)

    def values() -> list[float | None]:
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
                f"the reward {name!r} raised {in_words(error)}",
                where="rewards",
                fix=f"It was given the columns {', '.join(sorted(arguments))}.",
            ) from error
        found = answer.tolist() if hasattr(answer, "tolist") else answer
        expected = len(arguments["completions"])
        if not isinstance(found, (list, tuple)) or len(found) != expected:
            size = f" of {len(found)}" if isinstance(found, (list, tuple)) else ""
            raise RewardError(
                f"the reward {name!r} returned {shown(answer)}, a "
                f"{type(answer).__name__}{size}, for {expected} completions",
                where="rewards",
                fix="Return a list with one number (or None: not scored) per completion.",
            )
        bounds = getattr(function, "bounds", None) or (-math.inf, math.inf)
        return [_number(config, value, row, bounds) for row, value in enumerate(found)]

    return values, goes_on


_SLOW = (
    "the reward %r has been running for %g s. Only an async function can be stopped; "
    "Ctrl-C twice ends the run"
)


def reward_label(name: str) -> str:
    """The short name under which a reward is recorded.

    >>> reward_label("rewards/mine.py:brevity"), reward_label("format")
    ('brevity', 'format')
    """
    return name.rpartition(":")[2]


def _number(
    config: RewardConfig, value: Any, row: int, bounds: tuple[float, float]
) -> float | None:
    """One value as a float; never -0.0. Raises `RewardError` where it is none, or out of range."""
    if value is None:
        return None
    value = value.item() if getattr(value, "shape", None) in ((), (1,)) else value
    name, weight = reward_label(config.name), config.weight
    size: Any = abs(value) if isinstance(value, numbers.Real) else math.nan
    if not size <= LARGEST / max(1.0, abs(weight)):  # NaN is not, either
        weighted = f", which has the weight {weight:g}" if size <= LARGEST else ""
        raise RewardError(
            f"the reward {name!r} returned {shown(value)} for completion {row}{weighted}",
            where="rewards",
            fix=f"Return numbers that with the weight go from {-LARGEST:g} to {LARGEST:g} (beyond, "
            "a difference of 0.1 is lost and sums overflow), or None for a completion that cannot "
            "be scored.",
        )
    if not bounds[0] - 1e-9 <= value <= bounds[1] + 1e-9:
        raise RewardError(
            f"the reward {name!r} returned {value} for completion {row}, outside its range "
            f"{bounds[0]:g} to {bounds[1]:g}",
            where="rewards",
            fix="Correct the function or the `bounds` it states.",
        )
    return float(value) + 0.0


def shown(value: Any) -> str:
    """A value as text, cut where it is long."""
    text = _text(value, repr)
    return text if len(text) <= 120 else text[:117] + "..."


def _text(value: Any, form: Callable[[Any], str]) -> str:
    try:
        return form(value)
    except Exception:  # noqa: BLE001 - an integer of more than 4,300 digits, or a user's own class
        return f"<{type(value).__name__} that cannot be shown>"


# --- async functions -----------------------------------------------------------------------------


class StoppedError(TimeoutError):
    """The function was stopped, where a `TimeoutError` may be one of its own."""


def started(
    awaitable: Awaitable[Any], seconds: float
) -> Callable[[], tuple[Any, BaseException | None]]:
    """Let an async function run, also where an event loop is already running.

    All run in one event loop in a thread of its own, so that a client which belongs to a loop
    (an HTTP session) can be kept from one group to the next, as it can in TRL.

    Returns:
        What waits for it, and gives its result and None, or None and what it has raised: a
        `StoppedError` where it took longer than `seconds`. A function that blocks the loop, or
        cannot be cancelled, is left behind with its loop, and the next call starts another.
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
            if _loop_of(os.getpid()) is loop:  # and not one that has taken its place
                _loop_of.cache_clear()
            loop.call_soon_threadsafe(loop.stop)
            return None, StoppedError()

    return wait


@cache
def _loop_of(pid: int) -> asyncio.AbstractEventLoop:
    """The loop of this process: a forked child does not inherit its parent's thread."""
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
