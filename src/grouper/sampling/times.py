"""Which part of a sampler's time goes into prompts; the rest of it is decoding."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class SampleTimes:
    """Seconds of prefill since they were last taken."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextlib.contextmanager
    def prefill(self) -> Iterator[None]:
        """Count what happens inside this block, before and after which the host has waited."""
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started

    def take(self) -> float:
        """The seconds so far, which are then forgotten."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
