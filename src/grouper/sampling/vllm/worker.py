"""Additions to vLLM's own processes: weights by its transfer API, a CPU fix, and a secret.

vLLM imports this file in the process of the model (it is the `worker_extension_cls` of every engine
that Grouper starts), and in its HTTP server (`RequireSecret` is a middleware). Nothing else of
Grouper is imported there, and nothing of vLLM is imported here if it is not installed.
"""

from __future__ import annotations

import ctypes
import hmac
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
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
    """An empty class that vLLM mixes into its worker by name, so that it imports this file."""


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


@dataclass
class InitInfo:
    """The beginning of a transfer: empty, since both sides need to agree on nothing."""


@dataclass
class UpdateInfo:
    """One set of weights."""

    version: str
    temperature: float
    """Temperature of sampling: logits are divided by it."""
    path: str | None = None
    """A safetensors file; None: the weights are handed over within this process."""


class Receiver:
    """Our half of a `WeightTransferEngine`: loads all weights, by the names of transformers."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    model: Any
    device: torch.device

    def init_transfer_engine(self, init_info: InitInfo) -> None: ...

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load weights, and wait until the device has them."""
        self.receive_weights(UpdateInfo(**update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load weights and set the temperature.

        Raises:
            ValueError: a parameter of the model is not among the weights.
        """
        weights = HANDED.pop(update_info.version, ())
        if update_info.path is not None:
            weights = _read(update_info.path)
        loaded = set(self.model.load_weights(weights) or ())
        missing = set()
        for parameter_name, _ in self.model.named_parameters():
            # A layer that can have an adapter keeps its weight in a layer below.
            name = parameter_name.replace(".base_layer", "")
            if name not in loaded:
                missing.add(name)
        if missing:
            raise ValueError(f"weights did not arrive: {', '.join(sorted(missing)[:5])}")
        # vLLM reports log-probs either before the temperature or after all truncation. We need
        # them after the temperature and before truncation, so the logits themselves are scaled.
        for module in self.model.modules():
            if type(module).__name__ == "LogitsProcessor":
                original_scale = vars(module).setdefault("plain_scale", module.scale)
                module.scale = original_scale / update_info.temperature

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
