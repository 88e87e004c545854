"""A step that is played back does what it did when it was recorded, with what lies there now."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grouper.kernels import layers
from grouper.kernels.cpu import graph, ops
from grouper.kernels.cpu.graph import MOST_PACKED, PackedWeights, _arranged, _Life, packable, record
from grouper.kernels.cpu.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler, or kernels are off")

WIDTH = 48


def a_layer(x: Tensor, out: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """Our kernels and PyTorch's operations, views, allocations and changes in place, mixed."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(WIDTH, 2 * WIDTH, generator=generator).to(dtype)
    scale = torch.randn(WIDTH, generator=generator).to(dtype)
    angles = torch.randn(1, len(x), 8, generator=generator)
    count = torch.zeros(1, dtype=torch.long)

    def step() -> None:
        normed = layers.rms_norm(ops, x, scale, 1e-6)
        heads = normed.view(1, len(x), -1, 8).transpose(1, 2)
        turned = layers.rotate(ops, heads, angles.cos().to(dtype), angles.sin().to(dtype))
        flat = turned.transpose(1, 2).reshape(len(x), WIDTH)
        gate, up = (flat @ weight).chunk(2, dim=-1)
        inner = layers.gated(ops, gate.contiguous(), up.contiguous(), "silu")
        total = x + inner
        both = torch.cat([total, inner.float().sum(-1, keepdim=True).to(dtype)], dim=-1)
        blank = torch.empty_like(both)
        blank.copy_(both)
        blank[:, 0].add_(count)
        best, where = blank.float().max(-1)
        out.copy_(blank)
        out[:, 1] = best.to(dtype) + where
        count.add_(1)

    return step


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_does_the_same_with_new_contents(dtype: torch.dtype) -> None:
    x = torch.randn(5, WIDTH).to(dtype)
    ours, theirs = (torch.zeros(5, WIDTH + 1, dtype=dtype) for _ in range(2))
    played = record(a_layer(x, ours, dtype))
    plain = a_layer(x, theirs, dtype)
    plain()
    assert played is not None
    assert torch.equal(ours, theirs)
    for _ in range(3):
        x.copy_(torch.randn(5, WIDTH))
        ours.zero_()
        played()
        plain()
        assert torch.equal(ours, theirs)


@torch.no_grad()
def test_what_it_needs_outlives_everybody_else() -> None:
    out = torch.zeros(4)

    def made() -> Callable[[], None] | None:
        weight, numbers = torch.full((4,), 3.0), torch.tensor([1.0, 2.0, 3.0, 4.0])
        return record(lambda: out.copy_(weight * numbers + torch.tensor([0.5])))  # type: ignore[arg-type]  # its result is of no interest

    played = made()
    assert played is not None
    for _ in range(20):  # memory that has been freed would be used by these
        _ = [torch.randn(4) for _ in range(50)]
    out.zero_()
    played()
    assert out.tolist() == [3.5, 6.5, 9.5, 12.5]


ASKING: dict[str, Callable[[Tensor], Any]] = {
    "float": lambda x: x * float(x.sum()),
    "if": lambda x: x * 3 if x.sum() > 2 else x,
    "equal": lambda x: x * 3 if torch.equal(x, x.clone()) else x,
    "tolist": lambda x: x * sum(x.tolist()),
    "numpy": lambda x: x * x.numpy().sum(),
    "nonzero": lambda x: x * len(x.nonzero()),
    "where": lambda x: x * len(torch.where(x > 0)[0]),
    "mask": lambda x: x * x[x > 0].sum(),
    "masked_select": lambda x: x * x.masked_select(x > 0).sum(),
    "unique": lambda x: x * (2 + len(x.unique())),
    "repeat": lambda x: x * x.repeat_interleave(x.long()).sum(),
}


@torch.no_grad()
@pytest.mark.parametrize("name", ASKING)
def test_a_step_that_hangs_on_contents_is_run_and_not_recorded(name: str) -> None:
    x, out = torch.ones(3), torch.zeros(3)

    def step() -> None:
        out.copy_(ASKING[name](x))

    assert record(step) is None
    assert out.tolist() == [3.0, 3.0, 3.0]


@torch.no_grad()
def test_an_operation_that_changes_one_tensor_and_makes_another_is_not_recorded() -> None:
    x, mean, variance = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    out = torch.zeros(4, 3)

    def step() -> None:
        out.copy_(torch.nn.functional.batch_norm(x, mean, variance, training=True))

    played = record(step)
    if played is not None:  # a PyTorch whose operation does not own up to the change
        x.copy_(torch.randn(4, 3))
        played()
        expected = torch.nn.functional.batch_norm(x, mean.clone(), variance.clone(), training=True)
        torch.testing.assert_close(out, expected)


