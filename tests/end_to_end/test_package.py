"""The wheel and the sdist: the same bytes twice, and a wheel that works by itself."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def build(folder: Path) -> dict[str, str]:
    """Name -> hash of what hatchling builds into a folder."""
    words = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build(folder)
    return folder


def test_two_builds_are_the_same_bytes(built: Path, tmp_path: Path) -> None:
    first = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in built.iterdir()}
    assert build(tmp_path) == first
    assert sorted(Path(name).suffix for name in first) == [".gz", ".whl"]


def test_the_wheel_has_every_file_of_the_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("grouper/")}
    source = ROOT / "src"
    files = {
        str(f.relative_to(source))
        for f in (source / "grouper").rglob("*")
        if f.is_file() and "__pycache__" not in f.parts and f.suffix != ".pyc"
    }
    assert inside == files


def test_the_demonstration_runs_from_the_wheel_alone(built: Path, tmp_path: Path) -> None:
    """In an environment of its own, outside the repository; what it depends on is borrowed."""
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").iterdir()) / "site-packages"
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*words, "--target", str(site), str(wheel)], check=True)
    # Only the path, so that no editable install of this repository is found.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = """
import sys, grouper
assert "site-packages/grouper" in grouper.__file__, grouper.__file__
from grouper.cli import main
main(sys.argv[1:])
"""
    settings = [
        "sft.steps=2",
        "grpo.steps=1",
        "grpo.allow_truncation=true",
        "grpo.prompts_per_step=2",
    ]
    settings += ["data.test.options.count=4", "data.validation.options.count=2"]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(python), "-c", script, "run", "demo", *settings],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outputs" / "demo" / "grpo" / "final" / "config.json").exists()
