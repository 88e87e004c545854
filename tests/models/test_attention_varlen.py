"""Attention over ragged rows is that of the padded layout, its gradient included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from grouper.algorithms.batching import unweighted_rows
from grouper.kernels.switch import planned
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_a_shared_prompts_keys_are_summed_in_float32(dtype: torch.dtype) -> None:
    """G10: 32 completions pull at the keys of one prompt, and bfloat16 keeps three digits."""
    torch.manual_seed(0)
    index = torch.arange(6)[:, None].repeat(1, 32).flatten()[torch.randperm(192)]
    keys = torch.randn(6, 4, DIM).to(dtype).requires_grad_()
    pulls = torch.randn(192, 4, DIM).bfloat16()
    shared = attention.shared_rows(keys, index, torch.bfloat16)
    assert torch.equal(shared, keys.bfloat16()[index])
    (found,) = torch.autograd.grad(shared, keys, pulls)
    assert found.dtype == dtype
    sums = torch.zeros(6, 4, DIM, dtype=torch.float64).index_add_(0, index, pulls.double())
    exact = sums.to(dtype).double()

    def error(gradient: Tensor) -> float:
        """Beside the one rounding to the dtype of the keys, which alone is 0.17 % in bfloat16."""
        return float((gradient.double() - exact).norm() / exact.norm())

    assert error(found) < (1e-3 if dtype is torch.bfloat16 else 1e-6)
    (by_autograd,) = torch.autograd.grad(keys.bfloat16()[index], keys, pulls)
    assert error(by_autograd) > 2e-3


def refuses(*tensors: Any, **options: Any) -> Tensor:
    raise RuntimeError("FlashAttention backward does not support this head dimension")


def test_heads_that_flash_attention_cannot_learn_are_padded_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(attention, "device_type", lambda _: "cuda")
    prompts, index, completions = CASES["even"]
    rows = RaggedRows(prompts, index, completions - 1)
    query = torch.zeros(1, 2, 18, 256, dtype=torch.bfloat16)
    attention._flash_learns.cache_clear()
    try:
        monkeypatch.setattr(attention, "ragged_attention", refuses)
        assert not rows.serves(query)
        assert not rows.serves(query)
        (record,) = caplog.records
        assert "256 dimensions" in record.getMessage()
        assert "does not support this head dimension" in record.getMessage()
        monkeypatch.setattr(attention, "ragged_attention", lambda q, *_, **__: q * 2)
        assert rows.serves(query[..., :64])
    finally:
        attention._flash_learns.cache_clear()


def test_a_plan_takes_rows_without_padding() -> None:
    prompts, index, completions = CASES["even"]
    rows = RaggedRows(prompts, index, completions - 1)
    with planned("cuda"):
        for dtype, served in ((torch.bfloat16, True), (torch.float32, False)):
            assert rows.serves(torch.empty(1, 2, 18, 64, dtype=dtype, device="meta")) == served
