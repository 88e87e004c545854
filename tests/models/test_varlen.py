"""Attention over ragged rows is that of the padded layout, its gradient included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from grouper.algorithms.batching import unweighted_rows
from grouper.models import attention
from grouper.models.attention import AttentionSpec, RaggedRows, SharedPrompts

HEADS, SHARE, DIM = 2, 3, 8


def by_the_book(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """What FlashAttention promises of ragged rows: masks are aligned to the end of the keys."""
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert int(query_ends.diff().max()) == longest_query
    assert int(key_ends.diff().max()) == longest_key
    left, right = window_size
    out = []
    for i in range(len(query_ends) - 1):
        q = query[int(query_ends[i]) : int(query_ends[i + 1])]
        k, v = (
            t[int(key_ends[i]) : int(key_ends[i + 1])].repeat_interleave(SHARE, 1)
            for t in (key, value)
        )
        at = torch.arange(len(q))[:, None] + len(k) - len(q)
        columns = torch.arange(len(k))
        seen = columns <= at + right
        if left >= 0:
            seen &= columns >= at - left
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", shares, v))
    return torch.cat(out)


def spec(window: int | None = None, softcap: float | None = None) -> AttentionSpec:
    return AttentionSpec(layer=0, scaling=0.3, window=window, softcap=softcap)


def ragged(prompts: list[int], index: list[int], completions: list[int]) -> tuple[Any, ...]:
    return torch.tensor(prompts), torch.tensor(index), torch.tensor(completions)


CASES = {
    "even": ragged([3, 3], [0, 0, 1, 1], [4, 4, 4, 4]),
    "uneven": ragged([1, 6, 3], [2, 0, 1, 1, 0, 2, 2], [5, 1, 2, 7, 3, 4, 1]),
    "one token each": ragged([2, 4], [1, 0], [1, 1]),
    "a prompt without completions": ragged([2, 5, 3], [2, 0, 0], [3, 2, 6]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [None, 1, 4])
def test_it_is_the_padded_layouts_attention(
    case: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "ragged_attention", by_the_book)
    torch.manual_seed(0)
    prompts, index, completions = CASES[case]
    layout = SharedPrompts(
        unweighted_rows(
            [[0] * length for length in prompts.tolist()],
            [[0] * length for length in completions.tolist()],
            index.tolist(),
        )
    )
    rows = RaggedRows(prompts, index, completions - 1)
    total = layout.token_ids.shape[1]
    heads = [
        torch.randn(1, count, total, DIM, dtype=torch.float64, requires_grad=True)
        for count in (HEADS * SHARE, HEADS, HEADS)
    ]
    ours, theirs = (
        rows.attend(*heads, spec(window)),
        layout.attend(*heads, spec(window)),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(ours)
    found = torch.autograd.grad((ours * weight).sum(), heads)
    expected = torch.autograd.grad((theirs * weight).sum(), heads)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_it_is_offered_only_where_it_serves() -> None:
    prompts, index, completions = CASES["even"]
    rows = RaggedRows(prompts, index, completions - 1)
    query = torch.zeros(1, 2, 18, DIM)
    assert not rows.serves(query)
    assert not rows.serves(query.bfloat16())


def test_the_installed_torch_takes_these_arguments() -> None:
    """Shapes alone, without a GPU: the operator's own description of its result."""
    prompts, index, completions = CASES["uneven"]
    rows = RaggedRows(prompts, index, completions - 1)
    total = int(prompts.sum() + (completions - 1).sum())
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(1, HEADS * SHARE, total, DIM, dtype=torch.bfloat16)
        key = torch.empty(1, HEADS, total, DIM, dtype=torch.bfloat16)
        for window in (None, 4):
            assert rows.attend(query, key, key, spec(window)).shape == query.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", ["even", "uneven"])
@pytest.mark.parametrize("window", [None, 4])
def test_flash_attention_does_the_same(case: str, window: int | None) -> None:
    torch.manual_seed(0)
    prompts, index, completions = CASES[case]
    rows = RaggedRows(prompts.cuda(), index.cuda(), completions.cuda() - 1)
    total = int(prompts.sum() + (completions - 1).sum())
    heads = [
        torch.randn(1, count, total, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in (HEADS * SHARE, HEADS, HEADS)
    ]
    assert rows.serves(heads[0])
    flat = [h.detach().cpu().double().requires_grad_() for h in heads]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ragged_attention", by_the_book)
        theirs = RaggedRows(prompts, index, completions - 1).attend(*flat, spec(window))
    ours = rows.attend(*heads, spec(window))
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0.02, atol=0.02)
    weight = torch.randn_like(theirs)
    found = torch.autograd.grad((ours * weight.cuda()).sum(), heads)
    expected = torch.autograd.grad((theirs * weight).sum(), flat)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=0.05, atol=0.05)
