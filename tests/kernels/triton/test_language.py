"""The one launch of Triton kernels: who hears of it, what it does without memory, how it fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from grouper.kernels.switch import planned
from grouper.kernels.triton import language
from grouper.kernels.triton.language import Refused, launch, launches, power_of_two, serves


class Kernel:
    """Stands for a compiled kernel: remembers how it was started, or fails."""

    __name__ = "_kernel"

    def __init__(self, error: Exception | None = None) -> None:
        self.started: list[tuple[Any, ...]] = []
        self._error = error

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **constants: Any) -> None:
            if self._error is not None:
                raise self._error
            self.started.append((grid, arguments, constants))

        return start


@pytest.fixture(autouse=True)
def _forgets_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_FAILURES", [])


def test_a_launch_starts_the_kernel_and_tells_listeners() -> None:
    kernel, x, heard = Kernel(), torch.zeros(3), []
    with launches(lambda name, tensors: heard.append((name, tensors))):
        launch(kernel, (2,), x, x, 7, BLOCK=16)
    launch(kernel, (1,), x)
    assert kernel.started == [((2,), (x, x, 7), {"BLOCK": 16}), ((1,), (x,), {})]
    assert heard == [("_kernel", (x, x))]


def test_without_memory_only_the_listeners_hear_of_it() -> None:
    kernel, heard = Kernel(), []
    x = torch.empty(3, device="meta")
    with launches(lambda name, tensors: heard.append(len(tensors))):
        launch(kernel, (1,), x, 2.0)
    assert heard == [1]
    assert kernel.started == []


def test_a_plan_needs_neither_triton_nor_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "AVAILABLE", False)
    x = torch.empty(3, dtype=torch.bfloat16, device="meta")
    assert not serves(x)
    with planned("cuda"):
        assert serves(x, x.float())
        assert not serves(x, x.double())
        assert not serves(torch.zeros(3)), "it has memory, and lies on the CPU"
        monkeypatch.setenv("GROUPER_KERNELS", "0")
        assert not serves(x)


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setattr(language, "device_type", lambda _: "cuda")
    monkeypatch.setattr(language, "AVAILABLE", True)
    return torch.zeros(3)


def test_what_cannot_be_built_is_one_warning_and_never_offered_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = on_cuda(monkeypatch)
    assert serves(x)
    broken = Kernel(RuntimeError("Failed to find C compiler."))
    with caplog.at_level(logging.WARNING), pytest.raises(Refused):
        launch(broken, (1,), x)
    assert not serves(x)
    (record,) = caplog.records
    assert "Failed to find C compiler" in record.getMessage()


def test_memory_that_runs_out_is_no_fault_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x = on_cuda(monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        launch(Kernel(torch.OutOfMemoryError("full")), (1,), x)
    assert serves(x)


def test_powers_of_two() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
