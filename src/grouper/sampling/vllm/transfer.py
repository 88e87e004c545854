"""Weights from the trainer's GPU to vLLM's servers, by vLLM's own backends `ipc` and `nccl`.

With `ipc`, a server on the trainer's GPU reads the trainer's memory. With `nccl`, the trainer
broadcasts to servers on other GPUs, of this machine or of others. vLLM has both halves of each:
the trainer's half is used here, and `worker.py` has what receives.
"""

from __future__ import annotations

import importlib
import math
import os
import socket
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor

from grouper.errors import ConfigError
from grouper.models.allocator import OPTIONS
from grouper.sampling.vllm.worker import encode_handle

if TYPE_CHECKING:
    from grouper.sampling.vllm.sampler import Weights

Backend = Literal["ipc", "nccl"]
BACKENDS: tuple[Backend, ...] = ("ipc", "nccl")

# Weights are sent in parts of at least this many bytes. vLLM's own default of 1 GiB would be taken
# from the trainer's memory, for `nccl` twice.
_PART_BYTES = 2**28
_WHERE = "sampling.vllm.transfer"


def require_gpu(setting: str, device: torch.device) -> None:
    """Check that weights can be sent from this device.

    Raises:
        ConfigError: the recipe names a backend for GPUs, and the trainer computes on none.
    """
    if setting in BACKENDS and device.type != "cuda":
        raise ConfigError(
            f"{setting} sends weights from the memory of a GPU, and this run trains on a "
            f"{device.type.upper()}",
            where=_WHERE,
            fix=f"Set {_WHERE}=auto, which writes a file here.",
        )


def choose_transfer(
    setting: str, gpu: str | None, server_gpus: Sequence[str | None], *, processes: int
) -> Backend | None:
    """Return vLLM's backend that weights are sent by; None: they are written to a file.

    Args:
        setting: `auto` takes the first backend that can work.
        gpu: the UUID of the trainer's GPU; None: it computes on a CPU.
        server_gpus: the same of every worker of every server.
        processes: number of processes that train.

    Raises:
        ConfigError: the recipe names a backend that cannot work.
    """
    if setting == "file":
        return None
    for backend in BACKENDS:
        obstacle = _OBSTACLES[backend](gpu, server_gpus, processes)
        if setting == backend and obstacle:
            raise ConfigError(
                f"{backend} cannot send the weights: {obstacle}",
                where=_WHERE,
                fix=f"Set {_WHERE}=auto, which takes what works here.",
            )
        if setting in {"auto", backend} and not obstacle:
            return backend
    return None


def _no_gpu(gpu: str | None, server_gpus: Sequence[str | None]) -> str:
    if gpu is None:
        return "the trainer computes on a CPU"
    if None in server_gpus:
        return "a server computes on a CPU"
    return ""


def _obstacle_to_ipc(gpu: str | None, server_gpus: Sequence[str | None], processes: int) -> str:
    """Say why no memory can be shared; empty: it can."""
    problem = _no_gpu(gpu, server_gpus)
    if problem:
        return problem
    if processes > 1:
        return f"it shares the memory of one training process, and there are {processes}"
    if set(server_gpus) != {gpu}:
        return "a server is on another GPU than the trainer (nccl is for those)"
    return ""


def _obstacle_to_nccl(gpu: str | None, server_gpus: Sequence[str | None], _processes: int) -> str:
    """Say why nothing can be broadcast; empty: it can."""
    problem = _no_gpu(gpu, server_gpus)
    if problem:
        return problem
    if gpu in server_gpus:
        return "a server is on the trainer's GPU, and it needs one GPU for each (ipc shares one)"
    if len(set(server_gpus)) < len(server_gpus):
        return "two servers are on the same GPU, and it needs one GPU for each"
    return ""


_OBSTACLES = {"ipc": _obstacle_to_ipc, "nccl": _obstacle_to_nccl}


class Client:
    """The calls that vLLM's trainer half makes, sent to all servers at once.

    Args:
        post: sends a path and one body per server to all of them, and waits for their answers.
        backend: of the servers.
        worker_counts: the number of workers of each server.
    """

    def __init__(
        self,
        post: Callable[[str, Sequence[dict[str, Any]]], None],
        backend: Backend,
        worker_counts: Sequence[int],
    ) -> None:
        self._post = post
        self._backend = backend
        self._worker_counts = worker_counts
        self.update: dict[str, Any] = {}
        """Fields of every update besides vLLM's own: version and temperature."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        bodies = []
        # vLLM numbers the workers of one server. Ours are numbered from server to server.
        offset = init_info.get("rank_offset")
        for count in self._worker_counts:
            settings = dict(init_info)
            if offset is not None:
                settings["rank_offset"] = offset
                offset += count
            bodies.append({"init_info": {"transfer": self._backend, "settings": settings}})
        self._post("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self._post_to_all("/start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        settings = dict(update_info)
        # vLLM's own client would pickle the handles, and its server would have to unpickle them.
        settings.pop("ipc_handles_pickled", None)
        handles = settings.get("ipc_handles")
        if handles is not None:
            settings["ipc_handles"] = {gpu: encode_handle(args) for gpu, args in handles.items()}
        self._post_to_all("/update_weights", {"update_info": self.update | {"settings": settings}})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update. The engine sets the version itself, once all of the push is there."""
        del weight_version
        self._post_to_all("/finish_weight_update", {})

    def _post_to_all(self, path: str, body: dict[str, Any]) -> None:
        self._post(path, [body] * len(self._worker_counts))


