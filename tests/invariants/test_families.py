"""The sampler for every family: the same tokens whatever runs them; what is odd in the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, LetterTokenizer, make_batch, make_prompt, tiny_model
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from grouper.algorithms.batching import TrainBatch
from grouper.errors import ModelError, PromptError
from grouper.models.attention_check import check_native_attention
from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.types import Completion, FinishReason, SamplingParams

STOPS = (2, 5)
PROMPTS = (2, 11, 5, 8)
"""Tokens of each prompt: shorter and longer than the windows, the longest not the first."""
INTERFACE = [family for family in FAMILIES if family != "gpt2"]


def requests(prompts: Sequence[int] = PROMPTS, samples: int = 3, **params: Any) -> Any:
    settings = SamplingParams(**{"max_new_tokens": 14, **params})
    return [
        SampleRequest(
            prompt=make_prompt(number, length), params=settings, key=draw_seed(1, number, sample)
        )
        for number, length in enumerate(prompts)
        for sample in range(samples)
    ]


def drawn(policy: Policy, wanted: Sequence[SampleRequest], **options: Any) -> list[Completion]:
    sampler = NativeSampler(
        SamplingWeights(policy),
        LetterTokenizer(),
        stop_token_ids=options.pop("stops", STOPS),
        **options,
    )
    found = dict(sampler.sample(wanted))
    assert sorted(found) == list(range(len(wanted)))
    return [found[i] for i in range(len(wanted))]


def told(completions: Sequence[Completion]) -> list[tuple[tuple[int, ...], str, FinishReason]]:
    return [(c.token_ids, c.text, c.finish_reason) for c in completions]


@pytest.mark.parametrize("family", INTERFACE)
def test_what_runs_a_sequence_changes_none_of_its_tokens(family: str) -> None:
    """One seed: all at once, refilled slots, one slot, another order, in fours, a plain cache."""
    model, wanted, stops = tiny_model(family), requests(), range(16)
    policy = Policy(model)
    assert policy.native
    expected = drawn(policy, wanted, stops=stops)
    assert len({len(c.token_ids) for c in expected}) > 3, "they end at different times"
    for options in ({"max_slots": 5}, {"max_slots": 1}, {"steps_per_sync": 4}):
        assert told(drawn(policy, wanted, stops=stops, **options)) == told(expected), options
    backwards = drawn(policy, wanted[::-1], stops=stops, max_slots=4)[::-1]
    assert told(backwards) == told(expected)
    plain = Policy(model, native=False)
    for slots in (5, 64):
        found = drawn(plain, wanted, stops=stops, max_slots=slots)
        assert told(found) == told(expected), f"plain, {slots}"
    for ours, theirs in zip(expected, found, strict=True):
        gap = torch.tensor(ours.logprobs) - torch.tensor(theirs.logprobs)
        # Matrices are scaled up here, and rounding with them; a mistake changes tokens above.
        assert float(gap.abs().max()) < 1e-4


def eager_logprobs(model: Any, completion: Completion, prompt: Sequence[int]) -> Tensor:
    model.set_attn_implementation("eager")
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    targets = torch.tensor(completion.token_ids)
    picked: Tensor = logprobs[len(prompt) - 1 : -1].gather(1, targets[:, None])[:, 0]
    return picked


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
@torch.no_grad()
def test_a_softcap_that_bites_is_honoured_by_sampler_and_update(family: str) -> None:
    soft = {"attn_logit_softcapping": 0.3, "final_logit_softcapping": 2.0}
    if family == "gemma3":  # its layers do not pass the first one on
        soft.pop("attn_logit_softcapping")
    capped, free = tiny_model(family, **soft), tiny_model(family)
    wanted = requests((9, 4), 2, min_new_tokens=14)
    completions = drawn(Policy(capped), wanted)
    assert told(completions) != told(drawn(Policy(free), wanted)), "the caps matter here"
    for request, completion in zip(wanted, completions, strict=True):
        expected = eager_logprobs(capped, completion, request.prompt.token_ids)
        gap = (torch.tensor(completion.logprobs) - expected).abs()
        assert float(gap.max()) < 1e-5
    batch: TrainBatch = make_batch()
    capped.set_attn_implementation("eager")
    padded = Policy(capped, native=False)(batch).logprobs
    torch.testing.assert_close(Policy(capped)(batch).logprobs, padded, rtol=0, atol=1e-5)


def with_sinks() -> Any:
    config = GptOssConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return GptOssForCausalLM(config).eval()


def test_attention_sinks_are_refused_and_never_dropped() -> None:
    policy = Policy(with_sinks())
    for run in (
        lambda: check_native_attention(policy),
        lambda: drawn(policy, requests((5,), 1)),
        lambda: policy(make_batch()),
    ):
        with pytest.raises(ModelError, match="s_aux") as raised:
            run()
        assert "model.attention: sdpa (or eager)" in raised.value.paragraph()


# --- odd input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False], ids=["slots", "plain"])
@pytest.mark.parametrize("new", [1, 2])
def test_one_sample_of_one_token_prompt(native: bool, new: int) -> None:
    policy = Policy(tiny_model(), native=native)
    (only,) = drawn(policy, requests((1,), 1, max_new_tokens=new, min_new_tokens=new))
    assert len(only.token_ids) == len(only.logprobs) == new
    assert only.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("native", [True, False], ids=["slots", "plain"])
@pytest.mark.parametrize("slots", [1, 5, 64])
def test_all_stop_at_once_with_their_first_token(native: bool, slots: int) -> None:
    """Every id is a stop token, so nothing is ever decoded; then one by one on the length."""
    policy = Policy(tiny_model(), native=native)
    wanted = requests()
    stopped = drawn(policy, wanted, stops=range(97), max_slots=slots)
    cut = drawn(policy, requests(max_new_tokens=1), max_slots=slots)
    assert [c.token_ids for c in stopped] == [c.token_ids for c in cut]
    assert {len(c.token_ids) for c in stopped} == {1}
    assert {c.finish_reason for c in stopped} == {FinishReason.STOP_TOKEN}
    assert {c.text for c in stopped} == {""}


@pytest.mark.parametrize("native", [True, False], ids=["slots", "plain"])
def test_nothing_is_asked_of_an_engine(native: bool) -> None:
    assert drawn(Policy(tiny_model(), native=native), []) == []


def test_a_prompt_beyond_the_context_is_refused_before_anything_is_run() -> None:
    policy = Policy(tiny_model())
    policy.model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    policy.decoder.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    wanted = requests((3, 30, 4), 1)
    with pytest.raises(PromptError, match="30 tokens and 14 new ones do not fit") as raised:
        drawn(policy, wanted, max_length=43)
    assert "p/1" in raised.value.paragraph()


def test_a_prompt_that_just_fits_is_sampled() -> None:
    wanted = requests((3, 30, 4), 1)
    policy = Policy(tiny_model())
    assert told(drawn(policy, wanted, max_length=44)) == told(drawn(policy, wanted))


def test_a_long_prompt_that_comes_into_a_used_slot_fits() -> None:
    """The cache is as wide as the longest prompt of all, not of those that begin."""
    policy = Policy(tiny_model())
    wanted = requests((1, 2, 60, 3), 2)
    assert told(drawn(policy, wanted, max_slots=2)) == told(drawn(policy, wanted))


@pytest.mark.parametrize("native", [True, False], ids=["slots", "plain"])
def test_stop_ids_of_the_tokenizer_each_stop_and_more_ids_stop_earlier(native: bool) -> None:
    policy = Policy(tiny_model(scale=2.0), native=native)
    wanted = requests(samples=10, max_new_tokens=24)
    free = drawn(policy, wanted, stops=[10**6])  # an id the model does not have never comes
    assert {c.finish_reason for c in free} == {FinishReason.LENGTH}
    for stops in ((2,), (2, 5), (2, 5, 31, 77, 10**6)):
        found = drawn(policy, wanted, stops=stops, max_slots=7)
        for short, long in zip(found, free, strict=True):
            hits = [i for i, token in enumerate(long.token_ids) if token in stops]
            end = hits[0] + 1 if hits else 24
            assert short.token_ids == long.token_ids[:end]
            assert (short.finish_reason is FinishReason.STOP_TOKEN) == bool(hits)
        ended = {c.token_ids[-1] for c in found if c.finish_reason is FinishReason.STOP_TOKEN}
        assert len(ended) == len([i for i in stops if i < 97]), "each of them has stopped one"


class Syllables(LetterTokenizer):
    """Every token is two or three letters, so that a stop string begins and ends inside tokens."""

    def decode(self, token_ids: Sequence[int], **_: bool) -> str:
        return "".join("abcab"[i % 3 : i % 3 + 2 + i % 2] for i in token_ids)


@pytest.mark.parametrize("native", [True, False], ids=["slots", "plain"])
@pytest.mark.parametrize("stop", ["bca", "cc", "aabb", "bcabca"])
def test_a_stop_string_that_begins_and_ends_inside_tokens(native: bool, stop: str) -> None:
    policy = Policy(tiny_model(), native=native)
    tokenizer = Syllables()

    def run(**params: Any) -> list[Completion]:
        sampler = NativeSampler(
            SamplingWeights(policy), tokenizer, stop_token_ids=[10**6], max_slots=5
        )
        found = dict(sampler.sample(requests(max_new_tokens=14, **params)))
        return [found[i] for i in range(len(found))]

    stopped = 0
    for free, cut in zip(run(), run(stop=(stop,), include_stop=False), strict=True):
        ends = [n for n in range(1, 15) if stop in tokenizer.decode(free.token_ids[:n])]
        length = ends[0] if ends else 14
        assert cut.token_ids == free.token_ids[:length]
        assert (cut.finish_reason is FinishReason.STOP_STRING) == bool(ends)
        assert cut.text == free.text.partition(stop)[0]
        stopped += bool(ends)
    assert stopped > 0
