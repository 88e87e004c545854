"""Files that survive a kill or a full disk, and are equal for equal runs; resources of a job."""

from __future__ import annotations

import contextlib
import errno
import gzip
import importlib.resources
import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from grouper.errors import FULL, RunFolderError

# The problem of brackets that Python's parsers cannot follow.
TOO_DEEP = "it is nested too deeply"
# Microseconds of processor time, and of the period in which a container may take them.
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def raise_os_error(error: OSError, path: Path) -> NoReturn:
    """Raise an error of the operating system about `path` as a `RunFolderError`."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    problem = "cannot write here"
    fix = "Name a folder you may write to (of a run: output_dir)."
    # Another disk would solve all of these.
    if error.errno in {*FULL, errno.EIO}:
        problem = "nothing more can be written"
        fix = (
            "Free some space (old checkpoints first) or set output_dir to another disk, then "
            "start it again (a run with --resume); what was written before is complete."
        )
    raise RunFolderError(f"{problem} ({reason})", where=str(path), fix=fix) from error


@contextlib.contextmanager
def os_errors_as(path: Path) -> Iterator[None]:
    """Raise errors of the operating system while `path` is written as `RunFolderError`.

    Safetensors and tokenizers have exceptions of their own for it (the latter a bare `Exception`)
    that name the system's error number.
    """
    try:
        yield
    except OSError as error:
        raise_os_error(error, path)
    except Exception as error:  # tokenizers has no type of its own; raised again below
        match = re.search(r"\(os error (\d+)\)", str(error))
        if match is None:
            raise
        number = int(match[1])
        raise_os_error(OSError(number, os.strerror(number)), path)


def require_writable(path: Path, fix: str = "Name another folder.") -> None:
    """Raise `RunFolderError`, before anything slow, if nothing can be written at `path`."""
    folder = next(folder for folder in (*path.parents, path) if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise RunFolderError("cannot write here", where=str(folder), fix=fix)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` if the block succeeds; else it is removed.

    Its files get the permissions the user's other files have (safetensors writes private ones)
    and are on disk before the name appears.

    Raises:
        RunFolderError: the disk is full or not writable.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with os_errors_as(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            # A run that was killed may have left its temporary folder.
            for leftover in target.parent.glob(f".{target.name}.*.tmp"):
                shutil.rmtree(leftover)
            temporary.mkdir()
            yield temporary
            readable = temporary.stat().st_mode & 0o666
            for path in temporary.rglob("*"):
                if path.is_file():
                    path.chmod(readable)
                sync(path)
            sync(temporary)
            remove_folder(target)
            temporary.rename(target)
            sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(target: Path) -> None:
    """Delete a folder, if it exists; after a kill it is whole or no longer under its name."""
    if not target.exists():
        return
    gone = target.with_name(f".{target.name}.{os.getpid()}.gone.tmp")
    target.rename(gone)
    shutil.rmtree(gone)


def sweep(folder: Path) -> None:
    """Remove half-written files that a killed process left in a folder and its subfolders."""
    for leftover in [*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")]:
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears as a whole or not at all: temp file, fsync, rename, fsync.

    Raises:
        RunFolderError: the folder is not writable or the disk is full; the old file, if there
            was one, is untouched.
    """
    # The leading dot and the process id keep half-written files out of every glob and apart.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os_errors_as(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a whole file or nothing; raises as `whole_file` does."""
    with whole_file(path) as file:
        file.write(data)


