"""vLLM behind HTTP: one server or several, started by the run or by `grouper serve-rollouts`.

Requests go to the replica that has the least to do, and again to another one when it does not
answer. Weights travel as a safetensors file in a folder that both sides see. Every route of a
server asks for the shared secret (`vllm_worker.RequireSecret`).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch import Tensor

from grouper.errors import ConfigError, ModelError, hide
from grouper.sampling.vllm import ENVIRONMENT_DEFAULTS, Answer, Ask
from grouper.sampling.vllm_worker import MIDDLEWARE, SECRET, end_with_parent

log = logging.getLogger(__name__)

Value = TypeVar("Value")

# Seconds between attempts to reach a server; they double.
_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - files in it are named by tempfile
# Lines of a server's log that are shown when it has ended.
_LAST_LINES = 15


class Unreachable(Exception):  # noqa: N818 - a server may come back: it is tried again
    """A server gave no answer, or said that it cannot answer now."""


class Replica:
    """One server.

    Args:
        url: as http://127.0.0.1:8765.
        secret: that it shares with us.
        timeout: seconds for an answer.
    """

    def __init__(self, url: str, secret: str, timeout: float) -> None:
        self.url, self._timeout = url, timeout
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{url!r} is no address of a server",
                where="sampling.vllm.urls",
                fix="Write it as http://127.0.0.1:8765.",
            )
        self._kind = HTTPConnection if parts.scheme == "http" else HTTPSConnection
        self._place = (parts.hostname, parts.port)
        self._headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        self._held = threading.local()  # a connection per thread
        self.busy = 0
        """Requests that it is working on."""
        self.retry_at = 0.0
        """When it may be tried again, on the monotonic clock."""
        self.suspect = False
        """Whether it has failed since it was last seen to have the right weights."""
        self.lock = threading.Lock()

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Its answer: to GET without a body, else to POST.

        Raises:
            Unreachable: it gives none.
            ModelError: it refuses the request.
        """
        connection = getattr(self._held, "connection", None) or self._kind(
            *self._place, timeout=self._timeout
        )
        self._held.connection = None
        try:
            connection.request(
                "GET" if body is None else "POST",
                path,
                None if body is None else json.dumps(body),
                self._headers,
            )
            response = connection.getresponse()
            text = response.read()
        except (OSError, HTTPException) as error:
            connection.close()
            raise Unreachable(f"{self.url}: {error!r}") from error
        self._held.connection = connection
        if response.status >= 500 or response.status == 429:
            raise Unreachable(f"{self.url} answered {response.status}: {text[:200]!r}")
        if response.status >= 400:
            told = text[:300].decode(errors="replace")
            raise ModelError(
                f"the server refuses {path}: {response.status} {told}",
                where=self.url,
                fix=f"Give trainer and server the same {SECRET}."
                if response.status == 401
                else "Is it a server that `grouper serve-rollouts` of this version has started?",
            )
        found: dict[str, Any] = json.loads(text or b"{}")
        return found


