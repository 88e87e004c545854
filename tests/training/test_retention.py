"""The newest stay to go on from, the best stays to be used, the rest goes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from grouper.training import retention
from grouper.training.retention import BEST_FILE, OPTIMIZER_FILE, BestScore, numbered, thin_out


def checkpoint(phase: Path, step: int, *, optimizer: bool = True) -> Path:
    folder = phase / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    names = ["model.safetensors"] + [OPTIMIZER_FILE] * optimizer
    for name in names:
        (folder / name).write_bytes(b"x")
    (folder / "trainer_state.json").write_text(json.dumps({"files": dict.fromkeys(names)}))
    return folder


def left(phase: Path) -> dict[int, set[str]]:
    """Step -> `optimizer`, `best` where the folder has them."""
    words = {OPTIMIZER_FILE: "optimizer", BEST_FILE: "best"}
    return {
        step: {word for name, word in words.items() if (folder / name).exists()}
        for step, folder in numbered(phase)
    }


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    for step in (2, 4, 10, 12):
        checkpoint(tmp_path, step)
    best = BestScore(step=4, accuracy=0.5)
    thin_out(tmp_path, step=12, keep=2, best=best)
    assert left(tmp_path) == {4: {"best"}, 10: {"optimizer"}, 12: {"optimizer"}}
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert OPTIMIZER_FILE not in state["files"]
    mark = json.loads((tmp_path / "checkpoint-4" / BEST_FILE).read_text())
    assert mark == {"step": 4, "validation_accuracy": 0.5}


def test_a_better_one_takes_the_mark_and_the_old_best_goes(tmp_path: Path) -> None:
    for step in (2, 4):
        checkpoint(tmp_path, step)
    thin_out(tmp_path, step=4, keep=2, best=BestScore(step=2, accuracy=0.5))
    assert left(tmp_path) == {2: {"optimizer", "best"}, 4: {"optimizer"}}
    checkpoint(tmp_path, 6, optimizer=False)
    thin_out(tmp_path, step=6, keep=2, best=BestScore(step=6, accuracy=0.6))
    assert left(tmp_path) == {2: {"optimizer"}, 4: {"optimizer"}, 6: {"best"}}


def test_weights_alone_do_not_count_among_those_to_go_on_from(tmp_path: Path) -> None:
    for step, optimizer in ((2, True), (4, True), (5, False)):
        checkpoint(tmp_path, step, optimizer=optimizer)
    thin_out(tmp_path, step=6, keep=2, best=BestScore())
    assert sorted(left(tmp_path)) == [2, 4]


def test_what_lies_behind_is_left_alone(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        checkpoint(tmp_path, step)
    thin_out(tmp_path, step=4, keep=1, best=BestScore())
    assert sorted(left(tmp_path)) == [4, 6]


def test_an_incomplete_one_counts_for_nothing(tmp_path: Path) -> None:
    for step in (2, 4):
        checkpoint(tmp_path, step)
    (checkpoint(tmp_path, 6) / "trainer_state.json").unlink()
    thin_out(tmp_path, step=8, keep=2, best=BestScore())
    assert sorted(left(tmp_path)) == [2, 4]


def test_what_cannot_be_removed_is_told_and_nothing_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 4):
        checkpoint(tmp_path, step)

    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(retention, "remove_folder", refuse)
    thin_out(tmp_path, step=4, keep=1, best=BestScore())
    assert "cannot be removed" in caplog.text


def test_the_best_score_survives_saving_and_ignores_what_is_no_number() -> None:
    best = BestScore()
    assert not best.offer(2, math.nan)
    for score in (BestScore(), BestScore(step=3, accuracy=0.0)):
        back = BestScore()
        back.load_state_dict(json.loads(json.dumps(score.state_dict())))
        assert back == score
