"""Weights from GPU to GPU by vLLM's `ipc` and `nccl`: the choice, the calls, and both real halves.

No GPU is needed: the tests with a fake of vLLM's trainer half record what is called, and those with
the real engine (GROUPER_VLLM=1) replace only what a GPU has (`cpu_transfers.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cpu_transfers import GPU, TRAINER_GPU, replace_gpu
from fake_vllm import PASSWORD, FakeServer, FakeVllm
from test_vllm import (
    REAL,
    STOP,
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

from grouper.config.loading import load_recipe
from grouper.config.schema import VllmConfig
from grouper.errors import ConfigError, ModelError
from grouper.models.policy import Policy
from grouper.sampling import factory
from grouper.sampling.factory import Samplers
from grouper.sampling.vllm import server as vllm_server
from grouper.sampling.vllm import transfer as vllm_transfer
from grouper.sampling.vllm.server import ServerEngine, ServerProcess
from grouper.sampling.vllm.transfer import address_for, choose_transfer, require_gpu
from grouper.sampling.vllm.worker import decode_handle, encode_handle

NAME = "grouper-test"

# --- the choice ----------------------------------------------------------------------------------

A, B, C = "GPU-a", "GPU-b", "GPU-c"


@pytest.mark.parametrize(
    ("setting", "gpu", "servers", "processes", "chosen"),
    [
        ("auto", None, [None], 1, None),
        ("auto", A, [None], 1, None),
        ("auto", A, [A], 1, "ipc"),
        ("auto", A, [A], 2, None),
        ("auto", A, [B], 1, "nccl"),
        ("auto", A, [B, C], 4, "nccl"),
        ("auto", A, [A, B], 1, None),
        ("auto", A, [B, B], 1, None),
        ("file", A, [A], 1, None),
        ("file", A, [B], 1, None),
        ("ipc", A, [A], 1, "ipc"),
        ("nccl", A, [B, C], 1, "nccl"),
    ],
)
def test_the_way_is_one_that_can_work(
    setting: str, gpu: str | None, servers: list[str | None], processes: int, chosen: str | None
) -> None:
    assert choose_transfer(setting, gpu, servers, processes=processes) == chosen


@pytest.mark.parametrize(
    ("setting", "gpu", "servers", "processes", "reason"),
    [
        ("ipc", A, [None], 1, "ipc cannot send the weights: a server computes on a CPU"),
        ("nccl", A, [B, None], 1, "nccl cannot send the weights: a server computes on a CPU"),
        ("nccl", None, [B], 1, "the trainer computes on a CPU"),
        ("nccl", A, [A], 1, "a server is on the trainer's GPU"),
        ("nccl", A, [B, B], 1, "two servers are on the same GPU"),
        ("ipc", A, [B], 1, "a server is on another GPU than the trainer"),
        ("ipc", A, [A, B], 1, "a server is on another GPU than the trainer"),
        ("ipc", A, [A], 2, "one training process, and there are 2"),
    ],
)
def test_a_way_that_cannot_work_is_refused_in_one_paragraph(
    setting: str, gpu: str | None, servers: list[str | None], processes: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        choose_transfer(setting, gpu, servers, processes=processes)
    assert refused.value.where == "sampling.vllm.transfer"
    assert "sampling.vllm.transfer=auto" in refused.value.fix


def test_a_run_on_a_cpu_is_refused_before_a_server_starts(
    folders: dict[bool, Path],  # noqa: F811 - the fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(factory, "ServerProcess", lambda *_, **__: started.append(1))
    monkeypatch.setattr(factory, "require_vllm", lambda: "0.33.0")
    vllm = "sampling.vllm={mode: server, transfer: nccl}"
    recipe = load_recipe("demo", ["sampling.engine=vllm", vllm])
    samplers = Samplers(recipe=recipe, tokenizer=TOKENIZER, stop_token_ids=[STOP], longest=8)
    with pytest.raises(ConfigError, match=r"nccl sends weights from the memory of a GPU.*a CPU"):
        factory._start_vllm(samplers, load(folders[True]), tmp_path)
    assert not started
    for setting in ("auto", "file"):
        require_gpu(setting, torch.device("cpu"))
    require_gpu("nccl", torch.device("cuda"))


def test_an_engine_in_this_process_has_no_servers_to_send_to() -> None:
    transfer = "sampling.vllm.transfer=nccl"
    with pytest.raises(ConfigError, match="mode: colocate has none"):
        load_recipe("demo", ["sampling.engine=vllm", transfer])
    load_recipe("demo", ["sampling.engine=vllm", transfer, "sampling.vllm.mode=server"])
    load_recipe("demo", [transfer, "evaluation.servers=[cuda:1]"])


def test_a_server_beside_the_trainer_leaves_it_its_memory(
    folders: dict[bool, Path],  # noqa: F811 - the fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server named on the trainer's own GPU took 0.9 of it."""
    shares: list[bool] = []

    class Started(Exception):  # noqa: N818 - it ends the start
        pass

    def served(*_: Any, own_card: bool, **__: Any) -> None:
        shares.append(own_card)
        raise Started

    monkeypatch.setattr(factory, "require_vllm", lambda: "0.33.0")
    monkeypatch.setattr(Samplers, "served", served)
    policy = load(folders[True])
    monkeypatch.setattr(Policy, "device", torch.device("cuda:0"))
    for servers in ("cuda:0", "cuda:1", "auto", "cuda:1, cuda:0"):
        vllm = f"sampling.vllm={{mode: server, servers: [{servers}]}}"
        recipe = load_recipe("demo", ["sampling.engine=vllm", vllm])
        samplers = Samplers(recipe=recipe, tokenizer=TOKENIZER, stop_token_ids=[STOP], longest=8)
        with pytest.raises(Started):
            factory._start_vllm(samplers, policy, tmp_path)
    assert shares == [False, True, False, False]


