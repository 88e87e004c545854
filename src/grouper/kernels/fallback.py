"""A kernel that fails ends nothing: the plain operations it stands in for do its work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from grouper.errors import is_out_of_memory
from grouper.kernels.triton.language import Refused

log = logging.getLogger(__name__)

T = TypeVar("T")

# Kernels that have failed in this process: they are not asked again.
_FAILED: set[Callable[..., Any]] = set()


def kernel_or_plain(kernel: Callable[..., T] | None, plain: Callable[..., T], *args: Any) -> T:
    """What a kernel makes of these arguments, or else what plain operations make of them.

    Args:
        kernel: the faster one; None: there is none for these arguments. Once it cannot be built or
            launched, a warning says why, and it is not used again.
        plain: does the same, and may run after a kernel that has done part of its work.
        args: of both.
    """
    if kernel is not None and kernel not in _FAILED:
        try:
            return kernel(*args)
        except Exception as problem:  # compilers and drivers raise what they like
            if is_out_of_memory(problem):
                raise
            _FAILED.add(kernel)
            if not isinstance(problem, Refused):  # of which a warning has been given
                log.warning(
                    "The kernel %s.%s could not be used (%s: %s): plain operations do its work "
                    "from here on, which is slower.",
                    *(kernel.__module__, kernel.__name__, type(problem).__name__, problem),
                )
    return plain(*args)
