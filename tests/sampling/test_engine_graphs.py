"""Capturing a step on CUDA, as far as it can be followed without a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from grouper.sampling.engine import CudaGraphs


class Stream:
    """Notes whom it has waited for."""

    def __init__(self, *_: Any) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


class Device:
    """What `torch.cuda` is asked for, with a stream that is current."""

    def __init__(self) -> None:
        self.main = self.current = Stream()
        self.streams: list[Stream] = []
        self.captured: list[dict[str, Any]] = []
        self.log: list[str] = []
        self.end_fails = False
        self.pools_left: list[tuple[int, str]] = []

    def make_stream(self, *_: Any) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, other: Stream) -> Iterator[None]:
        before, self.current = self.current, other
        try:
            yield
        finally:
            self.current = before

    def make_graph(self) -> Any:
        device = self

        class Graph:
            def capture_begin(self, **options: Any) -> None:
                device.log.append("begin")
                device.captured.append({"stream": device.current, **options})

            def capture_end(self) -> None:
                device.log.append("end")
                if device.end_fails:
                    raise RuntimeError("the capture is broken")

            def replay(self) -> None:
                device.log.append("replay")

        return Graph()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Stream", made.make_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.make_graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(
        torch._C,
        "_cuda_endAllocateToPool",
        lambda index, pool: made.pools_left.append((index, pool)),
        raising=False,
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("the cache was emptied"))
    return made


def graphs() -> CudaGraphs:
    return CudaGraphs(torch.device("cuda"), "Tiny")


def test_a_step_runs_once_and_is_captured_on_one_side_stream(device: Device) -> None:
    made = graphs()
    for number in range(1, 4):
        played = made.record(lambda: device.log.append("step"))
        assert device.log == ["step", "begin", "step", "end"] * number
    (side,) = device.streams
    assert [found["stream"] for found in device.captured] == [side] * 3
    assert {found["pool"] for found in device.captured} == {"pool"}
    assert side.waited == [device.main] * 3
    assert device.main.waited == [side] * 3
    assert played is not None
    assert device.pools_left == []
    played()
    assert device.log[-1] == "replay"


@pytest.mark.parametrize("end_fails", [False, True])
def test_a_capture_that_fails_leaves_the_stream_as_it_was(
    device: Device, end_fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    device.end_fails = end_fails

    def step() -> None:
        device.log.append("step")
        if device.log.count("step") == 2:
            raise RuntimeError("operation not permitted when stream is capturing\nsecond line")

    assert graphs().record(step) is None
    assert device.log == ["step", "begin", "step", "end"]
    assert device.current is device.main
    assert device.main.waited == device.streams
    assert "Tiny cannot be recorded as a CUDA graph, so" in caplog.text
    assert "operation not permitted when stream is capturing" in caplog.text
    assert "second line" not in caplog.text
    # V6: the allocator stayed in the pool of the capture.
    assert device.pools_left == [(0, "pool")]


def test_a_capture_that_breaks_at_its_end_leaves_the_pool(device: Device) -> None:
    device.end_fails = True
    assert graphs().record(lambda: None) is None
    assert device.pools_left == [(0, "pool")]


def test_memory_that_runs_out_in_a_capture_is_told_as_such(device: Device) -> None:
    def step() -> None:
        device.log.append("step")
        if device.log.count("step") == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        graphs().record(step)
    assert device.current is device.main
    assert device.log[-1] == "end"
    assert device.pools_left == [(0, "pool")]


def test_a_step_that_fails_by_itself_is_no_failed_capture(device: Device) -> None:
    def step() -> None:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        graphs().record(step)
    assert device.current is device.main
    assert device.log == []


def test_rows_of_a_bucket_are_a_power_of_two(device: Device) -> None:
    assert [graphs().bucket(live) for live in (1, 2, 3, 8, 9, 100)] == [1, 2, 4, 8, 16, 128]
