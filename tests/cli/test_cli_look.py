"""`grouper runs` and `grouper env`: what is there, as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import shutil

import torch

from grouper.runs.lock import LOCK_FILE, RunLock, is_running


def test_the_runs_of_a_folder_with_the_latest_last(grouper, finished_run, tmp_path):
    for name in ("done", "half", "held"):
        shutil.copytree(finished_run, tmp_path / name)
    shutil.rmtree(tmp_path / "half" / "grpo")
    (tmp_path / "notes").mkdir()  # not a run
    # As a process that lives leaves it; the parent of a test does.
    holder = {"pid": os.getppid(), "host": platform.node()}
    (tmp_path / "held" / LOCK_FILE).write_text(json.dumps(holder))
    os.utime(tmp_path / "done" / "metrics.jsonl", (4e9, 4e9))
    called = grouper("runs", tmp_path, "--json")
    assert called.code == 0, called.err
    rows = {row["name"]: row for row in json.loads(called.out)}
    assert list(rows)[-1] == "done"
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {"done": "finished", "half": "stopped", "held": "running"}
    assert rows["done"]["step"] == "grpo 2"
    assert 0 <= rows["done"]["accuracy %"] <= 100
    table = grouper("runs", tmp_path).out
    assert all(name in table for name in ("name", "accuracy %", "done", "stopped"))


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


def test_env_names_what_numbers_depend_on(grouper):
    facts = json.loads(grouper("env", "--json").out)
    assert list(facts) == ["versions", "devices", "extras", "kernels"]
    assert facts["versions"]["torch"] == torch.__version__
    assert {"wandb", "quantized"} <= facts["extras"].keys()
    assert "dev" not in facts["extras"]
    assert "GiB" in facts["devices"]["memory"]
    text = grouper("env").out
    assert "Versions:" in text
    assert torch.__version__ in text