@torch.no_grad()
def test_places_may_be_looked_up() -> None:
    x, places, out = torch.arange(4.0), torch.tensor([3, 1]), torch.zeros(2)
    played = record(lambda: out.copy_(x[places]))  # type: ignore[arg-type]  # its result is of no interest
    places.copy_(torch.tensor([0, 2]))
    assert played is not None
    played()
    assert out.tolist() == [0.0, 2.0]


@torch.no_grad()
def test_a_step_that_fails_says_so_and_records_nothing() -> None:
    def step() -> None:
        raise ValueError("a mistake of its own")

    with pytest.raises(ValueError, match="a mistake of its own"):
        record(step)
    x = torch.zeros(2)
    played = record(lambda: x.add_(1))  # type: ignore[arg-type]  # its result is of no interest
    assert played is not None
    played()
    assert x.tolist() == [2.0, 2.0]


def test_memory_is_used_again_and_never_by_two_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lives = []
    for first in range(60):
        size, length = (int(torch.randint(1, 500, (1,), generator=generator)) for _ in range(2))
        lives.append(_Life(size, first, first + length % 7))
    total = _arranged(lives)
    for i, one in enumerate(lives):
        assert one.offset % graph.ALIGNMENT == 0
        for other in lives[:i]:
            if one.first <= other.last and other.first <= one.last:
                apart = one.offset + one.size <= other.offset
                assert apart or other.offset + other.size <= one.offset
    busiest = max(sum(p.size for p in lives if p.first <= t <= p.last) for t in range(70))
    assert busiest <= total < sum(life.size for life in lives) / 3


needs_halves = pytest.mark.skipif(
    not packable([torch.empty(1, 1, dtype=torch.bfloat16)]),
    reason="oneDNN has no products in bfloat16 for this processor",
)


@needs_halves
@torch.no_grad()
def test_products_with_weights_read_a_packed_copy() -> None:
    weights = [torch.randn(96, WIDTH).bfloat16(), torch.randn(WIDTH, 96).bfloat16()]
    bias = torch.randn(96).bfloat16()
    other = torch.randn(WIDTH, WIDTH).bfloat16()
    packed = PackedWeights(weights)
    for rows in (1, 5, 33):
        x, out = torch.randn(rows, WIDTH).bfloat16(), torch.zeros(rows, WIDTH).bfloat16()

        def step(x: Tensor = x, out: Tensor = out) -> None:
            inner = torch.addmm(bias, x, weights[0].T)
            out.copy_(inner @ weights[1].T @ other.T)

        played = record(step, packed)
        assert played is not None
        x.copy_(torch.randn(rows, WIDTH))
        step()
        expected = out.clone()
        # In place of the weights themselves, which nothing reads any more; `other` is none of them.
        kept = [weight.clone() for weight in (*weights, other)]
        weights[0].zero_()
        weights[1].zero_()
        played()
        assert_close(out, expected)
        other.zero_()
        played()
        assert not out.any()
        for weight, before in zip((*weights, other), kept, strict=True):
            weight.copy_(before)


@needs_halves
@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_an_adapter_is_no_linear_layer(scale: float) -> None:
    """Its product is added to another one, or scaled."""
    weight, bias = torch.randn(96, WIDTH).bfloat16(), torch.randn(96).bfloat16()
    x, out = torch.randn(5, WIDTH).bfloat16(), torch.zeros(5, 96).bfloat16()
    added = bias if scale < 1 else torch.randn(5, 96).bfloat16()

    def step() -> None:
        out.copy_(torch.addmm(added, x, weight.T, alpha=scale))

    played = record(step, PackedWeights([weight]))
    assert played is not None
    expected = out.clone()
    out.zero_()
    played()
    assert torch.equal(out, expected)


@needs_halves
def test_what_is_packed() -> None:
    halves = torch.empty(4, 8, dtype=torch.bfloat16)
    assert [w.shape for w in packable([halves, torch.empty(4, 8), halves[0]])] == [(4, 8)]
    large = torch.empty(MOST_PACKED // 8, 8, dtype=torch.bfloat16, device="meta")
    assert packable([large, halves]) == []


def test_kernels_of_another_thread_are_no_part_of_a_recording() -> None:
    """Two samplers may record at the same time; each would repeat the other's step in its own."""
    x, out, theirs = (torch.zeros(4, WIDTH) for _ in range(3))
    scale, elsewhere = torch.ones(WIDTH), []

    def step() -> None:
        thread = Thread(target=lambda: elsewhere.append(ops.gate(theirs, theirs, 1.0, 0.0)))
        thread.start()
        thread.join()
        out.copy_(ops.norm(x, scale, 1e-6, ones=False))

    played = record(step)
    assert played is not None
    elsewhere[0].fill_(7.0)
    played()
    assert elsewhere[0].eq(7.0).all()
