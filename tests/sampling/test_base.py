"""The shipped fake meets the protocol and its length limit."""

from __future__ import annotations

from tiny_models import make_prompt

from grouper.sampling.base import Sampler, SampleRequest, ScriptedSampler
from grouper.types import FinishReason, SamplingParams


def test_answers_are_cut_at_the_limit() -> None:
    sampler = ScriptedSampler(lambda request, index: "abcdef" if index else "ab")
    assert isinstance(sampler, Sampler)
    params = SamplingParams(max_new_tokens=4)
    wanted = [SampleRequest(prompt=make_prompt(0), params=params, key=0)] * 2
    short, long = (completion for _, completion in sampler.sample(wanted))
    assert (short.text, short.finish_reason) == ("ab", FinishReason.STOP_TOKEN)
    assert (long.text, long.finish_reason) == ("abcd", FinishReason.LENGTH)
    assert len(long.token_ids) == 4
