"""The demonstration with rollouts one step ahead of the update, and without, on seeds 0-2.

    python -m benchmarks.learning.ahead native
    make test-vllm                              # makes the environment
    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.learning.ahead vllm

Rollouts are sampled by the native sampler or by a vLLM server. Both runs of a seed start from one
SFT. Writes benchmarks/results/native_ahead.json or vllm_ahead.json after each run, and does not
repeat what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS
from benchmarks.learning.demo_seeds import one_run
from benchmarks.machine import machine
from grouper.runs.folder import RunFolder

SEEDS = (0, 1, 2)
SETTINGS = {
    "native": (),
    "vllm": ("sampling.engine=vllm", "sampling.vllm.mode=server", "data.test=null"),
}


def measured(engine: str, folder: str, seed: int, staleness: int, *more: str) -> dict[str, Any]:
    load = os.getloadavg()[0]
    result, seconds = one_run(
        folder,
        seed,
        *SETTINGS[engine],
        f"grpo.max_staleness={staleness}",
        f"name=ahead{staleness}-{seed}",
        *more,
    )
    record = RunFolder(result.path)
    steps = [r for r in record.read_metrics() if r.phase == "grpo"]
    drawn = [next(record.read_rollouts("grpo", r.step))["policy_version"] for r in steps]
    looks = [e for e in record.read_evaluations() if e.split == "validation" and e.phase == "grpo"]
    gap = "stale_logprob_diff" if staleness else "sampler_logprob_diff"
    return {
        "seed": seed,
        "max_staleness": staleness,
        "grpo": result.results[-1].accuracy,
        "problems": len(result.results[-1].scores),
        "validation": {e.step: e.accuracy for e in looks},
        "solve_rate": [round(r.tallies["solve_rate"].mean, 4) for r in steps],
        "versions": drawn,
        "gap": max(r.tallies[gap].mean for r in steps if gap in r.tallies),
        "importance": min(
            r.tallies["policy/importance"].mean for r in steps if "policy/importance" in r.tallies
        ),
        "seconds": round(seconds),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=sorted(SETTINGS))
    engine = parser.parse_args().engine
    path = RESULTS / f"{engine}_ahead.json"
    before = json.loads(path.read_text())["runs"] if path.exists() else []
    rows: list[dict[str, Any]] = before
    done = {(row["seed"], row["max_staleness"]) for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        for staleness, seed in ((s, n) for s in (1, 0) for n in SEEDS):
            if (seed, staleness) in done:
                continue
            sft = Path(folder) / f"ahead1-{seed}" / "sft" / "final"
            more = ["skip_sft=true", f"grpo.start_from={sft}"] if sft.exists() else []
            rows.append(measured(engine, folder, seed, staleness, *more))
            record = {"machine": machine(), "runs": rows}
            path.write_text(json.dumps(record, indent=1) + "\n")
            print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
