"""Answers that a program prints: each program is run once, in a process of its own."""

from __future__ import annotations

import os
import threading
from concurrent.futures import CancelledError, Future

from grouper.config.schema import ProgramsConfig
from grouper.errors import GrouperError
from grouper.files import processors
from grouper.grading.extract import Extraction
from grouper.grading.lenient import inside_a_sentence
from grouper.programs.runner import Limits, ProgramResult, ProgramRunner, require_isolation

# Programs whose results are kept; the oldest goes first.
_REMEMBERED = 65_536
# On the clock, a program may take this many times its processor time.
_CLOCK = 5
# Words of a printed line that is a sentence: "The answer is 42".
_WORDS = 3


class Programs:
    """Runs programs, side by side and each of them once.

    The processes start with the first program and live until `close`; later programs start new
    ones.

    Args:
        settings: limits and isolation.
    """

    def __init__(self, settings: ProgramsConfig) -> None:
        self._settings = settings
        self._runner: ProgramRunner | None = None
        self._known: dict[str, Future[ProgramResult]] = {}
        self._lock = threading.RLock()

    def start(self) -> None:
        """Run a first program, and see that it can be isolated.

        Raises:
            ConfigError: not as the settings ask for, or a package is missing.
        """
        self.run("print(1)").result()

    def run(self, program: str) -> Future[ProgramResult]:
        """Begin to run a program, or return what is known of it.

        Raises:
            ConfigError: this machine does not isolate it as the settings ask for, or a package is
                missing.
        """
        with self._lock:
            known = self._known.get(program)
            if known is not None:
                return known
            if self._runner is None:
                require_isolation(self._settings.isolation, where="grading.programs.isolation")
                self._runner = runner_of(self._settings)
            future = self._known[program] = self._runner.submit(program)
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        future.add_done_callback(lambda ended: self._keep(program, ended))
        return future

    def _keep(self, program: str, ended: Future[ProgramResult]) -> None:
        """Keep what came of a program, and nothing of those who have waited for it.

        What could not be run is forgotten, and tried again.
        """
        with self._lock:
            if self._known.get(program) is not ended:
                return
            try:
                result = ended.result()
            except (GrouperError, CancelledError):
                del self._known[program]
                return
            self._known[program] = known = Future[ProgramResult]()
            known.set_result(result)

    def close(self) -> None:
        """End the processes; programs that run are killed, and come to nothing."""
        with self._lock:
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def after_fork(self) -> None:
        """In a forked child: threads are gone and the processes are the parent's."""
        self._lock = threading.RLock()
        self._known = {program: future for program, future in self._known.items() if future.done()}
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.abandon()


def runner_of(settings: ProgramsConfig) -> ProgramRunner:
    """Return a runner of programs as the settings ask for."""
    limits = Limits(
        seconds=settings.seconds,
        clock_seconds=_CLOCK * settings.seconds,
        memory_bytes=settings.memory_mb * 2**20,
    )
    # Each process of a training has a grader of its own.
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    workers = max(1, processors() // (2 * here))
    return ProgramRunner(
        limits, workers=workers, isolation=settings.isolation, packages=settings.packages
    )


def printed_answer(result: ProgramResult, *, lenient: bool = False) -> Extraction:
    r"""Return the last line that a program printed.

    Args:
        result: what came of it.
        lenient: find the answer in a line that is a sentence.

    >>> printed_answer(ProgramResult(status="finished", output="so\n42\n"))
    Extraction(answer='42', reason='last line of the program')
    >>> printed_answer(ProgramResult(status="finished")).reason
    'the program printed nothing'
    """
    if result.reason:
        return Extraction(None, result.reason)
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    if not lines:
        return Extraction(None, "the program printed nothing")
    found = inside_a_sentence(lines[-1], words=_WORDS) if lenient else None
    return found or Extraction(lines[-1], "last line of the program")
