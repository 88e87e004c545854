"""A thread that reports where every thread stands when nothing has moved for a while."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading

# Exit code of a process that its watchdog has ended.
EXIT_CODE = 70


class Watchdog(threading.Thread):
    """Prints the stack of every thread when `alive` has not been called for a while.

    If one of several processes is stuck, the others wait forever without a sign of which one it is.
    So where others are waiting, the process also exits, and the launcher ends them all.

    Args:
        rank: of this process.
        fatal: exit, because other processes are waiting for this one.
        minutes: without a call of `alive`.
    """

    def __init__(self, *, rank: int = 0, fatal: bool = False, minutes: float = 30.0) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._minutes, self._rank, self._fatal = minutes, rank, fatal
        self._what, self._moved, self._ended = "starting", threading.Event(), False

    def alive(self, what: str) -> None:
        """Report progress, and what is being done now; without a name, the same as before."""
        self._what = what or self._what
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
                    f"{self._what}. Where every thread stands:\n"
                )
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                sys.stderr.flush()
                if self._fatal:
                    os._exit(EXIT_CODE)
            self._moved.clear()
