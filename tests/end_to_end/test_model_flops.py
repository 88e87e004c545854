"""The arithmetic that benchmarks compare with, against torch's own counter and against a walk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.planning.model_flops import (
    ModelShape,
    forward_flops,
    sampling_flops,
    seen_pairs,
    shape_of,
    update_flops,
)
from grouper.models.policy import Policy

LENGTH = 11
SHAPE = ModelShape(
    body=1000, trained_body=1000, head=70, trained_head=70, attention=8, windows=(None, 3)
)


def counted(policy: Policy, *, backward: bool) -> int:
    """What torch counts for one row of `LENGTH` tokens, all of whose logits are needed."""
    policy.model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        logits = policy.model(input_ids=torch.arange(LENGTH)[None] + 6).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("backward", [False, True])
def test_they_are_what_torch_counts_but_for_masked_pairs(family: str, backward: bool) -> None:
    policy = Policy(tiny_model(family))
    found = shape_of(policy)
    shape = replace(found, windows=())
    layers = policy.model.config.num_hidden_layers
    # `eager` multiplies all pairs, those a causal mask hides as well.
    pairs = 4 * layers * shape.attention * LENGTH**2
    # Of one row without a prompt of its own: one token and `LENGTH` targets after it.
    rows = [(1, [LENGTH])]
    if backward:
        assert counted(policy, backward=True) == update_flops(shape, rows) + 3 * pairs
    else:
        assert counted(policy, backward=False) == forward_flops(shape, rows) + pairs


def test_frozen_weights_need_no_gradient_of_their_own() -> None:
    rows = [(5, [4, 7])]
    frozen = replace(SHAPE, trained_body=0, trained_head=0)
    tokens, scored = 5 + 3 + 6, 11
    spared = 2 * SHAPE.body * tokens + 2 * SHAPE.head * scored
    assert update_flops(SHAPE, rows) - update_flops(frozen, rows) == spared


def test_a_prompt_counts_once_for_its_completions() -> None:
    assert sampling_flops(SHAPE, [(50, [4] * 8)]) < 2 * sampling_flops(SHAPE, [(50, [4])])
    apart = sampling_flops(SHAPE, [(50, [4])])
    assert sampling_flops(SHAPE, [(50, [4])] * 8) == 8 * apart


@given(
    start=st.integers(0, 12),
    length=st.integers(0, 12),
    window=st.none() | st.integers(1, 9),
)
def test_pairs_are_those_that_a_walk_finds(start: int, length: int, window: int | None) -> None:
    walked = sum(min(p + 1, window or p + 1) for p in range(start, start + length))
    assert seen_pairs(start, start + length, window) == walked
