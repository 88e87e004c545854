"""What rounding leaves of the steps of GRPO, on a pretrained model: three ways to keep its weights.

    python -m benchmarks.learning.laptop --seeds 0
    python -m benchmarks.learning.master_weights outputs/laptop-seeds/seed-0
    python -m benchmarks.learning.master_weights --table

The folder is a finished run of the laptop recipe: all begin with its model after SFT, rounded to
bfloat16 as published models are, on its problems. Weights are compared after rounding: a run with
float32 weights computes with rounded ones, too. Records are kept in
benchmarks/results/master_weights.json.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.checkout import RESULTS
from benchmarks.learning.result_records import (
    Record,
    accuracy_cell,
    change_cell,
    compare_records,
    keep_record,
    read_records,
    record_run,
    source_lines,
)

RECIPE = "laptop"
RESULT = RESULTS / "master_weights.json"
WEIGHTS = "model.safetensors"

# How weights are kept -> its settings; products are in bfloat16 each time.
WAYS = {
    "float32": ["model.compute_dtype=bfloat16"],
    "bfloat16, float32 masters": ["model.dtype=bfloat16", "grpo.optimizer.master_weights=true"],
    "bfloat16": ["model.dtype=bfloat16"],
}

COLUMNS = (
    "weights",
    "changed %",
    "norm of the change",
    "accuracy % [95 %]",
    "change, points",
    "against float32",
    "peak memory, GiB",
)


def rounded_model(source: Path, target: Path) -> Path:
    """Copy a model folder with its weights rounded to bfloat16; return the copy."""
    if not target.exists():
        shutil.copytree(source, target)
        weights = load_file(source / WEIGHTS)
        weights = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        save_file(weights, target / WEIGHTS, metadata={"format": "pt"})
    return target


def weight_changes(before: Path, after: Path) -> Record:
    """Compare the weights of two model folders, both rounded to bfloat16.

    Returns:
        `share`, of the numbers that changed, and `norm`, of all changes (Euclidean).
    """
    old, new = (load_file(folder / WEIGHTS) for folder in (before, after))
    changed = total = 0
    squares = 0.0
    for name, weight in old.items():
        difference = new[name].to(torch.bfloat16).double() - weight.to(torch.bfloat16).double()
        changed += int(difference.count_nonzero())
        total += difference.numel()
        squares += float(difference.square().sum())
    return {"share": changed / total, "norm": squares**0.5}


def run_once(way: str, start: Path, options: argparse.Namespace) -> None:
    """Run what has no record yet, and keep its record."""
    if way in read_records(RESULT):
        return
    student = rounded_model(start / "sft" / "final", options.folder / "start")
    name = way.replace(", ", "-").replace(" ", "-")
    command = [
        "run",
        RECIPE,
        f"name={name}",
        f"output_dir={options.folder}",
        "skip_sft=true",
        f"grpo.start_from={student}",
        f"grpo.steps={options.steps}",
        "grpo.evaluate_every=0",
        *WAYS[way],
        *options.set,
    ]
    record = record_run(options.folder / name, command, threads=options.threads)
    changes = weight_changes(student, options.folder / name / "grpo" / "final")
    keep_record(RESULT, way, {**record, "weights": changes})


def table(records: dict[str, Record], start: Record) -> str:
    """Write a row for each way, with its change against the model that all begin with."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    # Not in the order in which they were recorded.
    for way, record in ((way, records[way]) for way in WAYS if way in records):
        found = record["evaluations"]["grpo"]
        exact = records["float32"]["evaluations"]["grpo"]
        memory = record.get("peak_bytes")
        cells = [
            way,
            f"{100 * record['weights']['share']:.1f}",
            f"{record['weights']['norm']:.3f}",
            accuracy_cell(found),
            change_cell(compare_records(start, found)),
            "" if found is exact else change_cell(compare_records(exact, found)),
            "-" if memory is None else f"{memory / 2**30:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *source_lines(list(records.values()))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("start", nargs="?", type=Path, help="a finished run of the laptop recipe")
    parser.add_argument("--start-record", default="seed-2", help="its name in laptop.json")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("outputs/master-weights"))
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the recipe")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    options = parser.parse_args()
    start = read_records(RESULTS / "laptop.json")[options.start_record]["evaluations"]["sft"]
    for way in () if options.table else WAYS:
        run_once(way, options.start.resolve(), options)
    print(table(read_records(RESULT), start))


if __name__ == "__main__":
    main()
