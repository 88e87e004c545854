"""What runs beside training where vLLM has a device of its own: validation, the next rollouts.

With the fake engine, whose numbers are the same in every run.
"""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TINY_RUN, data_from, write_problems

from grouper import load_recipe
from grouper.advice import checks, recipe_checks
from grouper.errors import Interrupted
from grouper.evaluation.result import EvaluationResult
from grouper.runs.folder import RunFolder
from grouper.runs.progress import Progress
from grouper.sampling import factory
from grouper.sampling.factory import Samplers
from grouper.training.hooks import Hook, HookReply
from grouper.training.pipeline import train
from grouper.training.run import Run
from grouper.training.validation import Validation

for folder in ("sampling", "invariants"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))

from fake_vllm import FakeVllm
from run_records import unsigned

pytestmark = pytest.mark.slow

SETTINGS = [
    *TINY_RUN,
    "skip_sft=true",
    "model.new.hidden_size=128",
    "data.test=null",
    "data.sft=null",
    "grpo.steps=5",
    "grpo.prompts_per_step=2",
    "grpo.require_correct_in_group=false",
    "grpo.evaluate_every=2",
    "grpo.checkpoint_every=2",
    "grpo.keep_checkpoints=1",
    "grpo.optimizer.learning_rate=1e-3",
    "sampling.max_new_tokens=6",
    "rewards=[{name: 'by_length.py:shorter'}]",
    "sampling.engine=vllm",
    "sampling.vllm.mode=server",
    "tracking.token_groups=all",
]
BESIDE = "evaluation.servers=[auto]"
AHEAD = "grpo.max_staleness=1"

REWARD = """
def shorter(*, completions, completion_ids, **kwargs):
    return [float(len(ids) + sum(ids) % 3) for ids in completion_ids]
"""


class Engine(FakeVllm):
    """Says when it begins to draw beside the trainer, and waits there until it may go on."""

    def __init__(self, *given: Any, world: World) -> None:
        super().__init__(*given)
        self.world = world

    def answers(self, asks: Sequence[Any]) -> Iterator[Any]:
        if threading.current_thread() is not threading.main_thread():
            self.world.drawing_beside(self)
        yield from super().answers(asks)


