"""Atomic writes and JSON lines."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from pathlib import Path

import pytest

from grouper import files
from grouper.errors import RunFolderError
from grouper.files import (
    cache_folder,
    dumps,
    read_lines,
    require_writable,
    sweep,
    write_atomic,
    write_lines,
)


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    target = tmp_path / "a.json"
    write_atomic(target, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match=r"No space left on device.*Free some space"):
        write_atomic(target, b"new")
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_the_data_is_on_disk_before_the_name_is(tmp_path, monkeypatch):
    order: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), real_fsync(fd))[1])
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (order.append("rename"), real_replace(self, to))[1]
    )
    write_atomic(tmp_path / "a", b"x")
    assert order == ["fsync", "rename", "fsync"]


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match=r"cannot write here.*output_dir"):
        write_atomic(tmp_path / "file" / "a.json", b"x")


def test_equal_records_give_equal_bytes_whenever_written(tmp_path, monkeypatch):
    lines = [{"text": "a\nb  c\r", "x": 0.1 + 0.2}] * 50
    write_lines(tmp_path / "one.gz", lines)
    monkeypatch.setattr("time.time", lambda: 4e9)
    write_lines(tmp_path / "two.gz", lines)
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()
    assert list(read_lines(tmp_path / "one.gz")) == lines


@pytest.mark.parametrize("text", ["\ud83d", "\x00", "\u2028", '"\\', "é🙂"])
def test_whatever_a_model_writes_comes_back(tmp_path, text):
    write_lines(tmp_path / "a.gz", [{"text": text}])
    assert list(read_lines(tmp_path / "a.gz")) == [{"text": text}]


def test_not_finite_stays_what_it_is_at_any_depth():
    record = {"a": [1.0, float("inf")], "b": {"c": float("nan")}}
    assert repr(json.loads(dumps(record))) == repr(record)


def test_a_damaged_file_is_named(tmp_path):
    """Cut off, or with any byte changed: zlib has an exception of its own."""
    write_lines(tmp_path / "a.gz", [{"text": str(n) * n} for n in range(100)])
    data = (tmp_path / "a.gz").read_bytes()
    changed = [data[:n] + bytes([255 - data[n]]) + data[n + 1 :] for n in range(10, len(data), 7)]
    for damaged in (data[: len(data) // 2], *changed):
        (tmp_path / "a.gz").write_bytes(damaged)
        with pytest.raises(RunFolderError, match=r"a\.gz.*cannot be read"):
            list(read_lines(tmp_path / "a.gz"))


def test_the_root_of_the_file_system_can_be_asked_about() -> None:
    with contextlib.suppress(RunFolderError):  # as root it is writable
        require_writable(Path("/"))


def test_what_a_kill_left_half_written_is_swept_up(tmp_path: Path) -> None:
    (tmp_path / "grpo" / ".final.99.tmp").mkdir(parents=True)
    (tmp_path / "grpo" / ".final.99.tmp" / "model.safetensors").write_text("x")
    (tmp_path / "grpo" / "final").mkdir()
    (tmp_path / ".run.json.99.tmp").write_text("{")
    (tmp_path / "notes.tmp").write_text("mine")
    sweep(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["grpo", "grpo/final", "notes.tmp"]


def test_the_first_that_is_set_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GROUPER_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("GROUPER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "grouper"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "grouper"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GROUPER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for an unknown user
    with pytest.raises(NotADirectoryError):
        cache_folder().mkdir(parents=True)


def test_only_the_processors_of_the_job_and_of_its_container_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(files, "CPU_MAX", limit)
    found = [files.processors()]
    for text in ("max 100000\n", "250000 100000\n", "50000 100000\n"):
        limit.write_text(text)
        found.append(files.processors())
    assert found == [8, 8, 2, 1]
    monkeypatch.setattr(sys, "platform", "darwin")
    limit.unlink()
    assert files.processors() == 128
