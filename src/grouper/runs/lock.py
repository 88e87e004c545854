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
from grouper.files import raise_os_error

LOCK_FILE = ".lock"

# The errors of `flock` on file systems without locks, or without those of folders (EBADF: NFS).
_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF}


class RunLock:
    """Holds a run folder until it is released, or the process ends, however it ends.

    The operating system keeps the lock, so that a killed run leaves no lock. The file names the
    holder; the folder is locked as well, so that deleting the file does not admit another process.
    If the file system does not support locks, the process named in the file is looked for instead.

    Args:
        run: the run folder, or any other; made if it is missing.
        noun: for the content of the folder, in error messages.

    Raises:
        RunFolderError: another process holds it, or the folder cannot be written.
    """

    def __init__(self, run: Path, noun: str = "run") -> None:
        self._path = run.absolute() / LOCK_FILE
        self._noun = noun
        self.pid = os.getpid()
        self._host = platform.node()
        self._handle = -1
        self._folder = -1
        earlier = _HELD.pop(self._path, None)
        if earlier is not None and earlier.pid == self.pid:
            earlier.release()  # a run that was left open, as in a notebook
        try:
            while self._handle < 0:
                run.mkdir(parents=True, exist_ok=True)
                self._handle = self._open()
        except OSError as error:
            raise_os_error(error, self._path)
        _HELD[self._path] = self

    def release(self) -> None:
        """Release the lock and remove its file."""
        if self._handle < 0:
            return
        os.close(self._folder)
        # Otherwise the file is of a run that has replaced this one.
        if _holder(self._path) == (self.pid, self._host):
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self._handle)
        self._handle = -1
        self._folder = -1
        if _HELD.get(self._path) is self:
            del _HELD[self._path]

    def _open(self) -> int:
        """Open and lock the file, and write this process into it.

        Returns:
            The handle of the file; -1 if another attempt is needed.
        """
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        folder = -1
        try:
            is_locked = _flock(handle)
            if not is_locked and _is_alive(_holder(self._path)):
                self._refuse(surely=False)
            # The previous holder may have removed the file before this process locked it.
            if not self._path.exists() or os.fstat(handle).st_ino != self._path.stat().st_ino:
                os.close(handle)
                return -1
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
            _flock(folder)
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps({"pid": self.pid, "host": self._host}).encode(), 0)
            if not is_locked:
                # Of processes that begin at the same time, the last one to write holds the folder.
                os.fsync(handle)
                time.sleep(1)  # until all of them have written
                if _holder(self._path) != (self.pid, self._host):
                    self._refuse(surely=False)
        except BaseException as error:  # Ctrl-C included
            for descriptor in (folder, handle):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            if isinstance(error, BlockingIOError):
                self._refuse()
            raise
        self._folder = folder
        return handle

    def _refuse(self, *, surely: bool = True) -> None:
        """Raise `RunFolderError` with the name of the holder.

        Args:
            surely: the operating system says that the holder is running; otherwise the process may
                have ended on another machine, or another program may have its number.
        """
        holder = _holder(self._path)
        process = "another process"
        if holder is not None:
            pid, host = holder
            process = f"process {pid} on {host}"
        fix = "Wait for it or stop it, or choose another name or output_dir."
        if not surely:
            fix += f" If that process has ended, or is another program by now, delete {self._path}."
        raise RunFolderError(
            f"{process} is writing this {self._noun}",
            where=str(self._path.parent),
            fix=fix,
        )


# The locks of this process, by their files.
_HELD: dict[Path, RunLock] = {}


def is_held_here(run: Path) -> bool:
    """Return whether this process holds a run folder."""
    return run.absolute() / LOCK_FILE in _HELD


def is_running(run: Path) -> bool:
    """Return whether a process that may still write holds a run folder."""
    return _is_alive(_holder(run.absolute() / LOCK_FILE))


def _holder(file: Path) -> tuple[int, str] | None:
    """Read (process id, host) from a lock file; None if it is missing or damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return int(content["pid"]), str(content["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _flock(handle: int) -> bool:
    """Lock the file; return False if the file system does not support locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def _is_alive(holder: tuple[int, str] | None) -> bool:
    """Return whether a process may still write.

    A process of another machine cannot be checked, so it may.
    """
    if holder is None or holder == (os.getpid(), platform.node()):
        return False
    pid, host = holder
    if host != platform.node():
        return True
    try:
        os.kill(pid, 0)
    except OSError as error:  # a process of another user runs, but refuses the signal
        return not isinstance(error, ProcessLookupError)
    return True
