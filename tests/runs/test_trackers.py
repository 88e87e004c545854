"""A tracker that fails, hangs or is slow costs the run nothing, and is reported once.

The built-in ones are tried with the real packages, where they are installed.
"""

from __future__ import annotations

import logging
import sqlite3
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
from gates import package

from grouper.config.loading import load_recipe
from grouper.config.schema import TRACKERS
from grouper.runs.trackers import SINKS, Background, Record, Sink, close_all, find_trackers
from grouper.types import StepReport, Tally


def step(number: int) -> Record:
    tallies = {"loss": Tally.of([float(number)])}
    report = StepReport(phase="sft", step=number, tallies=tallies, status="learning")
    return Record.of_step(report, {}, {})


class Kept:
    """Keeps what it is given; `gate` holds it up until it is set."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.steps: list[int] = []
        self.closed = False
        self.gate = gate

    def send(self, record: Record) -> None:
        assert isinstance(record.made, StepReport)
        if self.gate is not None:
            self.gate.wait(30)
        self.steps.append(record.made.step)

    def close(self) -> None:
        self.closed = True


class Broken(Kept):
    def send(self, record: Record) -> None:
        super().send(record)
        raise SystemExit(f"no {self.steps[-1]}")


def test_records_arrive_in_order_and_the_sink_is_closed():
    kept = Kept()
    tracker = Background("kept", lambda: kept)
    for number in range(20):
        tracker.put(step(number))
    close_all([tracker])
    assert (kept.steps, kept.closed) == (list(range(20)), True)


def test_what_a_sink_raises_is_told_once_and_it_is_asked_again(caplog):
    broken = Broken()
    tracker = Background("broken", lambda: broken)
    for number in (1, 2, 3):
        tracker.put(step(number))
    close_all([tracker])
    assert broken.steps == [1, 2, 3]
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    (once,) = told
    said = "the run continues without it (reported once): SystemExit: no 1 (test_trackers.py, "
    assert said in once


def test_what_it_raises_need_not_have_a_text(caplog):
    def build():
        raise type("Odd", (Exception,), {"__str__": None})

    close_all([Background("odd", build)])
    assert "(reported once): Odd: <Odd that cannot be shown>" in caplog.text


def test_a_sink_that_cannot_be_made_is_told_and_nothing_waits_for_it(caplog):
    def build():
        raise RuntimeError("no such server")

    tracker = Background("lost", build)
    tracker.put(step(1))
    close_all([tracker], seconds=10)
    assert "no such server" in caplog.text
    assert "left behind" not in caplog.text


def test_a_sink_that_hangs_neither_holds_up_the_run_nor_its_end(caplog):
    gate = threading.Event()
    kept = Kept(gate)
    tracker = Background("slow", lambda: kept, capacity=3)
    for number in range(50):
        tracker.put(step(number))  # a bounded queue that blocked would never come back
    started = time.monotonic()
    close_all([tracker], seconds=0.1)
    assert time.monotonic() - started < 5
    assert caplog.text.count("is too slow") == 1
    assert "left behind" in caplog.text
    gate.set()
    tracker.wait(10)
    assert kept.closed
    assert len(kept.steps) < 5


def test_a_sink_that_hangs_at_its_end_has_nothing_left_to_wait_for(caplog):
    """-1 records waited for it."""
    gate, closing = threading.Event(), threading.Event()
    kept = Kept()
    kept.close = lambda: (closing.set(), gate.wait())
    tracker = Background("slow", lambda: kept)
    tracker.ask_to_end()
    closing.wait()
    tracker.wait(0)
    gate.set()
    assert "left behind; 0 records wait" in caplog.text


def test_all_of_them_share_one_time_limit():
    gate = threading.Event()
    trackers = [Background(str(n), lambda: Kept(gate)) for n in range(4)]
    for tracker in trackers:
        tracker.put(step(1))
    started = time.monotonic()
    close_all(trackers, seconds=0.2)
    assert time.monotonic() - started < 0.7
    gate.set()


@pytest.fixture(autouse=True)
def _everything_is_heard(caplog):
    caplog.set_level(logging.INFO, logger="grouper")


# --- the built-in trackers ----------------------------------------------------------------------

REPORT = StepReport(phase="grpo", step=3, tallies={"loss": Tally.of([0.5, 1.5])}, status="learning")
TABLE = ({"problem": "p/1", "completion": "so <b>|2|</b>\nand `3`"},)
STEP = Record.of_step(REPORT, {"total": [0.0, 1.0, 1.0]}, {}, TABLE)


def made(name: str, folder: Path) -> Sink:
    package(name, extra=name)
    recipe = load_recipe("demo", [f"tracking.trackers=[{{name: {name}, project: math}}]"])
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
    sink.send(STEP)
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
    (shown,) = events.Tensors("completions/text_summary")
    assert "`so <b>¦2¦</b> and '3'`" in shown.tensor_proto.string_val[0].decode()


@pytest.mark.slow
def test_wandb_writes_an_offline_run(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with caplog.at_level("WARNING", "grouper"):  # what the console shows
        sink = made("wandb", tmp_path)
    assert f"`wandb sync` sends it: {tmp_path / 'trackers' / 'wandb'}" in caplog.text
    sink.send(STEP)
    sink.close()
    (file,) = (tmp_path / "trackers" / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 20  # a process of its own writes it
    while b"grpo/loss" not in (content := file.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for text in (b"grpo/loss", b"grpo/rewards/total", b"math", b"group_size"):
        assert text in content


@pytest.mark.parametrize(
    ("said", "project", "name"),
    [("", "from-env", "run-of-env"), (", project: math, run_name: one", "math", "one")],
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

Histogram = Table = list

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
    sink.send(STEP)
    sink.close()
    assert capsys.readouterr().out == ""
    (file,) = tmp_path.glob("*.db")
    with sqlite3.connect(file) as database:
        ((logged,),) = database.execute("select metrics from metrics").fetchall()
    assert b'"grpo/loss":1.0' in logged
    assert b"grpo/rewards/total" in logged
    assert b"so <b>|2|</b>" in logged
