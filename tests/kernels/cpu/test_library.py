"""Building the kernels, and doing without them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from grouper.algorithms.batching import unweighted_rows
from grouper.kernels.cpu import library as building
from grouper.kernels.cpu.library import kernels_in_use, library
from grouper.kernels.switch import OFF, switched_off
from grouper.models.policy import Policy

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of this test's own, and no library loaded before or after; little is in it."""
    small = [source for source in building.SOURCES if source.stem in {"graph", "drawing"}]
    monkeypatch.setattr(building, "SOURCES", small)
    monkeypatch.setenv("GROUPER_CACHE", str(tmp_path / "grouper"))
    monkeypatch.delenv(OFF, raising=False)
    building.built.cache_clear()
    yield tmp_path / "grouper"
    building.built.cache_clear()


@needs_compiler
def test_it_is_built_once(fresh: Path) -> None:
    made = build(fresh)
    before = made.stat().st_mtime_ns
    assert library() is not None
    assert list((fresh / "kernels").iterdir()) == [made]
    assert made.stat().st_mtime_ns == before
    assert made.name.startswith(f"kernels-{kernels_in_use()}.")


def build(cache: Path) -> Path:
    """The file that `library` loads from this cache, loaded by a process of its own.

    A process that has a library loaded is given it again, whatever its file holds by now.
    """
    child = os.fork()
    if not child:
        building.built.cache_clear()
        os._exit(0 if library() is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    (made,) = (cache / "kernels").glob("*.so")
    return made


def is_whole(made: Path) -> bool:
    return made.name.split(".")[1] == hashlib.sha256(made.read_bytes()).hexdigest()


def replace(made: Path, content: bytes) -> None:
    made.unlink()
    made.write_bytes(content)
    made.chmod(0o700)


@needs_compiler
@pytest.mark.parametrize("kept", [0, 1000, -1])
def test_a_damaged_library_is_built_again_and_never_loaded(fresh: Path, kept: int) -> None:
    """R4: an empty one switched the kernels off for ever, a truncated one was a bus error."""
    made = build(fresh)
    content = made.read_bytes()
    replace(made, content[:kept])
    assert len(build(fresh).read_bytes()) >= len(content)
    assert is_whole(made)


@needs_compiler
def test_a_whole_library_that_does_not_load_is_built_again(fresh: Path) -> None:
    made = build(fresh)
    replace(made, b"no library")
    stem = made.name.split(".")[0]
    made.rename(made.with_name(f"{stem}.{hashlib.sha256(b'no library').hexdigest()}.so"))
    assert len(build(fresh).read_bytes()) > 1000


@pytest.mark.slow
@needs_compiler
def test_the_cache_is_private_and_what_others_can_change_is_not_loaded(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = build(fresh)
    folder = made.parent
    assert [p.stat().st_mode & 0o777 for p in (folder, made)] == [0o700, 0o700]
    made.chmod(0o722)
    before = made.stat().st_mtime_ns
    assert build(fresh).stat().st_mtime_ns != before
    folder.chmod(0o777)
    kernels = library()
    assert kernels is not None
    assert not Path(kernels._name).is_relative_to(folder)
    assert f"Others can write to {folder}" in caplog.text
    folder.chmod(0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    building.built.cache_clear()
    kernels = library()
    assert kernels is not None
    assert not Path(kernels._name).is_relative_to(folder)


@needs_compiler
def test_several_processes_build_it_once(fresh: Path) -> None:
    """A checksum is never that of another process's library."""
    children = []
    for _ in range(3):
        child = os.fork()
        if not child:
            os._exit(0 if library() is not None else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    (made,) = (fresh / "kernels").glob("*.so")
    assert is_whole(made)


def test_without_a_compiler_everything_runs(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library() is None
    assert "No C++ compiler" in caplog.text
    assert not fresh.exists()
    policy = Policy(tiny_model("qwen3"))
    batch = unweighted_rows([[4, 3, 2, 1], [7, 6]], [[1, 2, 3, 4, 5, 6], [8, 9]], [0, 1])
    found = policy(batch).logprobs
    with switched_off():
        assert torch.equal(policy(batch).logprobs, found)


def test_a_compiler_that_fails_is_told_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", shutil.which("false") or "false")
    assert library() is None
    assert library() is None
    assert len(caplog.records) == 1
    assert list((fresh / "kernels").iterdir()) == []


def test_it_can_be_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFF, "0")
    assert library() is None
    assert not fresh.exists()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fresh.parent / "temporary"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    fresh.write_text("a file where the folder should be")
    assert library() is not None
    assert list(made.iterdir()) == []  # it is loaded; nothing is left behind


@needs_compiler
def test_options_of_a_compiler_are_tried_in_turn(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "VARIANTS", (("-no-such-option",), ()))
    assert library() is not None


@pytest.mark.slow
@needs_compiler
def test_one_set_of_threads_serves_torch_and_the_kernels() -> None:
    """Two OpenMP libraries in a process would wait for each other's cores."""
    code = (
        "import torch; from grouper.kernels.cpu.library import library;"
        "assert library() is not None;"
        "maps = open('/proc/self/maps').read().split();"
        "print(len({m for m in maps if 'libgomp' in m}))"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc")
    environment = {**os.environ, OFF: "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == ["1"]
