r"""One grading worker: `python -P -m grouper.grading.worker PARENT_PID MEMORY_MB`.

Reads one JSON request a line from standard input and writes one JSON reply a line. It limits its
own memory and CPU time, ignores Ctrl-C (the parent decides), ends when its input closes, and on
Linux is killed with the thread that started it.

    {"prediction": "2\\sqrt{3}", "reference": "\\sqrt{12}", "seconds": 2.0}
    {"verdict": "correct", "reason": "equal at every point tried"}

A request without a prediction asks whether the reference can be read.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

Answer = Callable[[dict[str, Any]], dict[str, str | None]]
"""From a request to its reply."""

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Serve our own symbolic rung."""
    return serve(arguments, _load)


def serve(arguments: list[str], load: Callable[[], Answer]) -> int:
    """Answer requests until standard input closes; the exit status.

    Args:
        arguments: process id of the parent, megabytes of memory.
        load: imports what is needed, within the limits; an ImportError is told to the parent.
    """
    parent, memory_mb = int(arguments[0]), int(arguments[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(parent)
    _limit_memory(memory_mb)
    # Libraries print; the protocol must not hear it.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        answer = load()
    except ImportError as error:
        _send(replies, {"ready": False, "reason": str(error)})
        return 1
    _send(replies, {"ready": True})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit_cpu(request["seconds"])
        try:
            reply = answer(request)
        except (MemoryError, RecursionError) as error:
            reply = {"verdict": "crash", "reason": type(error).__name__}
        _send(replies, reply)
        if reply["verdict"] == "crash":
            return 1  # what ran out of memory may have left the libraries in any state
    return 0


def _load() -> Answer:
    """Our own judge; imports Math-Verify and sympy, which the trainer never does."""
    from grouper.grading.symbolic import judge, why_unreadable

    def answer(request: dict[str, Any]) -> dict[str, str | None]:
        try:
            if request["prediction"] is None:
                reason = why_unreadable(request["reference"])
                return {"verdict": "correct" if reason is None else "not_scored", "reason": reason}
            result = judge(request["prediction"], request["reference"])
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001 - sympy raises anything on odd input; data, not a bug
            return {"verdict": "unparseable", "reason": f"{type(error).__name__}: {error}"[:200]}
        return {"verdict": result.verdict.value, "reason": result.reason}

    return answer


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _die_with(parent: int) -> None:
    """Ask Linux to kill us with our parent; elsewhere the closed input and CPU limit do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)


def _limit_memory(megabytes: int) -> None:
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    except (ValueError, OSError):
        return  # macOS does not limit address space; the deadline still holds


def _limit_cpu(seconds: float) -> None:
    """A backstop for a parent that is gone: at most this request's time, then a kill."""
    import resource

    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(used + 2 * seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
