"""Tools that a model calls by a block of code: a name in a table, and what runs its text.

    ```python
    print(6 * 7)
    ```
    ```output
    42
    ```

The model writes the first block and reads the second. `python` is always there and runs isolated
(`grouper.programs`); other names are functions of the user's own, which run in this process.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from grouper.config.schema import ProgramsConfig, Recipe, ToolsConfig
from grouper.errors import ConfigError, GrouperError
from grouper.futures import then
from grouper.grading.programs import Programs
from grouper.programs.code_blocks import OUTPUT_NAME, PYTHON_NAMES, last_block
from grouper.programs.runner import ProgramResult
from grouper.rewards.user_code import describe_exception, load_user_object
from grouper.types import AnswerFormat

log = logging.getLogger(__name__)

# Characters of a tool's output that are looked at; the tokens that are kept are fewer.
_LONG = 20_000


def toolbox_of(recipe: Recipe, fmt: AnswerFormat) -> Toolbox | None:
    """Return the tools of a recipe, or None where its format has no turns.

    Raises:
        ConfigError: a function cannot be loaded, or there is one that nothing would call.
    """
    tools = recipe.sampling.tools
    if fmt.tools:
        return Toolbox(tools, recipe.grading.programs)
    if tools.functions:
        names = ", ".join(tools.functions)
        raise ConfigError(
            f"the format {fmt.name} has no turns, so that nothing calls {names}",
            where="sampling.tools.functions",
            fix="Leave them out, or use prompt.format: python-tool.",
        )
    return None


class Toolbox:
    """The tools of a recipe, by the names of their blocks.

    Args:
        tools: the recipe's settings.
        programs: limits and isolation of Python.

    Raises:
        ConfigError: a function cannot be loaded, or its name is taken.
    """

    def __init__(self, tools: ToolsConfig, programs: ProgramsConfig) -> None:
        self.settings = tools
        self._programs = Programs(programs)
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self.functions: dict[str, Callable[..., Any]] = {}
        for full_name in tools.functions:
            function = load_user_object(
                full_name, kind="tool", where="sampling.tools.functions", error=ConfigError
            )
            name = full_name.rpartition(":")[2].lower()
            if inspect.iscoroutinefunction(function):
                raise ConfigError(
                    f"the tool {full_name} is a coroutine, which nobody waits for",
                    where="sampling.tools.functions",
                    fix="Use `def`, not `async def`.",
                )
            if name in {*self.functions, *PYTHON_NAMES, OUTPUT_NAME}:
                raise ConfigError(
                    f"there are two tools with the name {name}",
                    where="sampling.tools.functions",
                    fix="Rename the function: its name is that of the blocks that call it.",
                )
            self.functions[name] = function
        _toolboxes.add(self)

    def call(self, text: str) -> Future[str] | None:
        """Begin to run the last closed block of a turn; None if that calls no tool."""
        block = last_block(text, (*PYTHON_NAMES, *self.functions))
        if block is None:
            return None
        if block.name in self.functions:
            with self._lock:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(1, thread_name_prefix="tools")
                function = self.functions[block.name]
                seconds = self.settings.function_seconds
                return self._threads.submit(_call, function, block.text, seconds)
        return then(self._programs.run(block.text), _said)

    def start(self) -> None:
        """Run a first program, and see that it can be isolated.

        Raises:
            ConfigError: not as the settings ask for.
        """
        self._programs.start()

    def close(self) -> None:
        """End the processes of programs; a later call starts new ones."""
        self._programs.close()
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(cancel_futures=True)

    def after_fork(self) -> None:
        """In a forked child: threads are gone, and the processes of programs are the parent's."""
        self._lock = threading.Lock()
        self._threads = None
        self._programs.after_fork()


_toolboxes: weakref.WeakSet[Toolbox] = weakref.WeakSet()


def _all_after_fork() -> None:
    for toolbox in list(_toolboxes):
        toolbox.after_fork()


os.register_at_fork(after_in_child=_all_after_fork)


def _said(ended: Future[ProgramResult]) -> str:
    """Return what a program says once it has ended: its output, and the error it ended with.

    Raises:
        ConfigError: it was not isolated, which stops the run.
    """
    try:
        result = ended.result()
    except ConfigError:
        raise
    except (GrouperError, CancelledError):
        return "error: the program could not be run"
    lines = [result.output.rstrip("\n"), result.reason.removeprefix("program failed: ")]
    return "\n".join(line for line in lines if line)[:_LONG]


def _call(function: Callable[..., Any], text: str, seconds: float) -> str:
    """Return what a user's function says to the text of a block, or that it says nothing in time.

    It has a thread of its own, which nothing can end: one that hangs is left behind.
    """
    answer: Future[str] = Future()
    threading.Thread(
        target=lambda: answer.set_result(_answer(function, text)), name="tool", daemon=True
    ).start()
    try:
        return answer.result(timeout=seconds)
    except concurrent.futures.TimeoutError:
        name = getattr(function, "__name__", str(function))
        log.warning(
            "The tool %s gave no answer within %g s (sampling.tools.function_seconds): the model "
            "reads that, and the function goes on in a thread of its own.",
            name,
            seconds,
        )
        return f"error: no answer within {seconds:g} s"


def _answer(function: Callable[..., Any], text: str) -> str:
    """Call a user's function with the text of a block, and return what it says as text.

    A block that is a JSON object holds its arguments by name; any other text is the one argument.
    """
    try:
        result = function(**arguments_of(function, text))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a user's function raises is told to the model
        return f"error: {describe_exception(error)}"[:_LONG]
    try:
        said = result if isinstance(result, str) else json.dumps(result, default=str)
    except (TypeError, ValueError, RecursionError):
        said = repr(result)
    return said[:_LONG]


def arguments_of(function: Callable[..., Any], text: str) -> Mapping[str, Any]:
    """Read the arguments of a call.

    Raises:
        ValueError: the function takes several, and the text is no JSON object.
    """
    names: Sequence[str] = list(inspect.signature(function).parameters)
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if isinstance(read, dict):
        return read
    if len(names) != 1:
        raise ValueError(f"the arguments have to be a JSON object of {', '.join(names)}")
    return {names[0]: text}
