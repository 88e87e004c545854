"""One writer per run folder: a second process is refused while the first one is running."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import time
from pathlib import Path

from grouper.errors import RunFolderError
from grouper.files import refused

LOCK_FILE = ".lock"

# The errors of `flock` on file systems without locks, or without those of folders (EBADF: NFS).
_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF}


class RunLock:
    """Holds a run folder until it is released, or the process ends, however it ends.

    The operating system keeps the lock, so that a killed run leaves no lock. The file names the
    holder; the folder is locked as well, so that deleting the file admits nobody. Where the
    file system knows no locks, the process named in the file is looked for instead.

    Args:
        run: the run folder, or any other; made if it is missing.
        what: is in it, in the refusal.

    Raises:
        RunFolderError: another process holds it, or the folder cannot be written.
    """

    def __init__(self, run: Path, what: str = "run") -> None:
        self._path, self._what = run.absolute() / LOCK_FILE, what
        self.pid, self._host = os.getpid(), platform.node()
        self._handle = self._folder = -1
        mine = _HELD.pop(self._path, None)
        if mine is not None and mine.pid == self.pid:
            mine.release()  # a run that was left open, as in a notebook
        try:
            while self._handle < 0:
                run.mkdir(parents=True, exist_ok=True)
                self._handle = self._open()
        except OSError as error:
            refused(error, self._path)
        _HELD[self._path] = self

    def release(self) -> None:
        """Release the lock and remove its file."""
        if self._handle < 0:
            return
        os.close(self._folder)
        if _holder(self._path) == (self.pid, self._host):  # else of a run that has taken its place
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self._handle)
        self._handle = self._folder = -1
        if _HELD.get(self._path) is self:
            del _HELD[self._path]

    def _open(self) -> int:
        """The open and locked file, with this process named in it; -1: to be tried again."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        folder = -1
        try:
            locked = _flock(handle)
            if not locked and _is_alive(_holder(self._path)):
                self._refuse(surely=False)
            # Whoever held it may have removed the file before we got the lock on it.
            if not self._path.exists() or os.fstat(handle).st_ino != self._path.stat().st_ino:
                os.close(handle)
                return -1
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
            _flock(folder)
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps({"pid": self.pid, "host": self._host}).encode(), 0)
            if not locked:  # of those that began at once, only the last to write finds itself
                os.fsync(handle)
                time.sleep(1)  # by then they have written
                if _holder(self._path) != (self.pid, self._host):
                    self._refuse(surely=False)
        except BaseException as error:  # close both, whatever it is
            for opened in (folder, handle):
                with contextlib.suppress(OSError):
                    os.close(opened)
            if isinstance(error, BlockingIOError):
                self._refuse()
            raise
        self._folder = folder
        return handle

    def _refuse(self, *, surely: bool = True) -> None:
        """Raise, naming the holder.

        Args:
            surely: the operating system says that it is running; otherwise the process may have
                ended on another machine, or its number may be another's by now.
        """
        holder = _holder(self._path)
        who = "another process" if holder is None else f"process {holder[0]} on {holder[1]}"
        fix = "Wait for it or stop it, or choose another name or output_dir."
        if not surely:
            fix += f" If that process has ended, or is another program by now, delete {self._path}."
        what = f"{who} is writing this {self._what}"
        raise RunFolderError(what, where=str(self._path.parent), fix=fix)


# The locks of this process, by their files.
_HELD: dict[Path, RunLock] = {}


def is_running(run: Path) -> bool:
    """Whether a process that may still write holds a run folder."""
    return _is_alive(_holder(run.absolute() / LOCK_FILE))


def _holder(file: Path) -> tuple[int, str] | None:
    try:
        there = json.loads(file.read_text(encoding="utf-8"))
        return int(there["pid"]), str(there["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _flock(handle: int) -> bool:
    """Lock the file; False where the file system knows no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def _is_alive(holder: tuple[int, str] | None) -> bool:
    """Whether that process may still write; one of another machine cannot be checked, so it may."""
    if holder is None or holder == (os.getpid(), platform.node()):
        return False
    pid, host = holder
    if host != platform.node():
        return True
    try:
        os.kill(pid, 0)
    except OSError as error:  # one of another user may not be asked
        return not isinstance(error, ProcessLookupError)
    return True
