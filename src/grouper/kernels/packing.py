"""Weights laid out for products with few rows, while a model samples in bfloat16 on the CPU.

A product with a few hundred rows spends up to a third of its time bringing the weight into the
order that the processor's matrix unit wants. While sampling the weights do not change: they are
brought into that order once (oneDNN's own layout), and the two layers that read the same input in
a gated MLP become one product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from grouper.kernels.library import library

__all__ = ["LARGEST", "Packed", "current", "pack", "packed_bytes"]

LARGEST = 256 << 20
"""Bytes of weights that are held a second time at most."""
FEWEST = 32
"""Tokens of a completion from which on it pays: packing costs as much as about two steps."""

_CURRENT: ContextVar[Packed | None] = ContextVar("packed", default=None)

current = _CURRENT.get
"""The packed weights to be used now, or None."""


class Packed:
    """The packed weights of one model; none at first."""

    def __init__(self) -> None:
        self._weights: dict[int, Tensor] = {}
        """By the module that they belong to; empty: it is part of another one's."""

    def fill(self, model: nn.Module, rows: int) -> None:
        """Pack a model whose kernels are attached, for products with about so many rows."""
        for module in model.modules():
            if "fused_activation" in vars(module):
                pair = [module.gate_proj, module.up_proj]
                if all(type(part) is nn.Linear and part.bias is None for part in pair):
                    merged = torch.cat([part.weight.detach() for part in pair])  # type: ignore[operator,union-attr]  # both are linear
                    self._weights[id(module)] = _reordered(merged, rows)
                    self._weights |= {id(part): merged[:0] for part in pair}
        for module in model.modules():
            if _is_packable(module) and id(module) not in self._weights:
                self._weights[id(module)] = _reordered(module.weight.detach(), rows)  # type: ignore[operator]  # a linear layer's

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Products with these weights run on the packed ones inside this block."""
        before = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(before)

    def product(self, module: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """X times the packed weight of a module, or None where it has none."""
        weight = self._weights.get(id(module))
        if weight is None or not weight.numel() or x.dtype is not torch.bfloat16:
            return None
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001 - no public name
        return out


def _is_packable(module: nn.Module) -> bool:
    # The marked ones are those inside layers; a head is not called in a pass of the decoder.
    return type(module) is nn.Linear and "fused_linear" in vars(module)


def _reordered(weight: Tensor, rows: int) -> Tensor:
    out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)  # noqa: SLF001 - no public name
    return out


def packed_bytes(model: nn.Module, completion: int, dtype: torch.dtype | None = None) -> int:
    """What `pack` would hold; 0 where it does not pay.

    Args:
        model: the model, its weights on any device.
        completion: tokens of the longest completion.
        dtype: of a copy that samples instead; None: the model samples itself.
    """
    weights: list[Tensor] = [m.weight for m in model.modules() if _is_packable(m)]  # type: ignore[misc]  # linear layers
    total = sum(weight.numel() * torch.bfloat16.itemsize for weight in weights)
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
    if library() is not None and on_cpu and packed_bytes(model, completion):
        packed.fill(model, rows)
    return packed
