"""The grader: completions in, verdicts out, from any thread, event loop or forked child.

What needs the symbolic stage is handed to warm worker processes, each with a limit of processor
time for an answer, so that a busy machine makes no answer wrong. One thread owns one worker for the
life of the pool: it starts the process, hands it one request at a time, and on a missed deadline
starts another. Linux kills a worker with
the thread that started it, so these threads must not be anybody else's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from grouper.config.schema import GradingConfig
from grouper.errors import ConfigError, GradingError, GrouperError
from grouper.files import processors
from grouper.futures import then
from grouper.grading.answers import read, read_reference
from grouper.grading.equivalence import Equivalence, exact
from grouper.grading.extract import Extraction, extract
from grouper.grading.lenient import extract_lenient
from grouper.grading.programs import Programs, printed_answer
from grouper.programs.runner import ProgramResult
from grouper.types import AnswerContract, AnswerKind, Grade, Verdict

# Seconds to wait, on however busy a machine: for a worker's start, for a reference to be read
# (which takes milliseconds), and for an answer beyond its processor time.
_PATIENCE = 120.0
# Times that a worker is started which is killed before it is up.
_STARTS = 3
# Memory that one worker may take.
MEMORY_MB = 2048
# Exit statuses of a worker killed from outside; its own limits end it in other ways.
_KILLED = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGQUIT)
_NEEDED = ("PATH", "HOME", "TMPDIR", "LANG", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_NEEDED_TOO = ("LC_", "PYTHONUSERBASE", "PYTHONNOUSERSITE")


_Pair = tuple[str | None, str]
"""(answer, reference); without an answer: whether the reference can be read."""
_Requests = SimpleQueue[tuple[_Pair, Future[Equivalence]] | None]


class _Worker(threading.Thread):
    """One process and its two pipes; replaced whenever it misses a deadline or ends.

    Args:
        requests: shared by all workers of a grader; None ends one of them.
        seconds: of processor time per request.
    """

    def __init__(self, requests: _Requests, seconds: float) -> None:
        super().__init__(name="grading", daemon=True)
        self.process: subprocess.Popen[bytes] | None = None
        self.closed = False
        self._requests = requests
        self._seconds = seconds
        self._lock = threading.Lock()
        self.start()

    def run(self) -> None:
        """Answer requests; none of them raises.

        A worker killed from outside says nothing about the answer, so the pair goes to another one,
        once. A missed deadline is final, and so is a worker that ended by its own limits.
        """
        killed = _crash("two workers were killed over this answer")
        while (request := self._requests.get()) is not None:
            pair, result = request
            result.set_result(self._judged(*pair) or self._judged(*pair) or killed)
        self.kill()

    def _judged(self, prediction: str | None, reference: str) -> Equivalence | None:
        """The verdict, a timeout or a crash; None if the worker was killed from outside.

        Its seconds are those of the request: not the wait for a worker, nor a worker's start.
        """
        process = self._living()
        if process is None:
            return _NOT_ASKED
        seconds = self._seconds if prediction is not None else _PATIENCE
        request = {"prediction": prediction, "reference": reference, "seconds": seconds}
        reply = _exchange(process, json.dumps(request).encode() + b"\n", seconds + _PATIENCE)
        status = process.poll()
        if reply is None or reply["verdict"] == Verdict.CRASH:
            self.kill()
        if reply is not None:
            verdict = Verdict(reply["verdict"])
            return Equivalence(verdict, "symbolic", reply["reason"], reply["seconds"])
        if status in (None, -signal.SIGPROF):
            late = f"no verdict within {seconds:g} s"
            return Equivalence(Verdict.TIMEOUT, "symbolic", late, seconds)
        if status in _KILLED:
            return _NOT_ASKED if self.closed else None
        return _crash("the worker ended (memory or CPU limit)")

    def _living(self) -> subprocess.Popen[bytes] | None:
        """The process, started if there is none; None if it does not come up."""
        if self.process is not None and self.process.poll() is None:
            return self.process
        for _ in range(_STARTS):
            self.kill()
            process = self._launched()
            if process is None:
                return None
            if _exchange(process, b"", _PATIENCE) is not None:
                return process
            # Killed from outside, it is started again; what ends by itself would end again.
            if process.poll() not in _KILLED:
                break
        self.kill()
        return None

    def _launched(self) -> subprocess.Popen[bytes] | None:
        """A new process, which may not answer yet; None once the worker is closed."""
        limits = str(os.getpid()), str(MEMORY_MB)
        command = [sys.executable, "-P", "-m", "grouper.grading.symbolic", *limits]
        with self._lock:
            if self.closed:
                return None
            self.process = process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
        return process

    def close(self) -> None:
        """Kill the process and start no other; later requests end as crashes."""
        self.closed = True
        self.kill()
        self._requests.put(None)

    def kill(self) -> None:
        """End the process now, and wait until it is gone."""
        with self._lock:
            process, self.process = self.process, None
        if process is not None:
            with process:  # which waits for it, and closes the pipes
                process.kill()

    def abandon(self) -> None:
        """After a fork, in the child: let go of the parent's process without touching it."""
        if self.process is not None:
            with self.process:  # which closes the pipes
                self.process.returncode = 0  # not our child: nothing to reap or warn about


