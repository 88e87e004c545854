"""Whole runs on a CUDA device that is not there give what the CPU gives: see `pretend_cuda.py`.

What is run is everything but the kernels: which tensor is on which device, CUDA graphs of the
sampler, ragged attention, the sampler's copies, rehearsal, offloaded activations, checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from grouper.runs.folder import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch knows CUDA by itself"),
    pytest.mark.skipif(sys.platform != "linux", reason="preloads a library"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]

HERE = Path(__file__).parent
SMALL = [
    "model.new.hidden_size=32",
    "model.new.intermediate_size=64",
    "data.sft.options.count=40",
    "data.train.options.count=16",
    "data.validation=null",
    "data.test.options.count=6",
    "sft.steps=2",
    "sft.evaluate_every=0",
    "sft.optimizer.name=adamw",
    "grpo.steps=2",
    "grpo.evaluate_every=0",
    "grpo.prompts_per_step=4",
    "grpo.group_size=4",
    "grpo.beta=0.05",
    "grpo.updates_per_batch=2",
    "grpo.allow_truncation=true",
    "grpo.require_correct_in_group=false",
    "sampling.max_new_tokens=16",
]
IN_FLOAT32 = "model.compute_dtype=float32"
COMPARED = {"loss", "grad_norm", "policy/kl", "policy/entropy", "policy/logprob"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("pretend") / "pretend_cuda.so"
    words = ["c++", "-std=c++20", "-fPIC", "-shared", str(HERE / "pretend_cuda.cpp"), "-o", built]
    words += [f"-isystem{path}" for path in include_paths()]
    words += [word for path in library_paths() for word in (f"-L{path}", f"-Wl,-rpath,{path}")]
    subprocess.run([*words, "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"], check=True)
    return built


def on_the_card(library: Path, folder: Path, *words: str) -> str:
    environment = {**os.environ, "GROUPER_KERNELS": "0", "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, *words],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_an_operation_that_mixes_devices_fails(library: Path, tmp_path: Path) -> None:
    """And one that does not is computed, with its gradient."""
    program = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
import torch
from pretend_cuda import pretend
pretend()
weight = torch.ones(2, 3, device="cuda", requires_grad=True)
(weight * torch.full((2, 1), 4.0).to("cuda")).sum().backward()
assert weight.grad.device.type == "cuda"
assert weight.grad.tolist() == [[4.0] * 3] * 2
try:
    weight * torch.ones(3)
except RuntimeError as error:
    print("refused:", error, flush=True)
# The thread of the backward may still be giving objects of Python back. Where the interpreter ends
# in that moment, C++ aborts the process.
os._exit(0)
"""
    assert "refused: aten.mul.Tensor mixes" in on_the_card(library, tmp_path, "-c", program)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            [IN_FLOAT32, "sampling.dtype=same", "grpo.importance=truncate"],
            marks=pytest.mark.long,
        ),
        [
            *(IN_FLOAT32, "model.lora={rank: 4}", "model.gradient_checkpointing=true"),
            *("model.activation_offload=true", "sampling.top_p=0.9"),
            "sampling.allow_truncated=true",
        ],
    ],
    ids=["plain", "lora, memory savers, nucleus"],
)
def test_a_run_is_the_cpus(library: Path, tmp_path: Path, settings: list[str]) -> None:
    words = ["run", "demo", *SMALL, *settings]
    environment = {**os.environ, "GROUPER_KERNELS": "0"}
    plain = [sys.executable, "-m", "grouper", *words, "device=cpu", "name=cpu"]
    subprocess.run(plain, env=environment, cwd=tmp_path, capture_output=True, check=True)
    program = str(HERE / "pretend_cuda.py")
    out = on_the_card(library, tmp_path, program, *words, "device=cuda", "name=cuda")
    used = json.loads(out.splitlines()[-1])
    assert used["captures"] > 0
    assert used["replays"] > used["captures"]

    cpu, cuda = (RunFolder(tmp_path / "outputs" / name) for name in ("cpu", "cuda"))
    texts = [[row["completion"] for row in run.read_rollouts()] for run in (cpu, cuda)]
    assert len(texts[0]) == 32
    assert texts[0] == texts[1]
    for expected, found in zip(cpu.metrics_rows(), cuda.metrics_rows(), strict=True):
        compared = COMPARED & expected.keys()
        assert len(compared) == (len(COMPARED) if expected["phase"] == "grpo" else 2)
        for name in compared:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name
    assert all(row["sampler_logprob_diff"] < 1e-5 for row in cuda.metrics_rows()[2:])
    results = [[r.accuracy for r in run.read_evaluations()] for run in (cpu, cuda)]
    assert results[0] == results[1]


def test_products_in_bfloat16_take_ragged_rows_and_a_copy(library: Path, tmp_path: Path) -> None:
    words = ["run", "demo", *SMALL, "device=cuda", "grpo.steps=1"]
    out = on_the_card(library, tmp_path, str(HERE / "pretend_cuda.py"), *words)
    assert json.loads(out.splitlines()[-1])["ragged"] > 0
    (row,) = [
        row for row in RunFolder(tmp_path / "outputs/demo").metrics_rows() if row["phase"] == "grpo"
    ]
    assert 0 < row["sampler_logprob_diff"] < 0.02
