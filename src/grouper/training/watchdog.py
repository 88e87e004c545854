"""A thread that prints the stack of every thread when there has been no progress for a while."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading

# Exit code of a process that its watchdog has ended.
EXIT_CODE = 70


class Watchdog(threading.Thread):
    """Prints the stack of every thread when `alive` has not been called for a while.

    If one of several processes is stuck, the others wait forever, and nothing shows which one it
    is. The stuck process therefore also exits, and the launcher ends the others.

    Args:
        rank: of this process.
        fatal: exit, because other processes are waiting for this one.
        minutes: time without a call of `alive` until the stacks are printed.
    """

    def __init__(self, *, rank: int = 0, fatal: bool = False, minutes: float = 30.0) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._minutes = minutes
        self._rank = rank
        self._fatal = fatal
        self._activity = "starting"
        self._moved = threading.Event()
        self._ended = False

    def alive(self, activity: str) -> None:
        """Report progress, and the current activity; without a name, the same as before."""
        if activity:
            self._activity = activity
        self._moved.set()

    def end(self) -> None:
        """Stop watching."""
        self._ended = True
        self._moved.set()

    def run(self) -> None:
        """Watch until the end."""
        while not self._ended:
            if not self._moved.wait(60 * self._minutes):
                sys.stderr.write(
                    f"\n[rank {self._rank}] nothing has moved for {self._minutes:g} minutes, in: "
                    f"{self._activity}. Where every thread stands:\n"
                )
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                sys.stderr.flush()
                if self._fatal:
                    os._exit(EXIT_CODE)
            self._moved.clear()
