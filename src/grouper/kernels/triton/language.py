"""Triton where it is installed: the language of the kernels for CUDA, and one way to ask for it."""

from __future__ import annotations

from typing import Any

try:  # torch brings it along where it is built for CUDA
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["AVAILABLE", "jit", "tl"]

AVAILABLE = triton is not None
"""Whether Triton is installed."""


def jit(function: Any) -> Any:
    """A kernel, or a part of one; without Triton the function itself, which nobody calls."""
    return triton.jit(function) if AVAILABLE else function
