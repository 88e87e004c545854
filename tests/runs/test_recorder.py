"""A run with trackers: they are told what is written, change nothing, and stop nothing."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from drawn_runs import report, result, rollout
from tiny_runs import TINY_RUN, data_from, write_problems

from grouper import errors
from grouper.api import train
from grouper.config.loading import load_recipe, recipe_hash, resolved_yaml
from grouper.config.schema import TrackerConfig, TrackingConfig
from grouper.errors import ConfigError, RunFolderError
from grouper.models.process_group import ProcessGroup
from grouper.report.page import draw_pictures
from grouper.runs.folder import RunFolder
from grouper.runs.recorder import Recorder
from grouper.runs.records import RunEnd, RunInfo, recipe_changes
from grouper.runs.trackers import Record, TrackedRun, WandbSink, check_trackers
from grouper.training.run import Run
from grouper.types import StepReport, Tally

MINE = """
seen = []

def each(record, *, prefix=""):
    seen.append(prefix + record.phase)

class Whole:
    def __init__(self, run):
        seen.append(run)

    def step(self, report):
        report.tallies["more"] = 1

    def close(self):
        seen.append("closed")
"""


class FakeRun:
    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.logged: list[dict[str, Any]] = []
        self.defined: list[str] = []
        self.finished = False

    def define_metric(self, name: str, **_: Any) -> None:
        self.defined.append(name)

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


def fake_wandb(opened: FakeRun | None = None) -> Any:
    """As much of the package as we use; `opened` is a run that the caller has."""
    module: Any = ModuleType("wandb")
    module.run = opened
    module.calls = []
    module.made = FakeRun()

    class Config(dict[str, Any]):
        def update(self, values: dict[str, Any], **_: Any) -> None:  # type: ignore[override]  # as wandb's
            super().update(values)

    for run in (opened, module.made):
        if run is not None:
            run.config = Config()

    class Settings(dict[str, Any]):
        model_fields = ("silent", "console")

    def init(**options: Any) -> FakeRun:
        module.calls.append(options)
        made: FakeRun = module.made
        return made

    module.Settings, module.init, module.Histogram = Settings, init, lambda values: values
    module.Table = lambda columns, data: (columns, data)
    return module


def run(folder: Path, *trackers: str) -> RunFolder:
    write_problems(folder)
    overrides = [
        *TINY_RUN,
        *data_from(str(folder)),
        "sft.steps=1",
        "grpo.steps=1",
        f"output_dir={folder}",
        f"tracking.trackers=[{', '.join(trackers)}]",
    ]
    with Run(load_recipe("demo", overrides)) as open_run:
        train(open_run)
    return RunFolder(folder / "demo")


@pytest.mark.parametrize("place", ["moved", "taken"])
def test_nothing_is_written_where_the_folder_was(tmp_path: Path, place: str) -> None:
    """It would be half a run, or mixed with the one that is there now."""
    recipe = load_recipe("demo").override(f"output_dir={tmp_path}")
    info = RunInfo(recipe_hash=recipe_hash(recipe), versions={}, fingerprints={})
    recorder = Recorder(recipe, ProcessGroup(), {}, info)
    recorder.append_metrics(report("sft", 1, {"loss": 1.0}))
    recorder.path.rename(tmp_path / "moved")
    if place == "taken":
        recorder.path.mkdir()
        there = json.loads((tmp_path / "moved" / "run.json").read_text())
        there["host"]["started"] = "later"
        (recorder.path / "run.json").write_text(json.dumps(there))
        (recorder.path / ".lock").write_text('{"pid": 1, "host": "other"}')
    before = sorted(tmp_path.rglob("*"))
    for write in (
        lambda: recorder.append_metrics(report("sft", 2, {"loss": 1.0})),
        lambda: recorder.write_rollouts("grpo", 1, []),
        lambda: recorder.write_evaluation(result("base", "base", 0, "test", 0)),
    ):
        with pytest.raises(RunFolderError, match="was deleted, moved or replaced while"):
            write()
    recorder.close()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_wandb_gets_the_recipe_the_metrics_and_reward_histograms_offline(tmp_path, monkeypatch):
    wandb = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    done = run(tmp_path, "{name: wandb, project: math, entity: us, tags: [a], run_name: one}")
    (call,) = wandb.calls
    given = {key: call[key] for key in ("project", "entity", "name", "tags", "mode", "resume")}
    assert given == {
        "project": "math",
        "entity": "us",
        "name": "one",
        "tags": ("a",),
        "mode": "offline",
        "resume": None,
    }
    assert call["config"]["grpo"]["steps"] == 1
    assert Path(call["dir"]).is_relative_to(done.path)
    steps = {key: line for line in wandb.made.logged for key in line if key.endswith("/step")}
    assert {"sft/step", "grpo/step"} <= steps.keys()
    grpo = next(line for line in wandb.made.logged if "grpo/reward/total" in line)
    first = next(r for r in done.read_metrics() if r.phase == "grpo")
    assert grpo["grpo/reward/total"] == first.mean("reward/total")
    assert len(grpo["grpo/rewards/total"]) == first.tallies["reward/total"].count == 20
    assert len(grpo["grpo/rewards/correctness"]) == 20
    weights = {reward["name"]: reward["weight"] for reward in call["config"]["rewards"]}
    for name, weight in weights.items():
        weighted = grpo[f"grpo/reward_weighted/{name}"]
        assert weighted == pytest.approx(weight * grpo[f"grpo/reward/{name}"])
    columns, rows = grpo["grpo/completions"]
    assert len(rows) == 16
    assert {"completion", "verdict", "reward"} <= set(columns)
    tested = next(line for line in wandb.made.logged if "grpo/test/accuracy" in line)
    assert tested["grpo/test/low"] <= tested["grpo/test/accuracy"] <= tested["grpo/test/high"]
    assert wandb.made.finished


def sink_of(folder: Path, *, online: bool = False) -> WandbSink:
    return WandbSink(
        TrackedRun(
            name="n",
            project="p",
            settings=TrackerConfig(name="wandb", mode="online" if online else "offline"),
            path=folder,
            mark="0" * 8,
            recipe={"name": "n"},
        )
    )


def test_a_run_that_the_caller_opened_is_used_and_left_open(tmp_path, monkeypatch):
    theirs = FakeRun()
    wandb = fake_wandb(opened=theirs)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = sink_of(tmp_path)
    done = StepReport(phase="sft", step=1, tallies={"loss": Tally.of([2])}, status="learning")
    sink.send(Record.of_step(done, {}, {}))
    sink.close()
    assert wandb.calls == []
    assert theirs.logged == [{"sft/step": 1, "sft/loss": 2.0}]
    assert not theirs.finished
    assert theirs.config["grouper"] == {"name": "n"}


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [("online", None, "online"), ("offline", "online", "online"), ("offline", None, "offline")],
)
def test_nothing_is_sent_unless_asked_for(tmp_path, monkeypatch, mode, environment, expected):
    wandb = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    if environment is None:
        monkeypatch.delenv("WANDB_MODE", raising=False)
    else:
        monkeypatch.setenv("WANDB_MODE", environment)
    sink_of(tmp_path, online=mode == "online")
    assert wandb.calls[0]["mode"] == expected


@pytest.mark.slow
def test_the_users_own_see_each_record_and_can_change_none(tmp_path, caplog):
    (tmp_path / "mine.py").write_text(MINE)
    done = run(
        tmp_path,
        f"{{name: '{tmp_path}/mine.py:each', params: {{prefix: p-}}}}",
        f"{{name: '{tmp_path}/mine.py:Whole'}}",
        "{name: 'math:sqrt'}",
    )
    file = str(tmp_path / "mine.py")
    module = next(m for m in [*sys.modules.values()] if getattr(m, "__file__", None) == file)
    assert {"p-sft", "p-grpo"} <= {seen for seen in module.seen if isinstance(seen, str)}
    assert module.seen.count("closed") == 1
    (made,) = (seen for seen in module.seen if not isinstance(seen, str))
    assert made.path == done.path
    assert "does not support item assignment" in caplog.text  # changing a report failed
    assert "The tracker math:sqrt failed" in caplog.text  # and so did this one
    assert len(done.read_metrics()) == 2
    assert "more" not in done.read_metrics()[0].tallies


def test_a_run_that_is_refused_opens_no_tracker(tmp_path, monkeypatch):
    wandb = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(ConfigError):
        run(tmp_path, "{name: wandb}", "{name: 'no_such_module_here:f'}")
    assert wandb.calls == []


def test_trackers_are_no_part_of_the_experiment():
    without = load_recipe("demo")
    tracked = load_recipe("demo", ["tracking.trackers=[{name: wandb, project: p}]"])
    assert recipe_hash(tracked) == recipe_hash(without)
    assert recipe_changes(resolved_yaml(without), resolved_yaml(tracked)) == {}
    other = load_recipe("demo", ["rewards=[format]"])
    assert recipe_hash(other) != recipe_hash(without)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandbb", "Did you mean 'wandb'"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("math:nothing", "has no function 'nothing'"),
    ],
)
def test_a_tracker_that_is_not_there_is_told_at_once(name, message):
    with pytest.raises(ConfigError, match=message):
        check_trackers(TrackingConfig(trackers=(TrackerConfig(name=name),)))


def test_a_package_that_is_missing_is_told_with_its_extra(monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "grouper-rl\[wandb\]"'):
        check_trackers(TrackingConfig(trackers=(TrackerConfig(name="wandb"),)))


# --- pictures ------------------------------------------------------------------------------------


def recording(folder: Path) -> Recorder:
    """A new run without steps, of which every drawing is counted."""
    recipe = load_recipe("demo", [f"output_dir={folder}"])
    info = RunInfo(recipe_hash=recipe_hash(recipe), versions={}, fingerprints={})
    return Recorder(recipe, ProcessGroup(), {}, info)


def test_trackers_get_the_rewards_that_were_trained_on_and_a_table_now_and_then(
    tmp_path, monkeypatch
):
    recorder = recording(tmp_path)
    sent: list[Record] = []
    monkeypatch.setattr(recorder, "_send", sent.append)
    for step in (1, 2, 25):
        rows = [rollout(step, number) for number in range(40)]
        rows[0]["advantage"] = None  # its group had nothing to say
        rows[1]["rewards"]["format"] = None  # it was not scored
        recorder.write_rollouts("grpo", step, rows)
        recorder.append_metrics(report("grpo", step, {"reward/total": 1.0}))
    recorder.append_metrics(report("grpo", 26, {"reward/total": 1.0}))
    recorder.close()
    assert [len(one.completions) for one in sent] == [16, 0, 16, 0]
    # As many problems as possible.
    shown = [row["problem_id"] for row in sent[0].completions]
    assert shown == [f"train/{n}" for n in [*range(10), *range(6)]]
    counts = {name: len(values) for name, values in sent[1].histograms.items()}
    assert counts == {"rewards/total": 39, "rewards/correctness": 39, "rewards/format": 38}
    assert sent[3].histograms == {}


def test_pictures_are_drawn_at_evaluations_and_at_the_end_if_there_is_news(tmp_path):
    recorder, drawn = recording(tmp_path), []
    recorder.draw = drawn.append
    recorder.write_evaluation(result("base", "base", 0, "test", 3))
    assert [folder.path for folder in drawn] == [recorder.path]
    recorder.append_metrics(report("grpo", 1, {"solve_rate": 0.5}))
    recorder.redraw()
    recorder.close()
    assert len(drawn) == 2


def test_drawing_takes_a_twentieth_of_the_time_at_most_but_at_the_end(tmp_path):
    recorder, drawn = recording(tmp_path), []

    def draw(folder: RunFolder) -> None:
        drawn.append(folder)
        time.sleep(0.05)

    recorder.draw = draw
    for step in (1, 2, 3):
        recorder.write_evaluation(result(f"v-{step}", "grpo", step, "validation", 3))
    assert len(drawn) == 1
    recorder.close()
    assert len(drawn) == 2


def test_a_picture_that_cannot_be_drawn_stops_nothing(tmp_path, caplog):
    recorder = recording(tmp_path)

    def draw(folder: RunFolder) -> None:
        raise ZeroDivisionError("no ink")

    recorder.draw = draw
    recorder.write_evaluation(result("base", "base", 0, "test", 3))
    assert recorder.read_evaluation("base") is not None
    recorder.close()
    assert caplog.text.count("ZeroDivisionError: no ink") == 1
    assert f"`grouper report {recorder.path}`" in caplog.text


def test_only_the_first_process_draws(tmp_path):
    recorder = recording(tmp_path)
    recorder.draw = lambda folder: pytest.fail("drawn by another process")
    recorder.append_metrics(report("grpo", 1, {"solve_rate": 0.5}))
    recorder.processes = SimpleNamespace(rank=1)
    recorder.close()


def test_the_end_is_recorded_and_the_pictures_show_it(tmp_path):
    recorder, drawn = recording(tmp_path), []
    recorder.draw = drawn.append
    recorder.append_metrics(report("grpo", 1, {"solve_rate": 0.5}))
    recorder.redraw()
    end = RunEnd(state="stopped", reason="SIGTERM")
    recorder.close(end)
    assert len(drawn) == 2
    assert drawn[1].read_end() == end


def test_a_run_without_a_step_has_no_pictures_of_its_end(tmp_path):
    recorder = recording(tmp_path)
    recorder.draw = lambda folder: pytest.fail("there is nothing to draw")
    recorder.close(RunEnd(state="failed", reason="no data"))
    assert recorder.read_end() is not None


def test_a_run_that_goes_on_has_no_end(tmp_path):
    recorder = recording(tmp_path)
    recorder.append_metrics(report("grpo", 1, {"solve_rate": 0.5}))
    recorder.close(RunEnd(state="stopped"))
    assert recorder.read_end() == RunEnd(state="stopped")
    recorder.write_end(None)
    assert recorder.read_end() is None


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (errors.Interrupted("stopped on request", where="x", fix="y"), "stopped", "SIGTERM"),
        (KeyboardInterrupt(), "stopped", "SIGTERM"),
        (RunFolderError("the disk is full", where="x", fix="y"), "failed", "the disk is full"),
        (RuntimeError("the lights\nwent out"), "failed", "RuntimeError: the lights"),
        (None, "stopped", ""),
    ],
)
def test_the_report_shows_how_the_run_ended(tmp_path, error, state, reason):
    write_problems(tmp_path)
    overrides = [*TINY_RUN, *data_from(str(tmp_path)), "sft.steps=1", "grpo.steps=3"]
    opened = Run(load_recipe("demo", [*overrides, f"output_dir={tmp_path}"]))
    opened.folder.draw = draw_pictures
    opened.folder.append_metrics(report("sft", 1, {"loss": 2.0}))
    opened.stop._request(signal.SIGTERM, None)
    opened.__exit__(type(error), error, None)
    assert RunFolder(tmp_path / "demo").read_end() == RunEnd(state=state, reason=reason)
    text = (tmp_path / "demo" / "report.html").read_text()
    assert f">{state}</span>" in text
    assert reason in text


def test_a_run_that_ends_with_an_error_has_its_report(tmp_path):
    write_problems(tmp_path)
    overrides = [*TINY_RUN, *data_from(str(tmp_path)), "sft.steps=1", "grpo.steps=3"]
    recipe = load_recipe("demo", [*overrides, f"output_dir={tmp_path}"])
    opened = Run(recipe)
    opened.folder.draw = draw_pictures
    opened.folder.append_metrics(report("sft", 1, {"loss": 2.0}))
    opened.__exit__(RuntimeError, RuntimeError("the lights went out"), None)
    assert "Loss" in (tmp_path / "demo" / "report.html").read_text()
    assert (tmp_path / "demo" / "curves.png").exists()
