"""Weights from GPU to GPU by vLLM's `ipc` and `nccl`: the choice, the calls, and both real halves.

No GPU is needed: the tests with a fake of vLLM's trainer half record what is called, and those with
the real engine (GROUPER_VLLM=1) replace only what a GPU has (`cpu_transfers.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from cpu_transfers import GPU, TRAINER_GPU, replace_gpu
from fake_vllm import PASSWORD
from test_vllm import (
    REAL,
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

from grouper.config.schema import VllmConfig
from grouper.sampling.vllm import server as vllm_server
from grouper.sampling.vllm.server import ServerEngine, ServerProcess


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
            settings=VllmConfig(timeout_seconds=180, transfer="auto"),
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
