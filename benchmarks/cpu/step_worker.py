"""Grouper's GRPO steps in a process of their own, asked for by `before_after.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# The code of the checkout whose steps these are comes first.
sys.path.insert(0, os.environ["STEPS_OF"])

from grouper_step import GrouperSteps
from workers import serve
from workload import CASES, REAL_CASES

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
