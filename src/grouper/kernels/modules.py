"""Which parts of a transformers model run on our kernels, and when.

A model keeps its own code. Its normalization and MLP layers, and the function that rotates its
queries and keys, first check whether one of Grouper's passes is running and a kernel takes their
tensors; otherwise they run as before. What a class computes is not guessed from its name: a kernel
is used only if the class's own code gives the same results on random numbers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from grouper.kernels import layers
from grouper.kernels.cpu import ops
from grouper.kernels.switch import SWAPS, device_type, is_running
from grouper.kernels.triton import layers as gpu
from grouper.kernels.triton.language import Refused

ROTARY = "apply_rotary_pos_emb"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
}
CLOSE = 1e-5

# What a decoder layer consists of, and what its attention is given.
LAYER_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
LAYER_SETTINGS = frozenset(
    {"attention_mask", "position_ids", "use_cache", "position_embeddings", "layout"}
)
# From transformers 5.24 on the first, before that the others.
CACHE_SETTINGS = frozenset({"cache", "past_key_values", "cache_position"})

# Entries of a module's own dictionary. Of a layer: the norm that reads its output. Of a norm: an
# input that is to come, and its norm.
NEXT_NORM = "_grouper_next_norm"
READY = "_grouper_ready"


def attach(model: nn.Module) -> None:
    """Let this model's layers use the kernels where there are any. Repeated calls do nothing."""
    for module in model.modules():
        if "forward" not in vars(module) and (forward := _fused(module)) is not None:
            # A bound method, not a closure: a copy of the model must run on its own weights.
            module.forward = MethodType(forward, module)
        _attach_rotary(type(module).__module__)
    for module in model.modules():
        _tell_next_norms(module)


def _tell_next_norms(module: Any) -> None:
    """Tell the layers of a decoder which norm reads their output: that of the next layer.

    That of the last layer is the decoder's own norm.
    """
    layers_ = getattr(module, "layers", None)
    last = getattr(module, "norm", None)
    if not isinstance(layers_, nn.ModuleList) or not isinstance(last, nn.Module):
        return
    for layer, following in pairwise([*layers_, None]):
        norm = last if following is None else getattr(following, "input_layernorm", None)
        if norm is not None:
            # Not as an attribute, which would make the norm a child of this layer.
            vars(layer)[NEXT_NORM] = norm


def _fused(module: Any) -> Callable[..., Tensor] | None:
    """The replacement for a module's forward; None if no kernel computes the same."""
    kind: Any = type(module)
    settings = _norm_settings(module)
    if settings is not None:
        return partial(_norm, **settings)
    if all(hasattr(module, name) for name in LAYER_PARTS) and _layer_is_plain(kind):
        return _layer
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    if all(hasattr(module, name) for name in parts) and _mlp_is_gated(kind):
        x = torch.linspace(-6, 6, 33, device="cpu")
        for name, function in ACTIVATIONS.items():
            if _agrees((function(x),), lambda: (module.act_fn(x),)):
                return partial(_mlp, activation=name)
    return None


def _norm_settings(module: Any) -> dict[str, Any] | None:
    """The `eps` and `ones` of a module that the kernel for norms computes; None for others."""
    kind: Any = type(module)
    weight = getattr(module, "weight", None)
    roots = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    eps = next((value for value in roots if isinstance(value, float)), None)
    if eps is None or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    ones = _norm_ones(kind)
    return None if ones is None else {"eps": eps, "ones": ones}


def _random(*shape: int) -> Tensor:
    # The global generator and the default device must not be touched.
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, device="cpu")


def _agrees(expected: tuple[Tensor, ...], theirs: Callable[[], Any]) -> bool:
    """Whether a function returns these tensors; False if it fails in any way."""
    try:
        with torch.no_grad():
            pairs = zip(expected, theirs(), strict=True)
            return all(a.shape == b.shape and bool((a - b).abs().max() < CLOSE) for a, b in pairs)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False


def _forward(kind: Any, x: Tensor, parts: dict[str, Any], **settings: Any) -> tuple[Tensor]:
    """The output for x and settings of a module of this class with these attributes."""
    probe = kind.__new__(kind)
    nn.Module.__init__(probe)
    vars(probe).update(parts)
    return (kind.forward(probe, x, **settings),)


@cache
def _norm_ones(kind: Any) -> bool | None:
    """Whether a class of norms multiplies by 1 + weight; None if the kernel does not compute it."""
    x, weight = _random(3, 8), _random(8)
    parts = {"weight": weight, "variance_epsilon": 1e-3, "eps": 1e-3}
    theirs = partial(_forward, kind, x, parts)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    fitting = (ones for ones in (False, True) if _agrees((normed * (weight + ones),), theirs))
    return next(fitting, None)


