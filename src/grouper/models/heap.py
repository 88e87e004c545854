"""Freed memory goes back to the system between layers of a step on the CPU.

glibc keeps blocks it is given back, up to 32 MiB each, and mostly cannot use the holes for the
next layer's tensors: a LoRA step then holds up to 1.45 times what is alive. Its own setting against
that (MALLOC_MMAP_THRESHOLD_) has to be made before a process starts and maps every tensor anew,
which makes a step of a small model a third slower. Here the holes are asked for back. That costs
time, too: what was given back is mapped anew, page by page (an update of a 25 M model in slices
of 4,096 tokens took 6.5 s instead of 5.0 s). So only a process does it that has grown by half of
what was free when it began: below that the holes are in nobody's way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

__all__ = ["FLOOR", "GROWTH", "trim_between_layers"]

FLOOR = "GROUPER_HEAP_FLOOR"
"""Bytes in the environment: grown by more than that, a process gives freed memory back."""

GROWTH = 64 * 2**20
"""Bytes by which the process may grow before its heap is looked through again."""
LEAST_FLOOR = 2**30

_STATM = Path("/proc/self/statm")
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""What a container may use, in the two versions of control groups."""


def _floor() -> int:
    """Bytes above what was resident after the imports, below which nothing is done."""
    told = os.environ.get(FLOOR, "")
    if told.isdecimal():
        return int(told)
    return max(LEAST_FLOOR, _free() // 2)


def _free() -> int:
    """Bytes that this process may still take; 0 where the system does not tell."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found.append(next(int(n.split()[1]) * 1024 for n in lines if n.startswith("MemAvailable")))
    for name in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            found.append(int(Path(name).read_text(encoding="utf-8")))
    return min(found, default=0)


class _Heap:
    """The heap of this process."""

    def __init__(self, trim: Callable[[int], int], floor: int) -> None:
        self._trim = trim
        self._floor = floor - GROWTH
        self._file = os.open(_STATM, os.O_RDONLY)
        self._process = os.getpid()
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._least = self._imported = self._resident()

    def _resident(self) -> int:
        if os.getpid() != self._process:  # after a fork the file still tells of the parent
            self._file, self._process = os.open(_STATM, os.O_RDONLY), os.getpid()
        return int(os.pread(self._file, 128, 0).split()[1]) * self._page

    def shrink(self) -> None:
        """Give free memory back where a large process has grown by `GROWTH`."""
        now = self._resident()
        if now - self._imported > self._floor and now - self._least > GROWTH:
            self._trim(0)
            self._least = self._resident()
        else:
            self._least = min(self._least, now)


def _find_heap() -> _Heap | None:
    """The heap, where the C library can shrink it and the system tells how large it is."""
    try:
        return _Heap(ctypes.CDLL(None).malloc_trim, _floor())
    except (AttributeError, OSError):  # not glibc, or not Linux
        return None


_heap = _find_heap()


def trim_between_layers(model: nn.Module) -> None:
    """Return freed memory after the forward and the backward of each decoder layer.

    Only where a gradient is recorded, on the CPU and under glibc; nowhere else does it do
    anything. Results do not change.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.register_forward_hook(_after_forward)


def _after_forward(layer: nn.Module, inputs: Any, output: Any) -> None:
    del layer, inputs
    hidden = output[0] if isinstance(output, tuple) else output
    if _heap is None or not torch.is_grad_enabled() or hidden.device.type != "cpu":
        return
    _heap.shrink()
    if hidden.requires_grad:
        # Its gradient is complete when the backward of the layers above it is done.
        hidden.register_hook(_after_backward)


def _after_backward(gradient: Tensor) -> None:
    del gradient
    if _heap is not None:
        _heap.shrink()
