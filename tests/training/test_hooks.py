"""A user's hook: what it may ask for, what it cannot break, and what a resumed run makes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_runs import TINY_RUN, data_from, write_problems
from tiny_states import TinyPhase, TinyRun, tiny_state

from grouper.api import prepare, train
from grouper.cli.main import cli
from grouper.config.loading import load_recipe, recipe_hash
from grouper.config.schema import GRPOConfig
from grouper.errors import ConfigError, Interrupted
from grouper.training.hooks import UserHook
from grouper.training.loop import run_phase
from grouper.training.saved_state import numbered, read_state
from grouper.training.state import TrainState
from grouper.types import StepReport, Tally


def hook(folder: Path, body: str) -> UserHook:
    """One that returns what `body` says; it knows the step's report as `report`."""
    file = folder / "mine.py"
    file.write_text(f"import sys\n\ndef f(report):\n    step = report.step\n    {body}\n")
    return UserHook(f"{file}:f")


def run(
    folder: Path,
    body: str,
    *,
    total: int = 6,
    state: TrainState | None = None,
    open_run: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[Any, TrainState]:
    desk = TinyRun(folder / "run", **(open_run or {}))
    state = state or tiny_state()
    settings = {"evaluate_every": 0, "keep_checkpoints": 9, **config}
    phase = TinyPhase(desk, state, GRPOConfig(**settings), total)
    run_phase(desk, phase.state, phase.step, [hook(folder, body)])  # type: ignore[arg-type]  # what it asks of a session
    return desk, state


def saved(folder: Path) -> list[int]:
    return [step for step, _ in numbered(folder / "run" / "grpo")]


def events(desk: Any) -> dict[int, tuple[str, ...]]:
    return {r.step: r.events for r in desk.folder.read_metrics() if r.events}


def test_one_that_asks_for_nothing_changes_nothing(tmp_path: Path) -> None:
    desk, state = run(tmp_path, "return None")
    assert (state.step, saved(tmp_path), events(desk)) == (6, [6], {})


def test_it_may_ask_for_a_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, "return 'save' if step in (2, 3) else None")
    assert saved(tmp_path) == [2, 3, 6]


def test_it_may_ask_for_an_evaluation(tmp_path: Path) -> None:
    accuracies = {4: 0.5}  # any other step would not be found
    desk, state = run(
        tmp_path, "return ['evaluate'] if step == 4 else []", open_run={"accuracies": accuracies}
    )
    assert desk.evaluated == [4]
    assert (state.best.step, state.best.accuracy) == (4, 0.5)


def test_what_it_asks_to_stop_is_measured_saved_and_named(tmp_path: Path) -> None:
    """As at the last step of a phase: at step 2 no evaluation is due otherwise."""
    desk, state = run(
        tmp_path,
        "return {'stop'} if step == 2 else None",
        open_run={"accuracies": {0: 0.1, 2: 0.3}},
        evaluate_every=5,
    )
    assert (state.step, saved(tmp_path)[-1], desk.evaluated) == (2, 2, [0, 2])
    assert any(
        "grpo ends at step 2" in text and "mine.py:f asks" in text for text in desk.display.said
    )


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise ValueError('no more')", "raised ValueError: no more (mine.py, line 5, in f)"),
        ("sys.exit(3)", "raised SystemExit: 3"),
        ("raise type('Odd', (Exception,), {'__str__': None})", "raised Odd: <Odd that cannot"),
        ("return 'pause'", "requests 'pause', which is none of evaluate, save, stop"),
        ("return ['save', 3]", "requests 3, which is none of"),
        ("return 'evaluate'", "requests an evaluation, but there are no validation problems"),
    ],
)
def test_what_goes_wrong_in_it_is_an_event_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, body: str, told: str
) -> None:
    desk, state = run(tmp_path, body, total=2)
    assert state.step == 2
    found = events(desk)
    assert sorted(found) == [1, 2]
    assert told in found[2][0]
    assert f"grpo step 2: hook {tmp_path}/mine.py:f" in caplog.text
    assert told in caplog.text
    assert saved(tmp_path) == [2]


def test_ctrl_c_in_it_is_the_users(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "raise KeyboardInterrupt")


def test_it_cannot_change_the_record(tmp_path: Path) -> None:
    desk, _ = run(tmp_path, "report.tallies.clear()", total=1)
    assert desk.folder.read_metrics()[0].mean("loss") == 1.0


def again(folder: Path, step: int, total: int = 6) -> TrainState:
    """The state of a checkpoint, as a resumed run of so many steps has it."""
    state = tiny_state(total=total)
    state.restore(read_state(folder / "run" / "grpo" / f"checkpoint-{step}"))
    return state


STOPS = "return 'stop' if step == 2 else None"


def test_a_run_that_is_killed_before_its_final_model_ends_where_the_hook_said(
    tmp_path: Path,
) -> None:
    run(tmp_path, STOPS)
    _, state = run(tmp_path, STOPS, state=again(tmp_path, 2))
    assert state.step == 2


def test_with_more_steps_it_goes_on_after_the_stop(tmp_path: Path) -> None:
    run(tmp_path, STOPS)
    _, state = run(tmp_path, STOPS, state=again(tmp_path, 2, 8), total=8)
    assert state.step == 8


