"""However many tokens lie between two looks of the host, the same ones come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import LetterTokenizer, make_prompt, tiny_model

from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.stops import StopStrings
from grouper.sampling.weights import SamplingWeights
from grouper.sampling.writing import Journal, Rows
from grouper.types import Completion, FinishReason, SamplingParams

STOPS = (2, 5)
CPU = torch.device("cpu")
MODELS = ["qwen2", "qwen2-sliding", "qwen3", "llama", "mistral", "gemma2", "gemma3"]


def ask(number: int, sample: int, **params: Any) -> SampleRequest:
    return SampleRequest(
        prompt=make_prompt(number, 3 + number),
        params=SamplingParams(**{"max_new_tokens": 11, **params}),
        key=draw_seed(0, "stretch", number, sample),
    )


def mixed() -> list[SampleRequest]:
    """Budgets that end anywhere in a stretch, minimums, stop strings, greedy and truncated rows."""
    letters = tuple(chr(32 + i) for i in range(10, 90, 4))
    kinds: list[dict[str, object]] = [
        {},
        {"max_new_tokens": 1},
        {"max_new_tokens": 7, "min_new_tokens": 5},
        {"min_new_tokens": 11},
        {"stop": letters},
        {"stop": ("zz", *letters[:3]), "include_stop": False, "max_new_tokens": 10},
        {"temperature": 0.0},
        {"temperature": 1.7, "top_p": 0.8, "max_new_tokens": 8},
        {"top_k": 4, "stop": letters[4:]},
    ]
    return [ask(i % 3, i, **kind) for i, kind in enumerate(kinds * 2)]


def draw_all(
    policy: Policy, wanted: list[SampleRequest], *, slots: int, stretch: int
) -> list[Completion]:
    sampler = NativeSampler(
        SamplingWeights(policy),
        LetterTokenizer(),
        stop_token_ids=STOPS,
        max_slots=slots,
        stretch=stretch,
    )
    found = dict(sampler.sample(wanted))
    return [found[i] for i in range(len(wanted))]


@pytest.mark.parametrize("family", MODELS)
def test_the_length_of_a_stretch_changes_nothing(family: str) -> None:
    policy = Policy(tiny_model(family, scale=2.0))
    wanted = mixed()
    straight = draw_all(policy, wanted, slots=64, stretch=1)
    assert {c.finish_reason for c in straight} == set(FinishReason)
    for slots, stretch in ((64, 3), (64, 8), (5, 3), (5, 8), (1, 8)):
        drawn = draw_all(policy, wanted, slots=slots, stretch=stretch)
        assert [c.token_ids for c in drawn] == [c.token_ids for c in straight]
        assert [c.text for c in drawn] == [c.text for c in straight]
        assert [c.finish_reason for c in drawn] == [c.finish_reason for c in straight]
        for one, other in zip(drawn, straight, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)


def test_the_length_of_a_stretch_changes_nothing_over_a_plain_cache() -> None:
    policy = Policy(tiny_model(scale=2.0), native=False)
    wanted = mixed()
    straight = draw_all(policy, wanted, slots=64, stretch=1)
    for slots, stretch in ((64, 8), (5, 3)):
        drawn = draw_all(policy, wanted, slots=slots, stretch=stretch)
        assert [c.token_ids for c in drawn] == [c.token_ids for c in straight]


def test_no_position_lies_beyond_the_context() -> None:
    """GPT-2 looks positions up in a table, and a stretch goes on behind the end of a row."""
    policy = Policy(tiny_model("gpt2", n_positions=16, max_position_embeddings=16))
    wanted = [ask(i, 0, max_new_tokens=13 - i, min_new_tokens=13 - i) for i in range(3)]
    straight = draw_all(policy, wanted, slots=4, stretch=1)
    drawn = draw_all(policy, wanted, slots=4, stretch=8)
    assert [c.token_ids for c in drawn] == [c.token_ids for c in straight]
    assert [len(c.token_ids) for c in drawn] == [13, 12, 11]


def test_all_stopping_at_the_same_token_is_one_look() -> None:
    wanted = [ask(0, i, max_new_tokens=4, min_new_tokens=4) for i in range(6)]
    for slots in (6, 4):
        drawn = draw_all(Policy(tiny_model()), wanted, slots=slots, stretch=8)
        assert [len(c.token_ids) for c in drawn] == [4] * 6


def test_the_longest_budgets_begin_first() -> None:
    wanted = [ask(0, i, max_new_tokens=n, min_new_tokens=n) for i, n in enumerate([2, 9, 5, 9, 3])]
    sampler = NativeSampler(
        SamplingWeights(Policy(tiny_model())), LetterTokenizer(), stop_token_ids=STOPS, max_slots=1
    )
    assert [index for index, _ in sampler.sample(wanted)] == [1, 3, 2, 4, 0]


class Counted(StopStrings):
    """Counts how often it was asked to decode."""

    asked = 0

    def completed(self, token_ids: Sequence[int]) -> bool:
        type(self).asked += 1
        return super().completed(token_ids)


def test_the_host_decodes_only_what_may_end() -> None:
    watchers: dict[tuple[str, ...], StopStrings] = {}

    def watcher(stops: tuple[str, ...]) -> StopStrings:
        return watchers.setdefault(stops, Counted(LetterTokenizer(), stops))

    journal = Journal(slots=2, longest=9, stretch=4, vocabulary=97, stop_ids=[2], watcher=watcher)
    journal.begin([0, 1], [ask(0, 0, stop=("ab",)), ask(0, 1, max_new_tokens=3)])
    a, b, c = (ord(letter) - 32 for letter in "abc")
    block = torch.tensor([[c, c], [b, a], [a, c], [b, c]])
    ended = journal.write((block, *torch.zeros(2, 4, 2)))
    assert sorted(ended) == [(0, FinishReason.STOP_STRING), (1, FinishReason.LENGTH)]
    assert journal.written(0)[0] == [c, b, a, b]
    assert journal.written(1)[0] == [c, a, c], "what came after its end is thrown away"
    assert Counted.asked == 2
    assert journal.write((block[:1], *torch.zeros(2, 1, 2))) == [], "nobody is left"


def test_rows_never_move_and_never_pass_their_budget() -> None:
    wanted = [ask(0, i, max_new_tokens=n) for i, n in enumerate([2, 9, 5])]
    rows = Rows(wanted, 4, 97, STOPS, CPU)
    places = [t.data_ptr() for t in (rows.tokens, rows.drawn, rows.budgets, rows.prompts)]
    rows.fill([0, 1, 2], wanted)
    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(0))
    for _ in range(7):
        rows.draw(logits, early=False)
    assert rows.drawn.tolist() == [2, 7, 5, 1]
    rows.close([0])
    rows.keep([2, 1])
    assert rows.count == 2
    assert rows.drawn.tolist() == [5, 7, 1, 1]
    assert rows.budgets.tolist() == [5, 9, 1, 1]
    assert rows.positions(2).tolist() == [7, 9]
    assert [t.data_ptr() for t in (rows.tokens, rows.drawn, rows.budgets, rows.prompts)] == places


def test_logits_that_are_no_numbers_lead_to_no_token_outside_the_vocabulary() -> None:
    wanted = [ask(0, 0)]
    rows = Rows(wanted, 1, 97, STOPS, CPU)
    rows.fill([0], wanted)
    tokens, logprobs, _ = rows.draw(torch.full((1, 97), torch.nan), early=False)
    assert 0 <= int(tokens) < 97
    assert np.isnan(float(logprobs))
