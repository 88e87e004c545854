"""A warm process that runs programs, each in a fork of its own: `python -P -s -S worker.py`.

It has imported what programs may use, holds nothing else, and never runs a program itself. A
request is a line of JSON on standard input, the reply a line on standard output. Standard library
only.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import marshal
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

# The name of a program in its tracebacks.
_FILE = "<program>"
# Characters of an error's text.
_ERROR_LENGTH = 300
# What a process reports once it is isolated, before the program's first line: nothing that the
# program does later can take it back.
_ISOLATED = b"isolated\n"
# Bytes of a report at most: more is a forgery.
_REPORT_BYTES = 4096
_BLOCK = 65536
# What the process holds, in pages, where the system tells it.
_PAGES = Path("/proc/self/statm")

# Exit codes of processes that have used up their processor time.
_OUT_OF_TIME = (-signal.SIGPROF, -signal.SIGXCPU)

# Where programs write, in a process that runs one.
_OUTPUT = 1
_REPORT = 3


def _beside(name: str) -> ModuleType:
    """Import a file of this folder, which `-P` keeps off the search path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- in the process of a program -----------------------------------------------------------------


def _limit(seconds: float, memory_bytes: int) -> None:
    """Bound what the process may use, for good."""
    # Ends the process with SIGPROF; the limit of whole seconds is for programs that catch it.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    processor_seconds = int(seconds) + 2
    limits = {
        resource.RLIMIT_CPU: processor_seconds,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
    }
    if _PAGES.exists():  # macOS neither tells the address space nor limits it
        pages = _PAGES.read_text(encoding="ascii").split()[0]
        limits[resource.RLIMIT_AS] = int(pages) * resource.getpagesize() + memory_bytes
    for name, most in limits.items():
        resource.setrlimit(name, (most, most))


def _keep_only(output: int, report: int) -> None:
    """Close every open file but these two, which get fixed numbers."""
    os.dup2(report, _REPORT)
    os.dup2(output, _OUTPUT)
    os.closerange(_REPORT + 1, os.sysconf("SC_OPEN_MAX"))
    for number in (0, 2):
        os.close(number)


def _describe(error: BaseException) -> dict[str, Any]:
    """Return the class, text and line of an error of the program."""
    line = None
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == _FILE:
            line = frame.tb_lineno
        frame = frame.tb_next
    if isinstance(error, SyntaxError) and error.filename == _FILE:
        line = error.lineno
    try:
        text = str(error)[:_ERROR_LENGTH]
    except Exception:  # noqa: BLE001 - `__str__` is the program's own
        text = ""
    return {"error": type(error).__name__[:_ERROR_LENGTH], "text": text, "line": line}


def _run_here(text: str, request: dict[str, Any], restrict: Any) -> None:
    """Run a program in this process, which ends."""
    problem: dict[str, Any] | None = None
    try:
        _limit(request["seconds"], request["memory_bytes"])
        sys.stdin = None  # nothing to read from
        sys.stderr = None  # nobody reads it
        sys.stdout = io.TextIOWrapper(
            io.FileIO(_OUTPUT, "w", closefd=False), encoding="utf-8", errors="replace"
        )
        for name in request["forgotten"]:
            sys.modules.pop(name, None)
        # A program draws the same numbers whenever it is run.
        importlib.import_module("random").seed(0)
        # `-S` leaves them out.
        vars(builtins).update(exit=sys.exit, quit=sys.exit)
        restrict()
        os.write(_REPORT, _ISOLATED)
    except BaseException:  # noqa: BLE001 - never run a program that is not isolated
        os._exit(1)
    try:
        code = compile(text, _FILE, "exec")
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102 - this is what it is for
    except SystemExit as end:
        if end.code not in (None, 0):
            problem = _describe(end)
    except BaseException as error:  # noqa: BLE001 - whatever a program raises is its result
        problem = _describe(error)
    try:
        sys.stdout.flush()
        if problem is not None:
            os.write(_REPORT, json.dumps(problem).encode()[:_REPORT_BYTES])
    finally:
        os._exit(0)


# --- in the worker -------------------------------------------------------------------------------


