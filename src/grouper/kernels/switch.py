"""Whether one of Grouper's passes is running, and for which device: what selects the kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from threading import Lock
from types import ModuleType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # torch's own shape engine

# If this environment variable is 0, everything runs on PyTorch's own operations.
OFF = "GROUPER_KERNELS"

_PLANNED: ContextVar[str | None] = ContextVar("planned", default=None)
_RUNNING: ContextVar[bool] = ContextVar("running", default=False)
_OFF: ContextVar[bool] = ContextVar("off", default=False)

is_running = _RUNNING.get
"""Whether the kernels may be used now."""


@contextlib.contextmanager
def _inside(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Give a variable of this thread a value inside the block."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


class Listeners:
    """Functions that are called with each call of a kernel that their own thread makes."""

    def __init__(self) -> None:
        self._now: ContextVar[tuple[Callable[..., object], ...]] = ContextVar("now", default=())

    def adding(self, listener: Callable[..., object]) -> contextlib.AbstractContextManager[None]:
        """Call this one, too, inside the block."""
        return _inside(self._now, (*self._now.get(), listener))

    def notify(self, *call: Any) -> None:
        """Call all of them with the name of a kernel and what it is given."""
        for listener in self._now.get():
            listener(*call)


class _Swaps:
    """Replaces functions in third-party modules while any of Grouper's passes is running.

    Passes of several threads may overlap: the first one swaps, the last one swaps back.
    """

    def __init__(self) -> None:
        self._others: dict[tuple[ModuleType, str], Any] = {}
        """Per function, whichever of the replacement and the original is not in place."""
        self._depth = 0
        self._lock = Lock()

    def add(self, home: ModuleType, name: str, function: Any) -> None:
        """Replace `name` in this module by this function while a pass is running."""
        with self._lock:
            self._others[home, name] = function
            if self._depth:
                self._exchange((home, name))

    def count(self, step: int) -> None:
        """Count a pass that begins or ends."""
        with self._lock:
            before, self._depth = self._depth, self._depth + step
            if 0 in {before, self._depth}:
                for place in self._others:
                    self._exchange(place)

    def _exchange(self, place: tuple[ModuleType, str]) -> None:
        there = getattr(*place)
        setattr(*place, self._others[place])
        self._others[place] = there


SWAPS = _Swaps()


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Allow the kernels inside this block."""
    with _inside(_RUNNING, not _OFF.get()):
        SWAPS.count(1)
        try:
            yield
        finally:
            SWAPS.count(-1)


def kernels_are_off() -> bool:
    """Whether everything runs on PyTorch's own operations, here or in the whole process."""
    return _OFF.get() or os.environ.get(OFF) == "0"


def switched_off() -> contextlib.AbstractContextManager[None]:
    """Run everything inside this block on PyTorch's own operations."""
    return _inside(_OFF, True)


def planned(device: str) -> contextlib.AbstractContextManager[None]:
    """Treat tensors without memory as being on this type of device inside the block.

    The same operations run as on that device, so its memory and, on a GPU, its traffic can be
    counted without it.
    """
    return _inside(_PLANNED, device)


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers, not only a shape and a dtype."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def device_type(tensor: Tensor) -> str:
    """The type of device (`cpu`, `cuda`, ...) that the tensor is on, or is planned for."""
    device = _PLANNED.get()
    return tensor.device.type if device is None or has_memory(tensor) else device


def representative(parts: Sequence[Any], tensor: Tensor) -> Sequence[Any]:
    """The parts of a loop that must run: all, or two and the last in a plan for the CPU.

    Each part that is traced takes a millisecond, and from the second on, which runs beside what the
    first has left, parts of equal size take the same memory.
    """
    if has_memory(tensor) or device_type(tensor) != "cpu" or len(parts) < 4:
        return parts
    return (*parts[:2], parts[-1])
