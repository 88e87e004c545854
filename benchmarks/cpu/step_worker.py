"""Grouper's GRPO steps in a process of their own, asked for by `before_after.py`.

Another checkout's `before_after.py` starts this file, too: what it asks for stays as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cpu.grouper_step import GrouperSteps
from benchmarks.workers import serve
from benchmarks.workload import CASES, REAL_CASES

RUNNING: dict[str, GrouperSteps] = {}


def begin(
    *, case: str, model: str, folder: str, smaller: list[int] | None, budget: int, threads: int
) -> None:
    work = {**CASES, **REAL_CASES}[case]
    if smaller:
        work = work.smaller(*smaller)
    RUNNING[case] = GrouperSteps(work, Path(model), Path(folder), budget=budget, threads=threads)


def step(case: str) -> dict[str, Any]:
    return RUNNING[case].step()


def end(case: str) -> None:
    RUNNING.pop(case).__exit__(None, None, None)


if __name__ == "__main__":
    serve({"begin": begin, "step": step, "end": end})
