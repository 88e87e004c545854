"""Problem order: each epoch holds every item once, and nothing but the address decides it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grouper.config.schema import SFTConfig
from grouper.training.curriculum import ProblemStream, total_steps


@given(size=st.integers(1, 40), per_step=st.integers(1, 17), seed=st.integers(0, 5))
def test_every_epoch_holds_every_item_once(size: int, per_step: int, seed: int) -> None:
    """T20, T31: also where steps cross the edge of an epoch."""
    stream = ProblemStream(size=size, per_step=per_step, seed=seed, phase="grpo")
    seen = [index for step in range(3 * size) for index in stream.at(step)]
    for epoch in range(3 * per_step):
        assert Counter(seen[epoch * size : (epoch + 1) * size]) == Counter(range(size))


def test_a_step_is_the_same_whenever_it_is_asked_for() -> None:
    first = ProblemStream(size=7, per_step=3, seed=1, phase="sft")
    straight = [first.at(step) for step in range(20)]
    second = ProblemStream(size=7, per_step=3, seed=1, phase="sft")
    assert [second.at(step) for step in reversed(range(20))] == straight[::-1]


def test_seeds_and_phases_have_their_own_orders() -> None:
    orders = {
        tuple(ProblemStream(size=30, per_step=30, seed=seed, phase=phase).at(0))
        for seed in range(3)
        for phase in ("sft", "grpo")
    }
    assert len(orders) == 6


@pytest.mark.parametrize(
    ("config", "expected"),
    [(SFTConfig(steps=9), 9), (SFTConfig(epochs=0.5), 2), (SFTConfig(epochs=0.001), 1)],
)
def test_steps_of_a_phase(config: SFTConfig, expected: int) -> None:
    assert total_steps(config, size=100, per_step=32) == expected


def test_a_difficulty_band_holds_beyond_the_first_epoch() -> None:
    """T2: ten of a hundred problems are in the band, and a step wants sixteen."""
    stream = ProblemStream(size=100, per_step=16, seed=0, phase="grpo")
    position = 0
    for _ in range(20):
        taken, position = stream.take(position, 16, lambda index, epoch: index < 10)
        assert len(taken) == 16
        assert max(taken) < 10


def test_a_stream_in_which_nothing_is_wanted_does_not_end() -> None:
    stream = ProblemStream(size=5, per_step=3, seed=0, phase="grpo")
    taken, position = stream.take(0, 3, lambda index, epoch: False)
    assert len(taken) == 3
    assert position == 5 + 3