def _answer(request: dict[str, Any], restrict: Any) -> dict[str, Any]:
    """Run a program in a fork, and return what came of it."""
    started = time.monotonic()
    output_end, output = os.pipe()
    report_end, report = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _keep_only(output, report)
            _run_here(request["program"], request, restrict)
        finally:
            os._exit(1)
    os.close(output)
    os.close(report)
    deadline = started + request["clock_seconds"]
    ended, written, reported = _listen(
        {output_end: request["output_bytes"], report_end: _REPORT_BYTES}, deadline
    )
    # What has closed its pipes may go on; nobody else kills it by SIGKILL than its limits.
    exited = ended == "finished" and _ends(child, deadline)
    os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    os.close(output_end)
    os.close(report_end)
    reply: dict[str, Any] = {
        "output": written.decode("utf-8", "replace"),
        "status": ended,
        "seconds": time.monotonic() - started,
    }
    if not reported.startswith(_ISOLATED):
        # At the deadline of a busy machine, the program may not have begun.
        return reply if ended == "timeout" else {**reply, "status": "not-isolated"}
    code = os.waitstatus_to_exitcode(status)
    problem = reported.removeprefix(_ISOLATED)
    if ended != "finished":
        return reply
    used = usage.ru_utime + usage.ru_stime
    if not exited or code in _OUT_OF_TIME or (code < 0 and used >= request["seconds"]):
        return {**reply, "status": "timeout"}
    if code != 0:
        reply |= {"status": "died", "text": _death(code)}
    elif problem:
        reply |= _read_report(problem)
    return reply


def _ends(child: int, deadline: float) -> bool:
    """Wait for a process to end by itself; False where it has not by the deadline."""
    pause = 0.0002
    while True:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _listen(limits: dict[int, int], deadline: float) -> tuple[str, bytes, bytes]:
    """Read two pipes until both end, the deadline passes, or one brings more than its limit.

    Returns:
        How it ended (`finished`, `timeout`, `too-long`), and what each pipe brought.
    """
    brought = {pipe: bytearray() for pipe in limits}
    first, second = brought
    waiting = set(limits)
    ended = "finished"
    while waiting:
        left = deadline - time.monotonic()
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, left))
        if not ready:
            ended = "timeout"
            break
        for pipe in ready:
            block = os.read(pipe, _BLOCK)
            if not block:
                waiting.discard(pipe)
            brought[pipe] += block
        if any(len(brought[pipe]) > limits[pipe] for pipe in limits):
            ended = "too-long"
            break
    return ended, bytes(brought[first][: limits[first]]), bytes(brought[second][: limits[second]])


def _death(code: int) -> str:
    """Return the reason why a process ended without a word."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def _read_report(data: bytes) -> dict[str, Any]:
    """Read what a process says of its error; a program may have written anything."""
    try:
        found = json.loads(data)
        line = found["line"]
        return {
            "status": "failed",
            "error": str(found["error"])[:_ERROR_LENGTH],
            "text": str(found["text"])[:_ERROR_LENGTH],
            "line": line if isinstance(line, int) else None,
        }
    except (ValueError, TypeError, KeyError, RecursionError):
        return {"status": "failed", "error": "", "text": "", "line": None}


class _InMemory(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules whose code was read while there were files.

    Packages import parts of themselves when they are first used, which is in a program's process.

    Args:
        codes: name of a module -> (its code, marshaled; whether it is a package).
    """

    def __init__(self, codes: dict[str, tuple[bytes, bool]]) -> None:
        self._codes = codes

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
        if name not in self._codes:
            return None
        _, is_package = self._codes[name]
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)

    def create_module(self, spec: Any) -> None:
        """Let the machinery make the module."""

    def exec_module(self, module: ModuleType) -> None:
        code, _ = self._codes[module.__name__]
        exec(marshal.loads(code), vars(module))  # noqa: S102, S302 - read from a package that the user allows


def _read_codes(package: str) -> dict[str, tuple[bytes, bool]]:
    """Read the code of every module of a package that is written in Python."""
    spec = importlib.util.find_spec(package)
    codes: dict[str, tuple[bytes, bool]] = {}
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in Path(folder).rglob("*.py"):
            parts = [package, *file.relative_to(folder).with_suffix("").parts]
            if "tests" in parts:
                continue
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            loader = importlib.machinery.SourceFileLoader(name, str(file))
            try:
                codes[name] = marshal.dumps(loader.get_code(name)), is_package
            except (SyntaxError, ValueError, OSError):
                continue  # templates, and code for other versions of Python
    return codes


def _prepare(setup: dict[str, Any]) -> Any:
    """Import what programs may use; return what isolates the process of one.

    Args:
        setup: `folders` to import from beside the standard library, `modules` to import, the
            `packages` among them, and the `isolation`.
    """
    sys.path += setup["folders"]
    codes: dict[str, tuple[bytes, bool]] = {}
    for name in setup["modules"]:
        importlib.import_module(name)
    for name in setup["packages"]:
        codes |= _read_codes(name)
    sys.meta_path.append(_InMemory(codes))
    seccomp = _beside("seccomp")
    sys.path[:] = []
    gc.collect()
    gc.freeze()  # forks share the pages of what is there
    return {"seccomp": seccomp.restrict, "limits": lambda: None}[setup["isolation"]]


def main() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    lines = sys.stdin.buffer
    replies = os.dup(1)
    restrict = _prepare(json.loads(lines.readline()))
    for line in lines:
        reply = _answer(json.loads(line), restrict)
        data = json.dumps(reply).encode() + b"\n"
        while data:
            data = data[os.write(replies, data) :]


if __name__ == "__main__":
    main()
