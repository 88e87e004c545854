"""The real packages, where they are installed: everything arrives, offline."""

from __future__ import annotations

import sqlite3
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from gates import package

from grouper.config.loading import load_recipe
from grouper.config.schema import TRACKERS
from grouper.runs.sinks import Sink, Step
from grouper.runs.trackers import SINKS, find_trackers
from grouper.types import StepReport, Tally

REPORT = StepReport(phase="grpo", step=3, tallies={"loss": Tally.of([0.5, 1.5])}, status="learning")
STEP = Step(report=REPORT, rewards={"total": (0.0, 1.0, 1.0)})


def made(name: str, folder: Path) -> Sink:
    package(name, extra=name)
    recipe = load_recipe("demo", [f"tracking.trackers=[{{name: {name}, project: maths}}]"])
    return find_trackers(recipe, folder, started="today")[name]()


def test_every_built_in_tracker_has_a_package():
    assert tuple(SINKS) == TRACKERS


def test_a_mark_is_that_of_the_folder_and_its_start(tmp_path):
    recipe = load_recipe("demo", ["tracking.trackers=[{name: wandb}]"])

    def mark(folder: Path, started: str) -> str:
        builder = find_trackers(recipe, folder, started=started)["wandb"]
        return str(builder.args[0].mark)  # type: ignore[attr-defined]  # a partial

    assert mark(tmp_path, "a") == mark(tmp_path, "a")
    assert len({mark(tmp_path, "a"), mark(tmp_path, "b"), mark(tmp_path / "x", "a")}) == 3


def test_tensorboard_reads_back_what_was_written(tmp_path):
    sink = made("tensorboard", tmp_path)
    sink.step(STEP)
    sink.close()
    assert "tensorflow" not in sys.modules
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "trackers" / "tensorboard" / "grpo"))
    events.Reload()
    (loss,) = events.Scalars("loss")
    assert (loss.step, loss.value) == (3, 1.0)
    (rewards,) = events.Histograms("rewards/total")
    assert rewards.histogram_value.num == 3
    assert "group_size" in str(events.Tensors("recipe/text_summary")[0].tensor_proto)


def test_wandb_writes_an_offline_run(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    sink = made("wandb", tmp_path)
    sink.step(STEP)
    sink.close()
    (file,) = (tmp_path / "trackers" / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 20  # a process of its own writes it
    while b"grpo/loss" not in (content := file.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for text in (b"grpo/loss", b"grpo/rewards/total", b"maths", b"group_size"):
        assert text in content


@pytest.mark.parametrize(
    ("said", "project", "name"),
    [("", "from-env", "run-of-env"), (", project: maths, run_name: one", "maths", "one")],
)
def test_wandb_s_own_variables_stand_behind_the_recipe(tmp_path, monkeypatch, said, project, name):
    monkeypatch.setenv("WANDB_PROJECT", "from-env")
    monkeypatch.setenv("WANDB_NAME", "run-of-env")
    recipe = load_recipe("demo", [f"tracking.trackers=[{{name: wandb{said}}}, {{name: trackio}}]"])
    builders = find_trackers(recipe, tmp_path, started="today")
    runs = [builders[tracker].args[0] for tracker in ("wandb", "trackio")]  # type: ignore[attr-defined]  # both are partials
    assert [(run.project, run.name) for run in runs] == [(project, name), ("grouper", "demo")]


def chatty_trackio() -> ModuleType:
    module = ModuleType("trackio")
    code = """
class Run:
    log = print

    def finish(self):
        print("done")

Histogram = list

def init(**_):
    print("hello")
    return Run()
"""
    exec(code, vars(module))
    return module


def test_trackio_prints_nothing_between_the_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", chatty_trackio())
    made("trackio", tmp_path).close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("place", ["space_id", "server_url"])
def test_trackio_sends_nothing_elsewhere_offline(tmp_path, monkeypatch, place):
    monkeypatch.setitem(sys.modules, "trackio", chatty_trackio())
    recipe = load_recipe("demo", [f"tracking.trackers=[{{name: trackio, params: {{{place}: x}}}}]"])
    with pytest.raises(ValueError, match=f"{place} sends to another machine"):
        find_trackers(recipe, tmp_path, started="today")["trackio"]()


def test_trackio_writes_its_local_database(tmp_path, monkeypatch, capsys):
    trackio = package("trackio", extra="trackio")
    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path, raising=False)
    sink = made("trackio", tmp_path)
    sink.step(STEP)
    sink.close()
    assert capsys.readouterr().out == ""
    (file,) = tmp_path.glob("*.db")
    with sqlite3.connect(file) as database:
        ((logged,),) = database.execute("select metrics from metrics").fetchall()
    assert b'"grpo/loss":1.0' in logged
    assert b"grpo/rewards/total" in logged
