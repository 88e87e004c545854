"""However many tokens lie between two looks of the host, the same ones come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import LetterTokenizer, make_prompt, tiny_model

from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest, StopStrings, draw_seed
from grouper.sampling.decode_rows import DecodeRows, HostLog
from grouper.sampling.kv_cache import CacheSize
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.types import Completion, FinishReason, SamplingParams

STOPS = (2, 5)
CPU = torch.device("cpu")
MODELS = [
    *("qwen2-sliding", "qwen3", "gemma2"),
    # What these have, one of those has, too.
    *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen2", "llama", "mistral", "gemma3")),
]


def ask(number: int, sample: int, **params: Any) -> SampleRequest:
    return SampleRequest(
        prompt=make_prompt(number, 3 + number),
        params=SamplingParams(**{"max_new_tokens": 11, **params}),
        key=draw_seed(0, "stretch", number, sample),
    )


def mixed() -> list[SampleRequest]:
    """Budgets that end between two looks, minimums, stop strings, greedy and truncated rows."""
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
    policy: Policy, wanted: list[SampleRequest], *, slots: int, steps: int
) -> list[Completion]:
    sampler = NativeSampler(
        SamplingWeights(policy),
        LetterTokenizer(),
        stop_token_ids=STOPS,
        max_slots=slots,
        steps_per_sync=steps,
    )
    found = dict(sampler.sample(wanted))
    return [found[i] for i in range(len(wanted))]


@pytest.mark.parametrize("family", MODELS)
def test_how_often_the_host_looks_changes_nothing(family: str) -> None:
    policy = Policy(tiny_model(family, scale=2.0))
    wanted = mixed()
    straight = draw_all(policy, wanted, slots=64, steps=1)
    assert {c.finish_reason for c in straight} == set(FinishReason)
    for slots, steps in ((64, 3), (64, 8), (5, 3), (5, 8), (1, 8)):
        drawn = draw_all(policy, wanted, slots=slots, steps=steps)
        assert [c.token_ids for c in drawn] == [c.token_ids for c in straight]
        assert [c.text for c in drawn] == [c.text for c in straight]
        assert [c.finish_reason for c in drawn] == [c.finish_reason for c in straight]
        for one, other in zip(drawn, straight, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)


def test_how_often_the_host_looks_changes_nothing_over_a_plain_cache() -> None:
    policy = Policy(tiny_model(scale=2.0), native=False)
    wanted = mixed()
    straight = draw_all(policy, wanted, slots=64, steps=1)
    for slots, steps in ((64, 8), (5, 3)):
        drawn = draw_all(policy, wanted, slots=slots, steps=steps)
        assert [c.token_ids for c in drawn] == [c.token_ids for c in straight]


def test_no_position_lies_beyond_the_context() -> None:
    """GPT-2 looks positions up in a table, and rows that have ended go on until the host looks."""
    policy = Policy(tiny_model("gpt2", n_positions=16, max_position_embeddings=16))
    wanted = [ask(i, 0, max_new_tokens=13 - i, min_new_tokens=13 - i) for i in range(3)]
    straight = draw_all(policy, wanted, slots=4, steps=1)
    drawn = draw_all(policy, wanted, slots=4, steps=8)
    assert [c.token_ids for c in drawn] == [c.token_ids for c in straight]
    assert [len(c.token_ids) for c in drawn] == [13, 12, 11]


def test_all_stopping_at_the_same_token_is_one_look() -> None:
    wanted = [ask(0, i, max_new_tokens=4, min_new_tokens=4) for i in range(6)]
    for slots in (6, 4):
        drawn = draw_all(Policy(tiny_model()), wanted, slots=slots, steps=8)
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

    log = HostLog(slots=2, longest=9, steps=4, vocabulary=97, stop_ids=[2], watcher=watcher)
    for slot, params in enumerate(({"stop": ("ab",)}, {"max_new_tokens": 3})):
        log.begin(slot, 10 + slot, ask(0, slot, **params))
    assert log.longest() == 0
    a, b, c = (ord(letter) - 32 for letter in "abc")
    block = torch.tensor([[c, c], [b, a], [a, c], [b, c]])
    first, second = log.write((block, *torch.zeros(2, 4, 2)), np.arange(2))
    assert (first.slot, first.request, first.reason) == (0, 10, FinishReason.STOP_STRING)
    assert (second.slot, second.request, second.reason) == (1, 11, FinishReason.LENGTH)
    assert first.token_ids == [c, b, a, b]
    assert second.token_ids == [c, a, c], "what came after its end is thrown away"
    assert Counted.asked == 2
    assert log.write((block[:1], *torch.zeros(2, 1, 2)), np.arange(2)) == [], "nobody is left"


def test_rows_never_move_and_never_pass_their_budget() -> None:
    wanted = [ask(0, i, max_new_tokens=n) for i, n in enumerate([2, 9, 5])]
    rows = DecodeRows(CacheSize(4, 1, 3, 9), 97, STOPS, CPU)
    places = [t.data_ptr() for t in (rows.tokens, rows.drawn, rows.budgets, rows.prompts)]
    for _ in range(2):  # what one call leaves does not reach the next one
        rows.begin(wanted)
        rows.fill([0, 1, 2], wanted)
        logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(0))
        for _ in range(7):
            rows.draw(logits)
        assert rows.drawn.tolist() == [2, 7, 5, 1]
        rows.free([0])
        rows.compact([2, 1])
        assert rows.count == 2
        assert rows.drawn.tolist() == [5, 7, 1, 1]
        assert rows.budgets.tolist() == [5, 9, 1, 1]
        assert rows.positions(2).tolist() == [7, 9]
    assert [t.data_ptr() for t in (rows.tokens, rows.drawn, rows.budgets, rows.prompts)] == places


def test_what_a_step_decides_on_the_host_is_known_of_each_call() -> None:
    rows = DecodeRows(CacheSize(2, 1, 3, 9), 97, STOPS, CPU)
    flags = []
    kinds = ({}, {"top_p": 0.5}, {"top_k": 5}, {"temperature": 0.0}, {"min_new_tokens": 2})
    for kind in kinds:
        rows.begin([ask(0, 0, **kind), ask(0, 1, **kind)])
        flags.append(rows.settings.flags)
    assert flags == [
        (False, False, False, False, False),
        (True, False, True, False, False),
        (True, True, False, False, False),
        (False, False, False, True, False),
        (False, False, False, False, True),
    ]


def test_logits_that_are_no_numbers_lead_to_no_token_outside_the_vocabulary() -> None:
    wanted = [ask(0, 0)]
    rows = DecodeRows(CacheSize(1, 1, 3, 11), 97, STOPS, CPU)
    rows.begin(wanted)
    rows.fill([0], wanted)
    tokens, logprobs, _ = rows.draw(torch.full((1, 97), torch.nan))
    assert 0 <= int(tokens) < 97
    assert np.isnan(float(logprobs))
