"""Keeping count of the groups a reward function failed on, and saying when it is too many."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW = 100
"""How many groups back the rate looks."""
START = 20
"""A rate over fewer groups says nothing: until then they are counted as this many."""


class FailureRate:
    """Failures of one reward function.

    Args:
        limit: the share of the recent groups that may fail; 0 stops at the first failure, and 1
            never stops.

    >>> rate = FailureRate(0.1)
    >>> [rate.add(failed=True) for _ in range(3)]
    [False, False, True]
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.failures = 0
        """Of all groups so far."""
        self.groups = 0
        self._recent: deque[bool] = deque(maxlen=WINDOW)

    def add(self, *, failed: bool) -> bool:
        """Count one group; whether the failures are now too many."""
        self.groups += 1
        self.failures += failed
        self._recent.append(failed)
        return sum(self._recent) > self.limit * max(START, len(self._recent))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON values."""
        return {"failures": self.failures, "groups": self.groups, "recent": list(self._recent)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a `state`; the limit stays as it is."""
        self.failures, self.groups = state["failures"], state["groups"]
        self._recent = deque(state["recent"], maxlen=WINDOW)
