"""The device that a recipe names."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grouper.config.loading import load_recipe
from grouper.config.schema import ModelConfig
from grouper.errors import ConfigError
from grouper.models import device
from grouper.models.device import (
    bfloat16_slowdown,
    cpu_product_rate,
    fastest_dtype,
    find_device,
    machine_memory,
    on_device,
    use_cpu_threads,
)
from grouper.training import parallel, run


def test_the_cpu_is_always_there() -> None:
    assert find_device("cpu") == torch.device("cpu")


def test_threads_of_one_recipe_are_not_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the demonstration, which asks for one, all that a notebook ran was on one thread."""
    now = SimpleNamespace(threads=6)
    monkeypatch.setattr(torch, "get_num_threads", lambda: now.threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(now, "threads", count))
    monkeypatch.setattr(device, "processors", lambda: 8)
    monkeypatch.setattr(device, "_THREADS", {})
    assert [use_cpu_threads(asked) for asked in (None, 1, 2, None)] == [6, 1, 2, 6]
    assert (use_cpu_threads(1), now.threads) == (1, 1)
    now.threads = 4  # the user's own choice, from here on
    assert [use_cpu_threads(asked) for asked in (None, 16, None)] == [4, 16, 4]
    now.threads = 32
    assert [use_cpu_threads(asked) for asked in (None, 1, None)] == [8, 1, 8]


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert find_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert find_device("auto") == torch.device("cuda", 3)


def test_a_process_that_sees_its_own_gpu_alone_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a scheduler may arrange it; and several processes on the CPU may be more than the GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert find_device("auto") == torch.device("cuda", 0)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(parallel, "TorchProcessGroup", lambda: None)
    parallel.join_processes()
    assert chosen == [torch.device("cuda", 0)]


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("cuda", torch.cuda.is_available()),
        ("mps", torch.backends.mps.is_available()),
    ],
)
def test_a_device_that_is_not_there_is_refused(name: str, there: bool) -> None:
    if there:
        assert find_device(name).type == name
        return
    with pytest.raises(ConfigError, match=rf"device: .* finds no {name} device .* auto or cpu"):
        find_device(name)


@pytest.mark.parametrize(
    ("dtype", "asked", "device", "low", "expected"),
    [
        ("float32", "auto", "cpu", True, "float32"),
        ("float32", "auto", "mps", True, "float32"),
        ("float32", "auto", "cuda", True, "bfloat16"),
        ("float32", "auto", "cuda", False, "float16"),
        ("bfloat16", "auto", "cuda", False, "bfloat16"),
        ("float32", "float32", "cuda", True, "float32"),
        ("float32", "bfloat16", "cpu", False, "bfloat16"),
        ("float32", "fastest", "cuda", True, "bfloat16"),
        ("float32", "fastest", "cuda", False, "float16"),
        ("float32", "fastest", "mps", True, "float32"),
    ],
)
def test_auto_is_what_the_device_has(
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    asked: str,
    device: str,
    low: bool,
    expected: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: low)
    config = ModelConfig(path="x", dtype=dtype, compute_dtype=asked)
    assert on_device(config, device).compute_dtype == expected
    assert config.compute_dtype == asked, "the recipe stays as it was written"


@pytest.mark.parametrize(
    ("dtype", "slowdown", "expected"),
    [("float32", 0.5, "bfloat16"), ("float32", 5.0, "float32"), ("bfloat16", 5.0, "bfloat16")],
)
def test_fastest_is_what_the_processor_multiplies_fastest(
    monkeypatch: pytest.MonkeyPatch, dtype: str, slowdown: float, expected: str
) -> None:
    """Weights in bfloat16 cannot be multiplied in float32, however slow they are."""
    monkeypatch.setattr(device, "bfloat16_slowdown", lambda: slowdown)
    config = ModelConfig(path="x", dtype=dtype, compute_dtype="fastest")
    assert on_device(config, "cpu").compute_dtype == expected


def test_the_record_of_a_run_says_what_auto_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is among the versions that a resumed run compares."""
    recipe = load_recipe("demo")
    assert recipe.model.compute_dtype == "auto"
    here = run.describe_versions(recipe)
    assert here["compute dtype"] == "float32"
    monkeypatch.setattr(run, "find_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert run.describe_versions(recipe)["compute dtype"] == "bfloat16"
    asked = recipe.override("model.compute_dtype=float32")
    assert "compute dtype" not in run.describe_versions(asked)


def test_a_share_of_the_card_is_all_that_a_process_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V1: slots were sized for the whole card, and the first step ran out of memory."""
    card = torch.device("cuda", 0)
    numbers = {"mem_get_info": (70, 80), "memory_reserved": 10, "memory_allocated": 6}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    share = "get_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, share, lambda _: 1.0)
    assert device.free_memory(card) == 70 + 10 - 6
    monkeypatch.setattr(torch.cuda, share, lambda _: 0.25)
    assert device.free_memory(card) == 20 - 6
    monkeypatch.setattr(torch.cuda, share, lambda _: 0.1)
    assert device.free_memory(card) == 10 - 6


@pytest.mark.parametrize("limit", ["8000000000", "max", None])
def test_memory_is_that_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None
) -> None:
    file = tmp_path / "memory.max"
    if limit is not None:
        file.write_text(f"{limit}\n")
    monkeypatch.setattr(device, "MEMORY_MAX", file)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10**7}.get)
    assert machine_memory() == (8 * 10**9 if limit == "8000000000" else 4096 * 10**7)


def test_the_slowdown_of_bfloat16_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many processors convert every number, and take several times as long."""

    def product(rows: torch.Tensor, weight: torch.Tensor) -> None:
        clock.now += 0.05 if rows.dtype == torch.bfloat16 else 0.01
        assert weight.dtype == rows.dtype

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(device.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(device, "_product_seconds", device._product_seconds.__wrapped__)
    assert bfloat16_slowdown() == pytest.approx(5.0)
    assert cpu_product_rate(torch.float32) == pytest.approx(5 * cpu_product_rate(torch.bfloat16))


@pytest.mark.parametrize(("slowdown", "dtype"), [(5.0, "float32"), (0.5, "bfloat16")])
def test_the_fastest_dtype(monkeypatch: pytest.MonkeyPatch, slowdown: float, dtype: str) -> None:
    monkeypatch.setattr(device, "bfloat16_slowdown", lambda: slowdown)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fastest_dtype() == dtype
