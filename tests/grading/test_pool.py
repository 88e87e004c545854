r"""Grading where there is no script: code from standard input, statement by statement, with an
event loop running in the main thread. That is what a notebook's kernel does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CELLS = r"""
import asyncio, threading
from pathlib import Path
from grouper.config import GradingConfig
from grouper.grading import Grader, grade
from grouper.rewards import RewardStack
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
    RewardStack([("judge", 1.0, judge)]).check()
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
