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

from grouper.kernels.cpu.calls import call, function
from grouper.kernels.cpu.library import library
from grouper.kernels.cpu.ops import CURVES

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


class PanelLayout:
    """Brings weights into panels, one after the other in memory of large pages.

    Args:
        numbers: of all of them together, what `numbers` says for each added up.
    """

    def __init__(self, numbers: int) -> None:
        self._room = torch.empty(numbers, dtype=torch.bfloat16, device="cpu")
        self._used = 0
        call("large_pages", (self._room,), self._room.nbytes)

    @staticmethod
    def numbers(n: int, k: int, *, pair: bool = False) -> int:
        """Numbers that a weight [n, k] takes, or a pair of them."""
        panels = _tiles(n, SIDE if pair else 2 * SIDE)
        return panels * 2 * SIDE * _tiles(k, DEPTH) * DEPTH

    def single(self, weight: Tensor) -> Panels:
        """One weight [n, k], on the CPU."""
        return self._laid_out(weight, None)

    def pair(self, gate: Tensor, up: Tensor) -> Panels:
        """Two weights [n, k], for `Panels.gated` only."""
        return self._laid_out(gate, up.contiguous())

    def _laid_out(self, weight: Tensor, other: Tensor | None) -> Panels:
        n, k = weight.shape
        start = self._used
        self._used += self.numbers(n, k, pair=other is not None)
        held = self._room[start : self._used]
        tensors = (weight.contiguous(), other, held)
        call("pack_weight_b", tensors, n, k, torch.get_num_threads())
        return Panels(held, n)


def _tiles(count: int, size: int) -> int:
    return -(-count // size)


def _threads(held: Tensor, rows: int) -> int:
    # However few rows there are, the weight has to be read.
    return torch.get_num_threads() if held.numel() * (rows + 2 * SIDE) >= _SMALL else 1
