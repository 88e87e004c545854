"""The grader: completions in, verdicts out, from any thread, event loop or forked child."""

from __future__ import annotations

import atexit
import importlib.util
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Self

from grouper.config.schema import GradingConfig
from grouper.errors import GradingError
from grouper.grading.equivalence import Equivalence, exact, unreadable
from grouper.grading.extraction import Extraction, extract
from grouper.grading.lenient import extract_lenient
from grouper.grading.normalise import canonical, tidy, tidy_reference
from grouper.grading.numerals import read_number
from grouper.grading.pool import WorkerPool
from grouper.types import AnswerContract, AnswerKind, Grade, Verdict

_REMEMBERED = 65_536
_OFFENDERS = 50
_RUNG_OFF = Equivalence(
    Verdict.INCORRECT, "number", "not equal as text or number; the symbolic rung is off"
)


class Grader:
    r"""Grades completions by one answer contract.

    Args:
        contract: where the answer stands.
        settings: deadline, and whether the symbolic rung is on.
        workers: processes that compare at the same time; 0: one for every four processors.

    Raises:
        GradingError: the symbolic rung is on and Math-Verify is not installed.

    Workers start at the first pair that needs one and live until `close`. Pairs already judged
    are remembered, timeouts among them, so a string that hangs costs its deadline once.

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
        self._workers = workers or max(1, (os.cpu_count() or 1) // 4)
        self.counts: Counter[Verdict] = Counter()
        """Verdicts handed out so far."""
        self.offenders: deque[tuple[str, str, Verdict]] = deque(maxlen=_OFFENDERS)
        """(answer, reference, verdict) of the last timeouts and crashes."""
        self._known: OrderedDict[tuple[str | None, str], Equivalence] = OrderedDict()
        self._pending: dict[tuple[str | None, str], Future[Equivalence]] = {}
        self._lock = threading.RLock()
        self._pool: WorkerPool | None = None
        self._closed = False
        _graders.add(self)

    def grade(self, texts: Sequence[str], references: Sequence[str]) -> list[Grade]:
        """One grade a text, in order; blocks until all are known.

        Raises:
            ValueError: not one reference a text.
        """
        outcomes = [self._decide(t, r) for t, r in zip(texts, references, strict=True)]
        return [outcome if isinstance(outcome, Grade) else outcome.result() for outcome in outcomes]

    def submit(self, text: str, reference: str) -> Future[Grade]:
        """The grade to come: there at once unless a worker is needed. Never raises."""
        return _to_come(self._decide(text, reference))

    def submit_lenient(self, text: str, reference: str) -> Future[Grade]:
        """The grade of the answer found in any known way (`extract_lenient`); not in `counts`.

        Its `reason` begins with how the answer was found.
        """
        started = time.perf_counter()
        found = extract_lenient(text, self.contract)
        return _to_come(self._judge(found, reference, started, lenient=True))

    def _decide(self, text: str, reference: str) -> Grade | Future[Grade]:
        """The grade where the exact rungs can tell, else the one to come."""
        started = time.perf_counter()
        return self._judge(extract(text, self.contract), reference, started)

    def _judge(
        self, found: Extraction, reference: str, started: float, *, lenient: bool = False
    ) -> Grade | Future[Grade]:
        answer, how = found
        decided = None
        if answer is None:
            decided = Equivalence(Verdict.NO_ANSWER, "extract", how)
        else:
            decided = exact(answer, reference)
            if decided is None and not self.settings.symbolic:
                decided = _RUNG_OFF
        seconds = time.perf_counter() - started
        said = f"{how}; " if lenient and answer is not None else ""
        if decided is not None:
            return self._finished(answer, decided, seconds, said, counted=not lenient)
        result: Future[Grade] = Future()
        self._ask(answer, reference).add_done_callback(
            lambda future: result.set_result(
                self._finished(answer, future.result(), seconds, said, counted=not lenient)
            )
        )
        return result

    def _finished(
        self, answer: str | None, decided: Equivalence, seconds: float, said: str, *, counted: bool
    ) -> Grade:
        verdict, rung, reason, waited = decided
        if counted:
            with self._lock:
                self.counts[verdict] += 1
        return Grade(
            verdict=verdict,
            extracted=answer,
            rung=rung,
            reason=said + reason if said else reason,
            seconds=seconds + waited,
        )

    def read_reference(self, reference: str) -> str | None:
        """Why the symbolic rung cannot read a reference, or None: a matter of its spelling alone.

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
        """Start a worker now, where the symbolic rung is on, and see that it can work.

        Raises:
            GradingError: it dies, for example because Math-Verify is installed but broken.
        """
        if not self.settings.symbolic:
            return
        decided = self._ask(None, r"\sqrt{2}").result()
        if decided.verdict is Verdict.CRASH:
            raise GradingError(
                f"the worker of the symbolic rung cannot start: {decided.reason}",
                where="grading.symbolic",
                fix="Try `python -m grouper.grading.worker` to see why; or set grading.symbolic: "
                "false to grade by text and exact numbers only.",
            )

    def close(self) -> None:
        """Kill the workers; a later `grade` starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers alive now."""
        pool = self._pool
        return pool.pids if pool is not None else ()

    def _ask(self, answer: str | None, reference: str) -> Future[Equivalence]:
        """Judged before, being judged, or handed to a worker: each pair once."""
        key = (answer, reference)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                done: Future[Equivalence] = Future()
                done.set_result(known)
                return done
            if key in self._pending:
                return self._pending[key]
            if self._pool is None:
                self._pool = WorkerPool(self.settings, self._workers)
            future = self._pool.submit(answer, reference)
            self._pending[key] = future
        future.add_done_callback(lambda done: self._remember(key, done.result()))
        return future

    def _remember(self, key: tuple[str | None, str], decided: Equivalence) -> None:
        with self._lock:
            self._pending.pop(key, None)
            self._known[key] = decided._replace(seconds=0.0)  # known answers are free
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            if decided.verdict in (Verdict.TIMEOUT, Verdict.CRASH):
                self.offenders.append((key[0] or "", key[1], decided.verdict))

    def _after_fork(self) -> None:
        """In a forked child: our threads are gone and the workers are the parent's."""
        self._lock = threading.RLock()
        self._pending = {}
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.abandon()


