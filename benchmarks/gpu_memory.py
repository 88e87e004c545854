"""Peak memory of a GRPO step on a GPU beside TRL's, at equal dtypes and rows in a micro-batch.

    python benchmarks/gpu_memory.py

Each side alone on the device, one step to warm up and one that is measured: the most that its
tensors take (`torch.cuda.max_memory_allocated`), in sampling and in the update. Written to
benchmarks/results/gpu_memory.json on a CUDA device; elsewhere nothing is measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from gpu_workload import Ours, Theirs, Work, arguments, save

MICRO_BATCH = 8


def peak_of(run: Callable[[], Any], device: torch.device) -> tuple[float | None, Any]:
    """GiB at the highest point of a call (None where nobody counts), and what it returned."""
    if device.type != "cuda":
        return None, run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    made = run()
    torch.cuda.synchronize(device)
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 3), made


def peaks(side: Ours | Theirs, device: torch.device) -> dict[str, float | None]:
    side.step()
    sampling, drawn = peak_of(side.sample, device)
    batch = side.batch(drawn) if isinstance(side, Ours) else drawn
    updating, _ = peak_of(lambda: side.update(batch), device)
    return {"sampling": sampling, "update": updating}


def sides(work: Work, device: torch.device) -> dict[str, Callable[[], Ours | Theirs]]:
    tokens = MICRO_BATCH * (work.prompt_tokens + work.new_tokens)
    return {
        "grouper": lambda: Ours(work, device, micro_tokens=tokens),
        "trl's parts": lambda: Theirs(work, device, micro_batch=MICRO_BATCH),
        "trl's parts, no checkpointing": lambda: Theirs(
            work, device, micro_batch=MICRO_BATCH, checkpointing=False
        ),
    }


def main() -> None:
    work, device = arguments(__doc__)
    found = {}
    for name, make in sides(work, device).items():
        found[name] = peaks(make(), device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    save("gpu_memory", {"micro_batch": MICRO_BATCH, "peak_gib": found}, work, device)
    if device.type != "cuda":
        print("memory: not measured here")
        return
    highest = {name: max(peak.values()) for name, peak in found.items()}  # type: ignore[type-var]  # numbers on CUDA
    told = ", ".join(f"{name} {peak} GiB" for name, peak in highest.items())
    print(f"memory: {told}")


if __name__ == "__main__":
    main()
