"""The fused kernels of a decoding step give what the model's own code gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch.nn.functional import gelu, silu
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

from grouper.kernels import modules
from grouper.kernels.cpu import ops
from grouper.kernels.switch import running, switched_off
from grouper.kernels.triton import layers as gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}

needs_triton = pytest.mark.skipif(
    not gpu.AVAILABLE, reason="Triton is not installed (pip install triton; 280 MB, Linux)"
)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def same(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == theirs.dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Qwen2RMSNorm, Gemma2RMSNorm])
@torch.no_grad()
def test_norms(kind: type, dtype: torch.dtype) -> None:
    for weights in {dtype, torch.float32}:
        norm = kind(24, eps=1e-3).to(DEVICE, weights)
        norm.weight.copy_(normal(24, dtype=weights, seed=1))
        x = normal(1, 5, 24, dtype=dtype)
        same(gpu.rms_norm(x, norm.weight, 1e-3, ones=kind is Gemma2RMSNorm), norm(x), dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24])
@torch.no_grad()
def test_rotations(dim: int, dtype: torch.dtype) -> None:
    angles = normal(1, 5, dim // 2, dtype=torch.float32).repeat(1, 1, 2)
    for kind in {dtype, torch.float32}:
        cosine, sine = angles.cos().to(kind), angles.sin().to(kind)
        # As models hand them over: heads are strided.
        q, k = (normal(1, 5, h, dim, dtype=dtype, seed=h).transpose(1, 2) for h in (6, 3))
        for ours, theirs in zip(
            (gpu.rotate(q, cosine, sine), gpu.rotate(k, cosine, sine)),
            apply_rotary_pos_emb(q, k, cosine, sine),
            strict=True,
        ):
            same(ours, theirs, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_gated_activations(dtype: torch.dtype) -> None:
    gate, up = (normal(1, 7, 300, dtype=dtype, seed=s) for s in (0, 1))
    same(gpu.gated(gate, up, "silu"), silu(gate) * up, dtype)
    same(gpu.gated(gate, up, "gelu_tanh"), gelu(gate, approximate="tanh") * up, dtype)


@needs_triton
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2"])
@torch.no_grad()
def test_a_model_runs_on_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family).to(DEVICE)
    ids = torch.arange(6, 14, device=DEVICE)[None]
    modules.attach(model)
    with switched_off(), running():
        expected = model(ids).logits
    called = set()
    for name in ("rms_norm", "rotate", "gated"):
        monkeypatch.setattr(ops, name, None)  # not these
        kernel = getattr(gpu, name)

        def counted(*given: Any, name: str = name, kernel: Any = kernel, **more: Any) -> Any:
            called.add(name)
            return kernel(*given, **more)

        monkeypatch.setattr(gpu, name, counted)
        serves = f"{name.removeprefix('rms_')}_serves"
        monkeypatch.setattr(ops, serves, lambda *_, **__: False)
    monkeypatch.setattr(gpu, "_serves", lambda *_: True)
    with running():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert called == {"rms_norm", "rotate", "gated"}


def test_they_serve_nothing_but_cuda_without_gradients() -> None:
    x, weight = torch.zeros(1, 2, 8), torch.zeros(8)
    heads = torch.zeros(1, 2, 3, 8)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert not gpu.norm_serves(x, weight)
            assert not gpu.rotate_serves(heads, torch.zeros(1, 3, 8))
            assert not gpu.gated_serves(x, x)
