"""kill -9 at any point, twenty times; resumed to its end the run is what it would have been."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_records import differences, everything
from tiny_runs import TINY_RUN, data_from, write_problems

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).parent / "kill_driver.py"

# Every mechanism that keeps something between steps is on, and SFT teaches just enough for groups
# that are partly right: dynamic sampling, the difficulty band and the KL all have work to do.
RECIPE = [
    *TINY_RUN,
    *data_from(".."),
    "output_dir=.",
    "sft.evaluate_every=8",
    "sft.checkpoint_every=8",
    # Twelve problems, five a step: an epoch ends inside a step.
    "grpo.steps=8",
    "grpo.evaluate_every=2",
    "grpo.checkpoint_every=2",
    "grpo.keep_checkpoints=1",
    "grpo.updates_per_batch=2",
    "grpo.num_iterations=2",
    "grpo.dynamic_sampling_rounds=1",
    "grpo.beta=0.05",
    "grpo.difficulty={band: [0.2, 0.8]}",
    "grpo.optimizer.learning_rate=5e-3",
    "evaluation.samples=4",
    "evaluation.temperature=1.0",
]
# An adapter on what the other kind of run has taught: a random base learns too little through one.
LORA = [
    "model.new=null",
    "model.path=../whole-full/demo/sft/final",
    "model.lora={rank: 4, dropout: 0.2}",
    "sft.optimizer.learning_rate=5e-3",
    "grpo.optimizer.learning_rate=2e-2",
]

Fault = tuple[str, str, str, int]

# In the order in which a run meets them: each attempt resumes what the one before has left.
FAULTS: dict[str, list[Fault]] = {
    "full": [
        ("summary", "inside", "evaluations/base.json", 1),
        ("weights", "before", "sft/.checkpoint-8.", 1),
        ("weights", "inside", "sft/.checkpoint-8.", 1),
        ("optimizer", "inside", "sft/.checkpoint-8.", 1),
        ("rename", "after", "sft/.checkpoint-16.", 1),
        ("info", "before", "", 1),
        ("marker", "after", "sft/.final.", 1),
        ("update", "after", "", 2),
        ("rollouts", "inside", "rollouts/grpo-000002", 1),
        ("metrics", "inside", "grpo-2", 1),
        ("evaluation", "inside", "validation-grpo-000002", 1),
        ("marker", "before", "grpo/.checkpoint-2.", 1),
        ("rename", "before", "grpo/.checkpoint-2.", 1),
        ("metrics", "after", "grpo-3", 1),
        ("cut", "before", "grpo-000003", 1),
        ("remove", "inside", "grpo/checkpoint-2", 1),
        ("strip", "before", "grpo/checkpoint-4/optimizer", 1),
        ("strip", "inside", "grpo/checkpoint-4/optimizer", 1),
        ("rename", "after", "grpo/.final.", 1),
    ],
    "lora": [
        ("optimizer", "after", "sft/.checkpoint-16.", 1),
        ("weights", "after", "sft/.final.", 1),
        ("evaluation", "inside", "validation-grpo-000004", 1),
        ("summary", "before", "evaluations/grpo.json", 1),
    ],
}

SEEDS = (4, 11, 0, 1, 2, 3, 5, 6, 7, 8, 9, 10)
"""Which checkpoint turns out to be the best hangs on rounding, so on the processor: the first seed
is taken for which it is one that loses its optimizer when it is no longer the last."""

RANDOM_KILLS = {"full": 2, "lora": 4}


class Driver:
    """A process that has imported everything and forks runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.seed = SEEDS[0]
        self._process = subprocess.Popen(
            [sys.executable, str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._answer() == "ready"

    def run(self, name: str, kind: str, **how: Any) -> dict[str, Any]:
        """One run of the recipe, from its start or (where its folder is there) resumed."""
        folder = self._folder / name
        order = {
            "overrides": [*RECIPE, f"seed={self.seed}", *(LORA if kind == "lora" else [])],
            "resume": folder.exists(),
            "folder": str(folder),
            **how,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = self._answer()
        if answer["code"] not in (0, None):
            pytest.fail((folder / "log").read_text()[-4000:])
        return answer

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    write_problems(folder)
    return folder


@pytest.fixture(scope="module")
def driver(place: Path) -> Iterator[Driver]:
    driver = Driver(place)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def whole(driver: Driver, place: Path) -> dict[str, tuple[dict[str, Any], float]]:
    """Each kind of run without any kill: what it leaves, and the seconds it took."""
    found = {}
    for driver.seed in SEEDS:
        found["full"] = _whole(driver, place, "full")
        if _the_fourth_is_best(found["full"][0]):
            break
        shutil.rmtree(place / "whole-full")
    found["lora"] = _whole(driver, place, "lora")
    return found


def _whole(driver: Driver, place: Path, kind: str) -> tuple[dict[str, Any], float]:
    answer = driver.run(f"whole-{kind}", kind)
    assert answer["code"] == 0
    return everything(place / f"whole-{kind}" / "demo"), answer["seconds"]


def _the_fourth_is_best(files: dict[str, Any]) -> bool:
    names = {name.rpartition("grpo/checkpoint-4/")[2] for name in files}
    return "best.json" in names and not any(name.startswith("optimizer/") for name in names)


def metrics(place: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / name / "demo/metrics.jsonl").open()]


@pytest.mark.parametrize("kind", FAULTS)
def test_the_run_exercises_what_could_go_wrong(
    place: Path, whole: dict[str, Any], kind: str
) -> None:
    steps = metrics(place, f"whole-{kind}")
    grpo = [line for line in steps if line["phase"] == "grpo"]
    assert all(step["updates"] == 4 for step in grpo[:2])
    for name in ("groups/mixed", "groups/replaced", "problems/left_out", "policy/kl/max"):
        assert any(step[name] > 0 for step in grpo), name
    assert any(event.startswith("check ") for line in steps for event in line["events"])
    assert "grpo/checkpoint-8/optimizer/0.safetensors" in whole[kind][0]


def test_a_best_checkpoint_loses_its_optimizer(whole: dict[str, Any]) -> None:
    assert _the_fourth_is_best(whole["full"][0]), "no seed gives such a run"


@pytest.mark.parametrize("kind", FAULTS)
def test_killed_at_every_named_point(
    driver: Driver, place: Path, whole: dict[str, Any], kind: str
) -> None:
    name = f"named-{kind}"
    for fault in FAULTS[kind]:
        assert driver.run(name, kind, fault=fault)["signal"] == 9, f"{fault} was never met"
    assert driver.run(name, kind)["code"] == 0
    assert differences(everything(place / name / "demo"), whole[kind][0]) == []


@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.long)])
def test_killed_at_random_times(
    driver: Driver, place: Path, whole: dict[str, Any], kind: str
) -> None:
    seed = int(os.environ.get("KILL_SEED", time.time_ns() % 1_000_000))
    print(f"KILL_SEED={seed}")
    times = random.Random(f"{seed} {kind}")
    kills = attempt = 0
    while kills < RANDOM_KILLS[kind]:
        name = f"random-{kind}-{attempt}"
        answer = driver.run(name, kind, delay=times.uniform(0.05, whole[kind][1]))
        kills += answer["signal"] == 9
        if answer["code"] == 0:  # it was quicker
            attempt += 1
    if answer["code"] != 0:
        assert driver.run(name, kind)["code"] == 0
    for number in range(attempt + 1):
        path = place / f"random-{kind}-{number}" / "demo"
        if path.exists():
            assert differences(everything(path), whole[kind][0]) == [], f"KILL_SEED={seed}"


def test_there_are_twenty_kills() -> None:
    assert sum(map(len, FAULTS.values())) + sum(RANDOM_KILLS.values()) >= 20
