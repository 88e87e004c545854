"""One writer at a time; a dead one is no hindrance."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grouper.errors import RunFolderError
from grouper.runs import lock
from grouper.runs.lock import LOCK_FILE, RunLock

HOLD = "import sys; from pathlib import Path; from grouper.runs.lock import RunLock; "
HOLD += "held = RunLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def other(tmp_path: Path):
    """A second process that holds the run."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_with_the_first_ones_name(tmp_path: Path, other) -> None:
    with pytest.raises(RunFolderError, match=f"process {other.pid} on {platform.node()}"):
        RunLock(tmp_path)


def test_deleting_the_lock_of_a_live_process_lets_nobody_in(tmp_path: Path, other) -> None:
    """R7: the message told people to delete the file, and then there were two writers."""
    with pytest.raises(RunFolderError) as caught:
        RunLock(tmp_path)
    assert "delete" not in str(caught.value)
    (tmp_path / LOCK_FILE).unlink()
    for _ in range(2):
        with pytest.raises(RunFolderError, match="another process is writing this run"):
            RunLock(tmp_path)
    other.kill()
    other.wait()
    RunLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_holds_nothing(tmp_path: Path, other) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert (tmp_path / LOCK_FILE).exists()
    held = RunLock(tmp_path)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_session_left_open_in_this_process_is_no_hindrance(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    second = RunLock(tmp_path)
    first.release()
    assert (tmp_path / LOCK_FILE).exists()
    second.release()
    assert not (tmp_path / LOCK_FILE).exists()


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_where_there_are_no_locks_the_process_is_looked_for(
    tmp_path: Path, other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    held = f"process {other.pid}.*is another program by now, delete"
    with pytest.raises(RunFolderError, match=held):
        RunLock(tmp_path)
    other.kill()
    other.wait()
    monkeypatch.setattr(lock.time, "sleep", lambda _: None)
    RunLock(tmp_path).release()


def test_of_several_that_begin_at_once_without_locks_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(_: float) -> None:
        (tmp_path / LOCK_FILE).write_text(json.dumps({"pid": 7, "host": "node7"}))

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    monkeypatch.setattr(lock.time, "sleep", meanwhile)
    with pytest.raises(RunFolderError, match="process 7 on node7 is writing"):
        RunLock(tmp_path)


def test_of_a_process_on_another_machine_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    (tmp_path / LOCK_FILE).write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with pytest.raises(RunFolderError, match=r"process 1 on elsewhere.*delete"):
        RunLock(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_paragraph(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="cannot write here"):
        RunLock(tmp_path / "file" / "run")
