"""Each kernel beside the same formula in PyTorch's own operations, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from grouper.kernels import ops
from grouper.kernels.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler, or kernels are off")

# bf16 keeps 8 bits: a sum of two rounded terms may be one unit of 2^-7 relative away.
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = list(CLOSE)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    scale = theirs.detach().float().abs().max()
    assert (
        float((ours.detach().float() - theirs.detach().float()).abs().max() / scale) < CLOSE[dtype]
    )


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, random(*out.shape, dtype=out.dtype, seed=9))


def norm(x: Tensor, weight: Tensor, eps: float, *, ones: bool) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if ones:
        return (normed * (1 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize(
    "dtypes",
    [(d, d) for d in DTYPES] + [(torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("shape", [(1, 5, 3, 20), (1, 300, 160)])
def test_rms_norm(ones: bool, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    x = random(*shape, dtype=dtypes[0]).requires_grad_()
    weight = random(shape[-1], dtype=dtypes[1], seed=1).requires_grad_()
    assert ops.norm_serves(x, weight, ones=ones)
    ours, theirs = ops.rms_norm(x, weight, 1e-3, ones=ones), norm(x, weight, 1e-3, ones=ones)
    same(ours, theirs, dtypes[0])
    for a, b in zip(gradients(ours, x, weight), gradients(theirs, x, weight), strict=True):
        same(a, b, dtypes[0])
    with torch.no_grad():
        assert torch.equal(ops.rms_norm(x, weight, 1e-3, ones=ones), ours)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosine[:, None] + turned * sine[:, None]


@pytest.mark.parametrize("dtypes", [(d, d) for d in DTYPES] + [(torch.bfloat16, torch.float32)])
def test_rotate(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Cosine and sine differ in both halves here, which no model does and the formula allows."""
    states = random(1, 7, 3, 8, dtype=dtypes[0]).requires_grad_()
    x = states.transpose(1, 2)
    cosine, sine = (
        random(1, 7, 8, dtype=dtypes[1], seed=1),
        random(1, 7, 8, dtype=dtypes[1], seed=2),
    )
    assert ops.rotate_serves(x, cosine)
    ours, theirs = ops.rotate(x, cosine, sine), rotated(x, cosine, sine)
    same(ours, theirs, dtypes[0])
    same(gradients(ours, states)[0], gradients(theirs, states)[0], dtypes[0])
    with torch.no_grad():
        assert torch.equal(ops.rotate(x, cosine, sine), ours)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(ops.CURVES))
@pytest.mark.parametrize("size", [33, 40_000])
def test_gated(dtype: torch.dtype, name: str, size: int) -> None:
    """Large values, too: the exponential inside is cut off where nothing is left of it."""
    gate = (random(size) * 30).to(dtype).requires_grad_()
    up = random(size, dtype=dtype, seed=1).requires_grad_()
    curve = {"silu": silu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}[name]
    ours, theirs = ops.gated(gate, up, name), curve(gate) * up
    same(ours, theirs, dtype)
    for a, b in zip(gradients(ours, gate, up), gradients(theirs, gate, up), strict=True):
        same(a, b, dtype)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_so(bad: float) -> None:
    """A gradient that is not finite must be seen by the update, whatever the compiler assumes."""
    x = random(1, 4, 16)
    x[0, 2, 3] = bad
    out = ops.rms_norm(x, torch.ones(16), 1e-6)
    assert not out[0, 2].isfinite().all()
    assert out[0, :2].isfinite().all()
    half = x.bfloat16()
    assert not ops.gated(half, half, "silu")[0, 2, 3].isfinite()
    assert not ops.gated(x, torch.ones_like(x), "silu")[0, 2, 3].isfinite()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [6, 32, 64, 128])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 2.0), (5, 3.0)])
def test_decode(dtype: torch.dtype, dim: int, window: int | None, softcap: float | None) -> None:
    rows, heads, group, width, column = 5, 2, 3, 12, 4
    query = random(rows, heads, group, dim, dtype=dtype)
    keys, values = (random(rows + 2, heads, width, dim, dtype=dtype, seed=s) for s in (1, 2))
    before = random(rows, heads, group, dim, dtype=dtype, seed=3)
    weight = random(rows, heads, group, seed=4)
    weight[1] = torch.finfo(torch.float32).min / 2  # its prompt has left the window
    lengths = torch.tensor([1, 3, 5, 9, 12])
    ages = (column - torch.arange(width)) % width
    seen = (ages < lengths[:, None]) & (ages < (window or width))
    new = tuple(random(rows, heads, dim, dtype=dtype, seed=s) for s in (5, 6))
    held = (keys.clone(), values.clone())
    for store, block in zip((keys, values), new, strict=True):
        store[:rows, :, column] = block
    scores = query.float() @ keys[:rows].float().transpose(2, 3) * 0.3
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    shares = torch.cat([weight[..., None], scores], -1).softmax(-1)
    expected = shares[..., 1:] @ values[:rows].float() + shares[..., :1] * before.float()
    assert ops.decode_serves(query, new, held)
    out = ops.decode(
        *(query, new, held, (before, weight), lengths),
        column=column,
        window=window,
        scaling=0.3,
        softcap=softcap,
    )
    same(out, expected.to(dtype), dtype)
    assert torch.equal(held[0], keys)
    assert torch.equal(held[1], values)


def test_other_tensors_are_left_to_the_models_own_code() -> None:
    x, weight = random(1, 4, 6), random(6)
    assert not ops.norm_serves(x.double(), weight.double(), ones=False)
    assert not ops.norm_serves(x.transpose(1, 2), random(4), ones=False)
    assert not ops.norm_serves(x, weight.bfloat16(), ones=False)
    assert not ops.gated_serves(x, x.bfloat16())
    assert not ops.gated_serves(x, x[:, :2])
    heads = random(1, 2, 4, 6)
    assert not ops.rotate_serves(heads, random(1, 4, 2))  # only a part of the head is rotated
    assert not ops.rotate_serves(heads.expand(2, -1, -1, -1), random(2, 4, 6))


def test_threads_change_nothing_but_the_sum_over_rows() -> None:
    x, weight = random(1, 700, 96).requires_grad_(), random(96, seed=1).requires_grad_()
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = ops.rms_norm(x, weight, 1e-6)
            found.append((out, *gradients(out, x, weight)))
    finally:
        torch.set_num_threads(before)
    one, two = found
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    same(two[2], one[2], torch.float32)
