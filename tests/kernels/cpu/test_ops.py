"""Each kernel beside the same formula in PyTorch's own operations, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from grouper.kernels.cpu import ops
from grouper.kernels.cpu.library import library
from grouper.sampling.draw import DrawSettings, draw
from grouper.types import SamplingParams

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
        turned = cosine.transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(ops.rotate(x, turned, sine), ours)


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
@pytest.mark.parametrize("width", [12, 70])
@pytest.mark.parametrize("group", [3, 17])
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (4, None), (None, 2.0), (9, 3.0), (40, None), (1, None)]
)
def test_decode(
    dtype: torch.dtype, dim: int, width: int, group: int, window: int | None, softcap: float | None
) -> None:
    """Rings that have wrapped round and not, prompts of several lengths shared by several rows."""
    rows, heads, column, columns = 5, 2, width // 3, 40
    query = random(rows, heads, group, dim, dtype=dtype)
    keys, values = (random(rows + 2, heads, width, dim, dtype=dtype, seed=s) for s in (1, 2))
    prompts = (
        random(3, heads, columns, dim, dtype=dtype, seed=3),
        random(3, heads, columns, dim, dtype=dtype, seed=4),
    )
    new = (
        random(rows, heads, dim, dtype=dtype, seed=5),
        random(rows, heads, dim, dtype=dtype, seed=6),
    )
    lengths = torch.tensor([1, 3, column + 1, column + 2, width])
    owners, prompt_lengths = torch.tensor([0, 2, 2, 1, 0]), torch.tensor([40, 1, 23])
    own = (keys.clone(), values.clone())
    for store, block in zip((keys, values), new, strict=True):
        store[:rows, :, column] = block
    ages = (column - torch.arange(width)) % width
    back = lengths[:, None] - 1 + prompt_lengths[owners][:, None] - torch.arange(columns)
    seen = torch.cat(
        [torch.arange(columns) < prompt_lengths[owners][:, None], ages < lengths[:, None]], 1
    )
    if window is not None:
        seen &= torch.cat([back, ages.expand(rows, -1)], 1) < window
    all_keys = torch.cat([prompts[0][owners], keys[:rows]], 2).float()
    scores = query.float() @ all_keys.transpose(2, 3) * 0.3
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    shares = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    expected = shares @ torch.cat([prompts[1][owners], values[:rows]], 2).float()
    assert ops.decode_serves(query, new, own, prompts)
    out = ops.decode(
        *(query, new, own, prompts, (lengths, owners, prompt_lengths)),
        column=torch.tensor([column]),
        window=window,
        scaling=0.3,
        softcap=softcap,
    )
    same(out, expected.to(dtype), dtype)
    assert torch.equal(own[0], keys)
    assert torch.equal(own[1], values)


def settings(temperature: list[float]) -> DrawSettings:
    params = [SamplingParams(max_new_tokens=1, temperature=t) for t in temperature]
    return DrawSettings.of(params, torch.device("cpu"))


@pytest.mark.parametrize("vocabulary", [1, 7, 256, 1000])
@pytest.mark.parametrize("bans", [False, True])
def test_draw(vocabulary: int, bans: bool) -> None:
    """The tokens of the plain operations, rows of every temperature beside each other."""
    rows = 300
    logits = random(rows, vocabulary) * 4
    logits[5] = -torch.inf
    logits[5, vocabulary // 2] = 1.0
    uniform = torch.rand(rows, generator=torch.Generator().manual_seed(3))
    uniform[:3] = torch.tensor([0.0, 1 - 2.0**-24, 0.5])
    heats = settings([(0.0, 0.3, 1.0, 2.5)[i % 4] for i in range(rows)])
    stops = torch.zeros(vocabulary, dtype=torch.bool)
    stops[: vocabulary // 3] = bans
    early = torch.arange(rows) % 2 == 0 if bans else None
    banned = None if early is None else early[:, None] & stops
    assert ops.draw_serves(logits)
    tokens, logprobs, entropies = ops.draw(logits, uniform, heats.temperature, early, stops)
    expected, theirs, exact = draw(logits, uniform, heats, banned)
    # Sums in another order may put a number on the other side of a border, hardly ever.
    assert (tokens != expected).sum() <= 1
    alike = tokens == expected
    torch.testing.assert_close(logprobs[alike], theirs[alike], rtol=0, atol=2e-6)
    torch.testing.assert_close(entropies, exact, rtol=1e-5, atol=2e-6)
    if banned is not None:
        assert not banned.gather(1, tokens[:, None])[5::2].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_seen_and_lead_nowhere_else(bad: float) -> None:
    logits = random(2, 50)
    logits[0, 10] = bad
    heats, half = settings([1.0, 1.0]).temperature, torch.tensor([0.5, 0.5])
    stops = torch.zeros(50, dtype=torch.bool)
    tokens, logprobs, _ = ops.draw(logits, half, heats, None, stops)
    assert not logprobs[0].isfinite()
    assert logprobs[1].isfinite()
    assert ((tokens >= 0) & (tokens < 50)).all()


def test_all_that_is_left_by_bans_is_drawn() -> None:
    logits, stops = torch.zeros(4, 600), torch.ones(600, dtype=torch.bool)
    stops[599] = False
    early, heats = torch.ones(4, dtype=torch.bool), settings([1.0] * 4).temperature
    uniform = torch.tensor([0.0, 0.3, 0.9, 1 - 2.0**-24])
    tokens, logprobs, _ = ops.draw(logits, uniform, heats, early, stops)
    assert tokens.tolist() == [599] * 4
    assert logprobs.tolist() == pytest.approx([-math.log(600)] * 4, abs=1e-6)


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