TEXT_ALONE = "text alone"
"""The rung of a grade whose reference cannot be read."""


def by_text_alone(grade: Grade, reference: str) -> Grade:
    r"""The same grade, or where the reference cannot be read, whether the answer is the same text.

    Evaluations keep such problems and count them apart; a reward leaves them out.

    >>> grade = Grade(verdict=Verdict.NOT_SCORED, extracted="a = b", rung="symbolic", reason="")
    >>> by_text_alone(grade, "$a=b$").verdict.value, by_text_alone(grade, "a=c").verdict.value
    ('correct', 'incorrect')
    """
    if grade.verdict is not Verdict.NOT_SCORED or grade.extracted is None:
        return grade
    same = canonical(tidy(grade.extracted)) == canonical(tidy_reference(reference))
    verdict = Verdict.CORRECT if same else Verdict.INCORRECT
    reason = f"{grade.reason}; {'the same text' if same else 'another text'}"
    return replace(grade, verdict=verdict, rung=TEXT_ALONE, reason=reason)


def _to_come(outcome: Grade | Future[Grade]) -> Future[Grade]:
    if isinstance(outcome, Future):
        return outcome
    result: Future[Grade] = Future()
    result.set_result(outcome)
    return result


_graders: weakref.WeakSet[Grader] = weakref.WeakSet()


def _close_all() -> None:
    for grader in list(_graders):
        grader.close()


def _after_fork_in_child() -> None:
    for grader in list(_graders):
        grader._after_fork()  # noqa: SLF001 - same module, one class


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def require_symbolic(
    settings: GradingConfig,
    find: Callable[[str], object | None] = importlib.util.find_spec,
) -> None:
    """Refuse to start with the symbolic rung on and no Math-Verify.

    Args:
        settings: the recipe's grading section.
        find: how a module is looked for; never imports it.

    Raises:
        GradingError: it is on and cannot be imported.
    """
    if not settings.symbolic:
        return
    missing = _missing(find)
    if missing:
        raise GradingError(
            f"the symbolic rung of the grader needs {', '.join(missing)}, not installed here",
            where="grading.symbolic",
            fix="Install it with `pip install 'math-verify[antlr4_13_2]'`, or set "
            "grading.symbolic: false to grade by text and exact numbers only (answers such as "
            "2\\sqrt{3} are then correct only when written like the reference).",
        )


def _missing(find: Callable[[str], object | None]) -> list[str]:
    return [name for name in ("math_verify", "latex2sympy2_extended", "sympy") if not find(name)]


_shared: dict[AnswerContract | None, Grader] = {}


def _shared_grader(contract: AnswerContract | None) -> Grader:
    """One lazily made grader a contract; None: for reading references."""
    found = _shared.get(contract)
    if found is None:
        # Without a lock, which a fork could leave locked; one too many starts no worker.
        made = Grader(contract or AnswerContract(kind=AnswerKind.BOXED), GradingConfig())
        found = _shared.setdefault(contract, made)
    return found


def grade(text: str, reference: str, contract: AnswerContract) -> Grade:
    r"""Grade one completion with a shared grader and default settings.

    >>> grade(r"so \boxed{0.5}", r"\frac12", AnswerContract(kind=AnswerKind.BOXED)).verdict.value
    'correct'
    """
    return _shared_grader(contract).submit(text, reference).result()


def check_reference(answer: str) -> str | None:
    r"""Why a reference answer cannot be graded against; None when it is readable.

    Only the spelling counts, never the time that it takes. Plain numbers are decided at once; the
    rest is read by a worker. Where Math-Verify is not installed (and so the symbolic rung is off by
    setting), the parser's grammar is not asked.

    Raises:
        GradingError: see `Grader.read_reference`.

    >>> check_reference("1,234") is None, check_reference(r"\frac{1}{2")
    (True, 'unbalanced braces')
    """
    why = unreadable(answer)
    if why is not None:
        return why
    if read_number(tidy(answer)) is not None or _missing(importlib.util.find_spec):
        return None
    return _shared_grader(None).read_reference(answer)
