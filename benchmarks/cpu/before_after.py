"""A GRPO step of this checkout beside one of another checkout: the same case, in turns.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu.before_after OTHER_CHECKOUT

A step of "25M bf16" takes more than eight minutes on a processor without bfloat16 products;
`--smaller PROMPTS GROUP TOKENS` runs the same shapes on less work, and the result says so.

Both have the same weights, prompts and lengths; each has its own kernels and its own
`step_worker.py`, which knows how a step is called there. The ratio of a pair is this checkout's
seconds over the other's, of two steps that follow each other; which of them comes first alternates.
Sampling is listed by itself, too.
Writes `results/before_after.json`, or `--output`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS, ROOT
from benchmarks.cpu.step import best_settings
from benchmarks.machine import where
from benchmarks.workers import Worker
from benchmarks.workload import CASES, REAL_CASES, save_model

RESULT = RESULTS / "before_after.json"


def worker_of(checkout: Path) -> Worker:
    """Start a process that takes steps of a checkout."""
    source = checkout / "src"
    flat = checkout / "benchmarks"
    if (flat / "step_worker.py").exists():
        # A checkout from before the benchmarks were a package: its scripts lie side by side.
        own = {"STEPS_OF": str(flat)}
        return Worker(sys.executable, "step_worker", own, folders=(flat, source))
    return Worker(sys.executable, "benchmarks.cpu.step_worker", folders=(checkout, source))


def commit_of(checkout: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def compare(
    sides: dict[str, Worker], name: str, pairs: int, folder: Path, smaller: list[int] | None
) -> dict[str, Any]:
    """Seconds of each side's steps after two to warm up, and the ratio of every pair."""
    model = folder / "model"
    save_model({**CASES, **REAL_CASES}[name], model)
    settings = best_settings(name)["grouper"]
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    sampling: dict[str, list[float]] = {side: [] for side in sides}
    for side, worker in sides.items():
        place = str(folder / side)
        worker.ask("begin", case=name, model=str(model), folder=place, smaller=smaller, **settings)
    for number in range(pairs + 2):
        for side in list(sides)[:: 1 if number % 2 else -1]:
            taken = sides[side].ask("step", case=name)
            if number >= 2:
                seconds[side].append(round(taken["seconds"], 4))
                sampling[side].append(taken["split"]["sample"])
    for worker in sides.values():
        worker.ask("end", case=name)
    return {
        "settings": settings,
        "smaller": smaller,
        "seconds": seconds,
        "ratio": of_pairs(seconds),
        "sampling_seconds": sampling,
        "sampling_ratio": of_pairs(sampling),
    }


def of_pairs(seconds: dict[str, list[float]]) -> dict[str, float]:
    """How `after` compares with `before`, over steps that followed each other."""
    ratios = [a / b for a, b in zip(seconds["after"], seconds["before"], strict=True)]
    return {
        "median": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout of the commit to compare with")
    known = [*CASES, *REAL_CASES]
    parser.add_argument("--cases", nargs="+", choices=known, default=["0.5M", "25M bf16"])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--smaller", nargs=3, type=int, metavar=("PROMPTS", "GROUP", "TOKENS"))
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    result, other = options.output, options.other.resolve()
    commits = {"after": commit_of(ROOT), "before": commit_of(other)}
    # Cases measured before of the same two commits stay in the file.
    found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    if found.get("commits") != commits:
        found = {"commits": commits, "machine": where()}
    with (
        worker_of(ROOT) as after,
        worker_of(other) as before,
        tempfile.TemporaryDirectory() as folder,
    ):
        for name in options.cases:
            place = Path(folder) / name.replace(" ", "-")
            place.mkdir()
            sides = {"after": after, "before": before}
            found[name] = compare(sides, name, options.pairs, place, options.smaller)
            print(name, found[name]["ratio"], found[name]["sampling_ratio"], flush=True)
            result.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
