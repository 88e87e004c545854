"""Triton where it is installed: the language of the CUDA kernels, and how they are launched."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from grouper.kernels.switch import Listeners, device_type, has_memory, kernels_are_off

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

_LISTENERS = Listeners()
launches = _LISTENERS.adding
"""The listener is given the name of each kernel and its tensors, before it is launched.

A tensor that a kernel both reads and writes is passed twice.
"""

# Why a kernel could not be built or started in this process; from then on none is used.
_FAILURES: list[str] = []


class Refused(RuntimeError):  # noqa: N818 - not an error: callers go on without the kernel
    """A kernel could not be built or started; a warning with the reason has been logged."""


def jit(function: Any) -> Any:
    """Mark a kernel or a part of one; without Triton the function itself, which is never called."""
    return triton.jit(function) if AVAILABLE else function


def serves(*tensors: Tensor) -> bool:
    """Whether CUDA kernels take these tensors: by device, dtype, and what this machine can build.

    For tensors without memory only device and dtype count, so that a machine without CUDA or
    Triton plans what one with them would run.
    """
    return (
        all(device_type(t) == "cuda" and t.dtype in DTYPES for t in tensors)
        and not kernels_are_off()
        and (not has_memory(tensors[0]) or (AVAILABLE and not _FAILURES))
    )


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel; with tensors without memory only the listeners are called.

    Args:
        kernel: made by `jit`.
        grid: number of programs in each dimension.
        arguments: by position, the first of them a tensor.
        constants: by name, the compiler's (`num_warps`, `num_stages`) included.

    Raises:
        Refused: it could not be built or started (no C compiler, a card that Triton does not know).
    """
    tensors = tuple(a for a in arguments if isinstance(a, Tensor))
    _LISTENERS.notify(kernel.__name__, tensors)
    if not has_memory(tensors[0]):
        return
    try:
        kernel[grid](*arguments, **constants)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever it is, plain operations take over
        _FAILURES.append(f"{type(error).__name__}: {error}")
        log.warning(
            "The CUDA kernel %s could not be built or started (%s): plain operations do its work "
            "from here on, which is slower. Triton needs a C compiler on the machine.",
            *(kernel.__name__, _FAILURES[-1]),
        )
        raise Refused(kernel.__name__) from error


@functools.cache
def limits(device: torch.device) -> tuple[int, int]:
    """Number of multiprocessors, and bytes of shared memory that a program may use.

    Without a card (in Triton's interpreter, or in a plan) those of a small one.
    """
    if device.type != "cuda":
        return 16, 99 * 1024
    card: Any = torch.cuda.get_device_properties(device)
    return card.multi_processor_count, card.shared_memory_per_block_optin


def power_of_two(least: int) -> int:
    """The smallest power of two from `least` upwards: the size of a block that holds so many."""
    return 1 << (least - 1).bit_length()


@jit
def tanh(x):  # type: ignore[no-untyped-def]  # Triton's own style
    """The hyperbolic tangent, exact to a rounding of 1."""
    return 2 * tl.sigmoid(2 * x) - 1
