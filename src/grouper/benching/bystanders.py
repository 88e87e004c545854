"""Who else has been working on our cores: a busy machine makes every measurement worthless."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Self

__all__ = ["Bystanders"]

_PROC = Path("/proc")
_IDLE = (3, 4)
"""Fields of a `cpu` line that are idle time: idle, and waiting for a disk."""
_GUEST = 8
"""From here on, fields are counted in earlier ones, too."""


class Bystanders:
    """Cores that other processes kept busy inside a `with` block, among those we may run on."""

    cores: float | None = None
    """Their mean number; None where the system does not tell (elsewhere than on Linux)."""

    def __enter__(self) -> Self:
        self._before = _busy_and_own()
        self._started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        after, seconds = _busy_and_own(), time.monotonic() - self._started
        if self._before is None or after is None or seconds <= 0:
            return
        busy, own = (late - early for early, late in zip(self._before, after, strict=True))
        self.cores = max(0.0, busy - own) / seconds


def _busy_and_own() -> tuple[float, float] | None:
    """Seconds that our cores have been busy, and those that went to us and our children."""
    try:
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = (_PROC / "stat").read_text().splitlines()
    except (OSError, AttributeError):
        return None
    busy = 0
    for line in lines:
        name, *fields = line.split()
        if name in mine:
            ticks = [int(field) for field in fields[:_GUEST]]
            busy += sum(ticks) - sum(ticks[i] for i in _IDLE)
    return busy / _ticks(), _seconds_of_family(os.getpid())


def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK")


def _seconds_of_family(pid: int) -> float:
    """CPU seconds of a process and of all that descend from it."""
    parents, ticks = {}, {}
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # A program's name may hold blanks, brackets and any bytes; what follows does not.
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has just ended
            continue
        number = int(entry.name)
        parents[number] = int(fields[1])
        ticks[number] = sum(int(field) for field in fields[11:15])  # also of children that ended
    total = 0
    for number, own in ticks.items():
        ancestor = number
        while ancestor not in (pid, 0) and ancestor in parents:
            ancestor = parents[ancestor]
        total += own if ancestor == pid else 0
    return total / _ticks()