class World(Hook):
    """The engines of a run, and what happens in it."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.moved = threading.Condition()
        self.step, self.waits, self.seen = 0, False, list[tuple[int, int]]()
        self.fails, self.stop_after = None, None

    def start(self, samplers: Samplers, policy: Any, folder: Path) -> Engine:
        self.engines.append(Engine(policy.model, samplers.tokenizer, world=self))
        return self.engines[-1]

    def drawing_beside(self, engine: Engine) -> None:
        with self.moved:
            begun = self.step
            if self.fails is not None and begun in self.fails:
                raise RuntimeError("the card is gone")
            if self.waits and begun < 4:
                assert self.moved.wait_for(lambda: self.step > begun, timeout=30)
            self.seen.append((begun, self.step))

    def after_step(self, run: Run, state: Any, report: Any) -> HookReply:
        with self.moved:
            self.step = report.step
            self.moved.notify_all()
        if self.step == self.stop_after:
            run.stop.requested = True
        return HookReply()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    write_problems(tmp_path)
    Path("by_length.py").write_text(REWARD)
    made = World()
    monkeypatch.setattr(factory, "_start_vllm", made.start)
    monkeypatch.setattr(recipe_checks, "require_vllm", lambda: "0.32.0")
    # The best is not the last one.
    better = property(lambda result: {0: 0.1, 2: 0.6, 4: 0.3, 5: 0.2}[result.step])
    monkeypatch.setattr(EvaluationResult, "accuracy", better)
    return made


def run(world: World, name: str, *more: str, resume: bool = False) -> RunFolder:
    data = [row for row in data_from(".") if row.startswith(("data.train", "data.validation"))]
    recipe = load_recipe("demo", [*SETTINGS, *data, f"name={name}", "output_dir=.", *more])
    with Run(recipe, Progress(quiet=True), resume=resume) as opened:
        train(opened, [world])
    return RunFolder(name)


def numbers(folder: RunFolder) -> dict[str, Any]:
    """The record without times, and without what only background validation leaves."""
    metrics = [
        {k: v for k, v in r.tallies.items() if not k.startswith(("time.", "memory."))}
        for r in folder.read_metrics()
    ]
    files = [*folder.path.glob("evaluations/*.jsonl.gz"), *folder.path.glob("rollouts/*")]
    best = {}
    for mark in folder.path.glob("grpo/checkpoint-*/best.json"):
        weights = mark.with_name("model.safetensors").read_bytes()
        best[mark.parent.name] = mark.read_text(), weights
    validations = [(e.step, e.accuracy, e.interval) for e in folder.read_evaluations()]
    # Rows carry the hash of their recipe, in which the run's name is.
    read = {f.name: unsigned(gzip.decompress(f.read_bytes())) for f in files}
    return {"metrics": metrics, "best": best, "validations": validations, **read}


def state_of(folder: RunFolder, step: int) -> dict[str, Any]:
    path = folder.path / "grpo" / f"checkpoint-{step}" / "trainer_state.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


# --- validation ----------------------------------------------------------------------------------


def test_training_goes_on_while_a_validation_runs(world: World) -> None:
    blocking = numbers(run(world, "blocking"))
    assert len(world.engines) == 1
    assert not world.seen
    world.step, world.waits = 0, True
    beside = run(world, "beside", BESIDE)
    assert len(world.engines) == 3, "rollouts and validation have a server each"
    assert [(begun, ended > begun) for begun, ended in world.seen] == [
        (0, True),
        (2, True),
        (4, False),
        (5, False),
    ]
    assert numbers(beside) == blocking
    assert [step for step, _, _ in blocking["validations"]] == [0, 2, 4, 5]
    assert blocking["best"].keys() == {"checkpoint-2"}


def test_a_validation_that_fails_is_reported_and_the_next_one_is_tried(world: World) -> None:
    world.fails = {2}
    folder = run(world, "run", BESIDE)
    assert [e.step for e in folder.read_evaluations()] == [0, 4, 5]
    events = [e for r in folder.read_metrics() for e in r.events]
    assert [e for e in events if "validation-failed" in e] == [
        "validation-failed: no validation at step 2: RuntimeError('the card is gone')"
    ]
    assert len(folder.read_metrics()) == 5


def test_servers_that_do_not_start_lose_validations_and_not_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(samplers: Samplers, policy: Any, folder: Path) -> Engine:
        if samplers.recipe.sampling.vllm.servers:
            raise OSError("no such card")
        return world.start(samplers, policy, folder)

    monkeypatch.setattr(factory, "_start_vllm", start)
    folder = run(world, "run", BESIDE)
    assert not folder.read_evaluations()
    assert sum("no such card" in e for r in folder.read_metrics() for e in r.events) == 3


def test_a_validation_that_was_running_is_started_again(world: World) -> None:
    blocking = numbers(run(world, "blocking"))
    world.step, world.waits, world.stop_after = 0, True, 3
    world.fails = {2}  # as a run that is closed gives it up
    settle = Validation.settle
    with pytest.MonkeyPatch.context() as patch:
        # The failure is seen by nobody before the run ends.
        patch.setattr(
            Validation,
            "settle",
            lambda self, **how: self.state.best.pending == 2 or settle(self, **how),
        )
        with pytest.raises(Interrupted):
            run(world, "cut", BESIDE)
    cut = RunFolder("cut")
    assert state_of(cut, 3)["best"]["pending"] == 2
    assert (cut.path / "grpo" / "checkpoint-2").is_dir(), "its weights were kept"
    world.fails, world.waits, world.stop_after = None, False, None
    assert numbers(run(world, "cut", BESIDE, resume=True)) == blocking


# --- rollouts ahead ------------------------------------------------------------------------------


def versions(folder: RunFolder) -> list[set[int]]:
    steps = range(1, 6)
    return [{r["policy_version"] for r in folder.read_rollouts("grpo", s)} for s in steps]


def test_the_next_rollouts_are_one_step_old(world: World) -> None:
    world.waits = True
    folder = run(world, "ahead", AHEAD)
    assert [begun for begun, _ in world.seen] == [0, 1, 2, 3]
    assert all(ended > begun for begun, ended in world.seen), "trained meanwhile"
    done = [int(r.tallies["updates"].sum) for r in folder.read_metrics()]
    known = [sum(done[:step]) for step in range(5)]
    assert known[-1] >= 3, "something was learned"
    assert versions(folder) == [{0}, *({known[step - 1]} for step in range(1, 5))]
    for report in folder.read_metrics():
        assert report.mean("sampler_push_gap") < 1e-5
        assert report.mean("time.other") >= 0
    record = checks.read_record(folder.path)
    assert not list(checks.stale_sampler(record))
    off = run(world, "plain")
    done = [int(r.tallies["updates"].sum) for r in off.read_metrics()]
    assert versions(off) == [{sum(done[:step])} for step in range(5)]


@pytest.mark.parametrize("band", [(), ("grpo.difficulty={}", "grpo.dynamic_sampling_rounds=1")])
def test_a_resumed_run_has_the_same_rollouts(world: World, band: tuple[str, ...]) -> None:
    whole = numbers(run(world, "whole", AHEAD, *band))
    world.step, world.stop_after = 0, 3
    with pytest.raises(Interrupted):
        run(world, "cut", AHEAD, *band)
    assert Path("cut/grpo/checkpoint-3/ahead.json").exists()
    world.stop_after = None
    assert numbers(run(world, "cut", AHEAD, *band, resume=True)) == whole


def test_what_fails_ahead_is_said_by_the_next_step(world: World) -> None:
    world.fails = {1}
    with pytest.raises(RuntimeError, match="is gone"):
        run(world, "run", AHEAD)
    assert len(RunFolder("run").read_metrics()) == 2
    world.fails = None
    assert len(run(world, "run", AHEAD, resume=True).read_metrics()) == 5
