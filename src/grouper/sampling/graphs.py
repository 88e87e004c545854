"""How a decoding step is repeated: op by op, as a recorded graph on the CPU, or as a CUDA graph."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import Tensor, nn

from grouper.errors import first_line, is_out_of_memory
from grouper.kernels.cpu import graph
from grouper.kernels.cpu.graph import Step
from grouper.models.policy import Policy
from grouper.sampling.decode_attention import has_kernel

log = logging.getLogger(__name__)

# Rotary embeddings that read the longest position on the host in every forward.
SIZED_BY_LENGTH = frozenset({"dynamic", "longrope"})

WHY = (
    "The decoding step of %s cannot be recorded%s, so sampling starts every operation from the "
    "host, which is slower%s"
)


class OpByOp:
    """Steps run as they are written; the subclasses record them."""

    share = 0.875
    """Rows are compacted once the live ones are at most this share of a bucket."""
    keeps = False
    """Whether recorded steps are worth their memory until the sampler is called again."""

    def bucket(self, live: int) -> int:
        """Rows to record a step for, given the number of live ones."""
        return live

    def record(self, step: Step) -> Step | None:
        """Run the step once; returns what repeats it, or None if it cannot be recorded."""
        step()
        return step


class CpuGraphs(OpByOp):
    """Steps whose kernels are called without Python in between, with packed weights.

    Args:
        model: the model, whose weights must not change meanwhile.
    """

    # Recording costs as much as some steps of a small model; rows that are not read cost their
    # share of every product. At 25 M parameters and ragged lengths, 0.5 to 0.8 are within 6 %.
    share = 0.7
    # Tokens of a completion from which on it pays; estimated from what recording a step of the
    # 0.5 M model takes, some ten steps' savings.
    fewest = 12

    def __init__(self, model: nn.Module) -> None:
        self._model = type(model).__name__
        self._weights = graph.PackedWeights(multiplied(model))

    def record(self, step: Step) -> Step | None:
        played = graph.record(step, self._weights)
        if played is None:
            log.info(WHY, self._model, "", ".")
        return played


class CudaGraphs(OpByOp):
    """Steps as CUDA graphs, which share one pool of memory and are captured on one stream.

    Args:
        device: where they run.
        model: the model's name, for a warning.
    """

    # Estimated, not measured: capturing takes as long as some steps op by op.
    share = 0.25
    keeps = True

    def __init__(self, device: torch.device, model: str) -> None:
        self._device = device
        self._model = model
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._pool: Any = torch.cuda.graph_pool_handle()

    def bucket(self, live: int) -> int:
        return 1 << (live - 1).bit_length()

    def record(self, step: Step) -> Step | None:
        here = torch.cuda.current_stream(self._device)
        self._side.wait_stream(here)
        try:
            with torch.cuda.stream(self._side):
                step()  # a warm-up, and the step itself
                return self._captured(step)
        finally:
            here.wait_stream(self._side)

    def _captured(self, step: Step) -> Step | None:
        # Not `torch.cuda.graph`: where a capture fails it leaves its own stream current, and it
        # empties the allocator's cache every time.
        captured = torch.cuda.CUDAGraph()
        try:
            captured.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:  # whatever it is, the stream must not go on capturing
                with contextlib.suppress(RuntimeError):  # a broken capture says so once more
                    captured.capture_end()
                raise
            captured.capture_end()
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise
            log.warning(WHY, self._model, " as a CUDA graph", f": {first_line(problem)}")
            return None
        replay: Step = captured.replay
        return replay


def choose_graphs(policy: Policy, completion: int) -> OpByOp:
    """How the steps of this model are repeated.

    Args:
        policy: the model.
        completion: tokens of the longest completion.
    """
    name, device = type(policy.model).__name__, policy.device
    if not allows_recording(policy.model.config):
        return OpByOp()
    if device.type == "cuda":
        return CudaGraphs(device, name)
    # Plain attention reads all columns, and little time passes between operations.
    if has_kernel(policy) and completion >= CpuGraphs.fewest:
        return CpuGraphs(policy.model)
    return OpByOp()


def multiplied(model: nn.Module) -> list[Tensor]:
    """The weights of a model's linear layers."""
    return [m.weight for m in model.modules() if type(m) is nn.Linear]


def allows_recording(config: Any) -> bool:
    """Whether a forward of a model with this configuration never needs a value on the host."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {rope.get("rope_type")} | {
        part.get("rope_type") for part in rope.values() if isinstance(part, dict)
    }
    return not kinds & SIZED_BY_LENGTH
