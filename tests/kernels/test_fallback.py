"""A kernel that fails is replaced by plain operations, once and for all, and says so once."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from grouper.kernels import fallback
from grouper.kernels.fallback import kernel_or_plain
from grouper.kernels.triton.language import Refused


@pytest.fixture(autouse=True)
def _nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_FAILED", set())


def plain(x: int, more: int = 0) -> str:
    return f"plain {x + more}"


def test_a_kernel_that_works_is_used() -> None:
    def kernel(x: int, more: int = 0) -> str:
        return f"fast {x + more}"

    assert kernel_or_plain(kernel, plain, 1, 2) == "fast 3"
    assert kernel_or_plain(None, plain, 1, 2) == "plain 3"


def test_one_that_fails_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def kernel(x: int, more: int = 0) -> NoReturn:
        asked.append(x + more)
        raise AttributeError("undefined symbol: decode_f")

    assert [kernel_or_plain(kernel, plain, n) for n in range(3)] == [
        "plain 0",
        "plain 1",
        "plain 2",
    ]
    assert asked == [0]
    (record,) = caplog.records
    assert "AttributeError: undefined symbol: decode_f" in record.getMessage()


def test_a_launch_that_was_refused_has_had_its_warning(caplog: pytest.LogCaptureFixture) -> None:
    def kernel(x: int, more: int = 0) -> NoReturn:
        raise Refused("own_part")

    assert kernel_or_plain(kernel, plain, 1) == "plain 1"
    assert not caplog.records


def test_memory_that_runs_out_is_no_failure_of_a_kernel() -> None:
    def kernel(x: int, more: int = 0) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            kernel_or_plain(kernel, plain, 1)
