"""vLLM behind HTTP: balance, retries, secrets and ends, with a fake server and the real one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import PASSWORD, FakeServer, FakeVllm
from test_vllm import (
    REAL,
    TOKENIZER,
    draw,
    folders,  # noqa: F401 - a fixture
    gap,
    load,
    over,
    requests,
    train,
    train_lora,
)
from test_vllm import served as engine_of

from grouper.config.schema import SamplingConfig, VllmConfig
from grouper.errors import ConfigError, ModelError
from grouper.models.policy import Policy
from grouper.sampling.vllm import server as vllm_server
from grouper.sampling.vllm.sampler import engine_arguments, write_shape
from grouper.sampling.vllm.server import (
    ServerEngine,
    ServerProcess,
    server_command,
    shared_secret,
)
from grouper.sampling.vllm.worker import SECRET, RequireSecret

NAME = "grouper-test"


Made = tuple[Policy, list[FakeServer]]


@pytest.fixture
def served(folders: dict[bool, Path]) -> Iterator[Made]:  # noqa: F811 - the fixture
    policy = load(folders[True])
    servers = [FakeServer(FakeVllm(policy.model, TOKENIZER), NAME) for _ in range(2)]
    yield policy, servers
    for server in servers:
        server.close()


def connect(urls: list[str], **changes: Any) -> ServerEngine:
    settings: dict[str, Any] = {
        "name": NAME,
        "dtype": torch.float32,
        "concurrency": 8,
        **changes,
    }
    settings["settings"] = VllmConfig(timeout_seconds=settings.pop("timeout", 60.0))
    engine = ServerEngine(urls, PASSWORD, **settings)
    engine.require_model()
    return engine


@pytest.mark.slow
@torch.no_grad()
def test_several_servers_share_the_work(served: Made) -> None:
    policy, servers = served
    engine = connect([server.url for server in servers])
    sampler = over(policy, engine)
    for _ in range(2):
        wanted = requests(24)
        assert gap(policy, wanted, draw(sampler, wanted)) < 2e-5
        train(policy)
    counts = [server.calls["/v1/completions"] for server in servers]
    assert sum(counts) == 2 * (24 + 2 * 2), "every request once, and the fixed prompts of each"
    assert max(counts) - min(counts) <= 2, "in turns"
    assert [server.calls["/reset_prefix_cache"] for server in servers] == [2, 2]
    folders_of_weights = {path.parent for path in servers[0].files}
    assert len(folders_of_weights) == 2
    assert not any(folder.exists() for folder in folders_of_weights), "memory is given back"


@pytest.mark.slow
def test_a_server_that_stumbles_is_asked_again(served: Made) -> None:
    policy, servers = served
    sampler = over(policy, connect([server.url for server in servers]))
    expected = draw(sampler, requests())
    servers[0].broken = 2
    assert draw(sampler, requests()) == expected


def test_a_server_that_starts_again_ends_the_step_and_not_the_run(served: Made) -> None:
    policy, (server, _) = served
    sampler = over(policy, connect([server.url]))
    expected = draw(sampler, requests(8))
    running = sampler.sample(requests(8))
    next(running)
    server.engine._tag = None
    with pytest.raises(ModelError, match="lost its weights while it sampled"):
        list(running)
    assert draw(sampler, requests(8)) == expected, "it was given its weights again"
    assert server.calls["/update_weights"] == 2


def test_a_server_that_vanishes_is_waited_for_and_reported(served: Made) -> None:
    policy, (server, _) = served
    engine = connect([server.url])
    sampler = over(policy, engine)
    draw(sampler, requests(1))
    server.broken, engine._timeout = 10**6, 0.5
    with pytest.raises(ModelError, match=r"has not answered for 0\.5 seconds.*--resume"):
        draw(sampler, requests(2))


def test_what_is_stopped_waits_for_no_server(served: Made) -> None:
    policy, (server, _) = served
    engine = connect([server.url], timeout=600.0)
    sampler = over(policy, engine)
    draw(sampler, requests(1))
    server.broken, ended = 10**6, list[ModelError]()

    def wait() -> None:
        try:
            draw(sampler, requests(2))
        except ModelError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.3)
    assert not ended
    engine.close()
    waiting.join(30)
    assert ended


def test_nobody_there_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="has not answered"):
        connect(["http://127.0.0.1:9"], timeout=0.1)


def test_a_server_of_another_model_is_refused(served: Made) -> None:
    server = served[1][0]
    with pytest.raises(ModelError, match="another model or tokenizer than the run"):
        connect([server.url], name="grouper-other")


def test_a_wrong_secret_is_refused(served: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    server = served[1][0]
    engine = connect([server.url])
    engine._headers["Authorization"] = "Bearer wrong"
    with pytest.raises(ModelError, match="same GROUPER_ROLLOUT_SECRET"):
        engine.tag()
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(ConfigError, match="is not set"):
        shared_secret()


def test_names_tell_models_and_tokenizers_apart(
    folders: dict[bool, Path],  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    names = {write_shape(tmp_path, load(folders[t]).model.config, TOKENIZER) for t in (0, 1)}
    assert len(names) == 2
    config = load(folders[True]).model.config
    assert write_shape(tmp_path, config, TOKENIZER) in names


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_no_route_answers_without_the_secret(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setenv(SECRET, PASSWORD)
    passed, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    guard = RequireSecret(app)
    good = [(b"authorization", f"Bearer {PASSWORD}".encode())]
    for headers in ([], [(b"authorization", b"Bearer wrong")], good):
        scope = {"type": kind, "path": "/update_weights", "headers": headers}
        asyncio.run(guard(scope, None, send))
    assert passed == ["/update_weights"]
    refused = {"http": ("http.response.start", 401), "websocket": ("websocket.close", 1008)}[kind]
    assert [m.get("status", m.get("code")) for m in sent if m["type"] == refused[0]] == [
        refused[1]
    ] * 2


def test_the_command_of_a_server(tmp_path: Path) -> None:
    arguments = engine_arguments(SamplingConfig(), dtype="float32", device="cpu", max_length=64)
    command, environment = server_command(tmp_path, NAME, arguments, host="127.0.0.1", port=1)
    line = " ".join(command)
    assert "--host 127.0.0.1 --port 1" in line
    assert "--enforce-eager" in command
    assert {"--no-trust-remote-code", "--no-enable-chunked-prefill"} <= {*command}
    assert '--weight-transfer-config {"backend": "grouper"}' in line
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


def test_weights_go_where_there_is_room(
    served: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has 64 MB of shared memory, which holds no model."""
    policy, (server, _) = served
    memory, disk, named = (tmp_path / name for name in ("memory", "disk", "named"))
    for folder in (memory, disk, named):
        folder.mkdir()
    monkeypatch.setattr(vllm_server, "_SHARED_MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    for free, chosen in ((2**40, memory), (64 * 2**20, disk)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, n=free: SimpleNamespace(free=n))
        draw(over(policy, connect([server.url])), requests(1))
        assert server.files[-1].parent.parent == chosen
    monkeypatch.setenv("GROUPER_WEIGHTS_DIR", str(named))
    draw(over(policy, connect([server.url])), requests(1))
    assert server.files[-1].parent.parent == named
    monkeypatch.setenv("GROUPER_WEIGHTS_DIR", str(tmp_path / "missing"))
    with pytest.raises(ModelError, match=r"vLLM does not take the weights: .*missing") as refused:
        draw(over(policy, connect([server.url])), requests(1))
    assert "GROUPER_WEIGHTS_DIR" in refused.value.fix


@pytest.mark.parametrize(
    ("visible", "asked", "seen"),
    [
        (None, "cuda:1", "1"),
        ("4,GPU-5f", "cuda:1", "GPU-5f"),
        ("4,6", "auto", "4,6"),
    ],
)
def test_a_gpu_is_one_of_those_that_the_run_sees(
    visible: str | None,
    asked: str,
    seen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With CUDA_VISIBLE_DEVICES=4,6 a trainer's cuda:1 is the driver's 6."""
    show = "import os; print('cards:', os.environ.get('CUDA_VISIBLE_DEVICES'))"
    command = [sys.executable, "-c", show]
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(vllm_server, "server_command", lambda *_, **__: (command, dict(os.environ)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    process = ServerProcess(tmp_path, NAME, {}, secret="x", device=asked)
    process._process.wait(20)
    process.close()
    assert process._log.read_text() == f"cards: {seen}\n"
    with pytest.raises(ConfigError, match=r"there is no GPU 'cuda:2'.*'cuda:1'"):
        ServerProcess(tmp_path, NAME, {}, secret="x", device="cuda:2")


def test_a_server_that_does_not_start_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit('no memory left')"]
    monkeypatch.setattr(vllm_server, "server_command", lambda *_, **__: (failing, {}))
    process = ServerProcess(tmp_path, NAME, {}, secret="x")
    with pytest.raises(ModelError, match="no memory left"):
        connect([process.url], timeout=20, processes=[process])
    process.close()


@pytest.mark.slow
def test_a_server_ends_with_its_trainer(tmp_path: Path) -> None:
    """Also where that is killed: the kernel ends it."""
    code = (
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from grouper.sampling.vllm import server as vllm_server\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "vllm_server.server_command = lambda *_, **__: (sleeper, {})\n"
        f"process = vllm_server.ServerProcess(Path({str(tmp_path)!r}), 'x', {{}}, secret='x')\n"
        "print(process._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    child = int(trainer.stdout.readline())
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not REAL, reason="the real engine: make test-vllm")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapter"])
@torch.no_grad()
def test_the_real_server(folders: dict[bool, Path], tmp_path: Path, lora: bool) -> None:  # noqa: F811 - the fixture
    policy = load(folders[True], lora=lora)
    name, arguments = engine_of(policy, tmp_path, adapter=lora)
    secret = PASSWORD
    process = ServerProcess(tmp_path, name, arguments, secret=secret)
    try:
        engine = ServerEngine(
            [process.url],
            secret,
            name=name,
            dtype=torch.float32,
            settings=VllmConfig(timeout_seconds=180),
            concurrency=16,
            processes=[process],
        )
        engine.require_model()
        sampler = over(policy, engine, adapter=lora, tolerance=2e-5)
        for version in range(2):
            # The last are more than vLLM takes at a time: prompts must not be cut in two.
            for wanted in (requests(12), requests(16, length=200)):
                drawn = draw(sampler, wanted)
                assert gap(policy, wanted, drawn) < 5e-5
                assert {c.policy_version for c in drawn} == {version}
            (train_lora if lora else train)(policy)
        # To the last bits it depends on what else the server computes at the time.
        first, second = (draw(sampler, requests(4)) for _ in range(2))
        assert [c.token_ids for c in first] == [c.token_ids for c in second]
        stopped = draw(sampler, requests(8, stop=("e", "a", "t"), include_stop=False))
        assert all(not {*c.text} & {*"eat"} for c in stopped)
        for path in open_routes(process.url, secret):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{process.url}{path}", timeout=60)
        pids = descendants(process._process.pid)
        assert pids, "the engine has a process of its own"
        os.kill(process._process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(alive, pids))
        train(policy)
        with pytest.raises(ModelError, match="server of this run has ended"):
            draw(sampler, requests(1))
    finally:
        process.close()


def open_routes(url: str, secret: str) -> list[str]:
    """Every route that the server says it has; the ones that need no method but GET will do."""
    request = urllib.request.Request(f"{url}/openapi.json")
    request.add_header("Authorization", f"Bearer {secret}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        paths = list(json.load(answer)["paths"])
    assert {"/update_weights", "/health", "/collective_rpc", "/v1/completions"} <= {*paths}
    return paths


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children = [int(word) for word in (task / "children").read_text().split()]
        found += children + [one for child in children for one in descendants(child)]
    return found
