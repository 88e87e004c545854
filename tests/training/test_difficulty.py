"""The difficulty band: who is left out, for how long, and what a checkpoint keeps of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import make_group

from grouper.config.schema import DifficultyConfig
from grouper.errors import ConfigError
from grouper.training.difficulty import DifficultyBand, read_pass_rates
from grouper.types import RolloutGroup

BAND = DifficultyConfig(low=0.2, high=0.8, recheck_epochs=2)


def solved(number: int, correct: int, of: int = 4) -> RolloutGroup:
    flags = [i < correct for i in range(of)]
    return make_group(number, [float(f) for f in flags], [2] * of, correct=flags)


def test_what_is_never_or_always_solved_is_left_out_for_a_while() -> None:
    band = DifficultyBand(BAND)
    band.update([solved(0, 0), solved(1, 2), solved(2, 4)], epoch=0)
    names = ["p/0", "p/1", "p/2", "p/unknown"]
    assert [band.allows(name, 1) for name in names] == [False, True, False, True]
    assert band.left_out(names, 1) == 2
    # Tried again once more than two epochs have passed, and judged anew.
    assert [band.allows(name, 3) for name in names] == [True] * 4
    band.update([solved(0, 1)], epoch=3)
    assert band.allows("p/0", 4)


def test_the_borders_belong_to_the_band() -> None:
    band = DifficultyBand(DifficultyConfig(low=0.25, high=0.75))
    band.update([solved(0, 1), solved(1, 3)], epoch=0)
    assert band.allows("p/0", 1)
    assert band.allows("p/1", 1)


def test_never_again_and_never_learned() -> None:
    never = DifficultyBand(DifficultyConfig(recheck_epochs=0), {"p/0": (0, 8)})
    assert not never.allows("p/0", 1000)
    fixed = DifficultyBand(DifficultyConfig(online=False, file="x"), {"p/0": (4, 8)})
    fixed.update([solved(0, 0)], epoch=0)
    assert fixed.allows("p/0", 1)


def test_the_state_survives_a_checkpoint() -> None:
    band = DifficultyBand(BAND, {"p/9": (0, 8)})
    band.update([solved(0, 0), solved(1, 4)], epoch=3)
    restored = DifficultyBand(BAND)
    restored.load_state_dict(json.loads(json.dumps(band.state_dict())))
    for name in ("p/0", "p/1", "p/9"):
        for epoch in range(8):
            assert restored.allows(name, epoch) == band.allows(name, epoch)


def test_pass_rates_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rates.jsonl"
    file.write_text('{"problem_id": "a/1", "correct": 3, "completions": 8, "subject": "x"}\n')
    assert read_pass_rates(file) == {"a/1": (3, 8)}


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
