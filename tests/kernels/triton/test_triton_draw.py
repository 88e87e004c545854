"""The drawing kernels against `draw`, and against the distribution where sums are rounded."""

from __future__ import annotations

import pytest
import torch

from grouper.kernels.triton.draw import draws_here, kernel_draw
from grouper.sampling.draw import DrawSettings, draw
from grouper.types import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.needs_package("triton", extra="triton")


@pytest.mark.parametrize("vocabulary", [97, 2048, 5000])
@pytest.mark.parametrize("bans", [False, True])
def test_it_draws_what_draw_draws(vocabulary: int, bans: bool) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    rows = 24
    logits = (3 * torch.randn(rows, vocabulary, generator=generator)).to(DEVICE)
    logits[3, : vocabulary // 2] = -torch.inf
    uniform = torch.rand(rows, generator=generator).to(DEVICE)
    uniform[0], uniform[1] = 0.0, 1.0 - 2.0**-24
    params = [SamplingParams(temperature=(0.0, 0.7, 1.0, 1.6)[i % 4]) for i in range(rows)]
    settings = DrawSettings.of(params, DEVICE)
    stops = torch.zeros(vocabulary, dtype=torch.bool, device=DEVICE)
    stops[logits.argmax(-1)] = True
    early = (torch.arange(rows, device=DEVICE) % 3 == 0) if bans else None
    banned = None if early is None else early[:, None] & stops
    expected, expected_logprobs, expected_entropies = draw(logits, uniform, settings, banned)
    tokens, logprobs, entropies = kernel_draw(logits, uniform, settings.temperature, early, stops)
    same = tokens == expected
    # Two orders of summation: a number within rounding of a border may fall to either side.
    assert int((~same).sum()) <= 1
    torch.testing.assert_close(logprobs[same], expected_logprobs[same], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies, rtol=1e-5, atol=1e-5)
    if banned is not None:
        assert not bool(banned.gather(1, tokens[:, None]).any())
    greedy = settings.temperature == 0
    assert torch.equal(tokens[greedy], expected[greedy])


def test_where_it_is_offered() -> None:
    logits = torch.zeros(2, 97, device=DEVICE)
    assert not draws_here(logits.double())
    assert draws_here(logits) == (DEVICE.type == "cuda")


def test_nothing_impossible_is_drawn() -> None:
    logits = torch.full((2, 5000), -torch.inf, device=DEVICE)
    logits[:, 3000] = 1.0
    uniform = torch.tensor([0.0, 1.0 - 2.0**-24], device=DEVICE)
    stops = torch.zeros(5000, dtype=torch.bool, device=DEVICE)
    heat = torch.ones(2, device=DEVICE)
    tokens, logprobs, entropies = kernel_draw(logits, uniform, heat, None, stops)
    assert tokens.tolist() == [3000, 3000]
    torch.testing.assert_close(logprobs, torch.zeros(2, device=DEVICE))
    torch.testing.assert_close(entropies, torch.zeros(2, device=DEVICE))


def test_logits_that_are_no_numbers_stay_inside_the_vocabulary() -> None:
    stops = torch.zeros(97, dtype=torch.bool, device=DEVICE)
    logits = torch.full((1, 97), torch.nan, device=DEVICE)
    half, one = torch.full((1,), 0.5, device=DEVICE), torch.ones(1, device=DEVICE)
    tokens, *_ = kernel_draw(logits, half, one, None, stops)
    assert 0 <= int(tokens) < 97


@pytest.mark.slow
def test_beside_a_banned_token_that_is_all_but_certain_the_others_keep_their_shares() -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0)).repeat(30, 1).to(DEVICE)
    logits[:, 3] = 200.0
    stops, heat = torch.arange(3000, device=DEVICE) == 3, torch.ones(30, device=DEVICE)
    uniform = torch.rand(30, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    tokens, *_ = kernel_draw(logits, uniform, heat, heat > 0, stops)
    logits[:, 3] = -torch.inf
    expected, *_ = kernel_draw(logits, uniform, heat, None, stops)
    assert int((tokens != expected).sum()) <= 1, "a number next to a border"
