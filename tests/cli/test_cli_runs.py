"""`grouper runs`: a table and JSON, whatever lies in the folder."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys

from drawn_runs import make_run

from grouper.runs.lock import LOCK_FILE, RunLock, is_running


def test_the_runs_of_a_folder_with_the_latest_last(grouper, finished_run, tmp_path):
    for name in ("done", "half", "held"):
        shutil.copytree(finished_run, tmp_path / name)
    shutil.rmtree(tmp_path / "half" / "grpo")
    (tmp_path / "notes").mkdir()  # not a run
    # As a process that lives leaves it; the parent of a test does.
    holder = {"pid": os.getppid(), "host": platform.node()}
    (tmp_path / "held" / LOCK_FILE).write_text(json.dumps(holder))
    make_run(tmp_path / "untested")
    shutil.rmtree(tmp_path / "untested" / "evaluations")
    order = ["half", "done", "untested", "held"]
    for place, name in enumerate(order):
        at = 4e9 + 1e6 * place
        os.utime(tmp_path / name / "recipe.yaml", (at, at))
        # What is gone a moment later, where a run goes on, is not when something happened.
        (tmp_path / name / ".half-written").touch()
        os.utime(tmp_path / name / ".half-written", (5e9, 5e9))
    called = grouper("runs", tmp_path, "--json")
    assert called.code == 0, called.err
    rows = {row["name"]: row for row in json.loads(called.out)}
    assert list(rows) == order
    assert [row["when"][:4] for row in rows.values()] == ["2096"] * 4
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {
        "done": "finished",
        "half": "stopped",
        "held": "running",
        "untested": "stopped",
    }
    assert rows["done"]["step"] == "grpo 2"
    assert 0 <= rows["done"]["accuracy %"] <= 100
    assert rows["untested"]["accuracy %"] is None
    heading, *lines = grouper("runs", tmp_path).out.splitlines()
    assert heading.split() == ["name", "state", "step", "accuracy", "%", "when"]
    shown = ["untested", "stopped", "grpo", "5", "-", *rows["untested"]["when"].split()]
    assert lines[2].split() == shown


def test_the_list_of_runs_makes_no_tally_of_any_step(grouper, tmp_path, monkeypatch):
    """It needs the number of the last one, and long runs have 30 metrics in each of thousands."""
    make_run(tmp_path / "long")
    made = []
    monkeypatch.setattr("grouper.runs.records._tally", lambda *_: made.append(1))
    called = grouper("runs", tmp_path, "--json")
    (row,) = json.loads(called.out)
    assert row["step"] == "grpo 5"
    assert made == []


def test_the_list_of_runs_reads_no_validation(grouper, finished_run, tmp_path):
    """A long run has hundreds, each with a line for every completion."""
    shutil.copytree(finished_run, tmp_path / "done")
    validations = [*(tmp_path / "done" / "evaluations").glob("validation-*.jsonl.gz")]
    assert validations
    for items in validations:
        items.write_bytes(b"not read")
    called = grouper("runs", tmp_path, "--json")
    (row,) = json.loads(called.out)
    assert (row["state"], called.err) == ("finished", "")
    assert row["accuracy %"] is not None


def test_a_damaged_run_hides_no_other(grouper, tmp_path):
    make_run(tmp_path / "sound")
    for name, file in (("metrics", "metrics.jsonl"), ("recipe", "recipe.yaml")):
        make_run(tmp_path / name)
        (tmp_path / name / file).write_text("{broken\n")
    called = grouper("runs", tmp_path, "--json")
    assert called.code == 0, called.err
    rows = {row["name"]: row for row in json.loads(called.out)}
    assert rows["sound"]["step"] == "grpo 5"
    assert [rows[name]["state"] for name in ("metrics", "recipe")] == ["damaged", "damaged"]
    assert "line 1 cannot be read" in called.err


def test_a_run_that_is_deleted_meanwhile_hides_no_other(grouper, tmp_path, monkeypatch):
    def deleting(run):
        if run.name == "going":
            shutil.rmtree(run)
        return False

    monkeypatch.setattr("grouper.cli.runs.is_running", deleting)
    for name in ("going", "staying"):
        make_run(tmp_path / name)
    called = grouper("runs", tmp_path, "--json")
    assert [row["name"] for row in json.loads(called.out)] == ["staying"]


def test_the_name_of_a_run_does_not_steer_the_terminal(grouper, tmp_path):
    run = make_run(tmp_path / "red\x1b[31m")
    for words in (("runs", tmp_path), ("watch", run.path)):
        assert "red\\x1b[31m" in grouper(*words).out


def test_a_folder_without_runs_and_one_that_is_not_there(grouper, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grouper("runs").refused("outputs: there is no folder of this name")
    assert grouper("runs", tmp_path).out == f"There are no runs in {tmp_path}.\n"


def test_a_lock_says_whether_its_holder_lives(tmp_path):
    assert not is_running(tmp_path)
    lock = RunLock(tmp_path)
    assert not is_running(tmp_path)  # this process itself
    lock.release()
    gone = {"pid": 999999999, "host": platform.node()}
    (tmp_path / LOCK_FILE).write_text(json.dumps(gone))
    assert not is_running(tmp_path)


def test_an_encoding_without_every_letter_is_no_traceback(tmp_path):
    run = make_run(tmp_path / "dé mo")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}

    def said(*words):
        call = [sys.executable, "-m", "grouper", *words]
        done = subprocess.run(call, capture_output=True, text=True, check=True, env=environment)
        return done.stdout

    assert "d\\xe9 mo: not running" in said("watch", str(run.path))
    assert json.loads(said("runs", str(tmp_path), "--json"))[0]["name"] == "dé mo"
