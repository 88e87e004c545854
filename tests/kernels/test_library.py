"""Building the kernels, and doing without them."""

from __future__ import annotations

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

from grouper.kernels import library as building
from grouper.kernels.library import library
from grouper.kernels.switch import switched_off
from grouper.policy import Policy, _probe_batch

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of this test's own, and no library loaded before or after; little is in it."""
    small = [source for source in building.SOURCES if source.stem in {"tape", "products"}]
    monkeypatch.setattr(building, "SOURCES", small)
    monkeypatch.setenv("GROUPER_CACHE", str(tmp_path / "grouper"))
    monkeypatch.delenv(building.OFF, raising=False)
    library.cache_clear()
    yield tmp_path / "grouper"
    library.cache_clear()


@needs_compiler
def test_it_is_built_once(fresh: Path) -> None:
    assert library() is not None
    (made,) = fresh.iterdir()
    before = made.stat().st_mtime_ns
    library.cache_clear()
    assert library() is not None
    assert [p.name for p in fresh.iterdir()] == [made.name]
    assert made.stat().st_mtime_ns == before


def test_without_a_compiler_everything_runs(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library() is None
    assert "No C++ compiler" in caplog.text
    assert not fresh.exists()
    policy, batch = Policy(tiny_model("qwen3")), _probe_batch(torch.arange(24).view(4, 6))
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
    assert list(fresh.iterdir()) == []


def test_it_can_be_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(building.OFF, "0")
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


@needs_compiler
def test_one_set_of_threads_serves_torch_and_the_kernels() -> None:
    """Two OpenMP libraries in a process would wait for each other's cores."""
    code = (
        "import torch; from grouper.kernels.library import library; assert library() is not None;"
        "maps = open('/proc/self/maps').read().split();"
        "print(len({m for m in maps if 'libgomp' in m}))"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc")
    environment = {**os.environ, building.OFF: "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == ["1"]
