"""Linear layers that read the same input as one product: queries, keys and values, gate and up.

A decoding step on a GPU is bound by the number of kernels, so one product is faster than three. The
model keeps its own code, which calls one layer after the other: the first of them computes the
whole product, and each returns its columns of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# Children of a module that its code calls with one and the same input.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def join_products(model: nn.Module, shared: Collection[nn.Parameter]) -> None:
    """Let the weights of such layers be parts of one tensor, and their products one product.

    They stay parameters of their own with their names. Nothing may be trained or moved afterwards:
    the model is a copy that weights are written into.

    Args:
        model: its layers are changed.
        shared: parameters that another model reads as well. They stay where they are: joined, they
            would exist twice.
    """
    shared_ids = {id(parameter) for parameter in shared}
    for module in model.modules():
        for names in TOGETHER:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if not all(_is_plain(layer) for layer in layers):
                continue
            is_shared = any(id(layer.weight) in shared_ids for layer in layers)
            if not is_shared and _are_alike(layers):
                _Product(layers).attach()


def _is_plain(layer: Any) -> bool:
    # A subclass may compute something else, and an instance may have a forward of its own.
    return type(layer) is nn.Linear and "forward" not in vars(layer)


def _are_alike(layers: Sequence[nn.Linear]) -> bool:
    """Tell whether the layers have inputs, dtypes and biases alike."""
    kinds = set()
    for layer in layers:
        has_bias = layer.bias is not None
        kinds.add((layer.in_features, layer.weight.dtype, has_bias))
    return len(kinds) == 1


class _Product:
    """The product of several layers with one input.

    Args:
        layers: their weights move into one tensor.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        self._sizes = [layer.out_features for layer in layers]
        self._weight = torch.cat([layer.weight.detach() for layer in layers])
        self._bias = None
        if layers[0].bias is not None:
            self._bias = torch.cat([layer.bias.detach() for layer in layers])
        self._input: Tensor | None = None
        """What the columns that have not been returned yet are of."""
        self._columns: dict[int, Tensor] = {}

    def attach(self) -> None:
        """Let the layers read their parts of the weights, and return their columns."""
        start = 0
        for number, layer in enumerate(self._layers):
            end = start + self._sizes[number]
            layer.weight = nn.Parameter(self._weight[start:end], requires_grad=False)
            if self._bias is not None:
                layer.bias = nn.Parameter(self._bias[start:end], requires_grad=False)
            forward: Any = partial(_forward, product=self, number=number)
            vars(layer)["forward"] = MethodType(forward, layer)
            start = end

    def columns(self, x: Tensor, number: int) -> Tensor:
        """Return the columns of one layer, [..., its outputs]."""
        if self._input is not x or number not in self._columns:
            product = linear(x, self._weight, self._bias)
            self._input = x
            self._columns = dict(enumerate(torch.split(product, self._sizes, -1)))
        columns = self._columns.pop(number)
        if not self._columns:
            self._input = None  # its memory is needed
        return columns


def _forward(module: nn.Linear, x: Tensor, *, product: _Product, number: int) -> Tensor:
    del module  # its weights are rows of the product's
    return product.columns(x, number)
