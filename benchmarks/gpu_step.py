"""A whole GRPO step on a GPU beside TRL's default one, and the update's share of the matrix rate.

    python benchmarks/gpu_step.py

TRL's step is rebuilt from its parts (see gpu_workload.py), with gradient checkpointing as by
default and without; where TRL is installed its own trainer runs as well. The FLOPs of the update
are those of `model_flops.py` (6 a parameter and token without embeddings, plus head and
attention; nothing recomputed, prompts once), the rate is that of a large product of the same dtype,
measured here. Written to benchmarks/results/gpu_step.json on a CUDA device; `--device cpu` only
tries the script out.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from gpu_limits import matrix_rate
from gpu_trl import installed, trl_seconds
from gpu_workload import Ours, Theirs, arguments, medians, save, seconds_of
from model_flops import shape_of, update_flops


def updating(ours: Ours, device: torch.device) -> dict[str, Any]:
    """How much of the matrix rate our update reaches."""
    work = ours.work
    batch = ours.batch(ours.sample())
    ours.update(batch)
    seconds = statistics.median(
        seconds_of(lambda: ours.update(batch), device) for _ in range(work.tries)
    )
    shape = shape_of(ours.policy)
    rows = [(work.prompt_tokens, [work.new_tokens] * work.group)] * work.prompts
    needed, rate = update_flops(shape, rows), matrix_rate(device, work.dtype)
    return {
        "seconds": round(seconds, 4),
        "flops": needed,
        "matrix_flops_a_second": round(rate),
        "share_of_the_matrix_rate": round(needed / seconds / rate, 4),
    }


def main() -> None:
    work, device = arguments(__doc__)
    ours = Ours(work, device)
    default = Theirs(work, device)
    runs = {"grouper": ours.step, "trl's parts": default.step}
    middle, seconds = medians(runs, work.tries, device)
    del default, runs
    kept = Theirs(work, device, checkpointing=False)
    more, kept_seconds = medians({"trl's parts, no checkpointing": kept.step}, work.tries, device)
    del kept
    split = updating(ours, device)
    real = trl_seconds(work, device) if installed() else []
    record = {
        "seconds": seconds | kept_seconds | {"trl": real or "not measured here"},
        "ratio_to_trl_itself": (
            round(statistics.median(real) / middle["grouper"], 2) if real else None
        ),
        "ratio": round(middle["trl's parts"] / middle["grouper"], 2),
        "ratio_without_checkpointing": round(
            more["trl's parts, no checkpointing"] / middle["grouper"], 2
        ),
        "update": split,
    }
    save("gpu_step", record, work, device)
    print(
        f"step: {record['ratio']} x TRL's default, {record['ratio_without_checkpointing']} x "
        "without its gradient checkpointing"
    )
    print(f"step, TRL itself: {record['ratio_to_trl_itself'] or 'not measured here'}")
    print(f"update: {split['share_of_the_matrix_rate']:.1%} of the measured matrix rate")


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