def _exchange(
    process: subprocess.Popen[bytes], message: bytes, seconds: float
) -> dict[str, Any] | None:
    """Send a line, return the reply; None when the deadline passes or the worker has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(message)
        process.stdin.flush()
        poller = select.poll()
        poller.register(process.stdout.fileno(), select.POLLIN)
        if not poller.poll(seconds * 1000):
            return None
        line = process.stdout.readline()  # a worker writes a whole line at once
        return json.loads(line)  # type: ignore[no-any-return] # one of ours
    except (OSError, ValueError):
        process.wait()
        return None


def _environment() -> dict[str, str]:
    """What Python needs, with the package findable and one thread: a worker has one thing to do.

    It reads text that a model wrote, so it is given none of the secrets around it.
    """
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {n: v for n, v in os.environ.items() if n in _NEEDED or n.startswith(_NEEDED_TOO)}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _ungraded(verdict: Verdict, reason: str) -> Grade:
    """The grade of a program that brought no answer to compare."""
    return Grade(verdict=verdict, extracted=None, stage="program", reason=reason)


def _crash(reason: str) -> Equivalence:
    return Equivalence(Verdict.CRASH, "symbolic", reason)


_NOT_ASKED = _crash("the grader was closed, or the worker could not be started")


# --- the grader ----------------------------------------------------------------------------------

# Judged pairs that a grader keeps; the oldest goes first.
_REMEMBERED = 65_536


class Grader(contextlib.AbstractContextManager["Grader"]):
    r"""Grades completions by one answer contract.

    Args:
        contract: where the answer is found.
        settings: deadline, and whether the symbolic stage is on.
        workers: processes that compare at the same time; 0: one for every four `processors`.

    Raises:
        GradingError: the symbolic stage is on and Math-Verify is not installed.

    Workers start at the first pair that needs one and live until `close`. Pairs already judged
    are remembered, timeouts among them, so a string that hangs costs its deadline once.

    >>> from grouper.types import AnswerKind
    >>> contract = AnswerContract(kind=AnswerKind.BOXED)
    >>> with Grader(contract, GradingConfig()) as grader:
    ...     [g.verdict.value for g in grader.grade([r"\boxed{4}", "4?"], ["4.0", "4"])]
    ['correct', 'no_answer']
    """

    def __init__(
        self, contract: AnswerContract, settings: GradingConfig, *, workers: int = 0
    ) -> None:
        require_symbolic(settings)
        self.contract = contract
        self.settings = settings
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes with workers of their own
        self._count = workers or max(1, processors() // (4 * here))
        self._workers: list[_Worker] = []
        self._requests: _Requests = SimpleQueue()
        self._asked: dict[_Pair, Future[Equivalence]] = {}
        self._lock = threading.RLock()
        self._programs: Programs | None = None
        if contract.kind is AnswerKind.PROGRAM:
            self._programs = Programs(settings.programs)
            weakref.finalize(self, self._programs.close)
        _graders.add(self)
        # Also where it is left open, as by a cell of a notebook that is run again.
        weakref.finalize(self, _end, self._workers)

    def grade(self, texts: Sequence[str], references: Sequence[str]) -> list[Grade]:
        """One grade per text, in order; blocks until all are known.

        Raises:
            ValueError: not one reference per text.
        """
        grades = [self._grade(t, r) for t, r in zip(texts, references, strict=True)]
        return [g.result() if isinstance(g, Future) else g for g in grades]

    def submit(self, text: str, reference: str, *, lenient: bool = False) -> Future[Grade]:
        """The future grade, done at once unless a worker is needed.

        Args:
            text: a completion.
            reference: the right answer.
            lenient: take the answer found in any known way (`extract_lenient`); the grade's
                `reason` then begins with how it was found.

        Raises:
            ConfigError: the answer is a program, and this machine cannot isolate it as asked for.
        """
        found = self._grade(text, reference, lenient=lenient)
        if isinstance(found, Future):
            return found
        known: Future[Grade] = Future()
        known.set_result(found)
        return known

    def answer(self, text: str) -> Extraction:
        """The answer that a completion commits to; a program is run.

        Raises:
            GrouperError: a program cannot be run.
        """
        found = extract(text, self.contract)
        if self._programs is None or found.answer is None:
            return found
        return printed_answer(self._programs.run(found.answer).result())

    def _grade(self, text: str, reference: str, *, lenient: bool = False) -> Grade | Future[Grade]:
        """The grade itself, unless a worker is needed: a future takes longer than most grades."""
        started = time.perf_counter()
        find = extract_lenient if lenient else extract
        if self._programs is None:
            return self._judge(find(text, self.contract), reference, started, lenient=lenient)
        program = extract(text, self.contract)
        if program.answer is None:
            found = find(text, self.contract) if lenient else program
            return self._judge(found, reference, started, lenient=lenient)

        def printed(ended: Future[ProgramResult]) -> Grade | Future[Grade]:
            try:
                result = ended.result()
            except ConfigError:  # an isolation that is not there stops the run
                raise
            except GrouperError as error:
                return _ungraded(Verdict.CRASH, f"the program was not run: {error.what}")
            except CancelledError:
                return _ungraded(Verdict.CRASH, "the grader was closed")
            found = printed_answer(result, lenient=lenient)
            if result.status == "timeout" and found.answer is None and not lenient:
                return _ungraded(Verdict.TIMEOUT, found.reason)
            if found.answer is None and lenient:
                found = extract_lenient(text, self.contract)
            stage = "program" if found.answer is None else ""
            return self._judge(found, reference, started, lenient=lenient, stage=stage)

        return then(self._programs.run(program.answer), printed)

    def _judge(
        self,
        found: Extraction,
        reference: str,
        started: float,
        *,
        lenient: bool,
        stage: str = "",
    ) -> Grade | Future[Grade]:
        """The grade of an answer that was found or not.

        Args:
            found: the answer as written, or the reason why there is none.
            reference: the right answer.
            started: when the grading began.
            lenient: whether the reason says how it was found.
            stage: the stage that found none, if it is not the first.
        """
        answer, how = found
        if answer is None:
            decided: Equivalence | None = Equivalence(Verdict.NO_ANSWER, stage or "extract", how)
        elif self.contract.as_text:
            decided = _compared_as_text(answer, reference)
        else:
            decided = exact(answer, reference)
            if decided is None and not self.settings.symbolic:
                off = "not equal as text or number; the symbolic stage is off"
                decided = Equivalence(Verdict.INCORRECT, "number", off)
        seconds = time.perf_counter() - started

        def graded(decided: Equivalence) -> Grade:
            verdict, decisive_stage, reason, waited = decided
            return Grade(
                verdict=verdict,
                extracted=answer,
                stage=decisive_stage,
                reason=f"{how}; {reason}" if lenient and answer is not None else reason,
                seconds=seconds + waited,
            )

        if decided is not None:
            return graded(decided)
        judged = self._ask(answer, reference)
        if judged.done():
            # Judged before: it cost nothing.
            return graded(judged.result()._replace(seconds=0.0))
        return then(judged, lambda known: graded(known.result()))

    def read_reference(self, reference: str) -> str | None:
        """Why the symbolic stage cannot read a reference, or None. Only its spelling counts.

        Raises:
            GradingError: a worker died over it, or this machine took minutes to parse it. Neither
                says anything about the reference, and a guess would change the problem set.
        """
        decided = self._ask(None, reference).result()
        if decided.verdict in (Verdict.TIMEOUT, Verdict.CRASH):
            raise GradingError(
                f"the reference {reference[:80]!r} could not be checked: {decided.reason}",
                where="grading.symbolic",
                fix="Try again with time and memory to spare, or leave the row out.",
            )
        return None if decided.verdict is Verdict.CORRECT else decided.reason

    def start(self) -> None:
        """Start a worker now, where the symbolic stage is on, and see that it can work.

        Raises:
            ConfigError: answers are programs, and this machine cannot isolate them as asked for.
            GradingError: it dies, for example because Math-Verify is installed but broken.
        """
        if self._programs is not None:
            self._programs.start()
        if not self.settings.symbolic:
            return
        decided = self._ask(None, r"\sqrt{2}").result()
        if decided.verdict is Verdict.CRASH:
            raise GradingError(
                f"the worker of the symbolic stage cannot start: {decided.reason}",
                where="grading.symbolic",
                fix="Try `python -c 'import grouper.grading.symbolic'` to see why; or set "
                "grading.symbolic: false to grade by text and exact numbers only.",
            )

    def close(self) -> None:
        """Kill the workers: what waits for them is a crash. A later `grade` starts new ones."""
        with self._lock:
            workers, self._workers[:] = self._workers[:], []
        _end(workers)
        if self._programs is not None:
            self._programs.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers alive now."""
        return tuple(worker.process.pid for worker in self._workers if worker.process)

    def _ask(self, answer: str | None, reference: str) -> Future[Equivalence]:
        """The verdict to come; each pair goes to a worker once."""
        pair = answer, reference
        with self._lock:
            known = self._asked.get(pair)
            if known is not None and not (known.done() and known.result() is _NOT_ASKED):
                return known
            if not self._workers:
                self._requests, seconds = SimpleQueue(), self.settings.timeout_seconds
                self._workers += [_Worker(self._requests, seconds) for _ in range(self._count)]
            future = self._asked[pair] = Future()
            future.set_running_or_notify_cancel()  # a verdict on its way cannot be called back
            self._requests.put((pair, future))
            if len(self._asked) > _REMEMBERED:
                del self._asked[next(iter(self._asked))]
        return future

    def after_fork(self) -> None:
        """In a forked child: our threads are gone and the workers are the parent's."""
        self._lock = threading.RLock()
        self._asked = {pair: future for pair, future in self._asked.items() if future.done()}
        for worker in self._workers:
            worker.abandon()
        self._workers.clear()
        if self._programs is not None:
            self._programs.after_fork()


