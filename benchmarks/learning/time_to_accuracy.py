"""Held-out accuracy against wall-clock seconds: the same GRPO here and in TRL's GRPOTrainer.

    python -m benchmarks.learning.laptop --seeds 0 --controls   # makes the SFT model of both
    python -m benchmarks.learning.time_to_accuracy outputs/laptop-seeds/seed-0/sft/final --seeds 0 1

The same model, prompts in the same order, rewards, batch, learning rate and schedule, AdamW and
clipping, float32 on both sides, one after the other on an idle machine. Seconds are those of the
steps: evaluations, loading and saving are left out on both sides. Every `--every` steps the model
answers the laptop recipe's test problems greedily, with Grouper's evaluation on both sides.

What is finished is kept in the folder and not run again. Results go to
benchmarks/results/time_to_accuracy.json, the chart to docs/images/time-to-accuracy.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.checkout import RESULTS, ROOT, importing_from
from benchmarks.learning.result_records import evaluation_record, run_grouper
from benchmarks.machine import where
from grouper.api import evaluate
from grouper.config.loading import load_recipe
from grouper.runs.folder import RunFolder

RECIPE = "laptop"
RESULT = RESULTS / "time_to_accuracy.json"
CHART = ROOT / "docs" / "images" / "time-to-accuracy.svg"

Point = dict[str, Any]


def changes_of(seed: int, model: Path, options: argparse.Namespace) -> list[str]:
    """Return what differs from the recipe; its test problems are measured as its validation."""
    recipe = load_recipe(RECIPE)
    assert recipe.data.test is not None
    test = recipe.data.test.model_dump(mode="json", exclude_defaults=True)
    return [
        f"seed={seed}",
        "skip_sft=true",
        "model.compute_dtype=float32",
        f"grpo.start_from={model.resolve()}",
        f"grpo.steps={options.steps}",
        f"grpo.evaluate_every={options.every}",
        f"data.validation={json.dumps(test)}",
        "data.test=null",
        *options.set,
    ]


def train_here(seed: int, model: Path, options: argparse.Namespace) -> list[Point]:
    """Train with Grouper, and return the seconds and the accuracy of each measured step."""
    folder = options.folder / f"grouper-{seed}"
    names = [f"name={folder.name}", f"output_dir={folder.parent}"]
    command = ["run", RECIPE, "--resume", *changes_of(seed, model, options), *names]
    run_grouper(command, threads=2)
    run = RunFolder(folder)
    elapsed = 0.0
    seconds = {}
    for row in run.metrics_rows():
        elapsed += float(row["time.step"])
        seconds[int(row["step"])] = elapsed
    points = [
        point(result.step, seconds[result.step], evaluation_record(result))
        for result in run.read_evaluations()
        if result.step and result.split == "validation"
    ]
    return sorted(points, key=lambda found: found["step"])


def train_there(seed: int, model: Path, options: argparse.Namespace) -> list[Point]:
    """Train with TRL, and return the seconds and the accuracy of each measured step."""
    folder = options.folder / f"trl-{seed}"
    changes = changes_of(seed, model, options)
    last = folder / f"step-{options.steps}"
    if not last.exists():
        script = [sys.executable, "-m", "benchmarks.learning.trl_train"]
        words = [*script, RECIPE, str(model), str(folder), *changes]
        subprocess.run(words, check=True, env={**importing_from(ROOT), "OMP_NUM_THREADS": "2"})
    lines = (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = {row["step"]: row["elapsed"] for row in map(json.loads, lines)}
    return [
        measured(step, seconds[step], folder / f"step-{step}", folder / f"measured-{step}", changes)
        for step in sorted(seconds)
        if step % options.every == 0
    ]


def measured(step: int, seconds: float, model: Path, folder: Path, changes: Sequence[str]) -> Point:
    """Measure a saved model as Grouper's validation does."""
    recipe = load_recipe(RECIPE, changes)
    result = evaluate(recipe, model, split="validation", folder=folder)
    return point(step, seconds, evaluation_record(result))


def point(step: int, seconds: float, found: dict[str, Any]) -> Point:
    kept = {name: found[name] for name in ("accuracy", "low", "high", "format", "right")}
    return {"step": step, "seconds": round(seconds, 1), **kept}


# --- what follows from it ------------------------------------------------------------------------


def seconds_to(accuracy: float, points: Sequence[Point], start: float) -> float | None:
    """Interpolate when a curve first reaches an accuracy above its start; None: never.

    >>> points = [{"seconds": 100, "accuracy": 0.4}, {"seconds": 200, "accuracy": 0.6}]
    >>> seconds_to(0.5, points, 0.3), seconds_to(0.7, points, 0.3)
    (150.0, None)
    """
    before_seconds = 0.0
    before = start
    for found in points:
        if found["accuracy"] >= accuracy:
            share = (accuracy - before) / (found["accuracy"] - before)
            return float(before_seconds + share * (found["seconds"] - before_seconds))
        before_seconds = found["seconds"]
        before = found["accuracy"]
    return None


def stated_accuracy(sides: Sequence[Sequence[Point]]) -> float:
    """Return the highest accuracy that every curve reaches, rounded down to five points."""
    reached = min(max(found["accuracy"] for found in points) for points in sides)
    return float(math.floor(20 * reached) / 20)


def summary(start: float, runs: dict[str, dict[str, list[Point]]]) -> dict[str, Any]:
    """Return the ratio of times to the stated accuracy, of each seed and their mean.

    There is none where some curve reaches no such accuracy above the start.
    """
    accuracy = stated_accuracy([points for sides in runs.values() for points in sides.values()])
    if accuracy <= start:
        return {"accuracy": accuracy, "ratios": {}, "ratio": None}
    ratios = {}
    for seed, sides in runs.items():
        ours = seconds_to(accuracy, sides["grouper"], start)
        theirs = seconds_to(accuracy, sides["trl"], start)
        assert ours is not None
        assert theirs is not None
        ratios[seed] = round(theirs / ours, 2)
    return {
        "accuracy": accuracy,
        "ratios": ratios,
        "ratio": round(statistics.fmean(ratios.values()), 2),
    }


def draw(start: float, runs: dict[str, dict[str, list[Point]]]) -> None:
    """Accuracy against seconds, a line for each side and seed."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    styles = {"grouper": ("Grouper", "#0b6e4f"), "trl": ("TRL", "#b5651d")}
    for number, sides in enumerate(runs.values()):
        for side, points in sides.items():
            name, color = styles[side]
            minutes = [0.0, *(found["seconds"] / 60 for found in points)]
            accuracy = [100 * start, *(100 * found["accuracy"] for found in points)]
            label = name if number == 0 else None
            axes.plot(minutes, accuracy, marker="o", markersize=4, color=color, label=label)
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(CHART, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the SFT model that both start from")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("outputs/time-to-accuracy"))
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the recipe")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    changes = changes_of(0, options.model, options)
    start = measured(0, 0.0, options.model, options.folder / "measured-0", changes)
    runs: dict[str, dict[str, list[Point]]] = {}
    for seed in options.seeds:
        runs[str(seed)] = {
            "grouper": train_here(seed, options.model, options),
            "trl": train_there(seed, options.model, options),
        }
        found = {
            "machine": where(trl=version("trl")),
            "settings": changes_of(seed, options.model, options),
            "start": start,
            "runs": runs,
            "summary": summary(start["accuracy"], runs),
        }
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
        draw(start["accuracy"], runs)
        print(found["summary"], flush=True)


if __name__ == "__main__":
    main()
