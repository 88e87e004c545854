"""vLLM behind HTTP: one server or several, started by the run or by `grouper serve-rollouts`.

Requests go to the servers in turn, and to the next one when one does not answer. Weights travel as
a safetensors file in a folder that both sides see, or from GPU to GPU (`transfer.py`). Every route
requires the shared secret.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
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
from grouper.errors import (
    ConfigError,
    ModelError,
    first_line,
    register_secret,
    require_known,
    require_vllm,
)
from grouper.sampling.vllm.sampler import ENVIRONMENT_DEFAULTS, Answer, Ask, Save, Weights
from grouper.sampling.vllm.transfer import BACKENDS, Client, Sender, choose_transfer
from grouper.sampling.vllm.worker import MIDDLEWARE, SECRET, end_with_parent, gpu_name

log = logging.getLogger(__name__)

Value = TypeVar("Value")

# Seconds between attempts to reach a server: they double from the first to the second.
_PAUSE = 0.2
_LONGEST_PAUSE = 5.0
# HTTP statuses of a server that is overloaded, is starting, or is ending because its engine ended.
_AWAY = (429, 500, 502, 503, 504)
# The adapter's name, if a server has one.
_ADAPTER = "adapter"
# The environment variable that names the folder for weights, where a server is on another machine.
_WEIGHTS_DIR = "GROUPER_WEIGHTS_DIR"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - files in it are named by tempfile
# Lines of a server's log in the error that says it has ended.
_LAST_LINES = 15

# Environment variables of torchrun: with them, a server would wait for the trainer's processes.
_OF_TORCHRUN = re.compile("^TORCHELASTIC_|^MASTER_|RANK$|WORLD_SIZE$")
_OPENER = build_opener(ProxyHandler({}))


class Unreachable(Exception):  # noqa: N818 - a server may come back: it is tried again
    """A server gave no answer, or said that it cannot answer now."""


class ServerEngine:
    """Several servers of one model, as one engine.

    Args:
        urls: addresses of the servers.
        secret: the secret shared with them.
        name: of the model, from `write_shape`.
        dtype: weights are sent in it.
        settings: `timeout_seconds` is the time that a server may be unreachable.
        concurrency: maximum number of open requests per server.
        processes: the servers that this run has started.
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
        self._urls = urls
        self.replicas = len(urls)
        self._headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        self._name = name
        self._dtype = dtype
        self._timeout = settings.timeout_seconds
        self._transfer = settings.transfer
        self._sender: Sender | None = None
        """Sends weights from GPU to GPU; None: they are written to a file."""
        self._pushed: str | None = None
        """The tag of the last push; None: it failed, or there was none."""
        self._threads = concurrency * len(urls)
        self._processes = processes
        self._turn = itertools.count()
        self._closed = threading.Event()

    def require_model(self) -> None:
        """Wait for the servers and check their model.

        Raises:
            ModelError: one has another model or tokenizer.
        """
        for url in self._urls:
            models = self._patiently(partial(self._call, url, "/v1/models"))
            served = models["data"][0]["id"]
            if served != self._name:
                raise ModelError(
                    f"the server has another model or tokenizer than the run ({served}, not "
                    f"{self._name})",
                    where=url,
                    fix="Start it with the recipe of this run: grouper serve-rollouts RECIPE.",
                )

    def choose_transfer(self, device: torch.device, *, processes: int = 1) -> None:
        """Decide how weights are sent. Until then they are written to a file.

        Args:
            device: of the trainer's first process.
            processes: number of processes that train.

        Raises:
            ConfigError: the recipe names a way that cannot work.
        """
        gpu = gpu_name(device)
        if self._transfer in BACKENDS:
            require_vllm()  # the half that sends is in the trainer
        elif self._transfer == "file" or gpu is None or not _has_vllm():
            return
        gpus: list[str | None] = []
        worker_counts = []
        for url in self._urls:
            workers = self._results(url, "grouper_gpu")
            worker_counts.append(len(workers))
            gpus += [worker["gpu"] for worker in workers]
        backend = choose_transfer(self._transfer, gpu, gpus, processes=processes)
        if backend is not None:
            self._sender = Sender(
                backend,
                Client(self._post_to_all, backend, worker_counts),
                dtype=self._dtype,
                device=device,
                worker_count=len(gpus),
                urls=self._urls,
            )
        log.info("Weights are sent to the servers by %s.", backend or "file")

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
        threads = min(len(asks), self._threads) or 1
        pool = ThreadPoolExecutor(threads)
        try:
            numbers = {}
            for number, ask in enumerate(asks):
                future = pool.submit(self._draw, ask)
                numbers[future] = number
            for future in as_completed(numbers):
                yield numbers[future], future.result()
        finally:
            # After Ctrl-C, open requests are not waited for.
            pool.shutdown(wait=False, cancel_futures=True)

    def push(
        self, weights: Weights | None, tag: str, temperature: float, adapter: Save | None = None
    ) -> None:
        pushed = self._pushed
        self._pushed = None
        sender = self._sender
        if weights is not None and sender is not None and self._connected(sender, weights, pushed):
            self._send(sender, weights, tag, temperature)
            weights = None
        tensors = {}
        for name, weight in weights or ():
            tensors[name] = weight.detach().to("cpu", self._dtype, copy=True)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with tempfile.TemporaryDirectory(prefix="grouper-", dir=_folder_for(size)) as folder:
            calls: dict[str, dict[str, Any]] = {}
            if weights is not None:
                file = Path(folder) / "weights.safetensors"
                contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
                save_file(contiguous, file)
                update = {"version": tag, "temperature": temperature, "path": str(file)}
                calls["/init_weight_transfer_engine"] = {"init_info": {}}
                calls["/start_weight_update"] = {}
                calls["/update_weights"] = {"update_info": update}
                calls["/finish_weight_update"] = {}
            if adapter is not None:
                adapter(folder)
                calls["/v1/load_lora_adapter"] = {"lora_name": _ADAPTER, "lora_path": folder}
            calls["/update_weight_version"] = {"new_version": tag}
            calls["/reset_prefix_cache"] = {}
            for url in self._urls:
                self._patiently(partial(self._load, url, calls))
        self._pushed = tag

    def _connected(self, sender: Sender, weights: Weights, pushed: str | None) -> bool:
        """Connect to the servers if they do not have the last push; tell whether that worked.

        Args:
            sender: to connect.
            weights: to be sent next.
            pushed: the tag of the last push.
        """
        if pushed is not None and self.tag() == pushed:
            return True
        # At the first push, and after a server has started again.
        try:
            sender.connect(weights)
        except Exception as error:  # of vLLM, PyTorch or NCCL: any class
            if self._transfer != "auto":
                raise
            backend = sender.backend
            reason = first_line(error)
            log.warning("Weights go through a file: %s does not connect (%s).", backend, reason)
            self._sender = None
            return False
        return True

    def _send(self, sender: Sender, weights: Weights, tag: str, temperature: float) -> None:
        """Send weights from GPU to GPU.

        Raises:
            ModelError: a server did not get every parameter.
        """
        sender.send(weights, tag, temperature)
        for url in self._urls:
            for missing in self._results(url, "grouper_missing_weights"):
                if missing:
                    raise ModelError(
                        f"weights did not arrive: {', '.join(missing[:5])}",
                        where=url,
                        fix="Set sampling.vllm.transfer=file, and please report it.",
                    )

    def _results(self, url: str, method: str) -> list[Any]:
        """Return the results of a method of the extension, one for each worker of a server."""
        call = partial(self._call, url, "/collective_rpc", {"method": method})
        return list(self._patiently(call)["results"])

    def _post_to_all(self, path: str, bodies: Sequence[dict[str, Any]]) -> None:
        """Send a body to each server, to all at once: they wait for each other in a broadcast."""
        with ThreadPoolExecutor(len(self._urls)) as pool:
            list(pool.map(lambda url, body: self._call(url, path, body), self._urls, bodies))

    def tag(self) -> str | None:
        versions = set()
        for url in self._urls:
            info = self._patiently(partial(self._call, url, "/weight_info"))
            versions.add(info["weight_version"])
        return versions.pop() if len(versions) == 1 else None

    def rest(self) -> None:
        """Do nothing: servers have a device of their own."""

    def close(self) -> None:
        """Wait for no server any longer; whoever has started a server ends it."""
        self._closed.set()

    def _draw(self, ask: Ask) -> Answer:
        """Sample a completion on the server whose turn it is, or on the next one that answers."""
        model = _ADAPTER if ask.adapter else self._name
        body = dict(ask.params)
        body["model"] = model
        body["prompt"] = ask.prompt
        body["return_token_ids"] = True
        turns: Iterator[int]
        if ask.replica is None:
            turns = itertools.count(next(self._turn))
        else:
            turns = itertools.repeat(ask.replica)

        def attempt() -> dict[str, Any]:
            url = self._urls[next(turns) % self.replicas]
            return self._call(url, "/v1/completions", body)

        (choice,) = self._patiently(attempt)["choices"]
        token_ids = tuple(choice["token_ids"])
        logprobs = tuple(map(float, choice["logprobs"]["token_logprobs"]))
        return Answer(token_ids, logprobs, choice["finish_reason"] == "stop")

    def _load(self, url: str, calls: dict[str, dict[str, Any]]) -> None:
        """Send the calls of one push, {path: body}, to a server."""
        if "/v1/load_lora_adapter" in calls:
            # An adapter that is replaced in place is read again with every request, so the old one
            # is unloaded first. There may be none yet.
            with contextlib.suppress(ModelError):
                self._call(url, "/v1/unload_lora_adapter", {"lora_name": _ADAPTER})
        for path, body in calls.items():
            self._call(url, path, body)

    def _call(self, url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return a server's answer: to GET without a body, else to POST.

        Raises:
            Unreachable: it gives no answer.
            ModelError: it refuses the request.
        """
        data = None if body is None else json.dumps(body).encode()
        request = Request(url + path, data, self._headers)  # noqa: S310 - the recipe's own address
        try:
            with _OPENER.open(request, timeout=self._timeout) as response:
                content = response.read()
                content_type = response.headers.get_content_type()
                # Some routes answer in plain text that they have done their work, or not at all.
                if content_type != "application/json":
                    return {}
                return dict(json.loads(content))
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
        """Return the result of `attempt`, repeated while a server is unreachable.

        Raises:
            ModelError: it was unreachable for `timeout_seconds`, or one of our own has ended.
        """
        deadline = time.monotonic() + self._timeout
        pause = _PAUSE
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
                        fix="Start it again, and continue with --resume: the step is repeated.",
                    ) from error
            self._closed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _has_vllm() -> bool:
    """Tell whether a vLLM that is supported is installed; servers elsewhere need none here."""
    try:
        require_vllm()
    except ConfigError:
        return False
    return True


def _folder_for(size: int) -> str | Path | None:
    """Return the folder to write this many bytes of weights in; None: the system's default."""
    named = os.environ.get(_WEIGHTS_DIR)
    if named:
        return named
    if not _SHARED_MEMORY.is_dir():
        return None
    # A container has only 64 MB of shared memory by default, and an adapter may take a GiB.
    needed = 2 * size + 2**30
    if shutil.disk_usage(_SHARED_MEMORY).free > needed:
        return _SHARED_MEMORY
    return None


# --- starting a server ---------------------------------------------------------------------------


def server_command(
    folder: Path, name: str, arguments: dict[str, Any], *, host: str, port: int
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a server, and its environment.

    Args:
        folder: the folder of configuration and tokenizer.
        name: of the model.
        arguments: from `engine_arguments`.
        host: the address to listen on.
        port: the port to listen on.
    """
    options = {
        "model": str(folder),
        "served_model_name": name,
        "host": host,
        "port": port,
        "middleware": MIDDLEWARE,
    }
    options |= arguments
    # Not `vllm serve`: it looks for a distribution of that name, which the CPU build has not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for key, value in options.items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, dict):
            command += [f"--{option}", json.dumps(value)]
        else:
            command += [f"--{option}", str(value)]

    inherited = {name: value for name, value in os.environ.items() if not _OF_TORCHRUN.search(name)}
    environment = ENVIRONMENT_DEFAULTS | inherited
    environment["VLLM_SERVER_DEV_MODE"] = "1"
    environment["VLLM_NO_USAGE_STATS"] = "1"
    # An engine in this process has set it to 0.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if "enable_lora" in arguments:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return command, environment


class ServerProcess:
    """A server that ends with this process, even if this process is killed.

    Args:
        folder: the folder of configuration and tokenizer.
        name: of the model.
        arguments: from `engine_arguments`.
        secret: the secret shared with it.
        device: the GPU that it may use, such as cuda:1; auto: all.
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
        environment[SECRET] = secret
        if device != "auto":
            environment["CUDA_VISIBLE_DEVICES"] = _visible_name(device)
        self._log = folder / f"server-{port}.log"
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - it takes no lock
                start_new_session=True,  # Ctrl-C goes to the trainer only, which ends the server
            )

    def require_alive(self) -> None:
        """Raise `ModelError` with the end of the server's log if it has ended."""
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
        """End the server; it has 10 seconds to do so itself."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()  # does nothing if it has ended
        self._process.wait()


def _visible_name(device: str) -> str:
    """Return the name in CUDA_VISIBLE_DEVICES of the GPU that this process calls cuda:1, say.

    Raises:
        ConfigError: there is no such GPU.
    """
    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    require_known("GPU", device, devices, where="servers")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return device.removeprefix("cuda:")
    # This process numbers only the GPUs that it may use itself.
    names = visible.split(",")
    return names[devices.index(device)]


def shared_secret() -> str:
    """Return the secret shared with servers that this run has not started.

    Raises:
        ConfigError: it is not set, or too short.
    """
    secret = os.environ.get(SECRET, "")
    if len(secret) < 16:
        raise ConfigError(
            f"{SECRET} is not set, or shorter than 16 characters",
            where="sampling.vllm",
            fix="Give trainer and servers the same one, for example: "
            f"export {SECRET}=$(openssl rand -hex 16)",
        )
    register_secret(secret, f"${SECRET}")
    return secret
