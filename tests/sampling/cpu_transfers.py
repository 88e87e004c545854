"""vLLM's `ipc` and `nccl` on a CPU: what only a GPU has is replaced, in trainer and worker.

A broadcast goes through the store in which the processes have met, and a handle of shared GPU
memory names a mapped file. All else is vLLM's: the rendezvous, the packing, the routes, the reload
of layers. vLLM imports this file in the process of its model, as the worker's extension.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from grouper.sampling.vllm import worker

GPU = "GROUPER_TEST_GPU"
"""The environment variable with the GPU that a worker says it has."""
TRAINER_GPU = "GPU-of-the-trainer"


class StoreCommunicator:
    """The broadcasts of `PyNcclCommunicator`, through the store of its group."""

    def __init__(self, group: Any, device: Any) -> None:
        del device
        self._group = group

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        del stream
        sent = self._group.broadcast(tensor, src)
        if self._group.rank != src:
            tensor.copy_(sent)

    def destroy(self) -> None: ...


class NoStream:
    """A stream, and an event of it, where all work is done when it is called."""

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record(self, stream: Any) -> None: ...


class MappedTorch(ModuleType):
    """PyTorch, but what is allocated on a GPU is a mapped file."""

    Event = NoStream

    def __init__(self) -> None:
        super().__init__("torch")
        self.file = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        if device != "cuda":
            tensor = torch.empty(size, dtype=dtype, device=device)
            tensor.record_stream = lambda _: None  # type: ignore[method-assign]
            return tensor
        self.file = str(Path(tempfile.mkdtemp(prefix="grouper-")) / "memory")
        return torch.from_file(self.file, shared=True, size=size, dtype=dtype)

    def handle_of(self, tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        """The result of `reduce_tensor`, which has 15 fields of these types for a GPU."""
        about = (torch.Tensor, tensor.size(), tensor.stride(), 0, torch.storage.TypedStorage)
        memory = (tensor.dtype, 0, self.file.encode(), tensor.nbytes, 0, False)
        return None, (*about, *memory, b"\x00\xff", 0, b"", False)


def mapped(*handle: Any) -> torch.Tensor:
    """The tensor of a handle, as `rebuild_cuda_tensor` returns it."""
    tensor_type, size, _, _, storage_type, dtype = handle[:6]
    assert (tensor_type, storage_type) == (torch.Tensor, torch.storage.TypedStorage)
    return torch.from_file(handle[7].decode(), shared=True, size=size[0], dtype=dtype)


def replace_gpu(gpu: str, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace what only a GPU has.

    Args:
        gpu: the UUID that this process says its GPU has.
        replace: as `setattr`.
    """
    from torch.multiprocessing import reductions
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    stream = NoStream()
    memory = MappedTorch()
    replace(pynccl, "PyNcclCommunicator", StoreCommunicator)
    replace(packed_tensor, "torch", memory)
    replace(packed_tensor, "reduce_tensor", memory.handle_of)
    replace(packed_tensor, "_get_streams", lambda _, count: (stream,) * count)
    replace(reductions, "rebuild_cuda_tensor", mapped)
    replace(torch.accelerator, "current_device_index", lambda: 0)
    replace(torch.accelerator, "current_stream", lambda: stream)
    replace(torch.cuda, "device", lambda _: contextlib.nullcontext())
    replace(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    replace(torch.cuda, "current_stream", lambda: stream)
    replace(torch.cuda, "ipc_collect", lambda: None)
    replace(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=gpu))


class Extension(worker.Extension):
    """The worker's extension, for a worker that says it has a GPU."""

    def grouper_gpu(self) -> dict[str, str | None]:
        return {"gpu": os.environ[GPU]}


if multiprocessing.parent_process() is not None:  # the worker
    replace_gpu(os.environ[GPU])
