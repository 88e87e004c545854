"""Whether a pass of ours is running: only then are kernels used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from threading import Lock
from types import ModuleType
from typing import Any

_RUNNING: ContextVar[bool] = ContextVar("running", default=False)
_OFF: ContextVar[bool] = ContextVar("off", default=False)

is_running = _RUNNING.get
"""Whether the kernels may be used now."""


class _Swaps:
    """Functions of other people's modules that are ours while any pass of ours is running.

    Passes of several threads may overlap: the first swaps, the last swaps back.
    """

    def __init__(self) -> None:
        self._ours: dict[tuple[ModuleType, str], Any] = {}
        self._theirs: list[tuple[ModuleType, str, Any]] = []
        self._depth = 0
        self._lock = Lock()

    def add(self, home: ModuleType, name: str, function: Any) -> None:
        with self._lock:
            self._ours[home, name] = function

    def enter(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._theirs = [(*place, getattr(*place)) for place in self._ours]
                for place, function in self._ours.items():
                    setattr(*place, function)

    def leave(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                for home, name, function in self._theirs:
                    setattr(home, name, function)


_SWAPS = _Swaps()

swap_while_running = _SWAPS.add
"""(module, name, function): what the module's function is while a pass of ours is running."""


@contextlib.contextmanager
def running() -> Iterator[None]:
    """The kernels may be used inside this block."""
    before = _RUNNING.set(not _OFF.get())
    _SWAPS.enter()
    try:
        yield
    finally:
        _SWAPS.leave()
        _RUNNING.reset(before)


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """No `running` inside this block has an effect."""
    before = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(before)
