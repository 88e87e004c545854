"""`grouper runs` and `grouper env`: what is there, as a table and as JSON."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from drawn_runs import GRPO, NASTY, make_run, new_run, report, rollout

from grouper.config.loading import load_recipe, resolved_yaml
from grouper.files import processors, write_lines
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


def test_what_a_record_or_a_file_of_data_holds_does_not_steer_the_terminal(grouper, tmp_path):
    """Names of rewards, ids and answers: whoever wrote a file chose them."""
    odd = "\x1b\x07\u202e"
    run = make_run(tmp_path / "demo")
    row = rollout(5, 0) | {"problem_id": f"{odd}p", "rewards": {odd: 1.0}, "verdict": "incorrect"}
    write_lines(run.path / "rollouts" / "grpo-000005.jsonl.gz", [row])
    (run.path / "recipe.yaml").write_text(
        resolved_yaml(load_recipe("demo", ["grading.symbolic=false"]))
    )
    facts = {"answer": f"red {odd}", "id": f"{odd}id", "subject": odd, "level": odd}
    rows = [{"question": f"What is 3 + 1?{odd}", **facts}, {"question": "No answer?", "id": odd}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for words in (
        ("show", run.path),
        ("grade", run.path),
        ("data", "show", data),
        ("data", "audit", data),
    ):
        called = grouper(*words)
        assert called.code == 0, (words, called.err)
        assert "audit" in words or "\\x1b" in called.out, called.out
        for sign in odd:
            assert sign not in called.out, (words, repr(called.out))


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
    assert facts["versions"]["torch"] == version("torch")
    assert facts["versions"]["grouper-rl"] == version("grouper-rl")
    assert facts["versions"]["python"] == platform.python_version()
    assert facts["devices"]["system"] == platform.platform()
    assert {"wandb", "quantized"} <= facts["extras"].keys()
    assert re.fullmatch("accelerate .+, bitsandbytes .+", facts["extras"]["quantized"])
    assert "dev" not in facts["extras"]
    memory, unit = facts["devices"]["memory"].split()
    assert unit == "GiB"
    assert 0.5 < float(memory) < 50_000
    assert facts["devices"]["cpu"].startswith(f"{processors()} of {os.cpu_count()} processors, ")
    text = grouper("env").out
    assert text.startswith("Versions:\n")
    assert version("torch") in text


def test_env_names_every_device(grouper, monkeypatch):
    card = SimpleNamespace(name="Card", total_memory=80 * 2**30)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: card)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    devices = json.loads(grouper("env", "--json").out)["devices"]
    assert [devices["cuda:0"], devices["cuda:1"]] == ["Card, 80.0 GiB"] * 2
    assert "mps" in devices


def test_a_damaged_file_of_rollouts_leaves_the_rest_of_a_diagnosis(grouper, tmp_path):
    run = make_run(tmp_path / "demo")
    whole = grouper("diagnose", run.path)
    (run.path / "rollouts" / "grpo-000002.jsonl.gz").write_bytes(b"no gzip")
    called = grouper("diagnose", run.path)
    assert (called.code, called.out) == (whole.code, whole.out)
    assert "warning: left out: " in called.err
    assert "grpo-000002.jsonl.gz: the file cannot be read" in called.err


def test_rows_of_another_program_are_damage_not_a_traceback(grouper, tmp_path):
    run = make_run(tmp_path / "demo")
    rows = [{"problem_id": 5, "reward": "high", "token_texts": 3, "verdict": None}]
    write_lines(run.path / "rollouts" / "grpo-000009.jsonl.gz", rows)
    for command in ("show", "watch", "report"):
        called = grouper(command, run.path)
        assert called.code == 0, called.err


def test_an_encoding_without_every_letter_is_no_traceback(tmp_path):
    run = make_run(tmp_path / "dé mo")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}

    def said(*words):
        call = [sys.executable, "-m", "grouper", *words]
        done = subprocess.run(call, capture_output=True, text=True, check=True, env=environment)
        return done.stdout

    assert "d\\xe9 mo: not running" in said("watch", str(run.path))
    assert json.loads(said("runs", str(tmp_path), "--json"))[0]["name"] == "dé mo"


# --- report, show, watch -------------------------------------------------------------------------


def test_a_run_has_written_its_report_with_tokens(finished_run):
    text = (finished_run / "report.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    rows = [dict(zip(data["fields"], row, strict=True)) for row in data["rows"]]
    traced = [row for row in rows if row["trace"]]
    assert traced
    for row in traced:
        texts, sampled, trained, entropies, _ = row["trace"]
        assert len(texts) == len(sampled) == len(entropies) == row["tokens"]
        if trained is not None:
            assert max(abs(a - b) for a, b in zip(sampled, trained, strict=True)) < 0.01
    assert {source["name"] for source in data["sources"]} >= {"GRPO step 1", "base on test"}


@pytest.mark.slow
def test_reports_of_one_run_and_of_several(grouper, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "again")
    (tmp_path / "again" / "report.html").unlink()
    called = grouper("report", tmp_path / "again")
    assert called.code == 0, called.err
    assert called.out.startswith(f"{tmp_path / 'again' / 'report.html'} (")
    both = tmp_path / "both.html"
    called = grouper("report", finished_run, tmp_path / "again", "--output", both)
    assert called.code == 0, called.err
    assert "demo against again" in both.read_text()
    called = grouper("report", finished_run, "--output", tmp_path)
    assert called.out.startswith(f"{tmp_path / 'report.html'} (")
    assert "named twice" in grouper("report", finished_run, finished_run).err


@pytest.mark.parametrize("running", [True, False])
def test_a_run_without_a_step_has_nothing_to_diagnose(grouper, tmp_path, running):
    new_run(tmp_path / "demo")
    (tmp_path / "demo" / LOCK_FILE).write_text(
        json.dumps({"pid": os.getppid() if running else 2**22 + 1, "host": platform.node()})
    )
    told = "try again after its first step" if running else "Continue it with --resume"
    grouper("diagnose", tmp_path / "demo").refused("nothing to diagnose", told)


def test_a_folder_that_is_no_run_is_refused(grouper, tmp_path):
    for command in ("report", "show", "watch"):
        grouper(command, tmp_path).refused("this is not a run folder of Grouper", str(tmp_path))
    info = {"format": 2, "recipe_hash": "a", "warp": 9}
    (tmp_path / "run.json").write_text(json.dumps(info))
    grouper("report", tmp_path).refused("this is not a run folder of Grouper")


def test_show_prints_what_was_asked_for(grouper, finished_run):
    called = grouper("show", finished_run)
    assert called.code == 0, called.err
    assert called.out.count("grpo step 2  ") == 5
    one = grouper("show", finished_run, "--step", "1", "--worst", "-n", "1").out
    assert one.count("grpo step 1  ") == 1
    assert "advantage" in one
    assert grouper("show", finished_run, "--problem", "nowhere").out == ("No rollout matches.\n")
    grouper("show", finished_run, "--step", "7").refused("no rollouts are stored of step 7")
    assert "give one" in grouper("show", finished_run, "--best", "--worst").err


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ("", ["5 train/0 0", "5 train/0 1", "5 train/0 2"]),
        ("--verdict correct", ["5 train/0 1", "5 train/0 3", "5 train/1 1"]),
        ("--best", ["5 train/1 3", "5 train/1 1", "5 train/0 3"]),
        ("--worst", ["5 train/0 0", "5 train/0 2", "5 train/1 0"]),
        ("--step 3 --problem train/1", ["3 train/1 0", "3 train/1 1", "3 train/1 2"]),
    ],
)
def test_show_chooses_and_orders(grouper, tmp_path, options, rows):
    called = grouper("show", make_run(tmp_path / "demo").path, *options.split(), "-n", "3")
    assert called.code == 0, called.err
    shown = re.findall(r"^grpo step (\d)  \w+  (\S+), sample (\d)", called.out, re.MULTILINE)
    assert [" ".join(row) for row in shown] == rows


def test_show_puts_two_steps_side_by_side(grouper, tmp_path):
    run = make_run(tmp_path / "demo").path
    for options, problems in (("", ["0", "1"]), ("-n 1", ["0"]), ("--problem train/1", ["1"])):
        called = grouper("show", run, "--diff", "3", "5", *options.split())
        assert called.code == 0, called.err
        assert re.findall(r"train/(\d): the reference is 2", called.out) == problems
        assert "step 3: incorrect" in called.out
        assert "No rollout matches" not in called.out
    for options in ("--step 3", "--verdict correct", "--best", "--worst"):
        called = grouper("show", run, "--diff", "3", "5", *options.split())
        assert (called.code, called.out) == (2, "")
        assert "only --problem and -n go with it" in called.err


def test_watch_prints_the_state_once_without_a_terminal(grouper, finished_run):
    called = grouper("watch", finished_run)
    assert called.code == 0, called.err
    assert "demo: not running, GRPO step 2 of 2" in called.out


@pytest.mark.slow
def test_watch_follows_a_run_in_a_terminal_and_leaves_it_as_it_was(tmp_path):
    run = make_run(tmp_path / "demo", text=NASTY)
    lock = RunLock(run.path)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
    settings = termios.tcgetattr(theirs)
    started = time.monotonic()
    command = [sys.executable, "-m", "grouper", "watch", str(run.path), "--every", "0.2"]
    shell = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=shell, start_new_session=True
    )
    screen = ""

    def until(text: str) -> None:
        nonlocal screen
        while text not in screen:
            assert time.monotonic() - started < 60, screen
            if select.select([ours], [], [], 0.2)[0]:
                screen += os.read(ours, 1 << 16).decode(errors="replace")

    try:
        until("GRPO step 5 of 60")
        first = time.monotonic() - started
        run.append_metrics(report("grpo", 6, GRPO))
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write('{"phase": "grpo", "st')  # a line that is being written
        until("GRPO step 6 of 60")
        process.send_signal(signal.SIGINT)
        until("Stopped.")
        assert process.wait(10) == 130
        changed = {path for path, at in before.items() if path.stat().st_mtime_ns != at}
    finally:
        process.kill()
        process.wait()
        lock.release()
    after = termios.tcgetattr(theirs)
    os.close(ours)
    os.close(theirs)
    assert first < 5
    assert after == settings
    # The other screen and the hidden cursor, each left as it was entered.
    for enter, leave in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
        assert screen.count(enter) == screen.count(leave) > 0
        assert screen.rindex(leave) > screen.rindex(enter)
    # Of what the model wrote nothing steers: only rich's own sequences are there.
    ours_alone = re.sub(r"\x1b\[(\?(1049|25)[hl]|[0-9;]*[mHKJA])", "", screen)
    assert not re.search("[\x00\x1b\u202a-\u202e\u2066-\u2069]", ours_alone)
    assert r"\x1b[31mred" in screen
    assert changed <= {run.path, run.path / "metrics.jsonl"}
