"""Every named algorithm on the demonstration, three seeds each: validation accuracy by step.

    python -m benchmarks.learning.presets            # about fifteen minutes on two cores

All start from the same SFT model of their seed and use the demonstration's settings; nothing is
tuned for any of them. Writes benchmarks/results/presets.json, docs/results/presets.md and
docs/images/presets.png. Only validation problems are measured: this chooses nothing and proves
nothing about new problems.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.checkout import RESULTS, ROOT
from benchmarks.machine import machine

mpl.use("agg")
from matplotlib import pyplot as plt

from grouper.api import train
from grouper.config.loading import load_recipe
from grouper.config.overrides import PRESETS
from grouper.runs.folder import RunFolder
from grouper.runs.progress import Progress
from grouper.training.run import Run

SEEDS = (0, 1, 2)
PLAIN = "Grouper's own"
# `distillation` is left out: it needs a teacher and uses no reward.
ALGORITHMS = [PLAIN, *(name for name in PRESETS if name != "distillation")]
BLUE, GREY = "#0072B2", "#9A9A9A"


def run(folder: str, seed: int, *overrides: str) -> tuple[Path, float]:
    """One run and its seconds, imports not counted."""
    recipe = load_recipe("demo", [f"seed={seed}", f"output_dir={folder}", *overrides])
    started = time.perf_counter()
    with Run(recipe, Progress(quiet=True)) as run:
        path = train(run).path
    return path, time.perf_counter() - started


def one_preset(folder: str, seed: int, name: str, start: Path) -> dict[str, Any]:
    label = name.replace("+", "p").replace("'", "").replace(" ", "-")
    chosen = [] if name == PLAIN else [f"grpo.algorithm={name}"]
    path, seconds = run(
        folder,
        seed,
        f"name=seed{seed}-{label}",
        "skip_sft=true",
        f"grpo.start_from={start}",
        "data.test=null",
        *chosen,
    )
    recorded = RunFolder(path)
    reports = recorded.read_metrics()
    tokens = sum(r.tallies["completion/tokens"].sum for r in reports)
    return {
        "algorithm": name,
        "seed": seed,
        "steps": [e.step for e in recorded.read_evaluations()],
        "accuracy": [e.accuracy for e in recorded.read_evaluations()],
        "updates": sum(r.tallies["updates"].sum for r in reports),
        "tokens": tokens,
        "seconds": round(seconds, 1),
    }


def draw(rows: list[dict[str, Any]], target: Path) -> None:
    """One small panel an algorithm, its seeds in front of everybody's."""
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    columns = 3
    height = -(-len(names) // columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(9, 2.1 * height), sharex=True, sharey=True, squeeze=False
    )
    for place, axis in enumerate(axes.flat):
        axis.set_visible(place < len(names))
        if place >= len(names):
            continue
        for row in rows:
            own = row["algorithm"] == names[place]
            axis.plot(
                row["steps"],
                [100 * a for a in row["accuracy"]],
                color=BLUE if own else GREY,
                linewidth=1.8 if own else 0.5,
                alpha=1.0 if own else 0.35,
                zorder=2 if own else 1,
            )
        axis.set_title(names[place], loc="left", fontsize=10, fontweight="bold")
        axis.set_ylim(0, 100)
        axis.grid(color="#E6E6E6", linewidth=0.7)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("validation\naccuracy %", fontsize=8)
    figure.supxlabel("GRPO step", fontsize=9)
    figure.tight_layout()
    figure.savefig(target, dpi=130)
    plt.close(figure)


def page(rows: list[dict[str, Any]], where: dict[str, Any]) -> str:
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    lines = [
        "# Algorithms compared on the demo",
        "",
        "Written by `python -m benchmarks.learning.presets`. All runs of a seed start from the",
        "same SFT model and use the settings of the demonstration (60 steps of 16 problems x 8",
        "samples, learning rate 5e-5). Nothing is tuned for any of them, so this shows",
        "how they behave; it is not a ranking. Accuracy is greedy on 256 validation problems.",
        "",
        "![accuracy by step](../images/presets.png)",
        "",
        "| algorithm | " + " | ".join(f"seed {s}: start, end" for s in SEEDS) + " | updates | "
        "completion tokens | seconds |",
        "|---|" + "---|" * (len(SEEDS) + 3),
    ]
    for name in names:
        own = [row for row in rows if row["algorithm"] == name]
        ends = [f"{row['accuracy'][0]:.3f}, {row['accuracy'][-1]:.3f}" for row in own]
        updates = sum(row["updates"] for row in own) / len(own)
        tokens = sum(row["tokens"] for row in own) / len(own)
        seconds = sum(row["seconds"] for row in own) / len(own)
        lines.append(
            f"| `{name}` | "
            + " | ".join(ends)
            + f" | {updates:.0f} | {tokens:,.0f} | {seconds:.0f} |"
        )
    lines += [
        "",
        "Updates, tokens and seconds are means over the seeds. `grpo.algorithm` selects a row;",
        "`src/grouper/config/presets.yaml` has the settings of each, [equations](../equations.md)",
        'explain them. "Grouper\'s own" is `grpo` without a name: standardised advantages,',
        "token mean, clip 0.2 and 0.28, no KL, and no update from a group without a correct",
        "answer.",
        "",
        "With one update per rollout batch, the ratio is 1 and every surrogate is the policy",
        "gradient, so many rows nearly coincide here; `gspo`, `sapo`, `dppo` and `cispo` make four",
        "or two updates on the same samples.",
        "",
        f"Commit {where['commit']}, {where['cpu']}, {where['threads']} thread(s),",
        f"torch {where['torch']}. Other work shared the machine: the seconds are upper bounds.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    where = machine()
    rows = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            path, _ = run(folder, seed, "name=sft", "skip_grpo=true", "data.test=null")
            for name in ALGORITHMS:
                rows.append(one_preset(folder, seed, name, path / "sft" / "final"))
                print(rows[-1], flush=True)
    rows.sort(key=lambda row: ALGORITHMS.index(row["algorithm"]))
    record = {"machine": where, "runs": rows}
    results = RESULTS / "presets.json"
    results.write_text(json.dumps(record, indent=1) + "\n")
    draw(rows, ROOT / "docs" / "images" / "presets.png")
    (ROOT / "docs" / "results" / "presets.md").write_text(page(rows, where))


if __name__ == "__main__":
    main()