def _end(workers: Sequence[_Worker]) -> None:
    """Kill these workers, and wait until they are gone."""
    for worker in workers:
        worker.close()
    for worker in workers:
        worker.join(timeout=10)


_graders: weakref.WeakSet[Grader] = weakref.WeakSet()


def _all_after_fork() -> None:
    for grader in list(_graders):
        grader.after_fork()


os.register_at_fork(after_in_child=_all_after_fork)


def require_symbolic(settings: GradingConfig) -> None:
    """Refuse to start with the symbolic stage on and no Math-Verify; nothing is imported.

    Raises:
        GradingError: it is on and cannot be imported.
    """
    needed = ("math_verify", "latex2sympy2_extended", "sympy") if settings.symbolic else ()
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    if missing:
        raise GradingError(
            f"the symbolic stage of the grader needs {', '.join(missing)}, not installed here",
            where="grading.symbolic",
            fix="Install it with `pip install 'math-verify[antlr4_13_2]'`, or set "
            "grading.symbolic: false to grade by text and exact numbers only (answers such as "
            "2\\sqrt{3} are then correct only when written like the reference).",
        )


# --- without a grader of one's own ---------------------------------------------------------------

TEXT_ALONE = "text alone"
"""The stage of a grade whose reference cannot be read."""


def _compared_as_text(answer: str, reference: str) -> Equivalence:
    """The verdict where commas, dollar signs, a last full stop and case alone may differ."""
    mine, theirs = (
        text.replace(",", "").replace("$", "").removesuffix(".").lower()
        for text in (answer, reference)
    )
    verdict = Verdict.CORRECT if mine == theirs else Verdict.INCORRECT
    return Equivalence(verdict, "text", "compared as text, as the protocol does")


