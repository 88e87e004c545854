"""Whether a pass of ours is running, and for which device: that decides which kernels are used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from threading import Lock
from types import ModuleType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # torch's own shape engine

# Set to 0 in the environment, everything runs on PyTorch's own operations.
OFF = "GROUPER_KERNELS"

_PLANNED: ContextVar[str | None] = ContextVar("planned", default=None)
_RUNNING: ContextVar[bool] = ContextVar("running", default=False)
_OFF: ContextVar[bool] = ContextVar("off", default=False)

is_running = _RUNNING.get
"""Whether the kernels may be used now."""


class _Swaps:
    """Functions of other people's modules that are ours while any pass of ours is running.

    Passes of several threads may overlap: the first swaps, the last swaps back.
    """

    def __init__(self) -> None:
        self._others: dict[tuple[ModuleType, str], Any] = {}
        """What is to take the place of a function, or was there before."""
        self._depth = 0
        self._lock = Lock()

    def add(self, home: ModuleType, name: str, function: Any) -> None:
        """While a pass is running, `name` in this module is this function."""
        with self._lock:
            self._others[home, name] = function
            if self._depth:
                self._exchange((home, name))

    def count(self, step: int) -> None:
        """One pass more or less is running."""
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
    """The kernels may be used inside this block."""
    before = _RUNNING.set(not _OFF.get())
    SWAPS.count(1)
    try:
        yield
    finally:
        SWAPS.count(-1)
        _RUNNING.reset(before)


def kernels_are_off() -> bool:
    """Whether everything runs on PyTorch's own operations, here or in the whole process."""
    return _OFF.get() or os.environ.get(OFF) == "0"


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Everything inside this block runs on PyTorch's own operations."""
    before = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(before)


@contextlib.contextmanager
def planned(device: str) -> Iterator[None]:
    """Tensors without memory count as being on this type of device inside the block.

    What runs is then what would run there: its memory and traffic are counted without it.
    """
    before = _PLANNED.set(device)
    try:
        yield
    finally:
        _PLANNED.reset(before)


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers, and not its shape and type only."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def device_type(tensor: Tensor) -> str:
    """`cpu`, `cuda` or another type of device: where the tensor is, or is planned to be."""
    device = _PLANNED.get()
    return tensor.device.type if device is None or has_memory(tensor) else device
