"""Work that goes on while a phase trains, on rank 0 alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from grouper.models.process_group import ProcessGroup

# The rollouts of the next step, and a validation.
_THREADS = 2


class Background:
    """Runs work in threads of rank 0: several processes can only meet in one place at a time.

    Args:
        processes: of the run.
    """

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self._threads = ThreadPoolExecutor(_THREADS)
        self._rollouts: Future[Any] | None = None

    def begin(self, work: Callable[[], Any]) -> Future[Any]:
        """Begin some work; its result is None on other processes than rank 0."""
        return self._threads.submit(work if self._processes.rank == 0 else _do_nothing)

    def begin_rollouts(self, collect: Callable[[], Any]) -> Future[Any]:
        """Begin to draw the rollouts of the next step; nothing else samples until that is done."""
        self._rollouts = self.begin(collect)
        return self._rollouts

    def wait_for_rollouts(self) -> None:
        """Wait until no rollouts are drawn: they may use the same engine, with other weights."""
        if self._rollouts is not None:
            wait([self._rollouts])

    def close(self) -> None:
        """Wait for what is going on, and take no more work."""
        self._threads.shutdown()


def _do_nothing() -> None:
    return None