def dumps(record: Mapping[str, Any]) -> str:
    r"""Write one line of JSON, with NaN and infinities as Python and pandas read them.

    Text may hold lone surrogates, which UTF-8 cannot carry; such a line is written in ASCII
    escapes, which can.

    >>> dumps({"text": "é", "loss": float("nan")})
    '{"text":"é","loss":NaN}'
    >>> dumps({"text": "\ud83d"})
    '{"text":"\\ud83d"}'
    """
    # default: mappings of other types become dicts.
    compact = partial(json.dumps, separators=(",", ":"), default=dict)
    text = compact(record, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return compact(record)
    return text


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write records as gzipped JSON lines; equal records give equal bytes (no time inside)."""
    with (
        whole_file(path) as file,
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed,
    ):
        for record in records:
            line = dumps(record) + "\n"
            packed.write(line.encode())


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file of JSON lines: all of its line or, on a full disk, no part of it.

    Raises:
        RunFolderError: the file cannot be written, or the disk is full.
    """
    text = dumps(record) + "\n"
    line = memoryview(text.encode())
    written = 0
    # Unbuffered, so that a failed write is not tried again on closing.
    with os_errors_as(path), path.open("ab", buffering=0) as file:
        try:
            while written < len(line):
                written += file.write(line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                # Another process may have written behind this line.
                if file.tell() == path.stat().st_size:
                    file.truncate(file.tell() - written)
            raise


def whole_lines(path: Path) -> list[Any]:
    """Read the lines of `append_line`, if any; a last line that a kill has truncated is removed.

    Raises:
        ValueError: a line is damaged.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    complete_text = text[: text.rfind("\n") + 1]
    if complete_text != text:
        write_atomic(path, complete_text.encode())
    lines = complete_text.split("\n")[:-1]
    return [json.loads(line) for line in lines]


# Errors of decompressing, decoding and parsing, and of the operating system.
_OF_CONTENT = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zlib.error)


def _yaml_error() -> type[Exception]:
    """Return PyYAML's error class. `grouper --help` does without the import."""
    from yaml import YAMLError

    return YAMLError


@contextlib.contextmanager
def read_errors_as(path: Path, what: str, fix: str) -> Iterator[None]:
    """Raise errors about the content of `path`, while it is read, as `RunFolderError`."""
    try:
        yield
    except RecursionError as error:
        raise RunFolderError(f"{what} ({TOO_DEEP})", where=str(path), fix=fix) from error
    except (*_OF_CONTENT, _yaml_error()) as error:
        raise RunFolderError(f"{what} ({error})", where=str(path), fix=fix) from error


def read_lines(path: Path, parse: Callable[[str], Any] = json.loads) -> Iterator[Any]:
    """Read the records of `write_lines`.

    Args:
        path: the file.
        parse: makes a record of a line; raises `ValueError` where it is damaged.

    Raises:
        RunFolderError: the file is missing or damaged.
    """
    fix = "It was damaged after it was written; restore it or delete it."
    with (
        read_errors_as(path, "the file cannot be read", fix),
        gzip.open(path, "rt", encoding="utf-8") as file,
    ):
        for line in file:
            yield parse(line)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON file.

    Raises:
        RunFolderError: it says `what` where the file is missing or damaged.
    """
    with read_errors_as(path, what, "Check the path, or restore the file."):
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError("it holds no object")
    return content


# Bytes that are read at a time.
_CHUNK = 1 << 24


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file's content, in hex."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def delete(path: Path) -> None:
    """Delete a file, if it exists."""
    with os_errors_as(path):
        path.unlink(missing_ok=True)


def load_table(package: str, name: str) -> Any:
    """Load a YAML file that ships with a package."""
    # Here, because `grouper --help` does without it.
    import yaml

    path = importlib.resources.files(package) / name
    text = path.read_text(encoding="utf-8")
    # The C parser is much faster, where there is one.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(text, Loader=loader)  # noqa: S506 - either one is safe


def cache_folder() -> Path:
    """Return the folder of things that can be computed again: `GROUPER_CACHE`, or the user's cache.

    It may not exist yet.
    """
    folder = os.environ.get("GROUPER_CACHE")
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        if folder:
            return Path(folder).expanduser()
        return Path(user_cache).expanduser() / "grouper"
    except RuntimeError:
        # A user without a home, as in a container, can keep nothing.
        return Path(os.devnull) / "grouper"


def processors() -> int:
    """Count the processors that this process may use: a job or a container often gets only few."""
    if sys.platform == "linux":
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    # There may be no control group, or no limit in it.
    with contextlib.suppress(OSError, ValueError):
        quota, period = CPU_MAX.read_text(encoding="ascii").split()
        limit = max(1, int(quota) // int(period))
        count = min(count, limit)
    return count
