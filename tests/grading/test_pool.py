"""Workers that are killed; and grading where there is no script, as in a notebook's kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grouper.config.schema import GradingConfig
from grouper.grading import Grader
from grouper.types import AnswerContract, AnswerKind, Verdict

BOXED = AnswerContract(kind=AnswerKind.BOXED)
HANGS = r"\boxed{\binom{1000000000}{500000000}}"
SYMBOLIC = [r"\boxed{\sqrt{12}}"], [r"2\sqrt{3}"]

# Code from standard input, statement by statement, with an event loop in the main thread.
CELLS = r"""
import asyncio, threading
from pathlib import Path
from grouper.config.schema import GradingConfig, RewardConfig
from grouper.grading import Grader, grade
from grouper.rewards.calling import call
from grouper.types import AnswerContract, AnswerKind
BOXED = AnswerContract(kind=AnswerKind.BOXED)
SYMBOLIC = r"\boxed{\sqrt{12}}", r"2\sqrt{3}"
assert __name__ == "__main__" and globals().pop("__file__", "<stdin>") == "<stdin>"
async def judge(completions, **kwargs):
    return [await asyncio.sleep(0, 1.0) for _ in completions]

async def cell():
    assert threading.current_thread() is threading.main_thread()
    asyncio.get_running_loop()
    assert grade(*SYMBOLIC, BOXED).correct
    call(RewardConfig(name="judge"), judge, {"completions": ["a"]})
    with Grader(BOXED, GradingConfig()) as grader:
        waiting = grader.submit(r"\boxed{\sqrt{27}}", r"3\sqrt{3}")
        assert (await asyncio.wrap_future(waiting)).correct
        print("worker", *grader.worker_pids)

asyncio.new_event_loop().run_until_complete(cell())
assert grade(*SYMBOLIC, BOXED).correct
print("graded")
"""


@pytest.mark.parametrize("how", [("-",), pytest.param(("-i", "-q"), marks=pytest.mark.slow)])
def test_cells_are_graded_and_nothing_is_left(how: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *how],
        input=CELLS,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr  # `-i` goes on after one
    lines = done.stdout.splitlines()
    assert lines[-1] == "graded"
    worker = next(line.split()[1] for line in lines if line.startswith("worker"))
    assert not Path(f"/proc/{worker}").exists()


def _kill_one(grader: Grader, before: tuple[int, ...] = ()) -> int:
    """Kill the worker that is not one of `before`, once it is there."""
    deadline = time.monotonic() + 20
    while not set(grader.worker_pids) - set(before) and time.monotonic() < deadline:
        time.sleep(0.02)
    (pid,) = set(grader.worker_pids) - set(before)
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_worker_killed_from_outside_is_replaced_and_asked_again() -> None:
    with Grader(BOXED, GradingConfig(timeout_seconds=30)) as grader:
        grader.grade(*SYMBOLIC)
        (pid,) = grader.worker_pids
        os.kill(pid, signal.SIGSTOP)  # the request is under way when the worker dies
        future = grader.submit(r"\boxed{\sqrt{20}}", r"2\sqrt{5}")
        time.sleep(0.2)
        assert not future.done()
        os.kill(pid, signal.SIGKILL)
        assert future.result(timeout=20).correct
        assert list(grader.offenders) == []


def test_two_workers_killed_over_one_answer_are_a_crash() -> None:
    with Grader(BOXED, GradingConfig(timeout_seconds=30)) as grader:
        grader.grade(*SYMBOLIC)
        future = grader.submit(HANGS, "5")
        first = _kill_one(grader)
        _kill_one(grader, (first,))
        assert future.result(timeout=20).verdict is Verdict.CRASH
        assert grader.grade([r"\boxed{\sqrt{18}}"], [r"3\sqrt{2}"])[0].correct


def test_a_missed_deadline_is_not_asked_again() -> None:
    with Grader(BOXED, GradingConfig(timeout_seconds=1)) as grader:
        grader.grade(*SYMBOLIC)
        started = time.monotonic()
        assert grader.grade([HANGS], ["5"])[0].verdict is Verdict.TIMEOUT
        assert time.monotonic() - started < 1.9
