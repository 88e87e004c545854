"""A tracker in a thread of its own: whatever it does, the run neither waits nor fails."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from grouper.evaluation.result import EvaluationResult
from grouper.runs.sinks.base import Sink, Step

log = logging.getLogger(__name__)

CAPACITY = 1000
"""Records that may wait for a tracker; what comes on top is not delivered."""

CLOSING_SECONDS = 10.0
"""How long the end of a run waits for all its trackers together."""

Record = Step | EvaluationResult
Result = TypeVar("Result")


class Background:
    """Delivers records to one sink, in order, from a daemon thread.

    Args:
        name: of the tracker, in messages.
        build: makes the sink; called in the thread, since it may take long or fail.
        capacity: records that may wait.
    """

    def __init__(self, name: str, build: Callable[[], Sink], capacity: int = CAPACITY) -> None:
        self.name = name
        self._build = build
        self._waiting: queue.Queue[Record | None] = queue.Queue(capacity)
        self._lost = 0
        self._failures = 0
        self._left_behind = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Hand over a record; returns at once."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._lost += 1
            if self._lost == 1:
                log.warning(
                    "The tracker %s is too slow: %d records wait for it, and what comes now is "
                    "not delivered. The run folder has everything.",
                    self.name,
                    self._waiting.qsize(),
                )

    def ask_to_end(self) -> None:
        """Let the thread end once everything that waits is delivered; returns at once."""
        while True:
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                self._drop_one()
            else:
                return

    def wait(self, seconds: float) -> None:
        """Wait for the end, but no longer than this; tells what was not delivered."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._left_behind = True
            log.warning(
                "The tracker %s has not finished in time and is left behind; %d records wait for "
                "it. The run folder has everything.",
                self.name,
                self._waiting.qsize(),
            )
        elif self._failures > 1:
            log.warning("The tracker %s failed %d times in all.", self.name, self._failures)
        if self._lost:
            log.warning("%d records were not delivered to the tracker %s.", self._lost, self.name)

    def _drop_one(self) -> None:
        try:
            self._waiting.get_nowait()
        except queue.Empty:
            return
        self._lost += 1

    def _work(self) -> None:
        sink = self._safely(self._build)
        while (record := self._waiting.get()) is not None:
            if sink is not None:
                self._deliver(sink, record)
        if sink is not None:
            self._safely(sink.close)

    def _deliver(self, sink: Sink, record: Record) -> None:
        if isinstance(record, Step):
            self._safely(lambda: sink.step(record))
        else:
            self._safely(lambda: sink.evaluation(record))

    def _safely(self, action: Callable[[], Result]) -> Result | None:
        try:
            return action()
        except BaseException as error:  # noqa: BLE001 - whatever a tracker raises ends here
            self._failures += 1
            if self._failures == 1 and not self._left_behind:
                log.warning(
                    "The tracker %s failed, and the run goes on without minding it (told once): "
                    "%s: %s",
                    self.name,
                    type(error).__name__,
                    error,
                )
            return None


def close_all(trackers: Sequence[Background], seconds: float = CLOSING_SECONDS) -> None:
    """End all of them at the same time, within this many seconds in all."""
    deadline = time.monotonic() + seconds
    for tracker in trackers:
        tracker.ask_to_end()
    for tracker in trackers:
        tracker.wait(deadline - time.monotonic())
