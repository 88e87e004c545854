"""`grouper watch`: a run that goes on, with and without a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from drawn_runs import GRPO, NASTY, make_run, report

from grouper.runs.lock import RunLock


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
