"""The first session on a card, on a CPU at toy size: its parts, its limits and its cleaning up.

Nothing is measured here. What only a card can show is left to the card.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
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
sys.argv = sys.argv[1:]
runpy.run_module(script, run_name="__main__", alter_sys=True)
"""
# Part -> what its outcome holds on a machine without a card, with this package's dependencies or
# without them.
PARTS = {
    "rates": "copy_gb_per_second",
    "tests": "no CUDA device",
    "kernels": "log-probs of sampler and trainer",
    "step": "1.5B, lora: split",
    "demonstration": "dependencies are not installed",
    "plan": "pydantic is not installed",
    "limit": "no CUDA device",
    "sampler": "1.5B ragged tokens per second",
    "trl": "TRL's parts over ours",
    "processes": "0 CUDA devices",
    "push": "vLLM is not installed",
}


def bare(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
    return subprocess.run(
        [sys.executable, "-c", BARE, f"benchmarks.gpu.{script}", *arguments, "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def session(
    folder: Path, *parts: str, benchmarks: Path = ROOT / "benchmarks", **settings: str
) -> subprocess.CompletedProcess[str]:
    """A first session without a card."""
    environment = {**os.environ, "DEVICE": "cpu", "PYTHON": sys.executable, **settings}
    environment["PYTHONPATH"] = str(ROOT / "src")
    return subprocess.run(
        [str(benchmarks / "gpu" / "first_card.sh"), str(folder), *parts],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


# Of the parts that CI leaves out, those it runs need the same code but for the card's kernels.
IN_CI = ("rates", "plan", "processes", "push", "step")


@pytest.mark.parametrize(
    "part",
    [part if part in IN_CI else pytest.param(part, marks=pytest.mark.long) for part in PARTS],
)
def test_a_part_runs_on_a_bare_machine(part: str, tmp_path: Path) -> None:
    done = bare("first_card", part, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    outcome = json.loads((tmp_path / f"{part}.json").read_text())
    assert re.search(PARTS[part], json.dumps(outcome))
    assert all(mark["passed"] for mark in outcome["marks"])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_usual_parts_fit_into_one_command_and_run_to_their_end(tmp_path: Path) -> None:
    listed = bare("first_card", "--list").stdout.split()
    limits = {name: int(seconds) for name, _, seconds in (row.partition(":") for row in listed)}
    assert sum(limits.values()) <= 570, "ten minutes a command, the last of them for its start"
    result = ROOT / "benchmarks" / "results" / "gpu.json"
    before = result.read_bytes() if result.exists() else None
    # Toys on one slow core need longer than a card: the order and the end are what is tried here.
    done = session(tmp_path, *(f"{name}:280" for name in limits), SECONDS_IN_ALL="1500")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if "===" in line] == [*limits]
    assert "first card: nothing missed" in (tmp_path / "summary.txt").read_text()
    demonstration = json.loads((tmp_path / "demonstration.json").read_text())
    assert demonstration["figures"]["killed in GRPO"] is True
    assert demonstration["figures"]["accuracy"] is not None
    planned = json.loads((tmp_path / "plan.json").read_text())["figures"]
    assert {"full: planned GiB", "float32: planned GiB", "lora: planned GiB"} <= planned.keys()
    kept = bare("first_card", "--keep", str(tmp_path))
    assert "nothing kept: no part ran on a card" in kept.stdout
    assert (result.read_bytes() if result.exists() else None) == before


def spoilt(folder: Path, body: str) -> Path:
    """A copy of the benchmarks whose `rates` does something else after its first figure."""
    copy = folder / "benchmarks"
    shutil.copytree(ROOT / "benchmarks", copy, ignore=shutil.ignore_patterns("results"))
    file = copy / "gpu" / "sections.py"
    text = file.read_text()
    begin = "def rates(device: torch.device, outcome: Outcome) -> None:\n"
    assert begin in text
    lines = "".join(f"    {line}\n" for line in ('outcome.figure("before", 1)', *body.split("\n")))
    file.write_text(text.replace(begin, begin + lines))
    return copy


def test_a_part_that_breaks_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    copy = spoilt(tmp_path, 'raise RuntimeError("no such card")')
    done = session(tmp_path / "out", "rates:60", "processes:60", benchmarks=copy)
    assert done.returncode == 1
    assert "BROKEN RuntimeError: no such card" in done.stdout
    assert "0 CUDA devices" in done.stdout
    assert "first card: 1 missed" in done.stdout


def running(mark: str) -> list[str]:
    """Processes that were started with a mark in their command."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if mark in line and "ps -eo" not in line]


HANGS = """import subprocess, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "{seconds}"], start_new_session=True)
time.sleep(1000)"""


def test_a_part_past_its_limit_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    """V1: a section past its time left children on the card."""
    copy = spoilt(tmp_path, HANGS.format(seconds=987_651))
    done = session(tmp_path / "out", "rates:30", "processes:60", benchmarks=copy)
    assert running("sleep 987651") == []
    assert "BROKEN it was ended after 30 seconds" in done.stdout
    # What came before is there, and so is the part after it.
    outcome = json.loads((tmp_path / "out" / "rates.json").read_text())
    assert outcome["figures"]["before"] == 1
    assert "0 CUDA devices" in done.stdout


def test_a_session_that_is_cut_off_leaves_results_and_no_process(tmp_path: Path) -> None:
    copy = spoilt(tmp_path, HANGS.format(seconds=987_652))
    environment = {**os.environ, "DEVICE": "cpu", "PYTHON": sys.executable}
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [
        str(copy / "gpu" / "first_card.sh"),
        str(tmp_path / "out"),
        "processes:60",
        "rates:300",
    ]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as child:
        deadline = time.monotonic() + 120
        while not running("sleep 987652"):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        child.terminate()
        assert child.wait(60) == 143
    assert running("sleep 987652") == []
    text = (tmp_path / "out" / "summary.txt").read_text()
    assert "0 CUDA devices" in text
    assert json.loads((tmp_path / "out" / "rates.json").read_text())["figures"]["before"] == 1


def test_the_session_ends_within_its_time(tmp_path: Path) -> None:
    copy = spoilt(tmp_path, "time.sleep(1000)")
    started = time.monotonic()
    done = session(tmp_path / "out", "rates:500", "processes", benchmarks=copy, SECONDS_IN_ALL="15")
    assert time.monotonic() - started < 60
    assert "not begun, the 15 seconds are over" in done.stdout


def test_the_comparison_with_vllm_says_what_is_missing() -> None:
    done = bare("vllm_step")
    assert done.returncode == 0, done.stderr
    assert "vllm: not measured here" in done.stdout
