"""Products by the matrix unit, beside float64's; what is rounded, and where."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from grouper.kernels.cpu import products
from grouper.kernels.cpu.calls import call
from grouper.kernels.cpu.ops import CURVES, gated
from grouper.kernels.cpu.products import PanelLayout, Panels, has_matrix_unit

pytestmark = pytest.mark.skipif(
    not has_matrix_unit(),
    reason="no kernels, no AMX-BF16 on this processor, or Linux does not grant it",
)

ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 256, 257]
OUTPUTS = [1, 8, 16, 24, 33, 96, 200]
INPUTS = [1, 7, 32, 40, 64, 512, 1000]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def laid_out(weight: Tensor) -> Panels:
    return PanelLayout(PanelLayout.numbers(*weight.shape)).single(weight)


def paired(gate: Tensor, up: Tensor) -> Panels:
    return PanelLayout(PanelLayout.numbers(*gate.shape, pair=True)).pair(gate, up)


def unit(x: Tensor) -> Tensor:
    """The distance of neighbours in bfloat16, which keeps eight bits."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 8)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("inputs", INPUTS)
def test_rounded_once(inputs: int, with_bias: bool) -> None:
    """Half a unit away at most, but for what summing up in float32 costs."""
    for outputs in OUTPUTS:
        weight = random(outputs, inputs)
        bias = random(outputs, seed=1) if with_bias else None
        packed = laid_out(weight)
        for rows in ROWS:
            x = random(rows, inputs, seed=2)
            exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
            sums = x.double().abs() @ weight.double().abs().T
            error = (packed.product(x, bias).double() - exact).abs()
            assert bool((error <= 0.5 * unit(exact) + sums * 2**-21).all()), (rows, outputs)


@pytest.mark.parametrize("activation", CURVES)
@pytest.mark.parametrize("inputs", [7, 64, 512])
def test_a_gated_product_is_its_steps(inputs: int, activation: str) -> None:
    """Each step rounds to bfloat16; an activation on the edge may round the other way."""
    m, c = CURVES[activation]
    for outputs in OUTPUTS:
        gate, up = random(outputs, inputs), random(outputs, inputs, seed=1)
        packed = paired(gate, up)
        for rows in ROWS:
            x = random(rows, inputs, seed=2) * 0.2
            first = laid_out(gate).product(x, None).double()
            second = laid_out(up).product(x, None).double()
            active = first * torch.sigmoid(m * first + c * first**3)  # exact far from zero, too
            steps = active.bfloat16().double() * second
            error = (packed.gated(x, activation).double() - steps).abs()
            assert bool((error <= 2.5 * unit(steps) + 1e-30).all()), (rows, outputs)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    weight, x = random(1000, 512), random(100, 512, seed=1)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found += [(laid_out(weight).product(x, None),)]
            found[-1] += (paired(weight, weight.flip(0)).gated(x, "silu"),)
    finally:
        torch.set_num_threads(threads)
    assert x.shape[0] * weight.numel() > products._SMALL  # or one would do it all
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_nothing_outside_is_written() -> None:
    room = torch.full((40 * 24 + 64,), 7.0).bfloat16()
    packed, x = laid_out(random(24, 40)), random(40, 40, seed=1)
    call("product_b", (x, packed.held, None, room), 40, 24, 40, 1)
    assert torch.equal(room[: 40 * 24].view(40, 24), packed.product(x, None))
    assert bool((room[40 * 24 :] == 7).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_row(value: float) -> None:
    weight, x = random(24, 40), random(20, 40, seed=1)
    clean = laid_out(weight).product(x, None)
    x[17, 39] = value
    found = laid_out(weight).product(x, None)
    expected = linear(x.float(), weight.float())[17].bfloat16()
    assert torch.equal(found[17].isnan(), expected.isnan())
    assert torch.equal(found[17].nan_to_num(), expected.nan_to_num())
    others = [row for row in range(20) if row != 17]
    assert torch.equal(found[others], clean[others])
    inner = paired(weight, weight).gated(x, "silu")
    assert torch.equal(inner[17].isnan(), gated(expected, expected, "silu").isnan())
    assert not bool(inner[others].isnan().any())


def test_a_result_has_the_shape_of_its_input() -> None:
    """And an input with gaps is read as what it is."""
    packed, wide = laid_out(random(24, 64)), random(2, 3, 5, 128)
    x = wide[..., :64]
    found = packed.product(x, None)
    assert found.shape == (2, 3, 5, 24)
    assert torch.equal(found[1, 2, 4], packed.product(x[1, 2, 4].clone(), None))
    assert packed.product(x[:0], None).shape == (0, 3, 5, 24)


def test_without_kernels_there_is_no_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "library", lambda: None)
    assert not has_matrix_unit.__wrapped__()
