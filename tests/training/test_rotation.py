"""The newest stay to go on from, the best stays to be used, the rest goes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from grouper.evaluation.statistics import wilson_interval
from grouper.models.folders import BEST_FILE, STATE_FILE
from grouper.training import rotation, saved_state
from grouper.training.rotation import rotate
from grouper.training.saved_state import OPTIMIZER_FOLDER, last_good, numbered
from grouper.training.state import BestScore

OPTIMIZER_FILE = f"{OPTIMIZER_FOLDER}/0.safetensors"


def make(phase: Path, step: int, *, optimizer: bool = True) -> Path:
    folder = phase / f"checkpoint-{step}"
    (folder / OPTIMIZER_FOLDER).mkdir(parents=True)
    names = ["model.safetensors"] + [OPTIMIZER_FILE] * optimizer
    for name in names:
        (folder / name).write_bytes(b"x")
    if not optimizer:
        (folder / OPTIMIZER_FOLDER).rmdir()
    state = {
        "phase": "grpo",
        "step": step,
        "total": 12,
        "skipped": 0,
        "position": 0,
        "epoch_ended": False,
        "checks": {},
        "asked": {},
        "difficulty": None,
        "best": {"step": None, "accuracy": 0.0, "interval": None, "pending": None},
        "policy_version": step,
        "started_from": "base",
        "recipe_hash": "",
        "files": dict.fromkeys(names, ""),
    }
    assert state.keys() == {*saved_state._KEYS}
    (folder / STATE_FILE).write_text(json.dumps(state))
    return folder


def left(phase: Path) -> dict[int, set[str]]:
    """Step -> `optimizer`, `best` where the folder has them."""
    words = {OPTIMIZER_FOLDER: "optimizer", BEST_FILE: "best"}
    return {
        step: {word for name, word in words.items() if (folder / name).exists()}
        for step, folder in numbered(phase)
    }


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    for step in (2, 4, 10, 12):
        make(tmp_path, step)
    best = BestScore(step=4, accuracy=0.5)
    rotate(tmp_path, step=12, keep=2, best=best)
    assert left(tmp_path) == {4: {"best"}, 10: {"optimizer"}, 12: {"optimizer"}}
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert OPTIMIZER_FILE not in state["files"]
    mark = json.loads((tmp_path / "checkpoint-4" / BEST_FILE).read_text())
    assert mark == {"step": 4, "validation_accuracy": 0.5}


def test_the_best_one_says_its_accuracy_with_its_interval(tmp_path: Path) -> None:
    make(tmp_path, 4)
    best = BestScore()
    assert best.offer(4, 0.5, wilson_interval(5, 10))
    rotate(tmp_path, step=4, keep=1, best=best)
    mark = json.loads((tmp_path / "checkpoint-4" / BEST_FILE).read_text())
    assert mark == {
        "step": 4,
        "validation_accuracy": 0.5,
        "low": pytest.approx(0.2366, abs=1e-4),
        "high": pytest.approx(0.7634, abs=1e-4),
    }


def test_a_better_one_takes_the_mark_and_the_old_best_goes(tmp_path: Path) -> None:
    for step in (2, 4):
        make(tmp_path, step)
    rotate(tmp_path, step=4, keep=2, best=BestScore(step=2, accuracy=0.5))
    assert left(tmp_path) == {2: {"optimizer", "best"}, 4: {"optimizer"}}
    make(tmp_path, 6, optimizer=False)
    rotate(tmp_path, step=6, keep=2, best=BestScore(step=6, accuracy=0.6))
    assert left(tmp_path) == {2: {"optimizer"}, 4: {"optimizer"}, 6: {"best"}}


def test_weights_alone_do_not_count_among_those_to_go_on_from(tmp_path: Path) -> None:
    for step, optimizer in ((2, True), (4, True), (5, False)):
        make(tmp_path, step, optimizer=optimizer)
    rotate(tmp_path, step=6, keep=2, best=BestScore())
    assert sorted(left(tmp_path)) == [2, 4]


def test_what_lies_behind_is_left_alone(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make(tmp_path, step)
    rotate(tmp_path, step=4, keep=1, best=BestScore())
    assert sorted(left(tmp_path)) == [4, 6]


def test_an_incomplete_one_counts_for_nothing(tmp_path: Path) -> None:
    for step in (2, 4):
        make(tmp_path, step)
    (make(tmp_path, 6) / "trainer_state.json").unlink()
    rotate(tmp_path, step=8, keep=2, best=BestScore())
    assert sorted(left(tmp_path)) == [2, 4]


def test_what_cannot_be_removed_is_told_and_nothing_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 4):
        make(tmp_path, step)

    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(rotation, "remove_folder", refuse)
    rotate(tmp_path, step=4, keep=1, best=BestScore())
    assert "cannot be removed" in caplog.text


def test_what_is_no_number_is_no_best_score() -> None:
    best = BestScore()
    assert not best.offer(2, math.nan)
    assert best == BestScore()
    assert best.offer(2, 0.0)
    assert not best.offer(3, math.nan)
    assert best == BestScore(step=2, accuracy=0.0)


def test_a_kill_while_the_best_one_loses_its_optimizer_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        make(tmp_path, step)
    best = BestScore(step=2, accuracy=0.5)

    class Killed(BaseException):
        pass

    def die(_: Path) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(rotation.shutil, "rmtree", die)
        with pytest.raises(Killed):
            rotate(tmp_path, step=4, keep=1, best=best)
    assert left(tmp_path)[2] == {"optimizer", "best"}
    assert str(tmp_path / "checkpoint-4") in last_good(tmp_path, 3), (
        "nothing to go on from any more"
    )
    rotate(tmp_path, step=4, keep=1, best=best)
    assert left(tmp_path) == {2: {"best"}, 4: {"optimizer"}}


def test_the_last_good_one_is_from_before_or_else_the_oldest(tmp_path: Path) -> None:
    assert last_good(tmp_path, 9) == "there is no checkpoint of this phase yet"
    for step, optimizer in ((2, False), (4, True), (6, True)):
        make(tmp_path, step, optimizer=optimizer)
    assert last_good(tmp_path, 9) == f"{tmp_path / 'checkpoint-6'} is from before these steps"
    assert last_good(tmp_path, 5) == f"{tmp_path / 'checkpoint-4'} is from before these steps"
    assert last_good(tmp_path, 3) == f"{tmp_path / 'checkpoint-4'} is the oldest that is left"