class Sender:
    """The trainer's half of a transfer from GPU to GPU.

    Args:
        backend: of vLLM.
        client: reaches the servers.
        dtype: weights are sent in it.
        device: the GPU of the trainer.
        worker_count: number of workers of all servers together.
        urls: addresses of the servers.
    """

    def __init__(
        self,
        backend: Backend,
        client: Client,
        *,
        dtype: torch.dtype,
        device: torch.device,
        worker_count: int,
        urls: Sequence[str],
    ) -> None:
        self.backend = backend
        self._client = client
        self._dtype = dtype
        self._device = device
        self._worker_count = worker_count
        self._urls = urls
        self._engine: Any = None
        self._source: Any = None

    def connect(self, weights: Weights) -> None:
        """Connect to the servers, which have been started, or started again, since.

        Args:
            weights: whose names and shapes all later ones have as well. None is sent yet.
        """
        if self._engine is not None:
            self._engine.shutdown()
        self._source = _weight_source(self._dtype)
        self._source.weights = weights
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
        with torch.cuda.device(self._device):
            self._engine = factory.WeightTransferTrainerFactory.trainer_init(
                self._init_info(weights), client=self._client, source=self._source
            )

    def send(self, weights: Weights, tag: str, temperature: float) -> None:
        """Send weights to all servers, and wait until they have them."""
        self._source.weights = weights
        self._client.update = {"version": tag, "temperature": temperature}
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self._device))
            if self.backend == "ipc":
                stack.enter_context(_shareable_memory())
            self._engine.send_weights()

    def _init_info(self, weights: Weights) -> Any:
        """Return vLLM's record of how the two sides connect."""
        module = importlib.import_module(f"vllm.distributed.weight_transfer.{self.backend}_engine")
        # A part of `ipc` has to hold the largest weight.
        numbers = max(math.prod(shape) for shape in weights.shapes.values())
        settings: dict[str, Any] = {"rank": 0, "packed": True}
        settings["packed_buffer_size_bytes"] = max(_PART_BYTES, numbers * self._dtype.itemsize)
        if self.backend == "ipc":
            return module.IPCTrainerInitInfo(**settings)
        address = address_for(self._urls)
        return module.NCCLTrainerInitInfo(
            master_address=address,
            master_port=_free_port(address),
            world_size=1 + self._worker_count,
            **settings,
        )


class _Source:
    """The weights to send next, in both forms that vLLM's trainer half reads them by.

    Up to 0.32 it calls `metadata()` and iterates; since 0.33 `metadata` is a cached property, and
    it calls `iter_full`.
    """

    weights: Weights
    dtype: torch.dtype
    make_record: Callable[[str, torch.dtype, tuple[int, ...]], Any]
    """vLLM's `ParamMeta`."""

    def describe(self) -> list[Any]:
        """Return vLLM's record of every weight: name, dtype and shape."""
        return [
            self.make_record(name, self.dtype, shape) for name, shape in self.weights.shapes.items()
        ]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights:
            yield name, weight.detach().to(self.dtype)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.iter_full()


def _weight_source(dtype: torch.dtype) -> Any:
    """Return a `WeightSource` of the vLLM that is installed; its `weights` are yet to be set."""
    base = importlib.import_module("vllm.distributed.weight_transfer")
    content: dict[str, Any] = {"dtype": dtype, "make_record": staticmethod(base.ParamMeta)}
    if hasattr(base.WeightSource, "iter_full"):
        content["metadata"] = cached_property(_Source.describe)
    else:
        content["metadata"] = _Source.describe
    return type("Source", (_Source, base.WeightSource), content)()


@contextmanager
def _shareable_memory(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Allocate GPU memory in this block that another process can open by a handle.

    A process can open memory of expandable segments only if it may trace the one that has it, which
    most containers and distributions forbid. The allocator's other memory has no such condition.
    """
    options = ""
    for name in OPTIONS:
        options = options or environment.get(name, "")
    if "expandable_segments:True" not in options:
        yield
        return
    # All options are given each time: those that are left out would return to their defaults.
    change = torch._C._accelerator_setAllocatorSettings  # noqa: SLF001 - PyTorch names this one
    change(options.replace("expandable_segments:True", "expandable_segments:False"))
    try:
        yield
    finally:
        change(options)


def address_for(urls: Sequence[str]) -> str:
    """Return the address at which the machines of these servers reach this one.

    >>> address_for(["http://127.0.0.1:8765", "http://localhost:8766"])
    '127.0.0.1'
    """
    for url in urls:
        host = urlsplit(url).hostname
        if host in {"127.0.0.1", "localhost", "::1"}:
            continue
        # Connecting a datagram socket sends nothing, but chooses the network that leads there.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _free_port(address: str) -> int:
    with socket.socket() as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])