def by_text_alone(grade: Grade, reference: str) -> Grade:
    r"""The same grade, or where the reference cannot be read, whether the answer is the same text.

    Evaluations keep such problems and count them apart; a reward leaves them out.

    >>> grade = Grade(verdict=Verdict.NOT_SCORED, extracted="a = b", stage="symbolic", reason="")
    >>> by_text_alone(grade, "$a=b$").verdict.value, by_text_alone(grade, "a=c").verdict.value
    ('correct', 'incorrect')
    """
    if grade.verdict is not Verdict.NOT_SCORED or grade.extracted is None:
        return grade
    answer = read(grade.extracted).statement
    is_same = answer.canonical == read_reference(reference).statement.canonical
    verdict = Verdict.CORRECT if is_same else Verdict.INCORRECT
    reason = f"{grade.reason}; {'the same text' if is_same else 'another text'}"
    return replace(grade, verdict=verdict, stage=TEXT_ALONE, reason=reason)


@cache
def shared_grader(contract: AnswerContract) -> Grader:
    """One grader with default settings for each contract, made when it is first needed."""
    return Grader(contract, GradingConfig())


def grade(text: str, reference: str, contract: AnswerContract) -> Grade:
    r"""Grade one completion with a shared grader and default settings.

    >>> from grouper.types import AnswerKind
    >>> grade(r"so \boxed{0.5}", r"\frac12", AnswerContract(kind=AnswerKind.BOXED)).verdict.value
    'correct'
    """
    return shared_grader(contract).submit(text, reference).result()
