"""Which part of a sampler's time goes into prompts; the rest of it is decoding."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class SampleTimes:
    """Seconds of prefill since they were last taken.

    On a GPU the borders are events on its stream: nothing waits for it while sampling goes on.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def prefill(self, device: torch.device) -> Iterator[None]:
        """Count what happens inside this block."""
        if device.type != "cuda":
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        stream = torch.cuda.current_stream(device)
        begin, end = _event(), _event()
        begin.record(stream)
        yield
        end.record(stream)
        self._events.append((begin, end))

    def take(self) -> float:
        """The seconds so far, which are then forgotten."""
        events, self._events = self._events, []
        for _, end in events[-1:]:
            end.synchronize()
        milliseconds: float = sum(begin.elapsed_time(end) for begin, end in events)
        seconds, self._seconds = self._seconds + milliseconds / 1000, 0.0
        return seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
