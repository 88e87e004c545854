"""Additions to vLLM's own processes: weights by its transfer API, a CPU fix, and a secret.

vLLM imports this file in the process of the model (it is the `worker_extension_cls` of every engine
that Grouper starts), and in its HTTP server (`RequireSecret` is a middleware). Nothing else of
Grouper is imported there, and nothing of vLLM is imported here if it is not installed.
"""

from __future__ import annotations

import base64
import ctypes
import hmac
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

BACKEND = "grouper"
"""The name of our weight transfer in vLLM's configuration."""
EXTENSION = f"{__name__}.Extension"
MIDDLEWARE = f"{__name__}.RequireSecret"
SECRET = "GROUPER_ROLLOUT_SECRET"
"""The environment variable that trainer and servers share."""

_PR_SET_PDEATHSIG = 1

HANDED: dict[str, Iterable[tuple[str, Tensor]]] = {}
"""Weights to hand over to an engine in this process, by version."""


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_server() -> None:
    """Have a worker of vLLM's server end with it, and end the engine between them (Linux).

    The engine's process is the parent of the worker and a child of the server. It imports nothing
    of ours, so the worker watches the server in its place.
    """
    end_with_parent()
    engine = os.getppid()
    name = Path(f"/proc/{engine}/comm")
    if name.exists() and name.read_text().startswith("VLLM::Engine"):
        server = _parent(engine)
        threading.Thread(target=_watch, args=(engine, server), daemon=True).start()


def _watch(engine: int, server: int) -> None:
    """Kill the engine once its parent is no longer the server."""
    while _parent(engine) == server:
        time.sleep(1)
    os.kill(engine, signal.SIGKILL)


def _parent(pid: int) -> int:
    """Return the process id of a process's parent (Linux)."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    # "pid (name) state parent ...", where the name may hold spaces and brackets.
    _, _, fields = stat.rpartition(")")
    return int(fields.split()[1])


class Extension:
    """Methods that vLLM mixes into its worker, for the trainer to call by name (`/collective_rpc`).

    Because vLLM imports this class by name, it imports this file in the process of the model.
    """

    device: torch.device
    weight_transfer_engine: Any

    def grouper_gpu(self) -> dict[str, str | None]:
        """Return the UUID of the worker's GPU; None: it computes on a CPU."""
        return {"gpu": gpu_name(self.device)}

    def grouper_missing_weights(self) -> list[str]:
        """Return the parameters that the last update from a GPU has left as they were."""
        return list(self.weight_transfer_engine.missing)


def gpu_name(device: torch.device) -> str | None:
    """Return the UUID of a GPU, which is the same in every process; None for another device."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


class RequireSecret:
    """ASGI middleware that lets no route of the server answer without the secret.

    Args:
        app: the server.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[SECRET]}".encode()

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        headers = dict(scope.get("headers", ()))
        authorization = headers.get(b"authorization", b"")
        authorized = hmac.compare_digest(authorization, self._expected)
        if scope["type"] == "lifespan" or authorized:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"the shared secret is wrong"})
        else:
            await send({"type": "websocket.close", "code": 1008})


