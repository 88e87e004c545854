"""Settings of PyTorch's CUDA allocator, made before it starts; no torch is imported here."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# PyTorch still reads the old name if the new one is not set.
OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def prefer_expandable_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let the allocator grow its segments, so that rows of changing length fragment less.

    Does nothing if the user has set the allocator's options. PyTorch reads them when the first
    tensor is made on a GPU; later they have no effect.

    >>> prefer_expandable_segments(empty := {})
    >>> empty
    {'PYTORCH_ALLOC_CONF': 'expandable_segments:True'}
    """
    if not set(OPTIONS) & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
