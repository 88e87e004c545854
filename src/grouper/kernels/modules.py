"""Which parts of a transformers model run on our kernels, and when.

A model keeps its own code. Its normalisation and MLP layers and the function that rotates its
queries and keys look first whether a pass of ours is running and a kernel takes their
tensors, and otherwise do what they always did. What a class computes is not guessed from its
name: a kernel is used only if the class's own code computes its formula on random numbers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from grouper.kernels.cpu import ops
from grouper.kernels.switch import device_type, is_running, swap_while_running
from grouper.kernels.triton import layers as gpu
from grouper.kernels.triton.language import Refused

ROTARY = "apply_rotary_pos_emb"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
}
CLOSE = 1e-5


def attach(model: nn.Module) -> None:
    """Let this model's layers use the kernels, where there are any; repeating it does nothing."""
    for module in model.modules():
        kind: Any = type(module)
        if "forward" in vars(module):
            continue
        if (eps := _eps(module)) is not None:
            if (ones := _norm_ones(kind)) is not None:
                vars(module)["fused_norm"] = (eps, ones)
                # A bound method and no closure: a copy of the model must run its own weights.
                module.forward = MethodType(_norm, module)
        elif _looks_like_mlp(module) and _mlp_is_gated(kind):
            activation = _activation(module)
            if activation is not None:
                vars(module)["fused_activation"] = activation
                module.forward = MethodType(_mlp, module)
        _attach_rotary(kind.__module__)


def _eps(module: nn.Module) -> float | None:
    """What a norm with a weight adds inside its root; None: it does not look like one."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    for name in ("variance_epsilon", "eps"):
        if isinstance(value := getattr(module, name, None), float):
            return value
    return None


def _random(*shape: int) -> Tensor:
    # Neither the global generator nor a default device may be touched.
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, device="cpu")


def _agrees(expected: tuple[Tensor, ...], theirs: Callable[[], Any]) -> bool:
    """Whether a function gives these tensors; anything unexpected is a no."""
    try:
        with torch.no_grad():
            pairs = zip(expected, theirs(), strict=True)
            return all(a.shape == b.shape and bool((a - b).abs().max() < CLOSE) for a, b in pairs)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False


@cache
def _norm_ones(kind: Any) -> bool | None:
    """Whether a class of norms multiplies by 1 + weight; None: it is not what our kernel does."""
    x, weight = _random(3, 8), _random(8)

    def theirs() -> tuple[Tensor]:
        probe = kind.__new__(kind)
        nn.Module.__init__(probe)
        probe.weight = nn.Parameter(weight)
        probe.variance_epsilon = probe.eps = 1e-3
        return (kind.forward(probe, x),)

    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    for ones in (False, True):
        expected = (normed * (weight + ones),)
        if _agrees(expected, theirs):
            return ones
    return None


def _norm(module: Any, x: Tensor) -> Tensor:
    eps, ones = module.fused_norm
    weight = module.weight
    kernels = _kernels(x)
    if is_running() and kernels.norm_serves(x, weight, ones=ones):
        with contextlib.suppress(Refused):
            out: Tensor = kernels.rms_norm(x, weight, eps, ones=ones)
            return out
    return _as_ever(module, x)


def _kernels(x: Tensor) -> Any:
    """The module of kernels for where a tensor is."""
    return gpu if device_type(x) == "cuda" else ops


def _as_ever(module: Any, x: Tensor) -> Tensor:
    """What the model's own code does."""
    out: Tensor = type(module).forward(module, x)
    return out


def _looks_like_mlp(module: nn.Module) -> bool:
    return all(hasattr(module, n) for n in ("gate_proj", "up_proj", "down_proj", "act_fn"))


@cache
def _mlp_is_gated(kind: Any) -> bool:
    """Whether a class computes down(act(gate(x)) * up(x)) of its linear layers."""
    gate, down, x = _random(6, 4), _random(4, 6), _random(2, 4)
    up = down.T.contiguous()

    def theirs() -> tuple[Tensor]:
        probe = kind.__new__(kind)
        nn.Module.__init__(probe)
        probe.gate_proj = lambda h: h @ gate.T
        probe.up_proj = lambda h: h @ up.T
        probe.down_proj = lambda h: h @ down.T
        probe.act_fn = torch.tanh
        return (kind.forward(probe, x),)

    return _agrees(((torch.tanh(x @ gate.T) * (x @ up.T)) @ down.T,), theirs)


def _activation(module: Any) -> str | None:
    x = torch.linspace(-6, 6, 33, device="cpu")
    for name, function in ACTIVATIONS.items():
        if _agrees((function(x),), lambda: (module.act_fn(x),)):
            return name
    return None


def _mlp(module: Any, x: Tensor) -> Tensor:
    if not is_running():
        return _as_ever(module, x)
    gate, up, inner = module.gate_proj(x), module.up_proj(x), None
    kernels = _kernels(gate)
    if kernels.gated_serves(gate, up):
        with contextlib.suppress(Refused):
            inner = kernels.gated(gate, up, module.fused_activation)
    if inner is None:
        inner = module.act_fn(gate) * up
    out: Tensor = module.down_proj(inner)
    return out


@cache
def _attach_rotary(name: str) -> None:
    """Let the rotation of queries and keys in this module of transformers use the kernel."""
    home = sys.modules.get(name)
    original = getattr(home, ROTARY, None)
    if home is None or original is None:
        return
    q, k, cosine, sine = _random(1, 4, 5, 8), _random(1, 2, 5, 8), _random(1, 5, 8), _random(5, 8)
    sine = sine[None]
    halves = [x.chunk(2, -1) for x in (q, k)]
    turned = [torch.cat([-second, first], -1) for first, second in halves]
    expected = (q * cosine + turned[0] * sine, k * cosine + turned[1] * sine)
    if not _agrees(expected, lambda: original(q, k, cosine, sine)):
        return

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        kernels = _kernels(q)
        usual = not args and not kwargs and is_running()
        if usual and all(kernels.rotate_serves(heads, cos) for heads in (q, k)):
            with contextlib.suppress(Refused):
                return kernels.rotate(q, cos, sin), kernels.rotate(k, cos, sin)
        return original(q, k, cos, sin, *args, **kwargs)

    swap_while_running(home, ROTARY, rotated)
