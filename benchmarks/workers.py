"""Another engine in a process and an environment of its own, spoken to in JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.checkout import ROOT, importing_from

__all__ = ["Worker", "peak_memory", "serve"]


class Worker:
    """A module that answers every line with one line, started as a process.

    Args:
        python: interpreter of the environment that has the engine.
        module: a script such as `benchmarks.cpu.trl_worker`, which ends in `serve(handlers)`.
        environment: variables on top of this process's own.
        folders: where its modules are looked for first.
    """

    def __init__(
        self,
        python: str,
        module: str,
        environment: dict[str, str] | None = None,
        folders: Sequence[Path] = (ROOT,),
    ) -> None:
        self._process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**importing_from(*folders), **(environment or {})},
        )

    def ask(self, verb: str, **arguments: Any) -> Any:
        """What the script's handler of that name returns."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([verb, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with code {self._process.wait()}; see above")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Requests:
    """The other side: lines come in, and what libraries print goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def next(self) -> tuple[str, dict[str, Any]] | None:
        line = sys.stdin.readline()
        return tuple(json.loads(line)) if line else None

    def answer(self, value: Any) -> None:
        self._out.write(json.dumps(value) + "\n")
        self._out.flush()


def peak_memory() -> int:
    """Bytes of memory that this process has held at most, shared libraries included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (text for text in lines if text.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def serve(handlers: dict[str, Callable[..., Any]]) -> None:
    """Answer requests until there are no more."""
    requests = Requests()
    while (request := requests.next()) is not None:
        verb, arguments = request
        requests.answer(handlers[verb](**arguments))
