"""Flat tokens as padded rows and back, beside plain indexing."""

from __future__ import annotations

import torch

from grouper.models.attention import collect_rows, spread_rows

LENGTHS = [3, 1, 4]
WIDTH = 4


def places() -> tuple[torch.Tensor, torch.Tensor]:
    """(gather [3, 4], scatter [8]) of rows of these lengths."""
    live = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    start = torch.tensor([0, 3, 4])
    return start[:, None] + torch.arange(WIDTH) * live, live.flatten().nonzero().flatten()


def test_there_and_back() -> None:
    gather, scatter = places()
    flat = torch.randn(1, 2, 8, 5, dtype=torch.float64)
    rows = spread_rows(flat, gather, scatter)
    assert rows.shape == (3, 2, 4, 5)
    assert torch.equal(rows[2, :, 1], flat[0, :, 5])
    assert torch.equal(collect_rows(rows, scatter), flat)


def test_gradients_are_those_of_indexing() -> None:
    """Where padding brings none; what it brings to `spread_rows` is thrown away."""
    gather, scatter = places()
    flat = torch.randn(1, 2, 8, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    live = torch.zeros(12, dtype=torch.float64).index_fill(0, scatter, 1.0).view(3, 1, 4, 1)
    plain = flat[0][:, gather].transpose(0, 1)
    (expected,) = torch.autograd.grad((plain * weights * live).sum(), flat)
    (found,) = torch.autograd.grad((spread_rows(flat, gather, scatter) * weights).sum(), flat)
    torch.testing.assert_close(found, expected)

    rows = torch.randn(3, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: collect_rows(r, scatter).sin(), rows)
    (grad,) = torch.autograd.grad(collect_rows(rows, scatter).sum(), rows)
    assert torch.equal(grad, live.expand_as(grad))
