"""The counter of kernels and bytes, on cases whose numbers are known by hand."""

from __future__ import annotations

import torch
from tensor_costs import TensorCosts, costs_on_cuda, size
from torch import Tensor

from grouper.kernels.triton.language import launch


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def counted(costs: TensorCosts) -> list[tuple[str, int]]:
    return [(kernel.name, kernel.bytes) for kernel in costs.kernels]


def test_a_product_and_what_follows_by_hand() -> None:
    x, weight, bias = meta(3, 5), meta(7, 5), meta(7)
    with TensorCosts() as costs:
        out = torch.nn.functional.linear(x, weight, bias)
        out.view(21)[4:9].transpose(0, 0)
        torch.empty_like(out)
        out.add_(1)
        out.bfloat16()
    assert counted(costs) == [
        ("addmm", 4 * (15 + 35 + 7 + 21)),
        ("add_", 4 * (21 + 21)),
        ("_to_copy", 4 * 21 + 2 * 21),
    ]
    assert costs.bytes == sum(kernel.bytes for kernel in costs.kernels)
    assert costs.bytes_of(lambda name: name == "add_") == 168


def test_of_a_table_only_the_rows_that_are_named_count() -> None:
    table, ids = meta(1000, 8), torch.empty(6, dtype=torch.int64, device="meta")
    ring = meta(2, 100, 8)
    with TensorCosts() as costs:
        torch.nn.functional.embedding(ids, table)
        ring.index_copy_(1, ids[:1], meta(2, 1, 8))
        ring[:, :3].copy_(meta(1, 3, 8).expand(2, 3, 8))
        torch.zeros(9, device="meta")
    assert counted(costs) == [
        ("embedding", 2 * 4 * 48 + 8 * 6),
        ("index_copy_", 2 * 4 * 16 + 8),
        ("copy_", 4 * 48 + 4 * 24),
        ("zeros", 36),
    ]


def test_what_is_repeated_is_read_once() -> None:
    assert size(meta(1, 8).expand(50, 8)) == 32
    assert size(meta(0, 8)) == 0


def test_a_backward_counts() -> None:
    weight = torch.nn.Parameter(meta(7, 5))
    with TensorCosts() as costs:
        torch.mm(meta(3, 5), weight.t()).backward(meta(3, 7))
    names = [kernel.name for kernel in costs.kernels]
    assert names == ["mm", "mm"], "the product, and the gradient of its weight"


def test_a_launch_counts_with_its_tensors() -> None:
    def double(*_: object) -> None:
        raise AssertionError("there is nothing to compute on")

    x, out = meta(10), meta(10)
    with costs_on_cuda(lambda name, t: 0.5 if name == "double" and t is x else 1.0) as costs:
        launch(double, (1,), x, out, 10)
    assert counted(costs) == [("double", 20 + 40)]
