"""The GPU benchmarks run on a CPU, at toy size, on what a bare machine has; nothing is measured."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BARE = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        missing = {"pydantic", "pydantic_core", "datasets", "math_verify", "trl"}
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
script = sys.argv[1]
sys.path[:0] = [script.rpartition("/")[0]]
sys.argv = sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


def bare(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = str(ROOT / "benchmarks" / script)
    return subprocess.run(
        [sys.executable, "-c", BARE, path, *arguments, "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("section", "found"),
    [
        ("rates", "copy_gb_per_second"),
        ("kernels", "log-probs of sampler and trainer"),
        ("tests", "no CUDA device"),
        ("sampler", "1.5B ragged tokens per second"),
        ("step", "1.5B, lora: split"),
        ("memory", "no CUDA device"),
        ("limit", "no CUDA device"),
        ("demonstration", "no CUDA device"),
        ("processes", "0 CUDA devices"),
    ],
)
def test_a_section_runs_on_a_bare_machine(section: str, found: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = bare("gpu_check.py", "--section", section, "--found", str(file))
    assert done.returncode == 0, done.stderr
    outcome = json.loads(file.read_text())
    assert found in json.dumps(outcome)
    assert all(mark["passed"] for mark in outcome["marks"])


def test_the_whole_check_runs_to_its_end_without_a_card() -> None:
    result = ROOT / "benchmarks" / "results" / "gpu.json"
    before = result.stat().st_mtime_ns if result.exists() else None
    script = str(ROOT / "benchmarks" / "gpu_check.py")
    done = subprocess.run(
        [sys.executable, script, "--device", "cpu", "--only", "rates", "processes"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu check: nothing missed" in done.stdout
    after = result.stat().st_mtime_ns if result.exists() else None
    assert after == before, "results are those of a GPU"


def test_a_section_that_breaks_is_reported(tmp_path: Path) -> None:
    spoilt = tmp_path / "benchmarks"
    shutil.copytree(ROOT / "benchmarks", spoilt, ignore=shutil.ignore_patterns("results"))
    sections = spoilt / "gpu_sections.py"
    text = sections.read_text()
    begin = "def rates(device: torch.device, outcome: Outcome) -> None:\n"
    assert begin in text
    broken = '    outcome.figure("before", 1)\n    raise RuntimeError("no such card")\n'
    sections.write_text(text.replace(begin, begin + broken))
    command = [sys.executable, str(spoilt / "gpu_check.py"), "--device", "cpu", "--only", "rates"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "BROKEN RuntimeError: no such card" in done.stdout
    assert "gpu check: 1 missed" in done.stdout


def test_the_comparison_with_vllm_says_what_is_missing() -> None:
    done = bare("gpu_vllm.py")
    assert done.returncode == 0, done.stderr
    assert "vllm: not measured here" in done.stdout
