"""Recording a decoding step, so that it can be played back: by device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from grouper.kernels.cpu import tape

log = logging.getLogger(__name__)

SIZED_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that look at the longest position on the host in every forward."""

WHY = (
    "The decoding step of %s cannot be recorded%s, so sampling starts every operation from the "
    "host, which is slower%s"
)


class Replay(Protocol):
    """How steps are recorded, and for how many rows."""

    share: float
    """Rows are moved together once the live ones are at most this part of a bucket."""

    def bucket(self, live: int) -> int:
        """Rows to record a step for, of which so many are live."""
        ...

    def record(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """Run the step once; what does it again, or None where it cannot be played back."""
        ...


class OpByOp:
    """Steps run as they are written."""

    share = 0.875

    def bucket(self, live: int) -> int:
        return live

    def record(self, step: Callable[[], None]) -> Callable[[], None] | None:
        step()
        return step


class CudaGraphs:
    """Steps as CUDA graphs, which share one pool of memory.

    Args:
        device: where they run.
        model: the model's name, for a warning.
    """

    share = 0.25
    """Estimated, not measured: capturing takes as long as some steps op by op."""

    def __init__(self, device: torch.device, model: str) -> None:
        self._device = device
        self._model = model
        self._pool: Any = None

    def bucket(self, live: int) -> int:
        return 1 << (live - 1).bit_length()

    def record(self, step: Callable[[], None]) -> Callable[[], None] | None:
        side: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        here = torch.cuda.current_stream(self._device)
        side.wait_stream(here)
        with torch.cuda.stream(side):  # a warm-up, and the step itself
            step()
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
        except RuntimeError as problem:
            log.warning(WHY, self._model, " as a CUDA graph", f": {problem}")
            return None
        return graph.replay


class Tapes:
    """Steps as tapes, on the CPU.

    Args:
        model: the model's name, for a note.
    """

    share = 0.7
    """Recording costs some steps of a small model; rows that nobody reads cost their part of every
    product. Measured on ragged lengths at 25 M parameters: 0.5 to 0.7 are alike, 0.8 is slower."""

    fewest = 12
    """Tokens of a completion from which on it pays; estimated from what recording a step of the
    0.5 M model takes, some ten steps' savings."""

    def __init__(self, model: str) -> None:
        self._model = model

    def bucket(self, live: int) -> int:
        return live

    def record(self, step: Callable[[], None]) -> Callable[[], None] | None:
        played = tape.record(step)
        if played is None:
            log.info(WHY, self._model, "", ".")
        return played


def allows_replay(config: Any) -> bool:
    """Whether a forward of a model with this configuration never asks for a value on the host."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {rope.get("rope_type")} | {
        part.get("rope_type") for part in rope.values() if isinstance(part, dict)
    }
    return not kinds & SIZED_BY_LENGTH
