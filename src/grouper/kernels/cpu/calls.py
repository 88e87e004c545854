"""How Python calls a kernel: with an array of pointers and numbers, eight bytes each.

While a graph is being recorded (`graph.py`), a listener receives every call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # torch's own shape engine

from grouper.kernels.cpu.library import library

_LETTERS = {torch.float32: "f", torch.bfloat16: "b"}
DTYPES = frozenset(_LETTERS)
_SMALL = 1 << 15
"""Below this many elements a second thread costs more than it gains."""


Tensors = tuple[Tensor | None, ...]
Listener = Callable[[str, Tensors, tuple[float, ...]], None]
"""Receives the name of a called kernel, its tensors and its numbers."""

_listeners: list[Listener] = []


@contextmanager
def listened(listener: Listener) -> Iterator[None]:
    """Pass every call inside this block to the listener."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()


@cache
def letters(*dtypes: torch.dtype) -> str:
    """The suffix of a kernel's name: one letter per dtype, `?` for one without kernels."""
    return "".join(_LETTERS.get(dtype, "?") for dtype in dtypes)


def threads_for(elements: int) -> int:
    """The number of threads that is worth using for this many elements."""
    return torch.get_num_threads() if elements >= _SMALL else 1


@cache
def function(name: str) -> Any:
    """The kernel of this name, with its suffix, as a function of one pointer."""
    kernels = library()
    assert kernels is not None, "callers have asked whether there are any"
    kernel = kernels[name]
    kernel.restype = None
    return kernel


@cache
def _layout(pointers: int, kinds: tuple[type, ...]) -> struct.Struct:
    return struct.Struct("q" * pointers + "".join("d" if kind is float else "q" for kind in kinds))


def packed(tensors: Tensors, numbers: tuple[float, ...]) -> bytes:
    """The array a kernel reads: floats as doubles, the rest as integers, None as a null pointer."""
    layout = _layout(len(tensors), tuple(map(type, numbers)))
    return layout.pack(*[0 if t is None else t.data_ptr() for t in tensors], *numbers)


def call(name: str, tensors: Tensors, *numbers: float) -> None:
    """Run a kernel; with a `FakeTensor`, as the memory plan uses, nothing runs."""
    if isinstance(tensors[0], FakeTensor):
        return
    function(name)(packed(tensors, numbers))
    for listener in _listeners:
        listener(name, tensors, numbers)
