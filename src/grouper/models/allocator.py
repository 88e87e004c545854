"""Settings of PyTorch's CUDA allocator; no torch is imported with this file."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def prefer_expandable_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let the allocator grow its segments, so that rows of changing length fragment less.

    Does nothing if the user has set the allocator's options. PyTorch reads them when the first
    tensor is made on a GPU; later they have no effect.

    >>> prefer_expandable_segments(empty := {})
    >>> empty
    {'PYTORCH_ALLOC_CONF': 'expandable_segments:True'}
    """
    # PyTorch still reads the old name if the new one is not set.
    if not set(_OPTIONS) & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


@contextmanager
def shareable_memory(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Allocate GPU memory in this block that another process can open by a handle.

    A process can open memory of expandable segments only if it may trace the one that has it, which
    most containers and distributions forbid. The allocator's other memory has no such condition.
    """
    options = ""
    for name in _OPTIONS:
        options = options or environment.get(name, "")
    if "expandable_segments:True" not in options:
        yield
        return
    import torch

    # All options are given each time: those that are left out would return to their defaults.
    change = torch._C._accelerator_setAllocatorSettings  # noqa: SLF001 - PyTorch names this one
    change(options.replace("expandable_segments:True", "expandable_segments:False"))
    try:
        yield
    finally:
        change(options)
