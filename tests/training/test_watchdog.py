"""The watchdog: quiet while something moves, and precise when nothing does."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from grouper.training.watchdog import EXIT_CODE, Watchdog


@pytest.mark.slow
def test_it_is_quiet_while_something_moves(capfd: pytest.CaptureFixture[str]) -> None:
    dog = Watchdog(minutes=0.3 / 60)
    dog.start()
    for step in range(6):
        dog.alive(f"step {step}")
        time.sleep(0.1)
    dog.end()
    time.sleep(0.4)
    assert "nothing has moved" not in capfd.readouterr().err


def test_it_says_where_every_thread_stands(capfd: pytest.CaptureFixture[str]) -> None:
    dog = Watchdog(minutes=0.05 / 60, rank=3)
    dog.start()
    dog.alive("sampling of grpo step 7")
    time.sleep(0.3)
    dog.end()
    told = capfd.readouterr().err
    assert "[rank 3] nothing has moved" in told
    assert "sampling of grpo step 7" in told
    assert "test_it_says_where_every_thread_stands" in told


@pytest.mark.slow
def test_it_ends_a_process_that_others_wait_for() -> None:
    script = (
        "import time\n"
        "from grouper.training.watchdog import Watchdog\n"
        "dog = Watchdog(minutes=0.1 / 60, fatal=True)\n"
        "dog.start()\n"
        "dog.alive('an all-reduce')\n"
        "time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == EXIT_CODE
    assert "an all-reduce" in done.stderr
