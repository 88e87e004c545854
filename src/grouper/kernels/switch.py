"""Whether a pass of ours is running: only then are kernels used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["is_running", "running", "switched_off"]

_RUNNING: ContextVar[bool] = ContextVar("running", default=False)
_OFF: ContextVar[bool] = ContextVar("off", default=False)

is_running = _RUNNING.get
"""Whether the kernels may be used now."""


@contextlib.contextmanager
def running() -> Iterator[None]:
    """The kernels may be used inside this block."""
    before = _RUNNING.set(not _OFF.get())
    try:
        yield
    finally:
        _RUNNING.reset(before)


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """No `running` inside this block has an effect."""
    before = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(before)
