"""Runs programs that a model has written, in isolated processes from a warm pool.

A worker (`worker.py`) has imported what programs may use, and forks for each of them. In the fork,
before the program's first line, every file is closed but two pipes, processor time, memory and
files are limited, and a filter of system calls (`seccomp.py`) leaves nothing but memory, clocks and
those pipes: no path, no socket, no process, no signal. The worker kills it at the deadline.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Self, get_args

from grouper.errors import ConfigError, GrouperError
from grouper.files import processors
from grouper.programs import seccomp

Isolation = Literal["seccomp", "limits"]
Status = Literal["finished", "failed", "timeout", "too-long", "died"]

MODULES = (
    "abc",
    "array",
    "bisect",
    "cmath",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "inspect",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "pprint",
    "random",
    "re",
    "statistics",
    "string",
    "textwrap",
    "time",
    "types",
    "typing",
    "warnings",
)
"""Modules of the standard library that programs can import."""

# Imported by the worker for itself.
_FORGOTTEN = ("ctypes", "_ctypes", "subprocess", "importlib.util", "resource", "select", "signal")
# Seconds beyond a program's deadline until its worker is given up: it has to be killed by then.
_PATIENCE = 30.0
# Times that a request is given to a new worker.
_TRIES = 3
_THREADS = "programs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use."""

    seconds: float = 2.0
    """Of processor time, so that a busy machine ends no program early."""
    clock_seconds: float = 10.0
    """From its start to its end: for programs that wait."""
    memory_bytes: int = 512 * 2**20
    """Beyond what the worker has loaded."""
    output_bytes: int = 10_000
    """Of its output; a program that writes more is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """What came of a program."""

    status: Status
    """`failed`: an exception; `died`: ended by a signal or by itself, without an exception."""
    output: str = ""
    """What it has printed, at most as much as its limit."""
    error: str = ""
    """The name of the exception's class."""
    text: str = ""
    """The text of the exception, or the reason of the death."""
    line: int | None = None
    """The line of the program that failed, from 1."""
    seconds: float = 0.0

    @property
    def reason(self) -> str:
        """Why it did not finish, in a few words; empty if it did.

        >>> ProgramResult(status="failed", error="NameError", text="no x", line=3).reason
        'program failed: line 3, NameError: no x'
        """
        if self.status == "failed":
            where = "" if self.line is None else f"line {self.line}, "
            text = f": {self.text}" if self.text else ""
            return f"program failed: {where}{self.error}{text}"
        # Without the seconds that it took: the model may read this, and they are never the same.
        reasons = {
            "finished": "",
            "timeout": "program stopped: it took too long",
            "too-long": "program stopped: it printed too much",
            "died": f"program ended early: {self.text}",
        }
        return reasons[self.status]


def available_isolation() -> Isolation:
    """Return the strongest isolation that this machine offers; the answer is tried, not assumed."""
    return "seccomp" if seccomp.is_known() and _holds() else "limits"


# Each of these has to fail under the filter.
_PROBE = """
import os
attempts = {
    "files": lambda: os.open("/", os.O_RDONLY),
    "processes": os.fork,
    "signals": lambda: os.kill(os.getppid(), 0),
    "folders": lambda: os.mkdir("/tmp/grouper-probe"),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except PermissionError:
        continue
    print(name)
"""


@cache
def _holds() -> bool:
    """Tell whether a program under the filter can do nothing of what the filter forbids."""
    with contextlib.suppress(GrouperError), ProgramRunner(workers=1, isolation="seccomp") as runner:
        result = runner.run(_PROBE)
        return result.status == "finished" and result.output == ""
    return False


def require_isolation(wanted: Isolation, *, where: str) -> None:
    """Raise `ConfigError` where this machine's isolation is weaker than a setting asks for."""
    if wanted == "seccomp" and available_isolation() != "seccomp":
        raise ConfigError(
            "this machine has no filter of system calls (seccomp), without which a program could "
            "read files and start processes",
            where=where,
            fix="Run it on Linux (x86-64 or ARM64), or set isolation: limits if what the model "
            "writes may do anything that you may, for example in a container of its own.",
        )


