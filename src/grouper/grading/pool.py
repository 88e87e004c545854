"""Warm worker processes for the symbolic rung, each behind a hard wall-clock limit.

One thread owns one worker for the life of the pool: it starts the process, hands it one request
at a time, and on a missed deadline kills it and starts another. Linux kills a worker with the
thread that started it, so these threads must not be anybody else's.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from grouper.config.schema import GradingConfig
from grouper.grading.equivalence import Equivalence
from grouper.types import Verdict

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0
# For reading a reference, which is a matter of milliseconds, on any machine however busy.
_READ_SECONDS = 120.0
# Memory that one worker may take.
MEMORY_MB = 2048
_RUNG = "symbolic"
_KILLED = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGQUIT})
"""Exit statuses of a worker that was killed; the limits it has end it in other ways."""


class _Request(NamedTuple):
    """A pair to compare, or with `prediction` None a reference to be read."""

    prediction: str | None
    reference: str
    result: Future[Equivalence]


class WorkerPool:
    """Threads, each with one worker process that is started at its first request.

    Args:
        settings: seconds per request.
        workers: how many.
        module: what a worker runs; another one is another judge.

    `submit` may be called from any thread; `close` kills the workers at once.
    """

    def __init__(
        self, settings: GradingConfig, workers: int, module: str = "grouper.grading.worker"
    ) -> None:
        self._settings = settings
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._workers = [_Worker(settings, module) for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"grading-{i}", daemon=True)
            for i, worker in enumerate(self._workers)
        ]
        self._closed = False
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers alive now."""
        return tuple(worker.pid for worker in self._workers if worker.pid)

    def submit(self, prediction: str | None, reference: str) -> Future[Equivalence]:
        """The verdict to come; the deadline starts when a worker takes the request up."""
        result: Future[Equivalence] = Future()
        result.set_running_or_notify_cancel()  # a verdict on its way cannot be called back
        self._requests.put(_Request(prediction, reference, result))
        return result

    def close(self) -> None:
        """Kill the workers and end the threads; waiting requests end as crashes."""
        self._closed = True
        for _ in self._threads:
            self._requests.put(None)
        for worker in self._workers:
            worker.close()
        for thread in self._threads:
            thread.join(timeout=10)

    def abandon(self) -> None:
        """After a fork, in the child: let go of the parent's workers without touching them."""
        for worker in self._workers:
            worker.release()

    def _serve(self, worker: _Worker) -> None:
        while (request := self._requests.get()) is not None:
            if self._closed:
                request.result.set_result(_crash("the grader was closed"))
            else:
                request.result.set_result(worker.ask(request.prediction, request.reference))
        worker.kill()


class _Worker:
    """One process and its two pipes; replaced whenever it misses a deadline or ends."""

    def __init__(self, settings: GradingConfig, module: str) -> None:
        self._settings = settings
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._unread = b""
        self._closed = False

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def ask(self, prediction: str | None, reference: str) -> Equivalence:
        """One request, answered, timed out or crashed; never raises.

        A worker that somebody else killed has said nothing about the answer, so another one is
        asked, once. A missed deadline and what a worker did to itself are final.
        """
        killed = "the worker was killed, and so was the one asked after it"
        return (
            self._ask(prediction, reference) or self._ask(prediction, reference) or _crash(killed)
        )

    def _ask(self, prediction: str | None, reference: str) -> Equivalence | None:
        """The same of one worker; None where somebody else killed it.

        Its seconds are those of the request: not the wait for a worker, nor a worker's start.
        """
        seconds = self._settings.timeout_seconds if prediction is not None else _READ_SECONDS
        request = {"prediction": prediction, "reference": reference, "seconds": seconds}
        process = None
        try:
            process = self._started()
            if process is None:
                return _crash("the worker could not be started")
            started = time.perf_counter()
            reply = self._exchange(process, json.dumps(request).encode() + b"\n", seconds)
        except (OSError, ValueError) as error:
            killed = process is not None and self._was_killed(process)
            self.kill()
            return None if killed else _crash(f"{type(error).__name__}: {error}")
        answered = self._outcome(process, reply, seconds)
        return answered and answered._replace(seconds=time.perf_counter() - started)

    def _outcome(
        self, process: subprocess.Popen[bytes], reply: dict[str, str] | None, seconds: float
    ) -> Equivalence | None:
        if reply is None:
            alive, killed = process.poll() is None, self._was_killed(process)
            self.kill()
            if alive:
                return Equivalence(Verdict.TIMEOUT, _RUNG, f"no verdict within {seconds:g} s")
            return None if killed else _crash("the worker ended (memory or CPU limit)")
        if reply["verdict"] == Verdict.CRASH:
            self.kill()
        return Equivalence(Verdict(reply["verdict"]), _RUNG, reply["reason"] or "readable")

    def _was_killed(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether a worker ended by a signal from outside, which was not ours."""
        return not self._closed and process.poll() in _KILLED

    def _started(self) -> subprocess.Popen[bytes] | None:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.kill()
        command = [sys.executable, "-P", "-m", self._module]
        process = subprocess.Popen(
            [*command, str(os.getpid()), str(MEMORY_MB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=_environment(),
        )
        with self._lock:
            self._process, self._unread = process, b""
        reply = self._exchange(process, b"", _START_SECONDS)
        if reply is None or not reply["ready"]:
            logger.error("grading worker did not start: %s", reply and reply["reason"])
            self.kill()
            return None
        return process

    def _exchange(
        self, process: subprocess.Popen[bytes], message: bytes, seconds: float
    ) -> dict[str, str] | None:
        """Send a line, return the reply; None when the deadline passes or the worker ends."""
        assert process.stdin is not None
        assert process.stdout is not None
        if message:
            process.stdin.write(message)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not _readable(process.stdout.fileno(), left):
                return None
            chunk = os.read(process.stdout.fileno(), 65_536)
            if not chunk:
                process.wait()
                return None
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, str] = json.loads(line)
        return reply

    def close(self) -> None:
        """Kill the process, and ask no other one."""
        self._closed = True
        self.kill()

    def kill(self) -> None:
        """End the process now, and wait until it is gone."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _close_pipes(process)

    def release(self) -> None:
        """Close our copies of the pipes of a process that belongs to the parent."""
        if self._process is not None:
            _close_pipes(self._process)
            self._process.returncode = 0  # not our child: nothing to reap or warn about


def _readable(descriptor: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


_NEEDED = ("PATH", "HOME", "TMPDIR", "LANG", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


def _environment() -> dict[str, str]:
    """What Python needs, with the package findable and one thread: a worker has one thing to do.

    It reads text that a model wrote, so it is given none of the secrets around it.
    """
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {n: v for n, v in os.environ.items() if n in _NEEDED or n.startswith("LC_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _crash(reason: str) -> Equivalence:
    return Equivalence(Verdict.CRASH, _RUNG, reason)
