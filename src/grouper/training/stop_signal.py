"""Requests to stop a run, by Ctrl-C, SIGTERM or SIGHUP, and when they are obeyed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from grouper.errors import Interrupted
from grouper.models.process_group import ProcessGroup
from grouper.runs.progress import Progress
from grouper.training.watchdog import Watchdog

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """Remembers a request to stop, and raises it where everything can be saved.

    Every place that looks at it also feeds the watchdog.

    Args:
        processes: of the run; one of them may be asked alone.
        display: says that the request was understood.
        run: the run folder, for messages.
        resume_command: continues the run, for messages.
    """

    def __init__(
        self, processes: ProcessGroup, display: Progress, run: Path, resume_command: str
    ) -> None:
        self.requested = False
        """Whether this process was asked to stop."""
        self.signal_name = ""
        """The signal of the request: `Ctrl-C`, `SIGTERM` or `SIGHUP`."""
        self._processes = processes
        self._display = display
        self._run = run
        self._resume_command = resume_command
        self._watchdog = Watchdog(rank=processes.rank, fatal=processes.size > 1)
        self._run_has_ended = threading.Event()
        self._replaced_handlers: dict[int, Any] = {}

    def begin(self) -> None:
        """Start the watchdog and listen to signals.

        Signal handlers can only be set from the main thread; elsewhere the caller's stay.
        """
        self._watchdog.start()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            is_ignored = signal.getsignal(number) is signal.SIG_IGN  # as `nohup` sets it
            if not is_ignored:
                self._replaced_handlers[number] = signal.signal(number, self._request)

    def end(self) -> None:
        """End the watchdog, bring the caller's handlers back, and end what is in the background."""
        for number, handler in self._replaced_handlers.items():
            signal.signal(number, handler)
        self._watchdog.end()
        self._run_has_ended.set()

    def tick(self, task: Callable[[int, int], None], what: str, done: int, total: int) -> None:
        """Display how far something is, and raise `Interrupted` once the user has asked to stop.

        Args:
            task: displays it.
            what: is being done.
            done: so far.
            total: to do.
        """
        task(done, total)
        self.raise_if_requested(what)

    def raise_if_requested(self, what: str = "", *, together: bool = False) -> None:
        """Raise `Interrupted` once the user has asked to stop.

        Args:
            what: what is being done; left out: what was said before.
            together: whether all processes are here. Elsewhere each is at a different point, and
                none may leave the others waiting.
        """
        self._watchdog.alive(what)
        if not together and self._processes.size > 1:
            return
        if any(self._processes.gather(self.requested)):
            raise Interrupted(
                "stopped on request",
                where=str(self._run),
                fix="Everything up to the last finished step is saved; continue with "
                f"`{self._resume_command}`.",
            )

    def raise_if_ended(self, *_: int) -> None:
        """Raise `Interrupted` in what goes on in the background, once the run is closed.

        It feeds the watchdog, too, since training may be waiting for it.
        """
        self._watchdog.alive("what goes on beside training")
        if self._run_has_ended.is_set():
            raise Interrupted("the run has ended", where=str(self._run), fix="Use --resume.")

    def _request(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal; a second Ctrl-C ends the process at once."""
        del frame
        was_requested = self.requested
        self.requested = True
        self.signal_name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if was_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGHUP:  # the terminal is gone: what is written to it would fail
            self._display.mute()
        if not was_requested:
            self._display.say(
                "Stopping: the current step is finished and saved first (Ctrl-C stops at once)."
            )