class ServerEngine:
    """Several servers of one model, as one engine.

    Args:
        urls: of the servers.
        secret: that they share with us.
        name: of the model, from `write_shape`.
        dtype: that weights are sent in.
        weights_dir: that they read weights from; None: this machine's shared memory.
        timeout: seconds that a server may be away.
        concurrency: requests on their way to each server at a time.
        processes: the servers, where they end with this engine.
    """

    def __init__(
        self,
        urls: Sequence[str],
        secret: str,
        *,
        name: str,
        dtype: torch.dtype,
        weights_dir: str | None,
        timeout: float,
        concurrency: int,
        processes: Sequence[ServerProcess] = (),
    ) -> None:
        self._replicas = [Replica(url, secret, timeout) for url in urls]
        self.replicas = len(self._replicas)
        self._name, self._dtype, self._timeout = name, dtype, timeout
        self._concurrency, self._processes = concurrency, processes
        self._tag: str | None = None
        self.revived = False
        self._closing = False
        folder = Path(weights_dir).expanduser() if weights_dir else _SHARED_MEMORY
        if not weights_dir and not folder.is_dir():
            folder = Path(tempfile.gettempdir())
        self._folder = tempfile.TemporaryDirectory(prefix="grouper-weights-", dir=folder)
        self._file = Path(self._folder.name) / "weights.safetensors"
        for replica in self._replicas:
            self._patiently(partial(self._meet, replica))

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
        threads = min(len(asks), self._concurrency * self.replicas)
        with ThreadPoolExecutor(threads, thread_name_prefix="vllm") as pool:
            waiting = {pool.submit(self._draw, ask): number for number, ask in enumerate(asks)}
            try:
                for done in as_completed(waiting):
                    yield waiting[done], done.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def push(self, weights: Iterable[tuple[str, Tensor]], tag: str) -> None:
        self._tag = None
        tensors = {
            name: value.detach().to("cpu", self._dtype).contiguous().clone()
            for name, value in weights
        }
        save_file(tensors, self._file)
        del tensors
        self.revived = False
        self._tag = tag
        for replica in self._replicas:
            self._patiently(partial(self._load, replica))

    def tag(self) -> str | None:
        found = {self._patiently(partial(self._tag_of, r)) for r in self._replicas}
        return found.pop() if len(found) == 1 else None

    def rest(self) -> None:
        """Servers have a device of their own."""

    def close(self) -> None:
        self._closing = True
        for process in self._processes:
            process.close()
        self._folder.cleanup()

    def _draw(self, ask: Ask) -> Answer:
        body = {**ask.params, "model": self._name, "prompt": list(ask.prompt)}
        body["return_token_ids"] = True

        def attempt() -> Answer:
            replica = self._choose(ask)
            with replica.lock:
                replica.busy += 1
            try:
                self._revive(replica)
                return _answer(replica.call("/v1/completions", body))
            except Unreachable:
                replica.suspect, replica.retry_at = True, time.monotonic() + _LONGEST_PAUSE
                raise
            finally:
                with replica.lock:
                    replica.busy -= 1

        return self._patiently(attempt)

    def _choose(self, ask: Ask) -> Replica:
        """The replica that is asked for, else the one with the least to do that is not away."""
        if ask.replica is not None:
            return self._replicas[ask.replica]
        now = time.monotonic()
        return min(self._replicas, key=lambda r: (r.retry_at > now, r.busy))

    def _revive(self, replica: Replica) -> None:
        """Give a server that has been away the weights again, if it has lost them."""
        if not replica.suspect:
            return
        with replica.lock:
            if self._tag_of(replica) != self._tag:
                self._meet(replica)
                self._load(replica)
                self.revived = True
                log.warning("%s had lost its weights, and has them again.", replica.url)
            replica.suspect = False

    def _load(self, replica: Replica) -> None:
        update = {"version": str(self._tag), "path": str(self._file)}
        replica.call("/start_weight_update", {})
        replica.call("/update_weights", {"update_info": update})
        replica.call("/finish_weight_update", {"weight_version": self._tag})
        replica.call("/reset_prefix_cache", {})

    def _tag_of(self, replica: Replica) -> str | None:
        found: str | None = replica.call("/weight_info").get("weight_version")
        return found

    def _meet(self, replica: Replica) -> None:
        """Begin with a server that has just started. Raises `ModelError` for another model's."""
        served = replica.call("/v1/models")
        names = [row.get("id") for row in served.get("data", ())]
        if self._name not in names:
            raise ModelError(
                f"the server has another model or tokenizer than the run ({names[0]}, not "
                f"{self._name})",
                where=replica.url,
                fix="Start it with the recipe of this run: grouper serve-rollouts RECIPE.",
            )
        replica.call("/init_weight_transfer_engine", {"init_info": {}})

    def _patiently(self, attempt: Callable[[], Value]) -> Value:
        """What `attempt` returns, tried again while a server is away. Raises `ModelError`."""
        deadline, pause = time.monotonic() + self._timeout, _PAUSE
        while True:
            try:
                return attempt()
            except Unreachable as error:
                for process in self._processes:
                    process.require_alive()
                if self._closing or time.monotonic() > deadline:
                    raise ModelError(
                        f"a vLLM server has not answered for {self._timeout:g} seconds ({error})",
                        where="sampling.vllm.urls",
                        fix="Start it again with `grouper serve-rollouts`, and go on with "
                        "--resume: nothing of this step was kept.",
                    ) from error
                log.debug("waiting for a server: %s", error)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _answer(found: dict[str, Any]) -> Answer:
    (choice,) = found["choices"]
    logprobs = tuple(float(value) for value in choice["logprobs"]["token_logprobs"])
    return Answer(tuple(choice["token_ids"]), logprobs, choice["finish_reason"] == "stop")


# --- starting one --------------------------------------------------------------------------------


def server_command(
    folder: Path, name: str, arguments: dict[str, Any], *, host: str, port: int
) -> tuple[list[str], dict[str, str]]:
    """The command line of a server, and what its environment has beside ours.

    Args:
        folder: configuration and tokenizer.
        name: of the model.
        arguments: from `engine_arguments`.
        host: address that it listens on.
        port: where.
    """
    options = {"model": str(folder), "served_model_name": name, "host": host, "port": port}
    options |= {"middleware": MIDDLEWARE, **arguments}
    # Not `vllm serve`: it looks for a distribution of that name, which the CPU build has not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            command.append(flag)
        elif value is not False and value is not None:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            command += [flag, text]
    fixed = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return command, ENVIRONMENT_DEFAULTS | dict(os.environ) | fixed


class ServerProcess:
    """A server that ends with this process, also where that is killed.

    Args:
        folder: configuration and tokenizer.
        name: of the model.
        arguments: from `engine_arguments`.
        secret: that is shared with it.
        device: the GPU that it sees; None: all.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        arguments: dict[str, Any],
        *,
        secret: str,
        device: int | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command, environment = server_command(folder, name, arguments, host="127.0.0.1", port=port)
        environment[SECRET] = secret
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(device)
        self._log = folder / f"server-{port}.log"
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=environment,
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
                f"the vLLM server of this run has ended (code {code}). Its last lines:\n"
                + "\n".join(lines),
                where=self.url,
                fix="Where it lacks memory: sampling.vllm.gpu_memory_utilization, "
                "sampling.max_slots, and VLLM_CPU_KVCACHE_SPACE on a CPU.",
            )

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def shared_secret() -> str:
    """The secret that servers elsewhere have as well.

    Raises:
        ConfigError: none is set.
    """
    secret = os.environ.get(SECRET, "")
    if len(secret) < 16:
        raise ConfigError(
            f"{SECRET} is not set, or shorter than 16 characters",
            where="sampling.vllm.urls",
            fix="Give trainer and servers the same one, for example: "
            f"export {SECRET}=$(openssl rand -hex 16)",
        )
    hide(secret, f"${SECRET}")
    return secret


def new_secret() -> str:
    """One for servers that only this process talks to."""
    return secrets.token_hex(32)
