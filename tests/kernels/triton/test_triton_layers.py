"""Norms, rotations and gates in Triton give what the model's own code gives, and its gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

from grouper.kernels import layers, modules
from grouper.kernels.switch import planned, running, switched_off
from grouper.kernels.triton import layers as gpu
from grouper.kernels.triton.language import Refused, launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Of a gradient's norm, against float64: float32 sums, or results rounded to the type once. Triton's
# interpreter cuts bfloat16 off instead of rounding, which costs twice as much.
GRADIENT_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}

needs_triton = pytest.mark.needs_package("triton", extra="triton")


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def same(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == theirs.dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def same_gradients(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor
) -> None:
    """Both at the same inputs, theirs in float64."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    out, expected = ours(*leaves), theirs(*exact)
    weight = normal(*out.shape, dtype=torch.float64, seed=9)
    found = torch.autograd.grad((out * weight.to(out.dtype)).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight.to(out.dtype)).sum(), exact)
    for leaf, mine, right in zip(leaves, found, wanted, strict=True):
        assert mine.dtype == leaf.dtype
        error = float((mine.double() - right).norm() / right.norm())
        assert error < GRADIENT_ERROR[leaf.dtype], error


def norm_of(kind: type[nn.Module], weight: Tensor, x: Tensor) -> Tensor:
    """By the class's own code, but in float64 where that is what comes in."""
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
    return scaled * (weight + 1 if kind is Gemma2RMSNorm else weight)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Qwen2RMSNorm, Gemma2RMSNorm])
