"""The demonstration on seeds 0-4, and its shuffled-reward control on seeds 0-2.

    python -m benchmarks.learning.demo_seeds        # about ten minutes on two cores

Writes benchmarks/results/demo_seeds.json and docs/results/demo.md. Settings were chosen on the
validation problems; the 512 test problems of each seed are measured once per phase, here.
"""

from __future__ import annotations

import json
import tempfile
import time
from typing import Any

from benchmarks.checkout import RESULTS, ROOT
from benchmarks.machine import machine
from grouper.api import train
from grouper.config.loading import load_recipe
from grouper.evaluation.statistics import PairedComparison, paired_comparison
from grouper.runs.progress import Progress
from grouper.training.pipeline import RunResult
from grouper.training.run import Run

SEEDS = (0, 1, 2, 3, 4)
CONTROL_SEEDS = (0, 1, 2)


def one_run(folder: str, seed: int, *overrides: str) -> tuple[RunResult, float]:
    """One whole run and its seconds, imports not counted."""
    recipe = load_recipe("demo", [f"seed={seed}", f"output_dir={folder}", *overrides])
    started = time.perf_counter()
    with Run(recipe, Progress(quiet=True)) as run:
        result = train(run)
    return result, time.perf_counter() - started


def row(seed: int, result: RunResult, seconds: float) -> dict[str, Any]:
    base, sft, grpo = result.results
    paired: PairedComparison = paired_comparison(
        [sft.scores[i] for i in sft.scores], [grpo.scores[i] for i in sft.scores]
    )
    return {
        "seed": seed,
        "problems": len(sft.scores),
        "base": base.accuracy,
        "sft": sft.accuracy,
        "grpo": grpo.accuracy,
        "gain": paired.difference,
        "gain_low": paired.interval.low,
        "gain_high": paired.interval.high,
        "seconds": round(seconds, 1),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| seed | problems | base | after SFT | after GRPO | gain [95 %] | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['seed']} | {r['problems']} | {r['base']:.3f} | {r['sft']:.3f} | {r['grpo']:.3f} "
        f"| {r['gain']:+.3f} [{r['gain_low']:+.3f}, {r['gain_high']:+.3f}] | {r['seconds']} |"
        for r in rows
    ]
    return lines


def main() -> None:
    runs, controls = [], []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(row(seed, *one_run(folder, seed)))
        print(runs[-1], flush=True)
    for seed in CONTROL_SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            controls.append(row(seed, *one_run(folder, seed, "grpo.shuffle_rewards=true")))
        print("control", controls[-1], flush=True)
    record: dict[str, Any] = {"machine": machine(), "runs": runs, "shuffled_rewards": controls}
    (RESULTS / "demo_seeds.json").write_text(json.dumps(record, indent=2) + "\n")
    where = record["machine"]
    text = [
        "# Results of the demo",
        "",
        "Written by `python -m benchmarks.learning.demo_seeds`; it lists every seed that was run.",
        "Accuracy is greedy on 512 test problems that share no question with training or",
        "validation. Settings were chosen on validation problems. The interval of the gain is",
        "paired by problem (Bonett-Price).",
        "",
        "History: a first version (GRPO learning rate 3e-4, other test problems) reached 0.957 to",
        "0.979 on the same seeds, but its shuffled-reward controls gained 0.002, 0.133 and 0.191:",
        "at that rate, noise alone moves a 0.45M model far enough to flip a habit. The rate was",
        "lowered on validation problems, and the test problems were replaced by new ones.",
        "",
        *table(runs),
        "",
        "Control: the same with `grpo.shuffle_rewards=true`, where rewards are permuted over",
        "all rollouts of a step. If the gain comes from the rewards, it must be absent here.",
        "",
        *table(controls),
        "",
        "Source of the gain: SFT trains on solutions that often stop one step early; GRPO",
        "reinforces the complete solutions that the model already samples. It teaches almost no",
        "arithmetic.",
        "",
        f"Commit {where['commit']}, {where['cpu']},",
        f"{where['threads']} thread(s), torch {where['torch']}.",
        "Other work shared the machine, so the seconds are an upper bound.",
        "",
    ]
    (ROOT / "docs" / "results" / "demo.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
