"""Ctrl-C and SIGTERM in the middle of GRPO, sent to a real process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import click
import pytest

from grouper.advice.live_checks import _require_room
from grouper.cli.main import cli
from grouper.config.loading import load_recipe
from grouper.errors import Interrupted
from grouper.runs.progress import Progress
from grouper.sampling.decode_rows import HostLog
from grouper.training.measure import measure_policy
from grouper.training.run import Run


def wait_for_steps(process: subprocess.Popen[str], metrics: Path, phase: str, count: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        if sum(json.loads(line)["phase"] == phase for line in lines) >= count:
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    pytest.fail("the run never got there")


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)]
)
def test_a_signal_saves_exits_with_130_and_resume_finishes(grouper, small, tmp_path, number):
    arguments = ["run", "demo", *small, f"output_dir={tmp_path}", "grpo.steps=60"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from grouper.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = tmp_path / "demo"
    wait_for_steps(process, run / "metrics.jsonl", "grpo", 3)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "--resume" in err or number == signal.SIGHUP  # its terminal is gone
    (checkpoint,) = (run / "grpo").glob("checkpoint-*")
    saved = json.loads((checkpoint / "trainer_state.json").read_text())["step"]
    assert f"at GRPO step {saved}" in (run / "report.html").read_text()
    assert (run / "curves.png").exists()
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert saved == max(r["step"] for r in reports if r["phase"] == "grpo")
    # Another number of steps would be another recipe, so the rest is really done.
    called = grouper(*arguments, "--resume", "--quiet")
    assert called.code == 0, called.err
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in reports if r["phase"] == "grpo"] == list(range(1, 61))
    assert (run / "grpo" / "final").is_dir()


TIDIES = """
import os, signal, sys, time
from grouper.cli import main, plan
from grouper.cli.main import _tell

def work(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("tidied", flush=True)

def telling(error):
    code = _tell(error)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT if "int" in sys.argv else signal.SIGTERM)
    return code

plan.plan.callback = work
sys.modules["grouper.cli.main"]._tell = telling
main(["plan", "demo"])
"""


@pytest.mark.parametrize("last", ["int", "term"])
def test_a_signal_that_comes_again_is_no_traceback_and_ends_no_tidying(last):
    """`timeout` sends it twice: to the process and to its group."""
    command = [sys.executable, "-c", TIDIES, last]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert (done.returncode, done.stdout) == (130, "tidied\n")
    assert done.stderr.startswith("Stopped"), done.stderr


@pytest.mark.slow
def test_a_signal_that_the_user_ignores_is_left_ignored(finished_run):
    """`nohup` has the hang-up ignored, and the run goes on."""
    recipe = load_recipe(finished_run / "recipe.yaml")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Run(recipe, Progress(quiet=True), resume=True):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_a_library_is_imported_is_no_missing_module(
    grouper, tmp_path, monkeypatch, number
):
    """R10: transformers makes a ModuleNotFoundError of it."""
    (tmp_path / "interrupted_import.py").write_text(
        "import signal\n"
        f"try:\n    signal.raise_signal({number})\n"  # in this thread, whoever else there is
        "except KeyboardInterrupt as error:\n"
        "    raise ModuleNotFoundError('Could not import module Qwen3') from error\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "interrupted_import", raising=False)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a process of its own
    bench = cli.get_command(click.Context(cli), "bench")
    monkeypatch.setattr(bench, "callback", lambda **_: __import__("interrupted_import"))
    called = grouper("bench", "demo")
    signal.signal(signal.SIGTERM, before)
    assert (called.code, called.out) == (130, "")
    assert called.err == "Stopped.\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_the_command_line_is_there_is_no_traceback():
    program = textwrap.dedent("""
        import sys
        class Interrupting:
            def find_spec(self, name, *_):
                if name == "click":
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupting())
        import grouper.cli
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize("name", ["pre-flight", "evaluation"])
def test_a_signal_in_the_middle_of_one_long_completion_is_heeded_at_its_next_token(
    small, tmp_path, monkeypatch, name
):
    """It was heeded when a completion ended, which took 90 seconds before GRPO."""
    long = "sampling.max_new_tokens=300"
    settings = [*small, long, "sampling.min_new_tokens=300", "skip_sft=true", "sampling.stop=[]"]
    recipe = load_recipe(
        "demo", [*settings, "grpo.allow_truncation=false", f"output_dir={tmp_path}"]
    )
    steps, write = [], HostLog.write

    def interrupted(log, *drawn):
        steps.append(drawn)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGTERM)
        return write(log, *drawn)

    with Run(recipe, Progress(quiet=True)) as run:
        policy = run.models.load(run.base_path)
        monkeypatch.setattr(HostLog, "write", interrupted)
        sampled = {
            "pre-flight": partial(_require_room, run, policy, begun=False),
            "evaluation": partial(measure_policy, run, policy, phase="base", step=0, split="test"),
        }
        with pytest.raises(Interrupted):
            sampled[name]()
    assert len(steps) == 3
