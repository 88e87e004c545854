"""Problem order: each epoch holds every item once, and nothing but the address decides it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_group

from grouper.config.schema import DifficultyConfig, SFTConfig
from grouper.errors import ConfigError
from grouper.training.curriculum import (
    DifficultyBand,
    ProblemStream,
    read_pass_rates,
    total_steps,
)
from grouper.types import RolloutGroup


@given(size=st.integers(1, 40), per_step=st.integers(1, 17), seed=st.integers(0, 5))
def test_every_epoch_holds_every_item_once(size: int, per_step: int, seed: int) -> None:
    """T20, T31: also where steps cross the edge of an epoch."""
    stream = ProblemStream(size=size, seed=seed, phase="grpo")
    seen: list[int] = []
    position = 0
    while position < 3 * size * per_step:
        taken, position = stream.take(position, per_step)
        seen += taken
    assert position == len(seen) == 3 * size * per_step
    for epoch in range(3 * per_step):
        assert Counter(seen[epoch * size : (epoch + 1) * size]) == Counter(range(size))


def test_a_step_is_the_same_whenever_it_is_asked_for() -> None:
    first = ProblemStream(size=7, seed=1, phase="sft")
    straight = [first.take(3 * step, 3) for step in range(20)]
    second = ProblemStream(size=7, seed=1, phase="sft")
    assert [second.take(3 * step, 3) for step in reversed(range(20))] == straight[::-1]


def test_seeds_and_phases_have_their_own_orders() -> None:
    orders = {
        tuple(ProblemStream(size=30, seed=seed, phase=phase).take(0, 30)[0])
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


def test_a_share_of_an_epoch_is_what_its_decimals_say() -> None:
    assert total_steps(SFTConfig(epochs=0.29), size=100, per_step=1) == 29


def test_a_difficulty_band_holds_beyond_the_first_epoch() -> None:
    """T2: ten of a hundred problems are in the band, and a step wants sixteen."""
    stream = ProblemStream(size=100, seed=0, phase="grpo")
    position = 0
    for _ in range(20):
        taken, position = stream.take(position, 16, lambda index, epoch: index < 10)
        assert len(taken) == 16
        assert max(taken) < 10


def test_a_stream_in_which_nothing_is_wanted_does_not_end() -> None:
    stream = ProblemStream(size=5, seed=0, phase="grpo")
    taken, position = stream.take(0, 3, lambda index, epoch: False)
    assert len(taken) == 3
    assert position == 5 + 3


# --- the difficulty band: who is left out, for how long, and what a checkpoint keeps of it


BAND = DifficultyConfig(band=(0.2, 0.8))


def solved(number: int, correct: int, of: int = 4) -> RolloutGroup:
    flags = [i < correct for i in range(of)]
    return make_group(number, [float(f) for f in flags], [2] * of, correct=flags)


def test_what_is_never_or_always_solved_is_left_out_for_a_while() -> None:
    band = DifficultyBand(BAND)
    band.update([solved(0, 0), solved(1, 2), solved(2, 4)], epoch=0)
    names = ["p/0", "p/1", "p/2", "p/unknown"]
    assert [band.allows(name, 1) for name in names] == [False, True, False, True]
    # Tried again once more than three epochs have passed, and judged anew.
    assert not band.allows("p/0", 3)
    assert [band.allows(name, 4) for name in names] == [True] * 4
    band.update([solved(0, 1), solved(1, 0)], epoch=4)
    assert band.allows("p/0", 5)
    assert [band.allows("p/1", epoch) for epoch in (5, 7, 8)] == [False, False, True]


def test_the_borders_belong_to_the_band() -> None:
    band = DifficultyBand(DifficultyConfig(band=(0.25, 0.75)))
    band.update([solved(0, 1), solved(1, 3)], epoch=0)
    assert band.allows("p/0", 1)
    assert band.allows("p/1", 1)


def write_rates(folder: Path, **solved: int) -> str:
    """A file of pass rates: how many of 8 completions of each problem were right."""
    file = folder / "rates.jsonl"
    rows = ({"problem_id": f"p/{n[1:]}", "correct": c, "completions": 8} for n, c in solved.items())
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_rates_from_a_file_hold_until_the_run_has_its_own(tmp_path: Path) -> None:
    band = DifficultyBand(DifficultyConfig(path=write_rates(tmp_path, p0=0, p1=4)))
    assert not band.allows("p/0", 1)
    assert band.allows("p/1", 1)
    band.update([solved(0, 2), solved(1, 0)], epoch=1)
    assert band.allows("p/0", 2)
    assert not band.allows("p/1", 2)


def test_the_state_survives_a_checkpoint(tmp_path: Path) -> None:
    band = DifficultyBand(BAND.model_copy(update={"path": write_rates(tmp_path, p9=0)}))
    band.update([solved(0, 0), solved(1, 4)], epoch=3)
    restored = DifficultyBand(BAND)
    restored.seen = json.loads(json.dumps(band.seen))
    for name in ("p/0", "p/1", "p/9"):
        for epoch in range(8):
            assert restored.allows(name, epoch) == band.allows(name, epoch)


def test_pass_rates_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rates.jsonl"
    file.write_text('{"problem_id": "a/1", "correct": 3, "completions": 8, "subject": "x"}\n')
    assert read_pass_rates(file) == {"a/1": (3, 8)}
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pass_rates(file)


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        '{"problem_id": "a/1"}',
        '{"problem_id": "a/1", "correct": 9, "completions": 8}',
        '{"problem_id": "a/1", "correct": 0, "completions": 0}',
        '{"problem_id": "a/1", "correct": "x", "completions": 8}',
    ],
)
def test_a_wrong_line_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "rates.jsonl"
    file.write_text(f'{{"problem_id": "a/0", "correct": 3, "completions": 8}}\n{line}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_pass_rates(file)


def test_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="grouper data difficulty"):
        read_pass_rates(tmp_path / "none.jsonl")
