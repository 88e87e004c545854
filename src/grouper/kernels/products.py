"""Products of bfloat16 with weights in panels, on a processor with Intel's matrix unit.

A weight is brought into panels once, for products with a few hundred rows and fewer: see
`products.cpp`.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from grouper.kernels.calls import call, function
from grouper.kernels.library import library
from grouper.kernels.ops import CURVES

__all__ = ["Panels", "has_matrix_unit"]

SIDE = 16
"""Columns of a tile of the matrix unit; a panel is two of them."""
DEPTH = 32
"""Numbers of each column in a tile."""
_SMALL = 1 << 22
"""Multiplications below which a second thread costs more than it brings."""


@cache
def has_matrix_unit() -> bool:
    """Whether `products.cpp` runs here, and Linux lets this process use the unit."""
    if library() is None:
        return False
    answer = ctypes.c_int64(0)
    function("products_supported")(struct.pack("q", ctypes.addressof(answer)))
    return bool(answer.value)


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight [n, k] in panels for `products.cpp`, padded with zeros.

    Of a pair, a gate [n, k] and what it gates [n, k], tiles take turns, so that what belongs
    together is at hand at the same time.
    """

    held: Tensor
    outputs: int
    """N."""

    @classmethod
    def of(cls, weight: Tensor, rows: int) -> Panels:  # noqa: ARG003 - the layout is one for all
        """Of one weight, on the CPU."""
        n, k = weight.shape
        held = weight.new_empty(cls.numbers(n, k))
        call("pack_weight_b", (weight.contiguous(), held), n, k, torch.get_num_threads())
        return cls(held, n)

    @classmethod
    def of_pair(cls, gate: Tensor, up: Tensor, rows: int) -> Panels:
        """Of two weights of one size, for `gated` only."""
        n, k = gate.shape
        both = gate.new_zeros(_tiles(n, SIDE), 2, SIDE, k)
        for place, weight in enumerate((gate, up)):
            padded = pad(weight, (0, 0, 0, -n % SIDE))
            both[:, place] = padded.view(-1, SIDE, k)
        return cls(cls.of(both.view(-1, k), rows).held, n)

    @staticmethod
    def numbers(n: int, k: int, *, pair: bool = False) -> int:
        """Numbers that are held for weights of this size, each of a pair."""
        panels = _tiles(n, SIDE if pair else 2 * SIDE)
        return panels * 2 * SIDE * _tiles(k, DEPTH) * DEPTH

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """X [..., k] times the weight, plus the bias -> [..., n]; summed in float, rounded once."""
        x, out, sizes = self._prepared(x)
        call("product_b", (x, self.held, bias, out), *sizes, _threads(self.held, sizes[0]))
        return out

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """activation(gate(x)) * up(x) [..., n], `activation` a name in `ops.CURVES`.

        Both products and the activation are rounded to bfloat16, as the layers of a model do.
        """
        x, out, sizes = self._prepared(x)
        numbers = (*sizes, *CURVES[activation], _threads(self.held, sizes[0]))
        call("gated_product_b", (x, self.held, out), *numbers)
        return out

    def _prepared(self, x: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
        """The input as the kernel reads it, room for the result, and rows, n and k."""
        k = x.shape[-1]
        out = x.new_empty((*x.shape[:-1], self.outputs))
        return x.contiguous(), out, (x.numel() // k, self.outputs, k)


def _tiles(count: int, size: int) -> int:
    return -(-count // size)


def _threads(held: Tensor, rows: int) -> int:
    return torch.get_num_threads() if held.numel() * rows >= _SMALL else 1
