"""vLLM behind HTTP: one server or several, started by the run or by `grouper serve-rollouts`.

Requests go to the servers in turn, and to the next one when one does not answer. Weights travel as
a safetensors file in a folder that both sides see. Every route asks for the shared secret.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import torch
from safetensors.torch import save_file

from grouper.config.schema import VllmConfig
from grouper.errors import ConfigError, ModelError, hide, require_known
from grouper.sampling.vllm import ENVIRONMENT_DEFAULTS, Answer, Ask, Save, Weights
from grouper.sampling.vllm_worker import MIDDLEWARE, SECRET, end_with_parent

Value = TypeVar("Value")

# Seconds between attempts to reach a server; they double.
_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
# HTTP statuses of a server that is overloaded, starts again, or ends since its engine has.
_AWAY = (429, 500, 502, 503, 504)
# The adapter's name, where a server has one beside the weights.
_ADAPTER = "adapter"
# The environment variable that names the folder for weights, where a server is on another machine.
_WEIGHTS_DIR = "GROUPER_WEIGHTS_DIR"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - files in it are named by tempfile
# Lines of a server's log that are shown when it has ended.
_LAST_LINES = 15

# With these a server would wait for the processes of the trainer.
_OF_TORCHRUN = re.compile("^TORCHELASTIC_|^MASTER_|RANK$|WORLD_SIZE$")
_OPENER = build_opener(ProxyHandler({}))


class Unreachable(Exception):  # noqa: N818 - a server may come back: it is tried again
    """A server gave no answer, or said that it cannot answer now."""


class ServerEngine:
    """Several servers of one model, as one engine.

    Args:
        urls: of the servers.
        secret: that they share with us.
        name: of the model, from `write_shape`.
        dtype: that weights are sent in.
        settings: where weights are written, and how long a server may be away.
        concurrency: requests on their way to each server at a time.
        processes: the servers, where they are ours.
    """

    def __init__(
        self,
        urls: Sequence[str],
        secret: str,
        *,
        name: str,
        dtype: torch.dtype,
        settings: VllmConfig,
        concurrency: int,
        processes: Sequence[ServerProcess] = (),
    ) -> None:
        self._urls, self.replicas = urls, len(urls)
        self._headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        self._name, self._dtype, self._timeout = name, dtype, settings.timeout_seconds
        self._threads, self._processes = concurrency * len(urls), processes
        self._turn, self._closed = itertools.count(), threading.Event()

    def require_model(self) -> None:
        """Wait for the servers. Raises `ModelError` if one has another model or tokenizer."""
        for url in self._urls:
            served = self._patiently(partial(self._call, url, "/v1/models"))["data"][0]["id"]
            if served != self._name:
                raise ModelError(
                    f"the server has another model or tokenizer than the run ({served}, not "
                    f"{self._name})",
                    where=url,
                    fix="Start it with the recipe of this run: grouper serve-rollouts RECIPE.",
                )

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
        pool = ThreadPoolExecutor(min(len(asks), self._threads) or 1)
        try:
            waiting = {pool.submit(self._draw, ask): number for number, ask in enumerate(asks)}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:  # Ctrl-C does not wait for what is still on its way
            pool.shutdown(wait=False, cancel_futures=True)

    def push(
        self, weights: Weights | None, tag: str, temperature: float, adapter: Save | None = None
    ) -> None:
        sent = {n: w.detach().to("cpu", self._dtype, copy=True) for n, w in weights or ()}
        size, memory = sum(w.nbytes for w in sent.values()), _SHARED_MEMORY
        # A container has 64 MB of it, unless it was given more; an adapter may take a GiB.
        fits = memory.is_dir() and shutil.disk_usage(memory).free > 2 * size + 2**30
        place = os.environ.get(_WEIGHTS_DIR) or (memory if fits else None)
        with tempfile.TemporaryDirectory(prefix="grouper-", dir=place) as folder:
            calls: dict[str, dict[str, Any]] = {}
            if weights is not None:
                file = Path(folder) / "weights.safetensors"
                save_file({name: tensor.contiguous() for name, tensor in sent.items()}, file)
                update = {"version": tag, "temperature": temperature, "path": str(file)}
                calls["/init_weight_transfer_engine"] = {"init_info": {}}
                calls["/start_weight_update"] = {}
                calls["/update_weights"] = {"update_info": update}
                calls["/finish_weight_update"] = {}
            if adapter is not None:
                adapter(folder)
                calls["/v1/load_lora_adapter"] = {"lora_name": _ADAPTER, "lora_path": folder}
            calls |= {"/update_weight_version": {"new_version": tag}, "/reset_prefix_cache": {}}
            for url in self._urls:
                self._patiently(partial(self._load, url, calls))

    def tag(self) -> str | None:
        """What all servers have."""
        asked = [partial(self._call, url, "/weight_info") for url in self._urls]
        found = {self._patiently(ask)["weight_version"] for ask in asked}
        return found.pop() if len(found) == 1 else None

    def rest(self) -> None:
        """Servers have a device of their own."""

    def close(self) -> None:
        """Wait for none any longer; those that are ours are ended by whoever has started them."""
        self._closed.set()

    def _draw(self, ask: Ask) -> Answer:
        """A completion, of the server whose turn it is, or of those after it."""
        model = _ADAPTER if ask.adapter else self._name
        body = {**ask.params, "model": model, "prompt": ask.prompt, "return_token_ids": True}
        first = next(self._turn) if ask.replica is None else ask.replica
        turns = itertools.count(first, 1 if ask.replica is None else 0)

        def attempt() -> dict[str, Any]:
            return self._call(self._urls[next(turns) % self.replicas], "/v1/completions", body)

        (choice,) = self._patiently(attempt)["choices"]
        logprobs = tuple(map(float, choice["logprobs"]["token_logprobs"]))
        return Answer(tuple(choice["token_ids"]), logprobs, choice["finish_reason"] == "stop")

    def _load(self, url: str, calls: dict[str, dict[str, Any]]) -> None:
        if "/v1/load_lora_adapter" in calls:
            # Replaced in place it would be read again with every request. There may be none yet.
            with contextlib.suppress(ModelError):
                self._call(url, "/v1/unload_lora_adapter", {"lora_name": _ADAPTER})
        for path, body in calls.items():
            self._call(url, path, body)

    def _call(self, url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A server's answer: to GET without a body, else to POST.

        Raises:
            Unreachable: it gives none.
            ModelError: it refuses the request.
        """
        data = None if body is None else json.dumps(body).encode()
        request = Request(url + path, data, self._headers)  # noqa: S310 - the recipe's own address
        try:
            with _OPENER.open(request, timeout=self._timeout) as response:
                found, kind = response.read(), response.headers.get_content_type()
                # Some routes say in plain text that they have done it, or nothing.
                return dict(json.loads(found)) if kind == "application/json" else {}
        except HTTPError as error:
            answer = f"{error.code} {error.read(300).decode(errors='replace')}"
            if error.code in _AWAY:
                raise Unreachable(f"{url}: {answer}") from error
            raise ModelError(
                f"the server refuses {path}: {answer}",
                where=url,
                fix=f"Have trainer and server the same {SECRET}, Grouper and recipe?",
            ) from error
        except (OSError, HTTPException, ValueError) as error:
            raise Unreachable(f"{url}: {error!r}") from error

    def _patiently(self, attempt: Callable[[], Value]) -> Value:
        """What `attempt` returns, tried again while a server is away. Raises `ModelError`."""
        deadline, pause = time.monotonic() + self._timeout, _PAUSE
        while True:
            try:
                return attempt()
            except Unreachable as error:
                for process in self._processes:
                    process.require_alive()
                if self._closed.is_set() or time.monotonic() > deadline:
                    raise ModelError(
                        f"a vLLM server has not answered for {self._timeout:g} seconds ({error})",
                        where="sampling.vllm",
                        fix="Start it again, and go on with --resume: the step is done anew.",
                    ) from error
            self._closed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


