"""Ways to use what is there besides rewards, at equal generated tokens, on a pretrained model.

    python -m benchmarks.learning.laptop --seeds 0 --controls
    python -m benchmarks.learning.equal_tokens outputs/laptop-seeds/seed-0 --seeds 0 1
    python -m benchmarks.learning.equal_tokens --page

The folder is a finished run of the laptop recipe: all begin with its model after SFT, on its
problems, with as many rollouts a step and as many steps as each other. The teacher is that run's
model after GRPO. A record of each run is kept in benchmarks/results/equal_tokens.json, and
docs/results/equal-tokens.md is written from them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.checkout import RESULTS, ROOT
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
RESULT = RESULTS / "equal_tokens.json"
PAGE = ROOT / "docs" / "results" / "equal-tokens.md"

# Method -> its settings; TEACHER and STUDENT are models of the run that all begin with.
METHODS = {
    "GRPO": [],
    "GRPO, worked solutions": ["grpo.solution_weight=0.1"],
    "distillation": ["grpo.algorithm=distillation", "grpo.teacher={path: TEACHER}"],
    "self-distillation": [
        "grpo.algorithm=distillation",
        "grpo.teacher={path: STUDENT, prompt: solution}",
        "prompt.max_prompt_tokens=320",
    ],
    "RAFT": ["grpo.algorithm=raft"],
}


def run_once(method: str, seed: int, start: Path, options: argparse.Namespace) -> None:
    """Run what has no record yet, and keep its record."""
    name = f"{method.lower().replace(', ', '-').replace(' ', '-')}-{seed}"
    if name in read_records(RESULT):
        return
    student = start / "sft" / "final"
    teacher = start / "grpo" / "final"
    settings = [
        setting.replace("TEACHER", str(teacher)).replace("STUDENT", str(student))
        for setting in METHODS[method]
    ]
    command = [
        "run",
        RECIPE,
        f"seed={seed}",
        f"name={name}",
        f"output_dir={options.folder}",
        "skip_sft=true",
        f"grpo.start_from={student}",
        f"grpo.steps={options.steps}",
        f"grpo.evaluate_every={options.steps // 3}",
        *settings,
        *options.set,
    ]
    record = record_run(options.folder / name, command, threads=options.threads)
    keep_record(RESULT, name, {"method": method, "seed": seed, **record})


def rows_of(records: dict[str, Record], start: Record) -> list[str]:
    """A row for each run, with its change against the model that all begin with."""
    rows = []
    for record in records.values():
        found = record["evaluations"]["grpo"]
        steps = record["steps"]["grpo"]
        sampled = sum(steps["completion/tokens"]) / len(steps["completion/tokens"])
        cells = [
            record["method"],
            str(record["seed"]),
            accuracy_cell(found),
            change_cell(compare_records(start, found)),
            str(len(steps["completion/tokens"])),
            f"{sampled:.0f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def against_grpo(records: dict[str, Record]) -> list[str]:
    """A row for each run with the seed's GRPO, paired by problem."""
    plain = {record["seed"]: record for record in records.values() if record["method"] == "GRPO"}
    rows = []
    for record in records.values():
        other = plain.get(record["seed"])
        if record["method"] == "GRPO" or other is None:
            continue
        paired = compare_records(other["evaluations"]["grpo"], record["evaluations"]["grpo"])
        rows.append(f"| {record['method']} | {record['seed']} | {change_cell(paired)} |")
    return rows


def page(records: dict[str, Record], start: Record) -> str:
    """Write docs/results/equal-tokens.md."""
    problems = len(start["right"])
    lines = [
        "# Rewards, teachers and worked solutions at equal generated tokens",
        "",
        "Written by `python -m benchmarks.learning.equal_tokens`; every run that was finished is",
        "listed. All begin with SmolLM2-135M-Instruct after the SFT of the",
        "[laptop recipe](../recipes/laptop.md), train on its problems, and sample as many",
        "completions a step for as many steps. The teacher of `distillation` is the same model",
        "after GRPO; that of `self-distillation` is the model that all begin with, which reads the",
        f"worked solution. Accuracy is in per cent, greedy, on {problems} test problems, with 95 %",
        "intervals; changes are in points, paired by problem. Nothing was tuned for any method:",
        "learning rate and schedule are those of the recipe.",
        "",
        f"Before: {accuracy_cell(start)}.",
        "",
        "| method | seed | after | change | steps | tokens a completion |",
        "|---|---|---|---|---|---|",
        *rows_of(records, start),
        "",
        "Against GRPO of the same seed:",
        "",
        "| method | seed | difference |",
        "|---|---|---|",
        *against_grpo(records),
        "",
        *source_lines(list(records.values())),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("start", nargs="?", type=Path, help="a finished run of the laptop recipe")
    parser.add_argument("--start-record", default="seed-2", help="its name in laptop.json")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("outputs/equal-tokens"))
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the recipe")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    options = parser.parse_args()
    start = read_records(RESULTS / "laptop.json")[options.start_record]["evaluations"]["sft"]
    for seed in options.seeds:
        for method in () if options.page else options.methods:
            run_once(method, seed, options.start.resolve(), options)
    PAGE.write_text(page(read_records(RESULT), start))


if __name__ == "__main__":
    main()
