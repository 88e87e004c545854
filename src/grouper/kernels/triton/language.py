"""Triton where it is installed: the language of the kernels for CUDA, and their one launch."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from grouper.kernels.switch import OFF, device_type, has_memory

try:  # torch brings it along where it is built for CUDA
    import triton
    from triton import language
except ImportError:
    triton = language = None

tl: Any = language

log = logging.getLogger(__name__)

AVAILABLE = triton is not None
"""Whether Triton is installed."""

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

Listener = Callable[[str, tuple[Tensor, ...]], None]
"""Gets the name of a kernel that is launched, and its tensors."""

_LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())
# Why a kernel could not be built or started in this process; after that none is offered.
_FAILURES: list[str] = []


class Refused(RuntimeError):  # noqa: N818 - callers go on without the kernel: it ends nothing
    """A kernel could not be built or started; a warning has said why."""


def jit(function: Any) -> Any:
    """A kernel, or a part of one; without Triton the function itself, which nobody calls."""
    return triton.jit(function) if AVAILABLE else function


def serves(*tensors: Tensor) -> bool:
    """Whether kernels for CUDA take these: by device, by type, and by what this machine can build.

    Of tensors without memory only device and type count, so that a machine without CUDA or
    Triton plans what one with them runs.
    """
    return (
        all(device_type(t) == "cuda" and t.dtype in DTYPES for t in tensors)
        and os.environ.get(OFF) != "0"
        and (not has_memory(tensors[0]) or (AVAILABLE and not _FAILURES))
    )


@contextlib.contextmanager
def launches(listener: Listener) -> Iterator[None]:
    """Inside this block the listener hears of every launch, before it.

    A tensor that a kernel both reads and writes is given twice.
    """
    before = _LISTENERS.set((*_LISTENERS.get(), listener))
    try:
        yield
    finally:
        _LISTENERS.reset(before)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel; on tensors without memory only the listeners hear of it.

    Args:
        kernel: made by `jit`.
        grid: programs in each direction.
        arguments: by position, the first of them a tensor.
        constants: by name, those of the compiler (`num_warps`, `num_stages`) among them.

    Raises:
        Refused: it could not be built or started: no C compiler, a card Triton does not know.
    """
    tensors = tuple(a for a in arguments if isinstance(a, Tensor))
    for listener in _LISTENERS.get():
        listener(kernel.__name__, tensors)
    if not has_memory(tensors[0]):
        return
    try:
        kernel[grid](*arguments, **constants)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever it is, plain operations do the work
        _FAILURES.append(f"{type(error).__name__}: {error}")
        log.warning(
            "The CUDA kernel %s could not be built or started (%s): plain operations do its work "
            "from here on, which is slower. Triton needs a C compiler on the machine.",
            *(kernel.__name__, _FAILURES[-1]),
        )
        raise Refused(kernel.__name__) from error


@functools.cache
def limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have.

    Those of a small card where there is none: in Triton's interpreter, or in a plan.
    """
    if device.type != "cuda":
        return 16, 99 * 1024
    card: Any = torch.cuda.get_device_properties(device)
    return card.multi_processor_count, card.shared_memory_per_block_optin


def power_of_two(least: int) -> int:
    """The first power of two from `least` on: the size of a block that holds so many."""
    return 1 << (least - 1).bit_length()


@jit
def tanh(x):  # type: ignore[no-untyped-def]  # Triton's own style
    """The hyperbolic tangent, exact to a rounding of 1."""
    return 2 * tl.sigmoid(2 * x) - 1
