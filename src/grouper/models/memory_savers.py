"""Less memory for activations: gradient checkpointing, and offloading of the rest to the host.

Both are exact. Checkpointing keeps only the input of each decoder layer and runs the layer again
in the backward; offloading keeps tensors for the backward in host memory until then.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grouper.errors import ModelError

Context = Callable[[], AbstractContextManager[Any]]


def checkpoint_layers(model: PreTrainedModel, context: Context) -> None:
    """Make every decoder layer of `model` recompute itself in the backward, from now on.

    It does so only if a gradient is recorded: sampling and evaluation run the layers as usual.
    transformers' own switch also needs the layer in training mode, which turns dropout on in some
    models; here the mode does not change.

    Args:
        model: changed in place; a deep copy of it samples like the original.
        context: returns the context of each recomputation. The caller of the model has left its
            own by then, so this one has to select the same attention again.

    Raises:
        ModelError: the model has no layers that can be run again.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} does not support gradient checkpointing",
            where="model.gradient_checkpointing",
            fix="Leave it off and lower tokens_per_micro_batch instead.",
        )

    def forward(layer: nn.Module, *inputs: Any, **options: Any) -> Any:
        plain = types.MethodType(type(layer).forward, layer)
        if not torch.is_grad_enabled():
            return plain(*inputs, **options)
        return checkpoint(
            plain,
            *inputs,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), context()),
            **options,
        )

    for layer in layers:
        # A bound method, unlike a closure, is bound anew when the layer is copied.
        layer.forward = types.MethodType(forward, layer)


def offloaded_activations(module: nn.Module) -> AbstractContextManager[Any]:
    """Keep tensors for the backward in host memory inside this block, pinned on CUDA.

    It is torch's own `save_on_cpu`, except for the weights of `module`, which are in memory anyway.
    On the CPU nothing moves.
    """
    parameters = list(module.parameters())
    weights = frozenset(parameter.untyped_storage().data_ptr() for parameter in parameters)
    on_cuda = any(parameter.device.type == "cuda" for parameter in parameters)
    host = save_on_cpu(pin_memory=on_cuda)

    def pack(tensor: Tensor) -> Any:
        stays = tensor.untyped_storage().data_ptr() in weights
        return tensor if stays else host.pack_hook(tensor)

    def unpack(packed: Any) -> Any:
        return packed if isinstance(packed, Tensor) else host.unpack_hook(packed)

    return saved_tensors_hooks(pack, unpack)