@torch.no_grad()
def test_norms(kind: type, dtype: torch.dtype) -> None:
    for weights in {dtype, torch.float32}:
        norm = kind(24, eps=1e-3).to(DEVICE, weights)
        norm.weight.copy_(normal(24, dtype=weights, seed=1))
        x = normal(1, 5, 24, dtype=dtype)
        same(layers.rms_norm(gpu, x, norm.weight, 1e-3, ones=kind is Gemma2RMSNorm), norm(x), dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Qwen2RMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("shape", [(1, 7, 24), (1, 300, 3, 16), (2, 3000)])
def test_gradients_of_norms(kind: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ones = kind is Gemma2RMSNorm
    x, weight = normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)
    same_gradients(
        lambda x, w: layers.rms_norm(gpu, x, w, 1e-3, ones=ones),
        lambda x, w: norm_of(kind, w, x),
        x,
        weight,
    )


@needs_triton
def test_norms_of_many_rows_leave_no_row_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs than tiles: each takes several, the last ones fewer."""
    monkeypatch.setattr(gpu, "PARTIAL_SUMS", 3)
    monkeypatch.setattr(gpu, "TILE", 64)
    x, weight = normal(1, 83, 24, dtype=torch.float32), normal(24, dtype=torch.float32, seed=1)
    same_gradients(
        lambda x, w: layers.rms_norm(gpu, x, w, 1e-3),
        lambda x, w: norm_of(Qwen2RMSNorm, w, x),
        x,
        weight,
    )


@needs_triton
def test_heads_before_tokens_are_normed_in_place() -> None:
    """Gemma 3 norms its queries after the transposition; nothing is copied for it."""
    x = normal(1, 5, 3, 16, dtype=torch.float32).transpose(1, 2)
    weight = normal(16, dtype=torch.float32, seed=1)
    read: list[int] = []
    with launches(lambda _, tensors: read.append(tensors[0].data_ptr())):
        out = layers.rms_norm(gpu, x, weight, 1e-3)
    assert read == [x.data_ptr()]
    same(out, norm_of(Qwen2RMSNorm, weight, x), torch.float32)
    same_gradients(
        lambda x, w: layers.rms_norm(gpu, x, w, 1e-3),
        lambda x, w: norm_of(Qwen2RMSNorm, w, x),
        x,
        weight,
    )


@needs_triton
@torch.no_grad()
def test_heads_that_are_columns_of_a_joined_product_are_normed_in_place() -> None:
    """Qwen 3 norms its queries and keys; neither heads nor tokens are dense then."""
    whole = normal(1, 5, 7 * 16, dtype=torch.float32)
    keys = whole[..., 64:].view(1, 5, 3, 16)
    weight = normal(16, dtype=torch.float32, seed=1)
    read: list[int] = []
    with launches(lambda _, tensors: read.append(tensors[0].data_ptr())):
        out = layers.rms_norm(gpu, keys, weight, 1e-3)
    assert read == [keys.data_ptr()]
    same(out, norm_of(Qwen2RMSNorm, weight, keys), torch.float32)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Qwen2RMSNorm, Gemma2RMSNorm])
@torch.no_grad()
def test_sums_with_their_norms(kind: type, dtype: torch.dtype) -> None:
    norm = kind(24, eps=1e-3).to(DEVICE, dtype)
    norm.weight.copy_(normal(24, dtype=dtype, seed=1))
    # More rows than a program holds, and an addend whose rows are not dense.
    x, added = normal(1, 90, 24, dtype=dtype), normal(1, 90, 30, dtype=dtype, seed=2)[..., :24]
    total, normed = gpu.add_norm(x, added, norm.weight, 1e-3, ones=kind is Gemma2RMSNorm)
    same(total, x + added, dtype)
    # Of the sum that was written, whichever way it was rounded.
    same(normed, norm(total), dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24])
@torch.no_grad()
def test_queries_and_keys_are_rotated_in_one_kernel(dim: int, dtype: torch.dtype) -> None:
    angles = normal(1, 5, dim // 2, dtype=torch.float32).repeat(1, 1, 2)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    for heads in ((6, 3), (2, 5)):
        q, k = (normal(1, 5, h, dim, dtype=dtype, seed=h).transpose(1, 2) for h in heads)
        used: list[str] = []
        with launches(lambda kernel, _, used=used: used.append(kernel)):
            pair = layers.rotate_both(gpu, q, k, cosine, sine)
        assert used == ["_rotate_both"]
        for ours, theirs in zip(pair, apply_rotary_pos_emb(q, k, cosine, sine), strict=True):
            same(ours, theirs, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24])
def test_rotations(dim: int, dtype: torch.dtype) -> None:
    angles = normal(1, 5, dim // 2, dtype=torch.float32).repeat(1, 1, 2)
    for kind in {dtype, torch.float32}:
        cosine, sine = angles.cos().to(kind), angles.sin().to(kind)
        # As models hand them over: heads are strided.
        q, k = (normal(1, 5, h, dim, dtype=dtype, seed=h).transpose(1, 2) for h in (6, 3))
        with torch.no_grad():
            for ours, theirs in zip(
                (layers.rotate(gpu, q, cosine, sine), layers.rotate(gpu, k, cosine, sine)),
                apply_rotary_pos_emb(q, k, cosine, sine),
                strict=True,
            ):
                same(ours, theirs, dtype)
        same_gradients(
            lambda q, c=cosine, s=sine: layers.rotate(gpu, q, c, s),
            lambda q, c=cosine, s=sine: apply_rotary_pos_emb(q, q, c.double(), s.double())[0],
            q,
        )


@needs_triton
def test_a_rotation_whose_halves_turn_differently_has_its_own_gradient() -> None:
    q, cosine, sine = (normal(1, *s, 16, dtype=torch.float32) for s in ((3, 5), (5,), (5,)))
    same_gradients(
        lambda q: layers.rotate(gpu, q, cosine, sine),
        lambda q: apply_rotary_pos_emb(q, q, cosine.double(), sine.double())[0],
        q,
    )


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "curve"), [("silu", silu), ("gelu_tanh", lambda x: gelu(x, approximate="tanh"))]
)
def test_gated_activations(name: str, curve: Any, dtype: torch.dtype) -> None:
    gate, up = (normal(1, 7, 1300, dtype=dtype, seed=s) for s in (0, 1))
    with torch.no_grad():
        same(layers.gated(gpu, gate, up, name), curve(gate) * up, dtype)
    same_gradients(
        lambda gate, up: layers.gated(gpu, gate, up, name),
        lambda gate, up: curve(gate) * up,
        gate,
        up,
    )


@needs_triton
def test_gates_that_are_halves_of_one_tensor() -> None:
    gate, up = normal(1, 7, 600, dtype=torch.float32).chunk(2, -1)
    same(layers.gated(gpu, gate, up, "silu"), silu(gate) * up, torch.float32)
    same_gradients(
        lambda gate, up: layers.gated(gpu, gate, up, "silu"),
        lambda gate, up: silu(gate) * up,
        gate,
        up,
    )


@needs_triton
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3"])
def test_a_model_learns_on_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family).to(DEVICE)
    model.set_attn_implementation("eager")
    ids = torch.arange(6, 14, device=DEVICE)[None]
    modules.attach(model)
    other = copy.deepcopy(model)

    def learned(model: Any) -> tuple[Tensor, list[Tensor]]:
        logits = model(ids).logits
        logits.log_softmax(-1)[..., 7].sum().backward()
        return logits, [p.grad for p in model.parameters()]

    with switched_off(), running():
        expected, theirs = learned(other)
    used: list[str] = []
    monkeypatch.setattr(gpu, "serves", lambda *_: True)
    monkeypatch.setattr(modules, "device_type", lambda _: "cuda")
    with running(), launches(lambda kernel, _: used.append(kernel)):
        logits, ours = learned(model)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-4)
    layers = model.config.num_hidden_layers
    forwards = [vars(m)["forward"].__func__ for m in model.modules() if "forward" in vars(m)]
    norms = sum(getattr(forward, "func", None) is modules._norm for forward in forwards)
    for forward, backward, count in (
        ("_norm", "_norm_gradient", norms),
        ("_gate", "_gate_gradient", layers),
    ):
        assert (used.count(forward), used.count(backward)) == (count, count)
    assert used.count("_rotate") == 4 * layers, "queries and keys, there and back"


@needs_triton
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma2", "gemma3"])
@torch.no_grad()
def test_without_gradients_a_model_computes_more_in_one_kernel(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family).to(DEVICE)
    model.set_attn_implementation("eager")
    ids = torch.arange(6, 14, device=DEVICE)[None]
    expected = model(ids).logits
    modules.attach(model)
    copied = copy.deepcopy(model)
    used: list[str] = []
    monkeypatch.setattr(gpu, "serves", lambda *_: True)
    monkeypatch.setattr(modules, "device_type", lambda _: "cuda")
    for own in (model, copied):
        used.clear()
        with running(), launches(lambda kernel, _: used.append(kernel)):
            for _ in range(2):
                torch.testing.assert_close(own(ids).logits, expected, rtol=1e-4, atol=1e-4)
        count = 2 * model.config.num_hidden_layers
        assert used.count("_rotate_both") == count
        # Gemma norms what is added, so that its layers are others.
        plain = not family.startswith("gemma")
        assert used.count("_add_norm") == (2 * count if plain else 0)
        of_heads = 2 * count if family in {"qwen3", "gemma3"} else 0
        if plain:
            assert used.count("_norm") == 2 + of_heads, "the first layer's alone"
        assert not any(modules.READY in vars(module) for module in own.modules())


def test_they_serve_nothing_but_cuda() -> None:
    x, weight, heads = torch.zeros(1, 2, 8), torch.zeros(8), torch.zeros(1, 2, 3, 8)
    cosine = torch.zeros(1, 3, 8)

    def answers(device: str) -> list[bool]:
        return [
            gpu.norm_serves(x.to(device), weight.to(device), ones=False),
            gpu.rotate_serves(heads.to(device), cosine.to(device)),
            gpu.gated_serves(x.to(device), x.to(device)),
        ]

    assert answers("cpu") == [False] * 3
    with planned("cuda"):
        assert answers("cpu") == [False] * 3
        assert answers("meta") == [True] * 3
        assert not gpu.gated_serves(x.to("meta"), x.to("meta").bfloat16())
        assert not gpu.rotate_serves(heads.to("meta"), cosine[..., :4].to("meta"))


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_where_no_kernel_can_be_built_the_models_own_code_runs(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    ids = torch.arange(6, 14)[None]
    expected = model(ids).logits
    modules.attach(model)
    asked: list[Any] = []

    def refuse(kernel: Any, *_: Any, **__: Any) -> None:
        asked.append(kernel)
        raise Refused(kernel.__name__)

    monkeypatch.setattr(gpu, "launch", refuse)
    monkeypatch.setattr(gpu, "serves", lambda *_: True)
    monkeypatch.setattr(modules, "device_type", lambda _: "cuda")
    with running():
        assert torch.equal(model(ids).logits, expected)
    assert {kernel.__name__ for kernel in asked} == {"_norm", "_rotate", "_gate"}
    with running(), torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
    names = {"_norm", "_rotate", "_rotate_both", "_gate"}
    assert {kernel.__name__ for kernel in asked} - {"_add_norm"} == names