@cache
def _mlp_is_gated(kind: Any) -> bool:
    """Whether a class computes down(act(gate(x)) * up(x)) of its linear layers."""
    x, weights = _random(2, 4), {"gate_proj": _random(6, 4).T, "up_proj": _random(4, 6)}
    layers = {name: partial(torch.matmul, other=weight) for name, weight in weights.items()}
    gate, up = (layer(x) for layer in layers.values())
    parts = {**layers, "down_proj": torch.exp, "act_fn": torch.tanh}
    theirs = partial(_forward, kind, x, parts)
    return _agrees(((gate.tanh() * up).exp(),), theirs)


@cache
def _layer_is_plain(kind: Any) -> bool:
    """Whether a class computes h = x + attention(norm(x)), and then h + mlp(norm(h))."""
    x = _random(2, 4)
    given: dict[str, Any] = {}

    def attention(hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        given.update(others)
        return hidden_states.sin(), None

    parts = {
        "input_layernorm": torch.tanh,
        "self_attn": attention,
        "post_attention_layernorm": torch.sigmoid,
        "mlp": torch.cos,
    }
    settings: dict[str, Any] = {name: name for name in LAYER_SETTINGS}
    between = x + x.tanh().sin()
    expected = between + between.sigmoid().cos()
    theirs = partial(_forward, kind, x, parts, **settings)
    # Whatever the layer is given, its attention is given.
    return _agrees((expected,), theirs) and settings.items() <= given.items()


def _kernels(x: Tensor) -> ModuleType:
    """The module of kernels for the tensor's device."""
    return gpu if device_type(x) == "cuda" else ops


def _norm(module: Any, x: Tensor, *, eps: float, ones: bool) -> Tensor:
    # The layer before has computed it together with the sum that it is of.
    of, normed = vars(module).pop(READY, (None, None))
    if of is x and normed is not None:
        return normed  # type: ignore[no-any-return]  # popped from a plain dictionary
    kernels = _kernels(x)
    if is_running() and kernels.norm_serves(x, module.weight, ones=ones):
        with contextlib.suppress(Refused):
            return layers.rms_norm(kernels, x, module.weight, eps, ones=ones)
    out: Tensor = type(module).forward(module, x)
    return out


def _layer(module: Any, hidden_states: Tensor, **settings: Any) -> Tensor:
    """A decoder layer whose sums are computed together with the norms that read them."""
    fuses = (
        is_running()
        and device_type(hidden_states) == "cuda"
        and not torch.is_grad_enabled()
        and settings.keys() <= LAYER_SETTINGS | CACHE_SETTINGS
    )
    if not fuses:
        return type(module).forward(module, hidden_states, **settings)  # type: ignore[no-any-return]  # any module's
    attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **settings)
    between = _sum_and_norm(hidden_states, attended, module.post_attention_layernorm)
    inner = module.mlp(module.post_attention_layernorm(between))
    return _sum_and_norm(between, inner, vars(module).get(NEXT_NORM))


def _sum_and_norm(x: Tensor, added: Tensor, norm: Any) -> Tensor:
    """The sum of two tensors; a kernel that computes it has the norm ready for when it is called.

    Args:
        x: [..., D].
        added: [..., D].
        norm: the module that will be called with the sum next, or None.
    """
    settings = None if norm is None else _norm_settings(norm)
    alike = x.shape == added.shape and x.dtype == added.dtype
    if settings is None or not alike or not gpu.norm_serves(x, norm.weight, ones=settings["ones"]):
        return x + added
    with contextlib.suppress(Refused):
        total, normed = gpu.add_norm(x, added, norm.weight, **settings)
        vars(norm)[READY] = (total, normed)
        return total
    return x + added


def _mlp(module: Any, x: Tensor, *, activation: str) -> Tensor:
    if not is_running():
        return type(module).forward(module, x)  # type: ignore[no-any-return]  # any module's
    gate, up = module.gate_proj(x), module.up_proj(x)
    kernels, inner = _kernels(gate), None
    if kernels.gated_serves(gate, up):
        with contextlib.suppress(Refused):
            inner = layers.gated(kernels, gate, up, activation)
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
                return layers.rotate_both(kernels, q, k, cos, sin)
        return original(q, k, cos, sin, *args, **kwargs)

    SWAPS.add(home, ROTARY, rotated)