def test_the_address_is_one_that_the_servers_reach() -> None:
    assert address_for(["http://localhost:1", "http://127.0.0.1:2"]) == "127.0.0.1"
    # Of documentation only: no machine has it, and nothing is sent.
    with contextlib.suppress(OSError):  # a machine without any network
        assert address_for(["http://127.0.0.1:2", "http://192.0.2.1:1"]) != "127.0.0.1"


# --- handles without pickles ---------------------------------------------------------------------


def handle(name: bytes) -> tuple[Any, ...]:
    """As `reduce_tensor` returns it for a tensor on a GPU."""
    about = (torch.Tensor, torch.Size([64]), (1,), 0, torch.storage.TypedStorage, torch.uint8)
    return (*about, 0, name, 64, 0, False, b"\x00\xff", 7, b"", True)


def test_a_handle_survives_json() -> None:
    import json

    original = handle(b"\xff\x00 memory")
    text = json.dumps(encode_handle(original))
    assert decode_handle(json.loads(text)) == original


@pytest.mark.parametrize("value", [{"type": "Popen"}, {"dtype": "load"}, {"dtype": "no"}])
def test_a_handle_makes_nothing_else(value: dict[str, str]) -> None:
    with pytest.raises((KeyError, TypeError)):
        decode_handle([value])


# --- memory that can be shared -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_shared_memory_is_in_no_expandable_segment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all other options of the user stay, also if the block fails."""
    changes: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", changes.append)
    set_up = "max_split_size_mb:64,expandable_segments:True"
    block = vllm_transfer._shareable_memory({name: set_up})
    block.__enter__()
    assert changes == ["max_split_size_mb:64,expandable_segments:False"]
    error = KeyError("a push that fails")
    assert not block.__exit__(KeyError, error, None), "the error goes on"
    assert changes[1:] == [set_up]