def _read(path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a safetensors file by name; nothing in it is ever executed."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            yield name, file.get_tensor(name)


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    """Keep a linear layer's weight as it is, instead of the packed copy that vLLM makes on a CPU.

    With a packed copy, loading new weights crashes or, with tied embeddings, has no effect.
    """
    del remove_weight
    layer.cpu_linear = torch.nn.functional.linear


# The types in a handle of CUDA IPC. Only these are made from what arrives.
_HANDLE_TYPES = {
    "Tensor": torch.Tensor,
    "TypedStorage": torch.storage.TypedStorage,
    "UntypedStorage": torch.UntypedStorage,
}


def encode_handle(handle: Sequence[Any]) -> list[Any]:
    """Write a handle of CUDA IPC as JSON values, so that no pickle has to be loaded.

    Args:
        handle: the arguments of `rebuild_cuda_tensor`, from `torch.multiprocessing.reductions`.

    >>> encode_handle((torch.Tensor, torch.Size([2]), torch.uint8, b"gpu", 0, None))
    [{'type': 'Tensor'}, [2], {'dtype': 'uint8'}, {'bytes': 'Z3B1'}, 0, None]
    """
    values: list[Any] = []
    for value in handle:
        if isinstance(value, type):
            values.append({"type": value.__name__})
        elif isinstance(value, torch.dtype):
            values.append({"dtype": str(value).removeprefix("torch.")})
        elif isinstance(value, bytes):
            values.append({"bytes": base64.b64encode(value).decode()})
        elif isinstance(value, tuple):
            values.append(list(value))
        else:
            values.append(value)
    return values


def decode_handle(values: Sequence[Any]) -> tuple[Any, ...]:
    """Read a handle that `encode_handle` has written.

    >>> decode_handle([{"type": "Tensor"}, [2], {"dtype": "uint8"}, {"bytes": "Z3B1"}, 0, None])
    (<class 'torch.Tensor'>, (2,), torch.uint8, b'gpu', 0, None)

    Raises:
        KeyError: it names a type that is in no handle.
        TypeError: it names a dtype that PyTorch has not.
    """
    handle: list[Any] = []
    for value in values:
        match value:
            case {"type": name}:
                handle.append(_HANDLE_TYPES[name])
            case {"dtype": name}:
                dtype = getattr(torch, name, None)
                if not isinstance(dtype, torch.dtype):
                    raise TypeError(f"no dtype: {name}")
                handle.append(dtype)
            case {"bytes": text}:
                handle.append(base64.b64decode(text))
            case [*items]:
                handle.append(tuple(items))
            case _:
                handle.append(value)
    return tuple(handle)


@dataclass
class InitInfo:
    """The beginning of a transfer."""

    transfer: str = "file"
    """`file`, or the backend of vLLM that receives weights from the trainer's GPU."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What that backend needs to connect to the trainer."""


@dataclass
class UpdateInfo:
    """One set of weights, or a part of it from a GPU."""

    version: str
    temperature: float
    """Temperature of sampling: logits are divided by it."""
    path: str | None = None
    """A safetensors file; None: the weights are handed over within this process."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What vLLM's own backend needs to find the weights."""


class Receiver:
    """Our half of a `WeightTransferEngine`: loads all weights, by the names of transformers.

    vLLM's own `ipc` and `nccl` receive what comes from a GPU. They neither check that every
    parameter has arrived nor set a temperature, so this class stays around them.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    vllm_config: Any
    model: Any
    device: torch.device
    missing: Sequence[str] = ()
    """The parameters that the last update by `_backend` has left as they were."""
    _backend: Any = None
    """vLLM's own engine; None: weights come as a file, or within this process."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect to the trainer, after the end of an older connection."""
        self.shutdown()
        if init_info.transfer == "file":
            return
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        config = WeightTransferConfig(backend=init_info.transfer)
        backend = WeightTransferEngineFactory.create_engine(
            config, self.vllm_config, self.device, self.model
        )
        backend.init_transfer_engine(backend.parse_init_info(init_info.settings))
        self._backend = backend

    def start_weight_update(self) -> None:
        self._loaded: set[str] = set()
        if self._backend is not None:
            self._backend.start_weight_update()

    def finish_weight_update(self) -> None:
        """Finish the update, and note which parameters did not arrive.

        The trainer asks for them. An error here would leave vLLM's update open for good.
        """
        if self._backend is not None:
            self._backend.finish_weight_update()
            self.missing = self._missing()

    def shutdown(self) -> None:
        """End the connection to the trainer."""
        backend = self._backend
        self._backend = None
        if backend is not None:
            backend.shutdown()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load weights, and wait until the device has them."""
        self.receive_weights(UpdateInfo(**update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load weights and set the temperature.

        Raises:
            ValueError: a parameter of the model is not among the weights of a file.
        """
        if self._backend is not None:
            settings = dict(update_info.settings)
            handles = settings.get("ipc_handles")
            if handles is not None:
                settings["ipc_handles"] = {
                    gpu: decode_handle(values) for gpu, values in handles.items()
                }
            with self._names_recorded():
                self._backend.receive_weights(self._backend.parse_update_info(settings))
        else:
            weights = HANDED.pop(update_info.version, ())
            if update_info.path is not None:
                weights = _read(update_info.path)
            self._loaded = set(self.model.load_weights(weights) or ())
            missing = self._missing()
            if missing:
                raise ValueError(f"weights did not arrive: {', '.join(missing[:5])}")
        # vLLM reports log-probs either before the temperature or after all truncation. We need
        # them after the temperature and before truncation, so the logits themselves are scaled.
        for module in self.model.modules():
            if type(module).__name__ == "LogitsProcessor":
                original_scale = vars(module).setdefault("plain_scale", module.scale)
                module.scale = original_scale / update_info.temperature

    @contextmanager
    def _names_recorded(self) -> Iterator[None]:
        """Note the parameters that the model loads in this block: its own method returns them."""
        load_weights = self.model.load_weights

        def recorded(weights: Iterable[tuple[str, Tensor]]) -> Any:
            names = load_weights(weights)
            self._loaded |= set(names or ())
            return names

        self.model.load_weights = recorded
        try:
            yield
        finally:
            del self.model.load_weights

    def _missing(self) -> list[str]:
        """Return the names of parameters that have not been loaded, in order."""
        missing = set()
        for parameter_name, _ in self.model.named_parameters():
            # A layer that can have an adapter keeps its weight in a layer below.
            name = parameter_name.replace(".base_layer", "")
            if name not in self._loaded:
                missing.add(name)
        return sorted(missing)

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Raise: the trainer sends weights by `vllm.Engine.push` instead."""
        raise NotImplementedError


def _install() -> None:
    """Register the weight transfer in this process of vLLM."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _plain_linear
    transfer = type("HandOver", (Receiver, WeightTransferEngine), {})
    WeightTransferEngineFactory.register_engine(BACKEND, transfer)
    if multiprocessing.parent_process() is not None:
        end_with_server()


if find_spec("vllm") is not None:
    _install()
