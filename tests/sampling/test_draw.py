"""Drawing: uniform streams, the inverse CDF against the distribution, truncation by brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grouper.kernels.cpu import ops
from grouper.sampling import draw as draw_module
from grouper.sampling.base import draw_seed
from grouper.sampling.draw import (
    DrawSettings,
    draw,
    draw_tokens,
    truncate,
    uniforms,
)
from grouper.types import SamplingParams

CPU = torch.device("cpu")


def settings(rows: int, **params: Any) -> DrawSettings:
    return DrawSettings.of([SamplingParams(**params)] * rows, CPU)


def test_uniform_streams_are_uniform_and_unrelated() -> None:
    streams = np.stack([uniforms(draw_seed("u", k), 400) for k in range(200)])
    assert streams.min() >= 0
    assert streams.max() < 1
    assert abs(streams.mean() - 0.5) < 0.005
    assert abs(streams.var() - 1 / 12) < 0.002
    # Neighbours in a stream and across streams are uncorrelated (5 sigma of 80,000 pairs: 0.018).
    assert abs(np.corrcoef(streams[:, :-1].ravel(), streams[:, 1:].ravel())[0, 1]) < 0.018
    assert abs(np.corrcoef(streams[:-1].ravel(), streams[1:].ravel())[0, 1]) < 0.018
    assert len({row.tobytes() for row in streams}) == 200


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    count = 40_000
    uniform = torch.from_numpy(uniforms(7, count))
    hot = settings(count, temperature=0.5)
    tokens, logprobs, entropies = draw(logits.expand(count, 4), uniform, hot)
    expected = (logits / 0.5).softmax(-1)
    found = torch.bincount(tokens, minlength=4) / count
    assert float((found - expected).abs().max()) < 0.01
    torch.testing.assert_close(logprobs, expected.log()[tokens], rtol=0, atol=1e-6)
    entropy = -(expected * expected.log()).sum()
    torch.testing.assert_close(entropies, entropy.expand(count), rtol=0, atol=1e-6)


@given(
    logits=st.lists(st.floats(-8, 8), min_size=2, max_size=12),
    top_k=st.integers(0, 6),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
    uniform=st.floats(0, 1, exclude_max=True, width=32),
)
def test_truncation_never_leaves_its_set(
    logits: list[float], top_k: int, top_p: float, min_p: float, uniform: float
) -> None:
    values = torch.tensor([logits])
    params: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    token, logprob, entropy = draw(values, torch.tensor([uniform]), settings(1, **params))
    probabilities = values[0].softmax(-1)
    chosen = float(probabilities[token])
    above = probabilities > chosen
    if top_k:
        assert int(above.sum()) < top_k
    # Tokens as likely as the last of the k stay with it.
    least = probabilities.sort(descending=True)[0][:top_k][-1] if top_k else 0.0
    kept = probabilities[probabilities >= least]
    assert float(probabilities[above].sum()) <= top_p * float(kept.sum()) + 1e-5
    assert chosen >= min_p * float(probabilities.max()) - 1e-6
    # T3: the reported log-prob is the full distribution's, not the truncated one's.
    assert float(logprob) == pytest.approx(float(values.log_softmax(-1)[0, token]), abs=1e-5)
    assert float(entropy) == pytest.approx(
        float(torch.distributions.Categorical(logits=values).entropy()), abs=1e-5
    )


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24])
def test_the_ends_of_the_unit_interval_draw_a_possible_token(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]])
    token, _, entropy = draw(logits, torch.tensor([uniform]), settings(1))
    assert int(token) == (1 if uniform == 0.0 else 2)
    likelier = 1 / (1 + math.exp(-1.0))
    expected = -likelier * math.log(likelier) - (1 - likelier) * math.log(1 - likelier)
    assert float(entropy) == pytest.approx(expected, abs=1e-6)  # what cannot be drawn adds nothing


def test_banned_tokens_are_not_drawn_but_counted_in_logprobs() -> None:
    logits = torch.tensor([[5.0, 0.0, 0.0]])
    banned = torch.tensor([[True, False, False]])
    token, logprob, _ = draw(logits, torch.tensor([0.1]), settings(1), banned)
    assert int(token) == 1
    assert float(logprob) == pytest.approx(float(logits.log_softmax(-1)[0, 1]))
    greedy, *_ = draw(logits, torch.tensor([0.1]), settings(1, temperature=0.0), banned)
    assert int(greedy) == 1


@pytest.mark.parametrize("ahead", [16.0, 200.0])
@pytest.mark.parametrize("kernels", [False, True])
def test_beside_a_banned_token_that_is_all_but_certain_the_others_keep_their_shares(
    kernels: bool, ahead: float
) -> None:
    """The kernel took its share off a sum that had been rounded; at last nothing was left."""
    rows = torch.randn(1000, generator=torch.Generator().manual_seed(0)).repeat(300, 1)
    rows[:, 3] = rows.max() + ahead
    stops, early = torch.arange(1000) == 3, torch.ones(300, dtype=torch.bool)
    how = torch.rand(300, generator=torch.Generator().manual_seed(1)), settings(300)
    banned = stops.expand(300, -1)
    tokens = (draw_tokens(rows, *how, early, stops) if kernels else draw(rows, *how, banned))[0]
    without = rows.masked_fill(banned, -torch.inf)
    assert int((tokens != draw(without, *how)[0]).sum()) <= 1, "a number next to a border"


@pytest.mark.parametrize("params", [{"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.1}])
def test_truncated_rows_are_drawn_in_plain_operations(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels draw from the full distribution only."""
    for kernel in ((draw_module, "kernel_draw"), (ops, "draw")):
        monkeypatch.setattr(*kernel, lambda *_: pytest.fail("a kernel was called"))
    monkeypatch.setattr(draw_module, "draws_here", lambda _: True)
    logits, uniform = torch.randn(5, 9), torch.rand(5)
    rows = (logits, uniform, settings(5, **params))
    found = draw_tokens(*rows, None, torch.zeros(9, dtype=torch.bool))
    for got, expected in zip(found, draw(*rows), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def truncate_by_order(probabilities: Tensor, settings: DrawSettings) -> Tensor:
    """The definition, in the order of the probabilities; ties are cut by index."""
    ordered, order = probabilities.sort(-1, descending=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    keep = (rank < settings.top_k[:, None]) | (settings.top_k[:, None] == 0)
    ordered = ordered * keep
    before = ordered.cumsum(-1) - ordered
    mass = ordered.sum(-1, keepdim=True)
    # Rounding may carry the sum of what comes before a token up to the whole.
    keep &= (before < settings.top_p[:, None] * mass) | (settings.top_p[:, None] >= 1)
    keep &= ordered >= settings.min_p[:, None] * ordered[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(probabilities).scatter(1, order, ordered * keep)


def test_tokens_as_likely_as_the_last_one_of_top_k_stay() -> None:
    shares = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]])
    assert truncate(shares, settings(1, top_k=2)).tolist() == [[*shares[0, :3].tolist(), 0.0, 0.0]]


@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.99),
    spread=st.sampled_from([0.1, 1.0, 5.0, 30.0]),
)
def test_truncation_without_sorting_keeps_the_same(
    seed: int, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    """G10: in rows whose settings differ; a token next to the border may fall to either side."""
    generator = torch.Generator().manual_seed(seed)
    shares = (torch.randn(3, 33, generator=generator) * spread).softmax(-1)
    rows = [
        SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p),
        SamplingParams(top_p=top_p),
        SamplingParams(top_k=top_k),
    ]
    chosen = DrawSettings.of(rows, CPU)
    expected, found = truncate_by_order(shares, chosen), truncate(shares, chosen)
    differ = (expected - found).abs().sum(-1)
    assert bool((found.amax(-1) == shares.amax(-1)).all())
    assert float(differ[2]) == 0, "counting is exact"
    # Sums of tokens in another order: one token whose border lies within their rounding.
    ordered = shares.sort(-1, descending=True)[0]
    for row, most in ((0, top_k), (1, 0)):
        sums = ordered[row, : most or None].cumsum(0)
        near = bool((sums - top_p * sums[-1]).abs().min() < 1e-5)
        assert float(differ[row]) == 0 or near