# --- starting one --------------------------------------------------------------------------------


def server_command(
    folder: Path, name: str, arguments: dict[str, Any], *, host: str, port: int
) -> tuple[list[str], dict[str, str]]:
    """The command line of a server, and its environment.

    Args:
        folder: configuration and tokenizer.
        name: of the model.
        arguments: from `engine_arguments`.
        host: address that it listens on.
        port: where.
    """
    options = {"model": str(folder), "served_model_name": name, "host": host, "port": port}
    # Not `vllm serve`: it looks for a distribution of that name, which the CPU build has not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for key, value in {**options, "middleware": MIDDLEWARE, **arguments}.items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{option}" if value else f"--no-{option}")
        else:
            command += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    # An engine in this process has set the last one otherwise.
    names = ("VLLM_SERVER_DEV_MODE", "VLLM_NO_USAGE_STATS", "VLLM_ENABLE_V1_MULTIPROCESSING")
    fixed = dict.fromkeys(names, "1")
    if "enable_lora" in arguments:
        fixed["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    own = {name: value for name, value in os.environ.items() if not _OF_TORCHRUN.search(name)}
    return command, ENVIRONMENT_DEFAULTS | own | fixed


class ServerProcess:
    """A server that ends with this process, also where that is killed.

    Args:
        folder: configuration and tokenizer.
        name: of the model.
        arguments: from `engine_arguments`.
        secret: that is shared with it.
        device: the GPU that it sees, as cuda:1; auto: all.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        arguments: dict[str, Any],
        *,
        secret: str,
        device: str = "auto",
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command, environment = server_command(folder, name, arguments, host="127.0.0.1", port=port)
        seen = {} if device == "auto" else {"CUDA_VISIBLE_DEVICES": _card(device)}
        self._log = folder / f"server-{port}.log"
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env={**environment, **seen, SECRET: secret},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - it takes no lock
                start_new_session=True,  # Ctrl-C is for the trainer, which ends it
            )

    def require_alive(self) -> None:
        """Raise `ModelError` with the end of its log if it has ended."""
        code = self._process.poll()
        if code is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            raise ModelError(
                "\n".join([f"the vLLM server of this run has ended (code {code}):", *lines]),
                where=self.url,
                fix="Where it lacks memory: sampling.vllm.gpu_memory_utilization, "
                "sampling.max_slots, and VLLM_CPU_KVCACHE_SPACE on a CPU.",
            )

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()  # does nothing if it has ended
        self._process.wait()


def _card(device: str) -> str:
    """The name by which a server sees the GPU that this process calls cuda:1.

    Raises:
        ConfigError: there is no such GPU.
    """
    known = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    require_known("GPU", device, known, where="servers")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[known.index(device)] if visible else device.removeprefix("cuda:")


def shared_secret() -> str:
    """The secret that servers elsewhere have as well.

    Raises:
        ConfigError: none is set.
    """
    secret = os.environ.get(SECRET, "")
    if len(secret) < 16:
        raise ConfigError(
            f"{SECRET} is not set, or shorter than 16 characters",
            where="sampling.vllm",
            fix="Give trainer and servers the same one, for example: "
            f"export {SECRET}=$(openssl rand -hex 16)",
        )
    hide(secret, f"${SECRET}")
    return secret
