from __future__ import annotations

import time

from tiny_models import LetterTokenizer, make_prompt, tiny_model

from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.times import SampleTimes
from grouper.sampling.weights import SamplingWeights
from grouper.types import SamplingParams


def test_seconds_are_added_up_and_taken_once() -> None:
    times = SampleTimes()
    for _ in range(2):
        with times.prefill():
            time.sleep(0.02)
    assert times.take() >= 0.04
    assert times.take() == 0.0


def test_a_sampler_fills_them_and_decoding_is_no_part_of_them() -> None:
    weights = SamplingWeights(Policy(tiny_model()), None)
    sampler = NativeSampler(weights, LetterTokenizer(), stop_token_ids=(2,), max_slots=2)
    params = SamplingParams(max_new_tokens=24, min_new_tokens=24)
    requests = [
        SampleRequest(prompt=make_prompt(i), params=params, key=draw_seed(0, i)) for i in range(4)
    ]
    started = time.perf_counter()
    list(sampler.sample(requests))
    whole = time.perf_counter() - started
    assert 0 < sampler.times.take() < whole / 2
