"""Flat tokens as padded rows and back, beside plain indexing."""

from __future__ import annotations

import torch

from grouper.models.attention import move_heads

LENGTHS = [3, 1, 4]
WIDTH = 4


def live() -> torch.Tensor:
    return torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]


def places() -> torch.Tensor:
    """[8] of rows of these lengths."""
    return live().flatten().nonzero().flatten()


def test_there_and_back() -> None:
    flat = torch.randn(1, 2, 8, 5, dtype=torch.float64)
    rows = move_heads(flat, places(), (3, WIDTH))
    assert rows.shape == (3, 2, 4, 5)
    assert torch.equal(rows[2, :, 1], flat[0, :, 5])
    assert not rows.transpose(1, 2)[~live()].any()
    assert torch.equal(move_heads(rows, places()), flat)


def test_gradients_are_those_of_indexing() -> None:
    """Where padding brings none; what it brings to flat heads is thrown away."""
    flat = torch.randn(1, 2, 8, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    start = torch.tensor([0, 3, 4])
    gather = start[:, None] + torch.arange(WIDTH) * live()
    plain = flat[0][:, gather].transpose(0, 1) * live()[:, None, :, None]
    (expected,) = torch.autograd.grad((plain * weights).sum(), flat)
    (found,) = torch.autograd.grad((move_heads(flat, places(), (3, WIDTH)) * weights).sum(), flat)
    torch.testing.assert_close(found, expected)

    rows = torch.randn(3, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: move_heads(r, places()).sin(), rows)
    (grad,) = torch.autograd.grad(move_heads(rows, places()).sum(), rows)
    assert torch.equal(grad, live()[:, None, :, None].expand_as(grad).double())
