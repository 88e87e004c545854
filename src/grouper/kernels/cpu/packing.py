"""Weights laid out for products with few rows, while a model samples in bfloat16 on the CPU.

A product with a few hundred rows spends much of its time bringing the weight into the order that
the processor's matrix unit wants. While sampling the weights do not change: they are brought into
that order once, and the two layers that read the same input in a gated MLP become one product.
Where the processor has Intel's matrix unit the order and the products are our own
(`products.py`); elsewhere they are oneDNN's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from grouper.kernels.cpu.library import library
from grouper.kernels.cpu.ops import gated_halves
from grouper.kernels.cpu.products import PanelLayout, has_matrix_unit

LARGEST = 256 << 20
"""Bytes of weights that are held a second time at most."""
FEWEST = 32
"""Tokens of a completion from which on it pays: packing costs as much as one or two steps."""

_CURRENT: ContextVar[Packed | None] = ContextVar("packed", default=None)

current = _CURRENT.get
"""The packed weights to be used now, or None."""


class _Weight(Protocol):
    """A packed weight [n, k]."""

    @property
    def held(self) -> Tensor:
        """What takes the memory."""
        ...

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """X [..., k] times the weight -> [..., n]."""
        ...

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Where it is a gate [n / 2, k] above another weight: activation(gate(x)) * other(x)."""
        ...


@dataclass(frozen=True, slots=True)
class _Reordered:
    """In the order of oneDNN; a pair is one weight of twice the rows."""

    held: Tensor

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.held, bias, "none", [], "")  # noqa: SLF001 - no public name
        return out

    def gated(self, x: Tensor, activation: str) -> Tensor:
        return gated_halves(self.product(x, None), activation)


class _Layout(Protocol):
    """Brings weights into an order."""

    @staticmethod
    def numbers(n: int, k: int, *, pair: bool = False) -> int:
        """Numbers that a weight [n, k] takes, or a pair of them."""
        ...

    def single(self, weight: Tensor) -> _Weight:
        """One weight [n, k]."""
        ...

    def pair(self, gate: Tensor, up: Tensor) -> _Weight:
        """Two weights [n, k], for `gated`."""
        ...


@dataclass(frozen=True, slots=True)
class _Reordering:
    rows: int
    """It is done for about so many."""

    @staticmethod
    def numbers(n: int, k: int, *, pair: bool = False) -> int:
        return (2 if pair else 1) * n * k

    def single(self, weight: Tensor) -> _Reordered:
        held = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.rows)  # noqa: SLF001 - no public name
        return _Reordered(held)

    def pair(self, gate: Tensor, up: Tensor) -> _Reordered:
        return self.single(torch.cat([gate, up]))


def _layout(model: nn.Module, rows: int) -> _Layout:
    return PanelLayout(_numbers(model)) if has_matrix_unit() else _Reordering(rows)


def _numbers(model: nn.Module) -> int:
    """Of all packed weights of a model."""
    count = PanelLayout.numbers if has_matrix_unit() else _Reordering.numbers
    pairs = sum(count(*gate.weight.shape, pair=True) for _, (gate, _) in _pairs(model))
    return pairs + sum(count(*linear.weight.shape) for linear in _single(model))


class Packed:
    """The packed weights of one model; none at first."""

    def __init__(self) -> None:
        self._weights: dict[int, _Weight | None] = {}
        """By the module that they belong to; None: it is part of another one's."""

    def fill(self, model: nn.Module, rows: int) -> None:
        """Pack a model whose kernels are attached, for products with about so many rows."""
        layout = _layout(model, rows)
        for module, pair in _pairs(model):
            self._weights[id(module)] = layout.pair(*(part.weight.detach() for part in pair))
            self._weights |= {id(part): None for part in pair}
        for linear in _single(model):
            self._weights[id(linear)] = layout.single(linear.weight.detach())

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Products with these weights run on the packed ones inside this block."""
        before = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(before)

    def product(self, module: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """X times the packed weight of a linear layer, or None where it has none."""
        weight = self._weight_for(module, x)
        return None if weight is None else weight.product(x, bias)

    def gated(self, module: nn.Module, x: Tensor, activation: str) -> Tensor | None:
        """activation(gate(x)) * up(x) of a gated MLP, or None where they are not packed.

        `activation` is a name in `ops.CURVES`. Results are rounded as if the two products and the
        activation had been steps of their own.
        """
        weight = self._weight_for(module, x)
        return None if weight is None else weight.gated(x, activation)

    def _weight_for(self, module: nn.Module, x: Tensor) -> _Weight | None:
        return self._weights.get(id(module)) if x.dtype is torch.bfloat16 else None


def _pairs(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[nn.Linear, nn.Linear]]]:
    """Gated MLPs, each with the gate and what it gates, that read the same input."""
    for module in model.modules():
        if "fused_activation" in vars(module):
            gate, up = module.gate_proj, module.up_proj
            if _is_packable(gate) and _is_packable(up) and not _have_bias(gate, up):
                yield module, (gate, up)


def _have_bias(*linears: Any) -> bool:  # torch's type of a layer's bias leaves None out
    return any(linear.bias is not None for linear in linears)


def _single(model: nn.Module) -> Iterator[nn.Linear]:
    """All other linear layers inside layers."""
    paired = {id(part) for _, parts in _pairs(model) for part in parts}
    for module in model.modules():
        if _is_packable(module) and id(module) not in paired:
            yield module


def _is_packable(module: object) -> TypeGuard[nn.Linear]:
    # The marked ones are those inside layers; a head is not called in a pass of the decoder.
    return type(module) is nn.Linear and "fused_linear" in vars(module)


def packed_bytes(model: nn.Module, completion: int, dtype: torch.dtype | None = None) -> int:
    """What `pack` would hold; 0 where it does not pay.

    Args:
        model: the model, its weights on any device.
        completion: tokens of the longest completion.
        dtype: of a copy that samples instead; None: the model samples itself.
    """
    total = _numbers(model) * torch.bfloat16.itemsize
    weights = (m.weight for m in model.modules() if _is_packable(m))
    halves = all((dtype or weight.dtype) is torch.bfloat16 for weight in weights)
    pays = completion >= FEWEST and total <= LARGEST
    return total if halves and pays and torch.ops.mkldnn._is_mkldnn_bf16_supported() else 0  # noqa: SLF001 - no public name


def pack(model: nn.Module, *, rows: int, completion: int) -> Packed:
    """The packed weights of a model on the CPU; none where they would not pay.

    Args:
        model: the model; its kernels are attached, or there are none.
        rows: sequences at the same time.
        completion: tokens of the longest completion.
    """
    packed = Packed()
    on_cpu = all(parameter.is_cpu for parameter in model.parameters())
    if on_cpu and library() is not None and packed_bytes(model, completion):
        packed.fill(model, rows)
    return packed
