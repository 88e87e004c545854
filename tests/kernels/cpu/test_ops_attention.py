"""Attention whose backward is ours beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grouper.kernels.cpu import ops
from grouper.kernels.cpu.library import library
from grouper.kernels.cpu.ops import VisibleSpan, attend, attention_serves
from grouper.kernels.switch import running, switched_off


@pytest.fixture(autouse=True)
def within_a_pass() -> Iterator[None]:
    with running():
        yield


pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler, or kernels are off")

PROMPTS, LENGTHS, PROMPT_COLUMNS, TOKENS = [5, 1, 3], [6, 2, 1], 5, 6
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def seen(span: VisibleSpan, tokens: int) -> Tensor:
    """[R, 1, T, K], token by token. A padded query sees something, as in the update's masks."""
    rows = len(span.prompts)
    mask = torch.zeros(rows, 1, tokens, span.prompt_columns + tokens, dtype=torch.bool)
    for row, prompt in enumerate(span.prompts.tolist()):
        for token in range(tokens):
            for column in range(mask.shape[3]):
                own = column - span.prompt_columns
                place = prompt + own if own >= 0 else column
                live = own <= token if own >= 0 else column < prompt
                near = span.window is None or prompt + token - place < span.window
                mask[row, 0, token, column] = live and near
    return mask


def made(
    span: VisibleSpan, heads: tuple[int, int], dim: int, dtype: torch.dtype, tokens: int = TOKENS
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, columns = len(span.prompts), span.prompt_columns + tokens
    shapes = [(rows, heads[0], tokens, dim), *[(rows, heads[1], columns, dim)] * 2]
    tensors = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    grad = torch.randn(shapes[0], generator=generator).to(dtype)
    # What comes back for padding is zero: nobody reads it.
    live = torch.arange(tokens) < span.lengths[:, None]
    query, key, value = tensors
    return (query, key, value), grad * live[:, None, :, None]


def compare(span: VisibleSpan, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    inputs, grad = made(span, heads, dim, dtype)
    mask = seen(span, TOKENS)
    assert attention_serves(*inputs)
    ours = attend(*inputs, mask, span, 0.3)
    theirs = scaled_dot_product_attention(*inputs, attn_mask=mask, scale=0.3, enable_gqa=True)
    assert torch.equal(ours, theirs)
    pairs = zip(
        torch.autograd.grad(ours, inputs, grad),
        torch.autograd.grad(theirs, inputs, grad),
        strict=True,
    )
    for a, b in pairs:
        assert a.dtype == dtype
        # Everything that goes in is about 1; a softmax over one key has no gradient but noise.
        assert float((a.float() - b.float()).abs().max()) < CLOSE[dtype] * (1 + b.abs().max())


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("window", [None, 3, 1])
def test_rows_that_continue_prompts(
    dtype: torch.dtype, heads: tuple[int, int], window: int | None
) -> None:
    span = VisibleSpan(torch.tensor(PROMPTS), torch.tensor(LENGTHS), PROMPT_COLUMNS, window)
    compare(span, heads, 8, dtype)


@pytest.mark.parametrize("room", [1, 150, 300])
def test_a_few_heads_at_a_time(room: int) -> None:
    span = VisibleSpan(torch.tensor(PROMPTS), torch.tensor(LENGTHS), PROMPT_COLUMNS, None)
    inputs, grad = made(span, (4, 2), 8, torch.float32)
    mask = seen(span, TOKENS)
    whole = torch.autograd.grad(attend(*inputs, mask, span, 0.3), inputs, grad)
    with mock.patch.object(ops, "ROOM", room):
        parts = torch.autograd.grad(attend(*inputs, mask, span, 0.3), inputs, grad)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_prompts_by_themselves_are_causal() -> None:
    lengths = torch.tensor([6, 4])
    span = VisibleSpan(torch.zeros_like(lengths), lengths, 0, None)
    inputs, grad = made(span, (4, 2), 8, torch.float32)
    ours = torch.autograd.grad(attend(*inputs, None, span, 0.3), inputs, grad)
    plain = scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3, enable_gqa=True)
    for a, b in zip(ours, torch.autograd.grad(plain, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_it_does_not_serve() -> None:
    span = VisibleSpan(torch.tensor(PROMPTS), torch.tensor(LENGTHS), PROMPT_COLUMNS, None)
    inputs, _ = made(span, (4, 2), 8, torch.float32)
    query, key, value = inputs
    with switched_off(), running():
        assert not attention_serves(*inputs)
    assert not attention_serves(query.double(), key.double(), value.double())
    assert not attention_serves(query, key.bfloat16(), value)
    assert not attention_serves(query, key, value[..., :4])
    with torch.no_grad():
        assert not attention_serves(*inputs)
    with mock.patch.object(ops, "ROOM", 2 * TOKENS * (PROMPT_COLUMNS + TOKENS) - 1):
        assert not attention_serves(*inputs)
