"""The watchdog: when nothing has moved for a long time, every process says where it stands.

Processes that wait for one another wait for ever when one of them is stuck, and nothing tells
which. The watchdog writes the phase and the stack of every thread to standard error and, where
others are waiting, ends the process, so that whoever started the team ends them all.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from types import TracebackType
from typing import Self

__all__ = ["Watchdog"]

EXIT_CODE = 70
"""What a process ends with that its watchdog has ended."""


class Watchdog:
    """Barks when `alive` has not been called for a while.

    Args:
        minutes: how long; 0: never.
        rank: of this process.
        fatal: end the process, since others are waiting for it.
    """

    def __init__(self, minutes: float, *, rank: int = 0, fatal: bool = False) -> None:
        self._seconds = 60.0 * minutes
        self._rank = rank
        self._fatal = fatal
        self._what = "starting"
        self._moved = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None

    def alive(self, what: str) -> None:
        """Say that something moves, and what is being done now."""
        self._what = what
        self._moved.set()

    def __enter__(self) -> Self:
        if self._seconds > 0:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended = True
        self._moved.set()

    def _watch(self) -> None:
        while not self._ended:
            if not self._moved.wait(self._seconds):
                self._bark()
            self._moved.clear()

    def _bark(self) -> None:
        sys.stderr.write(
            f"\n[rank {self._rank}] nothing has moved for {self._seconds / 60:g} minutes, in: "
            f"{self._what}. Where every thread stands:\n"
        )
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        if self._fatal:
            os._exit(EXIT_CODE)