def test_an_evaluation_that_was_interrupted_is_made_up_for(tmp_path: Path) -> None:
    body = "return 'evaluate' if step == 3 else None"

    class Stopping(TinyRun):
        def evaluate(self, *_: Any, **__: Any) -> Any:
            raise Interrupted("stopped on request")

    desk = Stopping(tmp_path / "run", {3: 0.5})
    phase = TinyPhase(desk, tiny_state(), GRPOConfig(evaluate_every=0), 6)
    with pytest.raises(Interrupted):
        run_phase(desk, phase.state, phase.step, [hook(tmp_path, body)])  # type: ignore[arg-type]  # what it asks of a session
    resumed, _ = run(tmp_path, body, state=again(tmp_path, 3), open_run={"accuracies": {3: 0.5}})
    assert resumed.evaluated == [3]


class Follower:
    """Rank 1 of two: what rank 0 has said comes from there."""

    rank, size = 1, 2

    def __init__(self, told: Any) -> None:
        self._told = told

    def on_rank0(self, work: Callable[[], Any]) -> Any:
        del work
        return self._told


def test_every_process_does_what_rank_0_was_asked(tmp_path: Path) -> None:
    mine = hook(tmp_path, "raise AssertionError('called beside rank 0')")
    told = object()
    open_run: Any = type("OpenRun", (), {"processes": Follower(told)})
    assert mine.after_step(open_run, None, None) is told  # type: ignore[arg-type]  # neither is looked at


# --- whole runs ----------------------------------------------------------------------------------


def recipe(folder: Path, *overrides: str) -> Any:
    write_problems(folder)
    given = [f"output_dir={folder}", "name=run", "sft.steps=1", "grpo.steps=4"]
    return load_recipe("demo", [*TINY_RUN, *data_from(str(folder)), *given, *overrides])


@pytest.mark.slow
def test_a_run_that_a_hook_ended_is_finished_and_can_be_prolonged(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def f(report):\n"
        "    return 'stop' if (report.phase, report.step) == ('grpo', 2) else None\n"
    )
    hooks = f"hooks=['{file}:f']"

    def go_on(*overrides: str, **intent: bool) -> tuple[int, int, list[str]]:
        with prepare(recipe(tmp_path, hooks, *overrides)) as setup:
            result = train(setup, **intent)
        state = json.loads((result.path / "grpo" / "final" / "trainer_state.json").read_text())
        return state["step"], state["total"], [r.name for r in result.results]

    assert go_on() == (2, 4, ["base", "sft", "grpo"])
    # Nothing is left to do, and nothing is done.
    assert go_on(resume=True) == (2, 4, ["base", "sft", "grpo"])
    assert go_on("grpo.steps=5", resume=True) == (5, 5, ["base", "sft", "grpo"])
    # Another text of the function is another code.
    file.write_text("def f(report):\n    return None\n")
    with pytest.raises(Exception, match=r"the code changed since this run began: .*mine\.py"):
        go_on("grpo.steps=6", resume=True)


@pytest.mark.slow
def test_what_a_hook_asked_for_goes_with_it(tmp_path: Path) -> None:
    """A run that is killed between its last checkpoint and its final model, then without hook."""
    file = tmp_path / "mine.py"
    file.write_text("def f(report):\n    return 'stop' if report.phase == 'grpo' else None\n")
    with prepare(recipe(tmp_path, f"hooks=['{file}:f']")) as setup:
        path = train(setup).path
    assert read_state(path / "grpo" / "final")["step"] == 1
    shutil.rmtree(path / "grpo" / "final")
    with prepare(recipe(tmp_path)) as setup:
        train(setup, resume=True, allow_changes=True)
    assert read_state(path / "grpo" / "final")["step"] == 4


def test_which_hooks_look_on_is_no_part_of_the_experiment(tmp_path: Path) -> None:
    hooked = recipe(tmp_path, "hooks=['mine.py:f']")
    assert hooked.hooks == ("mine.py:f",)
    assert recipe_hash(hooked) == recipe_hash(recipe(tmp_path))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nofile.py:f", "there is no file nofile.py"),
        ("mine.py:g", "mine.py has no function 'g'"),
        ("mine.py:none", "cannot be called with a report"),
        ("stop", "there is no hook 'stop'"),
    ],
)
def test_a_wrong_reference_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def f(report): ...\n\n\ndef none(): ...\n")
    with pytest.raises(ConfigError, match=told):
        prepare(recipe(tmp_path, f"hooks=['{name}']", "data.train.path=not-there.jsonl"))
    for switches in ([], ["--dry-run"]):
        arguments = ["run", "demo", f"hooks=['{name}']", "output_dir=out", *switches]
        refused = CliRunner().invoke(cli, arguments)
        assert isinstance(refused.exception, ConfigError)
        assert told in str(refused.exception)
    assert not Path("out").exists()


def test_a_metric_that_is_not_there_is_answered_with_the_nearest_one() -> None:
    report = StepReport(phase="grpo", step=3, status="", tallies={"groups/mixed": Tally.of([1.0])})
    assert report.mean("groups/mixed") == 1.0
    with pytest.raises(KeyError, match="grpo step 3 has no metric 'group/mixed': did you mean"):
        report.mean("group/mixed")