class ProgramRunner:
    """A pool of warm workers; programs may come from any thread.

    Args:
        limits: of every program.
        workers: processes; default: one for each processor.
        isolation: `seccomp`, or `limits` alone, which protects from mistakes and not from intent.
        packages: importable beside the standard library's modules, such as `sympy`.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        workers: int | None = None,
        isolation: Isolation = "seccomp",
        packages: Sequence[str] = (),
    ) -> None:
        assert isolation in get_args(Isolation)
        self._limits = limits or Limits()
        self._setup = {
            "isolation": isolation,
            "modules": [*MODULES, *packages],
            "packages": list(packages),
            "folders": _folders_of(packages),
        }
        count = workers or processors()
        self._workers = [_Worker(self._setup) for _ in range(count)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=_THREADS)

    def run(self, program: str) -> ProgramResult:
        """Run a program, and return what came of it.

        Raises:
            GrouperError: no worker can be started, or a program could not be isolated.
        """
        return self.submit(program).result()

    def submit(self, program: str) -> Future[ProgramResult]:
        """Begin to run a program."""
        return self._threads.submit(self._run, program)

    def map(self, programs: Sequence[str]) -> Iterator[ProgramResult]:
        """Run programs side by side; results come in their order."""
        return self._threads.map(self._run, programs)

    def close(self) -> None:
        """End the workers; programs that run are killed, and those that wait are given up."""
        for worker in self._workers:
            worker.kill()
        # A thread of its own may be the last one to know of it, and cannot wait for itself.
        is_own = threading.current_thread().name.startswith(_THREADS)
        self._threads.shutdown(wait=not is_own, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def abandon(self) -> None:
        """After a fork, in the child: let go of the parent's workers without touching them."""
        for worker in self._workers:
            worker.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, program: str) -> ProgramResult:
        request = {"program": program, "forgotten": _FORGOTTEN, **asdict(self._limits)}
        worker = self._idle.get()
        try:
            return worker.answer(request, self._limits.clock_seconds + _PATIENCE)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process; replaced when it ends.

    Args:
        setup: its first line, see `worker._prepare`.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def answer(self, request: dict[str, Any], patience: float) -> ProgramResult:
        """Have a program run.

        Args:
            request: see `worker._answer`.
            patience: seconds after which the worker itself is killed.

        Raises:
            GrouperError: it ended or said nothing, several times.
        """
        for _ in range(_TRIES):
            reply = None if self._is_closed else self._ask(request, patience)
            if self._is_closed:
                raise GrouperError("the runner of programs was closed")
            if reply is None:
                self.close()
                continue
            if reply["status"] == "not-isolated":
                raise ConfigError(
                    "a program could not be isolated, and was not run",
                    where="the runner of programs",
                    fix="See `grouper env` for the isolation that this machine offers.",
                )
            return ProgramResult(**{name: _as_text(value) for name, value in reply.items()})
        raise GrouperError(
            f"the worker that runs programs ended {_TRIES} times",
            where="the runner of programs",
            fix="Is the memory of this machine full?",
        )

    def _ask(self, request: dict[str, Any], patience: float) -> dict[str, Any] | None:
        """Send a request and return the reply; None if the worker ended."""
        if self._process is None:
            self._process = _start()
            requests = [self._setup, request]
        else:
            requests = [request]
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(patience, process.kill)
        late.start()
        try:
            for sent in requests:
                process.stdin.write(json.dumps(sent).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it has ended
            return None
        finally:
            late.cancel()
        if not line.endswith(b"\n"):
            return None
        reply: dict[str, Any] = json.loads(line)
        return reply

    def kill(self) -> None:
        """End its process now, whoever waits for it, and start no other."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End its process, if it has one; no other thread may use it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def abandon(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with process:  # which closes the pipes
                process.returncode = 0  # not our child: nothing to reap or warn about


# Threads of libraries do not live through a fork.
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def _as_text(value: Any) -> Any:
    """Return a value of a reply; texts without halves of characters, which nothing can encode."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "replace").decode("utf-8")


def _start() -> subprocess.Popen[bytes]:
    """Start a worker, which knows none of the secrets around it.

    Sets of strings have one order in all of them: a program prints the same tomorrow.
    """
    script = Path(__file__).with_name("worker.py")
    return subprocess.Popen(
        [sys.executable, "-P", "-s", "-S", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=_ENVIRONMENT,
        start_new_session=True,
    )


def require_packages(packages: Sequence[str], *, where: str) -> None:
    """Raise `ConfigError` where a package that programs may import is not installed."""
    for package in packages:
        try:
            spec = find_spec(package)
        except (ModuleNotFoundError, ValueError):
            spec = None
        if spec is None:
            raise ConfigError(
                f"{package} is not installed",
                where=where,
                fix=f"pip install {package}, or leave it out.",
            )


def _folders_of(packages: Sequence[str]) -> list[str]:
    """Return the folders that packages are imported from.

    Raises:
        ConfigError: one is not installed.
    """
    require_packages(packages, where="grading.programs.packages")
    folders = []
    for package in packages:
        spec = find_spec(package)
        assert spec is not None
        places = spec.submodule_search_locations or [spec.origin or ""]
        folders.append(str(Path(places[0]).parent))
    return list(dict.fromkeys(folders))
