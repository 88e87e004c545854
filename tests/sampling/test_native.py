"""The native sampler: equal to `generate` and to the trainer, whatever the slots; stops; edges."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILIES,
    LetterTokenizer,
    graded_rollouts,
    make_group,
    make_prompt,
    one_step,
    tiny_model,
)
from torch import Tensor

from grouper.errors import ModelError, PromptError
from grouper.models.policy import Policy
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.types import (
    Completion,
    FinishReason,
    RolloutGroup,
    SamplingParams,
)

STOPS = (2, 5)


def make_sampler(policy: Policy, slots: int = 64, **options: int) -> NativeSampler:
    return NativeSampler(
        SamplingWeights(policy),
        LetterTokenizer(),
        stop_token_ids=STOPS,
        max_slots=slots,
        **options,
    )


def requests(prompts: int = 5, samples: int = 4, **params: Any) -> list[SampleRequest]:
    settings = SamplingParams(**{"max_new_tokens": 20, **params})
    return [
        SampleRequest(
            prompt=make_prompt(i, 3 + i), params=settings, key=draw_seed(0, "test", i, sample)
        )
        for i in range(prompts)
        for sample in range(samples)
    ]


def draw_all(sampler: Sampler, wanted: list[SampleRequest]) -> list[Completion]:
    found = dict(sampler.sample(wanted))
    assert sorted(found) == list(range(len(wanted)))
    return [found[i] for i in range(len(wanted))]


def test_the_copy_is_refreshed_although_nothing_is_asked() -> None:
    """Of several processes with split weights some may have no requests, and all take part."""
    policy = Policy(tiny_model("qwen3"))
    weights = SamplingWeights(policy, torch.float32, copy_now=True)
    policy.version += 1
    assert draw_all(NativeSampler(weights, LetterTokenizer(), stop_token_ids=STOPS), []) == []
    assert weights._copy is not None
    assert weights._copy.version == policy.version


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_equals_generate(family: str) -> None:
    model = tiny_model(family)
    wanted = requests(samples=1, temperature=0.0)
    ours = draw_all(make_sampler(Policy(model)), wanted)
    for request, completion in zip(wanted, ours, strict=True):
        prompt = torch.tensor([request.prompt.token_ids])
        theirs = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=list(STOPS),
            pad_token_id=0,
        )
        assert list(completion.token_ids) == theirs[0, prompt.shape[1] :].tolist()


@torch.no_grad()
def test_prompts_whose_row_is_rounded_up_are_continued_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for products in bfloat16 on a CPU; here in float32, where nothing else changes."""
    policy = Policy(tiny_model("gemma3"))
    plain = draw_all(make_sampler(policy), requests())
    monkeypatch.setattr(Policy, "size_multiple", 64)
    rounded = draw_all(make_sampler(policy), requests())
    for one, other in zip(plain, rounded, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_sampled_logprobs_are_the_trainers(family: str) -> None:
    """DESIGN 9: mean 1e-6, max 1e-5 in float32."""
    policy = Policy(tiny_model(family))
    wanted = requests(temperature=0.7)
    drawn = draw_all(make_sampler(policy, slots=6), wanted)
    groups = []
    for number in range(5):
        rollouts = graded_rollouts(drawn[4 * number : 4 * number + 4])
        template = make_group(number, [1.0], [1])
        groups.append(
            RolloutGroup(
                problem=template.problem,
                prompt=wanted[4 * number].prompt,
                params=wanted[0].params,
                rollouts=rollouts,
            )
        )
    batch = one_step(groups, [[1.0] * 4] * 5)
    assert batch.temperature == 0.7
    assert batch.sampler_logprobs is not None
    outputs = policy(batch)
    gap = (outputs.logprobs - batch.sampler_logprobs).abs()[batch.mask]
    assert float(gap.mean()) < 1e-6
    assert float(gap.max()) < 1e-5
    entropies = torch.tensor([entropy for completion in drawn for entropy in completion.entropies])
    torch.testing.assert_close(entropies, outputs.entropies[batch.mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 3, 7, 20])
def test_slots_and_refills_change_nothing(slots: int) -> None:
    policy = Policy(tiny_model())
    wanted = requests()
    everything_at_once = draw_all(make_sampler(policy, slots=64), wanted)
    refilled = draw_all(make_sampler(policy, slots=slots), wanted)
    assert [c.token_ids for c in refilled] == [c.token_ids for c in everything_at_once]


def test_all_stopping_at_once_leaves_room_for_fewer() -> None:
    policy = Policy(tiny_model())
    wanted = requests(5, 1, min_new_tokens=4, max_new_tokens=4)
    at_once = draw_all(make_sampler(policy, slots=64), wanted)
    in_turns = draw_all(make_sampler(policy, slots=3), wanted)
    assert [c.token_ids for c in in_turns] == [c.token_ids for c in at_once]
    assert {len(c.token_ids) for c in at_once} == {4}


def test_the_order_and_company_of_requests_change_nothing() -> None:
    sampler = make_sampler(Policy(tiny_model()))
    wanted = requests()
    straight = draw_all(sampler, wanted)
    backwards = draw_all(sampler, wanted[::-1])[::-1]
    alone = [draw_all(sampler, [request])[0] for request in wanted]
    assert [c.token_ids for c in backwards] == [c.token_ids for c in straight]
    assert [c.token_ids for c in alone] == [c.token_ids for c in straight]


def test_samples_of_one_prompt_differ() -> None:
    drawn = draw_all(make_sampler(Policy(tiny_model(scale=2.0))), requests(1, 8))
    assert len({c.token_ids for c in drawn}) > 4  # T30


def test_the_plain_cache_draws_the_same_tokens() -> None:
    model = tiny_model()
    wanted = requests()
    native = draw_all(make_sampler(Policy(model)), wanted)
    plain = draw_all(make_sampler(Policy(model, native=False), slots=6), wanted)
    assert [c.token_ids for c in plain] == [c.token_ids for c in native]


def test_new_weights_are_sampled_at_once() -> None:
    """P24: change the weights, and greedy output must change."""
    policy = Policy(tiny_model())
    sampler = make_sampler(policy)
    wanted = requests(samples=1, temperature=0.0)
    before = draw_all(sampler, wanted)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    policy.version += 1
    after = draw_all(sampler, wanted)
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    assert {c.policy_version for c in before} == {0}
    assert {c.policy_version for c in after} == {1}


def test_a_copy_in_another_dtype_follows_the_trainer() -> None:
    policy = Policy(tiny_model())
    weights = SamplingWeights(policy, torch.float64)
    copy = weights.current()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    policy.version += 1
    assert weights.current() is copy
    assert copy.version == 1
    ours = dict(policy.model.named_parameters())
    for name, parameter in copy.model.named_parameters():
        assert parameter.dtype == torch.float64
        torch.testing.assert_close(parameter.float(), ours[name], rtol=0, atol=0)


def test_every_stop_token_stops_and_is_kept() -> None:
    """T6, T7: the finish reason is known, not guessed from the last token."""
    drawn = draw_all(make_sampler(Policy(tiny_model(scale=2.0))), requests(8, 8, max_new_tokens=60))
    ended = [c for c in drawn if c.finish_reason is FinishReason.STOP_TOKEN]
    assert {c.token_ids[-1] for c in ended} == set(STOPS)
    for completion in drawn:
        assert not set(completion.token_ids[:-1]) & set(STOPS)
        assert len(completion.logprobs) == len(completion.token_ids)
        if completion.finish_reason is FinishReason.LENGTH:
            assert len(completion.token_ids) == 60
    last = ended[0]
    again = draw_all(
        make_sampler(Policy(tiny_model(scale=2.0))),
        requests(8, 8, max_new_tokens=len(last.token_ids)),
    )[drawn.index(last)]
    assert again.finish_reason is FinishReason.STOP_TOKEN, "the last token allowed is a stop token"


def test_stop_tokens_are_not_drawn_before_the_minimum() -> None:
    drawn = draw_all(make_sampler(Policy(tiny_model(scale=2.0))), requests(6, 6, min_new_tokens=12))
    assert min(len(c.token_ids) for c in drawn) > 12 - 1


def test_stop_strings_across_token_borders() -> None:
    policy = Policy(tiny_model())
    free = draw_all(make_sampler(policy), requests())
    target = next(c for c in free if len(c.text) >= 8)
    stop = target.text[4:7]
    first = target.text.find(stop) + 3
    for include in (True, False):
        cut = draw_all(make_sampler(policy), requests(stop=(stop,), include_stop=include))[
            free.index(target)
        ]
        assert cut.finish_reason is FinishReason.STOP_STRING
        assert cut.token_ids == target.token_ids[:first]
        assert cut.text == target.text[: first if include else first - 3]


def test_model_defaults_do_not_leak_into_sampling() -> None:
    """T4: a generation config with odd values changes nothing."""
    model = tiny_model()
    plain = draw_all(make_sampler(Policy(model)), requests())
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.temperature = 0.01
    model.generation_config.top_k = 1
    odd = draw_all(make_sampler(Policy(model)), requests())
    assert [c.token_ids for c in odd] == [c.token_ids for c in plain]


def test_nothing_asked_is_nothing_drawn() -> None:
    assert list(make_sampler(Policy(tiny_model())).sample([])) == []


def test_a_prompt_beyond_the_context_is_refused() -> None:
    sampler = make_sampler(Policy(tiny_model()), max_length=22)
    with pytest.raises(PromptError, match="do not fit the model's context of 22"):
        list(sampler.sample(requests()))


def test_no_stop_token_is_refused() -> None:
    with pytest.raises(PromptError, match="no stop token"):
        NativeSampler(SamplingWeights(Policy(tiny_model())), LetterTokenizer(), stop_token_ids=[])


# --- memory that runs out ------------------------------------------------------------------------


def run_short_of_memory(
    policy: Policy, most: int, *, after: int = 1, error: Exception | None = None
) -> list[int]:
    """After so many passes every one over more than so many rows fails; the rows of each one."""
    rows: list[int] = []
    plain = policy.logits

    def logits(hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        if len(hidden) > most and len(rows) > after:
            raise error or torch.OutOfMemoryError("injected\nmore of it")
        return plain(hidden)

    policy.logits = logits  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize("native", [True, False], ids=["slots", "padded"])
@pytest.mark.parametrize(("new", "after"), [(11, 4), (30, 1)], ids=["op-by-op", "recorded"])
def test_memory_that_runs_out_halves_the_slots_and_changes_no_token(
    native: bool, new: int, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    """G6."""
    wanted = requests(5, 4, max_new_tokens=new)
    wanted += requests(2, 2, max_new_tokens=2)
    expected = draw_all(make_sampler(Policy(tiny_model())), wanted)
    policy = Policy(tiny_model(), native=native)
    sampler = make_sampler(policy, slots=16)
    caplog.clear()
    rows = run_short_of_memory(policy, 5, after=after)
    given = list(sampler.sample(wanted))
    assert len(given) == len(wanted), "nothing is answered twice"
    found = dict(given)
    assert [found[i].token_ids for i in range(len(wanted))] == [c.token_ids for c in expected]
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert sampler.max_slots == 4
    assert [text.partition(" (")[0].rpartition(" sampling ")[2] for text in told] == [
        "16 sequences at a time",
        "8 sequences at a time",
    ]
    assert all("(injected)" in text and "the tokens are the same" in text for text in told)
    caplog.clear()
    rows.clear()
    again = draw_all(sampler, wanted)
    assert [c.token_ids for c in again] == [c.token_ids for c in expected]
    assert max(rows) <= 5, "later calls begin with what was enough"
    assert not caplog.records


def test_what_is_answered_is_not_sampled_again() -> None:
    policy = Policy(tiny_model())
    wanted = requests(3, 1, max_new_tokens=1)
    wanted += requests(5, 1, max_new_tokens=9, min_new_tokens=9)
    rows = run_short_of_memory(policy, 4, after=4)
    found = draw_all(make_sampler(policy, slots=8), wanted)
    assert [len(c.token_ids) for c in found] == [1] * 3 + [9] * 5
    # All prompts at first, of which five are asked by those that are not answered yet.
    assert rows[0] == 5
    failed = next(n for n, count in enumerate(rows) if n > 3 and count > 4)
    assert rows[failed + 1] == 4


def test_what_does_not_fit_a_single_sequence_is_told_in_one_paragraph() -> None:
    policy = Policy(tiny_model())
    run_short_of_memory(policy, 0, after=0)
    sampler = make_sampler(policy, slots=3)
    with pytest.raises(ModelError) as raised:
        list(sampler.sample(requests(2, 2)))
    told = raised.value.paragraph()
    assert "one sequence of 24 tokens cannot be sampled in the memory of cpu: injected" in told
    assert "sampling.max_new_tokens" in told
    assert "grouper plan" in told
    assert "\n" not in told


def test_memory_of_the_host_counts_too_and_other_errors_do_not() -> None:
    wanted, policy = requests(2, 4), Policy(tiny_model())
    run_short_of_memory(policy, 4, error=MemoryError())
    sampler = make_sampler(policy, slots=8)
    assert len(draw_all(sampler, wanted)) == 8
    assert sampler.max_slots == 4
    broken = Policy(tiny_model())
    run_short_of_memory(broken, 4, error=RuntimeError("size mismatch"))
    sampler = make_sampler(broken, slots=8)
    with pytest.raises(RuntimeError, match="size mismatch"):
        draw_all(sampler, wanted)
    assert sampler.max_slots == 8


def test_what_prompts_take_is_counted_apart() -> None:
    sampler = make_sampler(Policy(tiny_model()), slots=2)
    params = SamplingParams(max_new_tokens=24, min_new_tokens=24)
    requests = [
        SampleRequest(prompt=make_prompt(i), params=params, key=draw_seed(0, i)) for i in range(4)
    ]
    started = time.perf_counter()
    list(sampler.sample(requests))
    whole = time.perf_counter() - started
    assert 0 < sampler.seconds["prefill"] < whole / 2