@pytest.mark.parametrize("options", ["", "max_split_size_mb:64", "expandable_segments:False"])
def test_an_allocator_without_expandable_segments_stays_as_it_is(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", changes.append)
    with vllm_transfer._shareable_memory({"PYTORCH_ALLOC_CONF": options}):
        pass
    assert changes == []


# --- the calls -----------------------------------------------------------------------------------


class Wire:
    """The fast way from trainer to servers, which a test may cut."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.cut = False
        self.events: list[str] = []
        """What vLLM's trainer half does."""
        self.shareable: list[bool] = []
        """Whether each push could share what it allocated."""
        self.unreachable = False


_in_shareable_memory: list[bool] = []


@contextlib.contextmanager
def shareable_memory() -> Iterator[None]:
    _in_shareable_memory.append(True)
    yield
    _in_shareable_memory.pop()


@dataclass
class Meta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class GpuServer(FakeServer):
    """A server whose worker says it has a GPU, and takes weights from the wire."""

    def __init__(self, engine: FakeVllm, wire: Wire, gpu: str) -> None:
        self.gpu, self.wire = gpu, wire
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.missing: list[str] = []
        self.forgets = False
        super().__init__(engine, NAME)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if not path.startswith(("/v1/completions", "/v1/models", "/weight_info")):
            self.log.append((path, body))
        if path == "/collective_rpc":
            results = {"grouper_gpu": {"gpu": self.gpu}, "grouper_missing_weights": self.missing}
            return {"results": [results[body["method"]]]}
        if path == "/update_weight_version" and self.forgets:
            return {}
        update = body.get("update_info", {})
        if path == "/update_weights" and "path" not in update:
            handles = update["settings"].get("ipc_handles", {})
            for values in handles.values():
                assert decode_handle(values) == handle(b"buffer")
            if not self.wire.cut:
                self.engine.push(self.wire.weights.items(), "loaded", update["temperature"])
            return {}
        return super().answer(path, body)

    def paths(self) -> list[str]:
        return [path for path, _ in self.log]


@dataclass
class IPCTrainerInitInfo:
    rank: int
    packed: bool
    packed_buffer_size_bytes: int


@dataclass
class NCCLTrainerInitInfo(IPCTrainerInitInfo):
    master_address: str
    master_port: int
    world_size: int


class OldSource:
    """The base of 0.32: the trainer half calls `metadata()` and iterates."""

    def metadata(self) -> Any: ...


class NewSource:
    """The base of 0.33: the trainer half reads a cached property and calls `iter_full`."""

    def iter_full(self) -> Any: ...

    def __init_subclass__(cls) -> None:
        assert isinstance(cls.__dict__["metadata"], cached_property)


class TrainerHalf:
    """A fake of `TrainerWeightTransferEngine`, whose weights go through a `Wire`."""

    def __init__(self, wire: Wire, info: Any, client: Any, source: Any) -> None:
        if wire.unreachable:
            raise RuntimeError("no route to the server")
        wire.events.append(f"connect {type(info).__name__}")
        self.wire, self.client, self.source = wire, client, source
        self.is_ipc = isinstance(info, IPCTrainerInitInfo) and not hasattr(info, "world_size")
        settings: dict[str, Any] = {"packed": True}
        if not self.is_ipc:
            settings |= {"rank_offset": 1, "world_size": info.world_size}
        client.init_weight_transfer_engine(settings)

    def send_weights(self) -> None:
        self.wire.events.append("send")
        self.wire.shareable.append(bool(_in_shareable_memory))
        if isinstance(self.source, NewSource):
            metadata, pairs = self.source.metadata, self.source.iter_full()  # type: ignore[attr-defined]
        else:
            metadata, pairs = self.source.metadata(), iter(self.source)
        self.client.start_weight_update()
        self.wire.weights = {name: value.clone() for name, value in pairs}
        described = {one.name: (one.dtype, one.shape) for one in metadata}
        sent = {name: (v.dtype, tuple(v.shape)) for name, v in self.wire.weights.items()}
        assert described == sent
        update: dict[str, Any] = {
            "names": list(described),
            "dtype_names": [str(dtype).split(".")[-1] for dtype, _ in described.values()],
            "shapes": [list(shape) for _, shape in described.values()],
        }
        if self.is_ipc:
            update |= {"ipc_handles": {A: handle(b"buffer")}, "ipc_handles_pickled": None}
        self.client.update_weights(update)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.wire.events.append("shutdown")


def install_fake(monkeypatch: pytest.MonkeyPatch, wire: Wire, source: type) -> None:
    """Put a fake of vLLM's trainer half in the place of vLLM."""

    class TrainerFactory:
        @staticmethod
        def trainer_init(init_info: Any, *, client: Any, source: Any) -> TrainerHalf:
            return TrainerHalf(wire, init_info, client, source)

    transfer = "vllm.distributed.weight_transfer"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        transfer: {"ParamMeta": Meta, "WeightSource": source},
        f"{transfer}.factory": {"WeightTransferTrainerFactory": TrainerFactory},
        f"{transfer}.ipc_engine": {"IPCTrainerInitInfo": IPCTrainerInitInfo},
        f"{transfer}.nccl_engine": {"NCCLTrainerInitInfo": NCCLTrainerInitInfo},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(vllm_transfer, "_shareable_memory", shareable_memory)
    monkeypatch.setattr(vllm_server, "gpu_name", lambda _: A)
    monkeypatch.setattr(vllm_server, "require_vllm", lambda: "0.33.0")


Start = Callable[..., tuple[Policy, ServerEngine, list[GpuServer]]]


@pytest.fixture(params=[OldSource, NewSource], ids=["0.32", "0.33"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    install_fake(monkeypatch, wire, request.param)
    return wire


@pytest.fixture
def start(wire: Wire, folders: dict[bool, Path]) -> Iterator[Start]:  # noqa: F811 - the fixture
    servers: list[GpuServer] = []

    def begin(
        *gpus: str, transfer: str = "auto", lora: bool = False
    ) -> tuple[Policy, ServerEngine, list[GpuServer]]:
        policy = load(folders[True], lora=lora)
        plain = load(folders[True])
        servers.extend(GpuServer(FakeVllm(plain.model, TOKENIZER), wire, gpu) for gpu in gpus)
        engine = ServerEngine(
            [server.url for server in servers],
            PASSWORD,
            name=NAME,
            dtype=torch.float32,
            settings=VllmConfig(timeout_seconds=20, transfer=transfer),  # type: ignore[arg-type]
            concurrency=8,
        )
        engine.require_model()
        engine.choose_transfer(policy.device)
        return policy, engine, servers

    yield begin
    for server in servers:
        server.close()


ONE_PUSH = [
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/collective_rpc",
    "/update_weight_version",
    "/reset_prefix_cache",
]


@torch.no_grad()
def test_nccl_connects_once_and_sends_every_version(start: Start, wire: Wire) -> None:
    policy, engine, servers = start(B, C)
    sampler = over(policy, engine)
    for version in range(3):
        wanted = requests(6)
        drawn = draw(sampler, wanted)
        assert gap(policy, wanted, drawn) < 2e-5
        assert {completion.policy_version for completion in drawn} == {version}
        train(policy)
    assert wire.events == ["connect NCCLTrainerInitInfo", "send", "send", "send"]
    assert wire.shareable == [False, False, False], "nothing is shared"
    named = dict(load(Path(policy.model.config._name_or_path)).model.named_parameters())
    for number, server in enumerate(servers):
        assert server.paths() == ["/collective_rpc", "/init_weight_transfer_engine", *3 * ONE_PUSH]
        begin = server.log[1][1]["init_info"]
        assert begin["transfer"] == "nccl"
        # The trainer is 0, and no two workers have one number.
        assert begin["settings"]["rank_offset"] == 1 + number
        assert begin["settings"]["world_size"] == 3
        updates = [body["update_info"] for path, body in server.log if path == "/update_weights"]
        for update in updates:
            sent = update["settings"]
            assert dict(zip(sent["names"], sent["shapes"], strict=True)) == {
                name: list(value.shape) for name, value in named.items()
            }
            assert set(sent["dtype_names"]) == {"float32"}
        versions = [body["new_version"] for path, body in server.log if "version" in path]
        assert versions == [update["version"] for update in updates]
        assert [version.split("-")[1] for version in versions] == ["0", "1", "2"]
        assert not server.files, "nothing was written"


@torch.no_grad()
def test_ipc_sends_handles_that_are_no_pickles(start: Start, wire: Wire) -> None:
    policy, engine, (server,) = start(A)
    sampler = over(policy, engine)
    for _ in range(2):
        wanted = requests(4)
        assert gap(policy, wanted, draw(sampler, wanted)) < 2e-5
        train(policy)
    assert wire.events == ["connect IPCTrainerInitInfo", "send", "send"]
    assert wire.shareable == [True, True]
    assert server.paths() == ["/collective_rpc", "/init_weight_transfer_engine", *2 * ONE_PUSH]
    assert server.log[1][1]["init_info"] == {"transfer": "ipc", "settings": {"packed": True}}
    sent = server.log[3][1]["update_info"]["settings"]
    assert "ipc_handles_pickled" not in sent
    assert sent["ipc_handles"].keys() == {A}


@torch.no_grad()
def test_weights_that_are_lost_on_the_way_end_the_run(start: Start, wire: Wire) -> None:
    policy, engine, (server,) = start(B)
    sampler = over(policy, engine)
    draw(sampler, requests(2))
    train(policy)
    wire.cut = True
    with pytest.raises(ModelError, match="its weights are different"):
        draw(sampler, requests(2))
    server.missing = ["model.norm.weight"]
    with pytest.raises(ModelError, match=r"did not arrive: model\.norm\.weight") as refused:
        draw(sampler, requests(2))
    assert "transfer=file" in refused.value.fix
    server.missing, wire.cut = [], False
    wanted = requests(4)
    assert gap(policy, wanted, draw(sampler, wanted)) < 2e-5, "repaired"


def test_the_version_is_read_back(start: Start) -> None:
    policy, engine, (server,) = start(B)
    server.forgets = True
    with pytest.raises(ModelError, match="did not acknowledge its weights"):
        draw(over(policy, engine), requests(1))


@torch.no_grad()
def test_a_server_that_started_again_is_connected_again(start: Start, wire: Wire) -> None:
    policy, engine, (first, second) = start(B, C)
    sampler = over(policy, engine)
    expected = draw(sampler, requests(4))
    second.engine._tag = None  # as after a start
    assert draw(sampler, requests(4)) == expected
    assert wire.events == [
        "connect NCCLTrainerInitInfo",
        "send",
        "shutdown",
        "connect NCCLTrainerInitInfo",
        "send",
    ]
    for server in (first, second):
        assert server.paths().count("/init_weight_transfer_engine") == 2


def test_what_does_not_connect_goes_through_a_file_unless_it_is_named(
    start: Start, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    wire.unreachable = True
    policy, engine, (server,) = start(B)
    with caplog.at_level(logging.WARNING):
        wanted = requests(4)
        assert gap(policy, wanted, draw(over(policy, engine), wanted)) < 2e-5
    assert "nccl does not connect (no route to the server)" in caplog.text
    assert len(server.files) == 1
    # A named backend is not replaced.
    named = ServerEngine(
        [server.url],
        PASSWORD,
        name=NAME,
        dtype=torch.float32,
        settings=VllmConfig(timeout_seconds=20, transfer="nccl"),
        concurrency=8,
    )
    named.choose_transfer(policy.device)
    with pytest.raises(ModelError, match="no route to the server") as refused:
        draw(over(policy, named), requests(1))
    assert "sampling.vllm.transfer=file" in refused.value.fix
    assert len(server.files) == 1


def test_without_vllm_in_the_trainer_weights_go_through_a_file(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers elsewhere need none here; a named backend does."""

    def missing() -> str:
        raise ConfigError("this needs vLLM", where="sampling.engine", fix="Install it.")

    monkeypatch.setattr(vllm_server, "require_vllm", missing)
    policy, engine, (server,) = start(B)
    draw(over(policy, engine), requests(1))
    assert len(server.files) == 1
    with pytest.raises(ConfigError, match="this needs vLLM"):
        start(C, transfer="nccl")


@torch.no_grad()
def test_an_adapter_goes_by_its_own_interface(start: Start, wire: Wire) -> None:
    policy, engine, (server,) = start(B, lora=True)
    sampler = over(policy, engine, adapter=True, tolerance=2e-5)
    for _ in range(3):
        wanted = requests(4)
        assert gap(policy, wanted, draw(sampler, wanted)) < 5e-5
        train_lora(policy)
    assert wire.events == ["connect NCCLTrainerInitInfo", "send"], "the weights below it, once"
    paths = server.paths()
    assert paths.count("/v1/load_lora_adapter") == 3
    # The version is of weights and adapter, and set when both are there.
    assert paths.index("/v1/load_lora_adapter") < paths.index("/update_weight_version")


# --- both real halves ----------------------------------------------------------------------------


@pytest.mark.skipif(not REAL, reason="the real engine: make test-vllm")
@pytest.mark.parametrize(
    ("backend", "lora"),
    [("ipc", False), ("nccl", False), ("nccl", True)],
    ids=["ipc", "nccl", "nccl-adapter"],
)
@torch.no_grad()
def test_the_real_server_receives_from_the_real_trainer(
    folders: dict[bool, Path],  # noqa: F811 - the fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    lora: bool,
) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(GPU, TRAINER_GPU if backend == "ipc" else "GPU-of-the-server")
    replace_gpu(TRAINER_GPU, monkeypatch.setattr)
    monkeypatch.setattr(vllm_server, "gpu_name", lambda _: TRAINER_GPU)
    policy = load(folders[True], lora=lora)
    name, arguments = engine_of(policy, tmp_path, adapter=lora)
    arguments["worker_extension_cls"] = "cpu_transfers.Extension"
    process = ServerProcess(tmp_path, name, arguments, secret=PASSWORD)
    try:
        engine = ServerEngine(
            [process.url],
            PASSWORD,
            name=name,
            dtype=torch.float32,
            settings=VllmConfig(timeout_seconds=400, transfer="auto"),
            concurrency=16,
            processes=[process],
        )
        engine.require_model()
        engine.choose_transfer(policy.device)
        assert engine._sender is not None
        assert engine._sender.backend == backend
        sampler = over(policy, engine, adapter=lora, tolerance=2e-5)
        for version in range(3):
            for wanted in (requests(12), requests(16, length=200)):
                drawn = draw(sampler, wanted)
                assert gap(policy, wanted, drawn) < 5e-5
                assert {c.policy_version for c in drawn} == {version}
            assert engine._sender is not None, "it did not fall back to a file"
            (train_lora if lora else train)(policy)
    finally:
        process.close()
