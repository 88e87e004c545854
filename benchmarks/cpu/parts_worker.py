"""Grouper's GRPO steps with some kernels switched off, asked for by `kernel_parts.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cpu.grouper_step import GrouperSteps
from benchmarks.workers import serve
from benchmarks.workload import CASES
from grouper.kernels.cpu import ops
from grouper.sampling import decode_attention as decoding
from grouper.sampling import engine
from grouper.sampling.engine import OpByOp

RUNNING: list[GrouperSteps] = []


def no(*_: object, **__: object) -> bool:
    """What a kernel answers that serves nothing."""
    return False


def recorded_steps() -> None:
    engine.choose_graphs = lambda *_: OpByOp()


def decode_attention() -> None:
    decoding.kernel_for = lambda _: None  # type: ignore[assignment]  # called by place


def layers() -> None:
    ops.norm_serves = no
    ops.rotate_serves = no
    ops.gated_serves = no


def drawing() -> None:
    ops.draw_serves = no


def attention_backward() -> None:
    ops.attention_serves = no


PARTS: dict[str, Callable[[], None]] = {
    "recorded_steps": recorded_steps,
    "decode_attention": decode_attention,
    "layers": layers,
    "drawing": drawing,
    "attention_backward": attention_backward,
}


def begin(
    *, case: str, model: str, folder: str, prompts: int | None, budget: int, threads: int
) -> None:
    for name in filter(None, os.environ.get("PARTS_OFF", "").split(",")):
        PARTS[name]()
    work = CASES[case]
    if prompts is not None:
        work = work.smaller(prompts, work.group, work.new_tokens)
    RUNNING.append(GrouperSteps(work, Path(model), Path(folder), budget=budget, threads=threads))


def step() -> dict[str, Any]:
    return RUNNING[0].step()


if __name__ == "__main__":
    serve({"begin": begin, "step": step})
