"""What Grouper adds to vLLM's own processes: weights by its transfer API, a CPU fix, and a secret.

vLLM imports this file where the model is (it is the `worker_extension_cls` of every engine that
Grouper starts), and in its HTTP server (`RequireSecret` is a middleware). Nothing else of Grouper
is imported there, and nothing here is imported where vLLM is missing.
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
"""Weights on their way to an engine in this very process, by version."""


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_server() -> None:
    """Have a worker of vLLM's server end with it, and take the engine between them along (Linux).

    The engine's own process imports nothing of ours.
    """
    end_with_parent()
    engine = os.getppid()
    name = Path(f"/proc/{engine}/comm")
    if name.exists() and name.read_text().startswith("VLLM::Engine"):
        threading.Thread(target=_watch, args=(engine, _parent(engine)), daemon=True).start()


def _watch(engine: int, server: int) -> None:
    while _parent(engine) == server:
        time.sleep(1)
    os.kill(engine, signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Extension:
    """Mixed into vLLM's worker by its name; to have this file imported there is all it is for."""


class RequireSecret:
    """ASGI middleware: no route of the server answers without the secret, whatever it does.

    Args:
        app: the server.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ[SECRET]}".encode()

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"the shared secret is wrong"})
        else:
            await send({"type": "websocket.close", "code": 1008})


def _read(path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file, one by one; nothing of it is ever executed."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            yield name, file.get_tensor(name)


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    """Keep a linear layer's weight as it is, where vLLM would pack a copy of it (CPU).

    A packed copy is what makes a reload crash, or, with tied embeddings, go unnoticed.
    """
    del remove_weight
    layer.cpu_linear = torch.nn.functional.linear


@dataclass
class InitInfo:
    """What a transfer begins with: nothing has to be agreed on."""


@dataclass
class UpdateInfo:
    """One set of weights."""

    version: str
    temperature: float
    """At which completions are drawn: logits are divided by it."""
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
        """Load them, and wait until they are there."""
        self.receive_weights(UpdateInfo(**update_info))
        if self.device.type != "cpu":  # where there is nothing to wait for
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load them; an error unless every parameter of the model was among them."""
        path, held = update_info.path, HANDED.pop(update_info.version, ())
        loaded = self.model.load_weights(held if path is None else _read(path))
        named = (name for name, _ in self.model.named_parameters())
        # Within a layer that may have an adapter beside it, weights have another name.
        left = {name.replace(".base_layer", "") for name in named} - set(loaded or ())
        if left:
            raise ValueError(f"weights did not arrive: {', '.join(sorted(left)[:5])}")
        # vLLM reports log-probs before the temperature, or after all that cuts the distribution.
        # What is asked for lies between, so the model's own logits are made to be of it.
        for module in self.model.modules():
            if type(module).__name__ == "LogitsProcessor":
                plain = vars(module).setdefault("plain_scale", module.scale)
                module.scale = plain / update_info.temperature

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """The trainer has a side of its own: `vllm.Engine.push`."""
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
