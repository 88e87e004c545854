"""The GPU benchmarks run on a CPU, at toy size, on what a bare machine has; nothing is measured."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("script", "figures"),
    [
        ("gpu_sampler.py", ["sampler:", "decode:"]),
        ("gpu_step.py", ["step:", "step, TRL itself: not measured here", "update:"]),
        ("gpu_memory.py", ["memory: not measured here"]),
        ("gpu_vllm.py", ["vllm: not measured here"]),
    ],
)
def test_a_gpu_benchmark_runs_on_a_bare_machine(script: str, figures: list[str]) -> None:
    results = ROOT / "benchmarks" / "results"
    before = {path: path.stat().st_mtime_ns for path in results.glob("gpu_*.json")}
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(ROOT / "benchmarks" / script), "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for figure in figures:
        assert figure in done.stdout
    after = {path: path.stat().st_mtime_ns for path in results.glob("gpu_*.json")}
    assert after == before, "results are those of a GPU"
