"""A large process that grew asks for freed memory, between layers that record a gradient."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
from tiny_models import make_batch, tiny_model

from grouper.config.schema import OptimizerConfig
from grouper.models import heap
from grouper.models.policy import Policy
from grouper.training.objectives import sft_objective
from grouper.training.optimizers import make_optimizer
from grouper.training.update import update

MIB = 2**20


class FakeHeap(heap._Heap):
    """Resident sizes as told, one after the other."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = iter(sizes)
        self.trims = 0
        super().__init__(self._count, 1024 * MIB)

    def _count(self, pad: int) -> int:
        assert pad == 0
        self.trims += 1
        return 1

    def _resident(self) -> int:
        return next(self.sizes)


@pytest.mark.parametrize(
    ("resident", "trims"),
    [
        ([100, 900, 1000], 0),  # large enough to grow, not to matter
        ([100, 1200, 800], 1),  # asked, and 400 MiB came back
        ([100, 1200, 1190, 1210, 1240], 1),  # nothing came back, and not asked again at once
        ([100, 1200, 1190, 1260, 1200], 2),
        ([100, 1200, 1190, 700, 1000, 1100, 900], 2),  # what it gave back itself counts as least
    ],
)
def test_it_is_asked_when_a_large_process_grew(resident: list[int], trims: int) -> None:
    one = FakeHeap([size * MIB for size in resident])
    with contextlib.suppress(StopIteration):
        while True:
            one.shrink()
    assert next(one.sizes, None) is None
    assert one.trims == trims


def test_it_is_not_asked_below_half_of_what_was_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(heap.FLOOR, raising=False)
    monkeypatch.setattr(heap, "_free", lambda: 24 << 30)
    assert heap._floor() == 12 << 30
    monkeypatch.setattr(heap, "_free", lambda: 0)  # the system does not tell
    assert heap._floor() == 1 << 30
    monkeypatch.setenv(heap.FLOOR, "12345")
    assert heap._floor() == 12345


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no /proc")
def test_what_is_free_is_less_than_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < heap._free() < whole
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(heap, "_LIMITS", (str(limit), str(tmp_path / "none")))
    limit.write_text("1000000\n")
    assert heap._free() == 1_000_000
    limit.write_text("max\n")
    assert heap._free() > 1_000_000


@pytest.mark.skipif(heap._heap is None, reason="the C library cannot give memory back")
def test_the_resident_size_is_that_of_this_process() -> None:
    real = heap._find_heap()
    assert real is not None
    before = real._resident()
    held = torch.ones(64 * MIB // 4)
    assert 60 * MIB < real._resident() - before < 80 * MIB
    del held


def test_every_layer_is_a_chance_only_where_a_gradient_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = FakeHeap([0] * 1000)
    calls: list[bool] = []
    monkeypatch.setattr(asked, "shrink", lambda: calls.append(torch.is_grad_enabled()))
    monkeypatch.setattr(heap, "_heap", asked)
    policy = Policy(tiny_model("qwen3"))
    layers = policy.model.config.num_hidden_layers
    with torch.no_grad():
        policy(make_batch())
    assert not calls
    optimizer = make_optimizer(policy, OptimizerConfig())
    update(
        policy,
        make_batch(),
        sft_objective,
        optimizer,
        scale=1.0,
        max_grad_norm=None,
        token_budget=10**6,
    )
    assert calls == [True] * layers + [False] * layers
