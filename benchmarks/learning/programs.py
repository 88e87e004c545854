"""GSM8K on Qwen2.5-Coder-0.5B: reasoning, programs as answers, and turns with Python.

    make real-models MODELS=coder05
    python -m benchmarks.learning.programs ../shared/data/gsm8k --seeds 0 1
    python -m benchmarks.learning.programs --page

Each way to answer is measured greedily before and after GRPO with an adapter. Every run may
generate as many tokens: a way with longer completions takes fewer steps. Killed, it goes on where
it was when it is called again. A record of each is kept in benchmarks/results/programs.json, and
docs/results/programs.md is written from them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.checkout import REAL_MODELS, RESULTS, ROOT
from benchmarks.learning.result_records import (
    Record,
    accuracy_cell,
    change_cell,
    compare_records,
    evaluation_record,
    keep_record,
    read_records,
    record_run,
    source_lines,
)
from benchmarks.machine import where
from grouper.api import evaluate
from grouper.config.loading import load_recipe

RECIPE = Path(__file__).with_name("programs.yaml")
RESULT = RESULTS / "programs.json"
PAGE = ROOT / "docs" / "results" / "programs.md"

# Of a step, as programs.yaml says.
COMPLETIONS = 4 * 8

# Way to answer -> the format of its prompt.
WAYS = {"reasoning": "boxed", "program": "program", "turns": "python-tool"}


def settings_of(way: str, data: Path, options: argparse.Namespace) -> list[str]:
    """What a way has different from programs.yaml."""
    return [
        f"model.path={REAL_MODELS / options.model}",
        f"prompt.format={WAYS[way]}",
        f"data.train.path={data / 'train.jsonl'}",
        f"threads={options.threads}",
        f"output_dir={options.folder}",
        *options.set,
    ]


def measured(name: str, way: str, model: Path, data: Path, options: argparse.Namespace) -> Record:
    """Evaluate a model on the first test problems."""
    test = f"data.test={{source: gsm8k, path: {data / 'test.jsonl'}, limit: {options.problems}}}"
    recipe = load_recipe(str(RECIPE), [*settings_of(way, data, options), test])
    started = time.perf_counter()
    found = evaluate(recipe, model, name=name, folder=options.folder / "measured" / name)
    return {
        "machine": {**where(), "threads": options.threads},
        "seconds": round(time.perf_counter() - started),
        "evaluations": {"test": evaluation_record(found)},
    }


def trained(way: str, seed: int, steps: int, data: Path, options: argparse.Namespace) -> Record:
    """Run GRPO, and evaluate what it has made."""
    name = f"{way}-{seed}"
    command = ["run", str(RECIPE), *settings_of(way, data, options)]
    command += [f"seed={seed}", f"name={name}", f"grpo.steps={steps}"]
    record = record_run(options.folder / name, command, threads=options.threads)
    model = options.folder / name / "grpo" / "final"
    return {**record, **measured(name, way, model, data, options)}


def run(data: Path, options: argparse.Namespace) -> None:
    """Measure and train what has no record yet."""
    for way in options.ways:
        before = read_records(RESULT).get(f"{way}-before")
        if before is None:
            model = REAL_MODELS / options.model
            before = measured(f"{way}-before", way, model, data, options)
            keep_record(RESULT, f"{way}-before", {"way": way, **before})
        # Greedy completions are about as long as sampled ones.
        a_step = COMPLETIONS * before["evaluations"]["test"]["mean_tokens"]
        steps = max(1, round(options.tokens / a_step))
        for seed in options.seeds:
            if f"{way}-{seed}" not in read_records(RESULT):
                record = trained(way, seed, steps, data, options)
                keep_record(RESULT, f"{way}-{seed}", {"way": way, "seed": seed, **record})


def rows(records: dict[str, Record]) -> list[str]:
    """A row for each evaluation, those of a way together."""
    made = []
    for way in WAYS:
        before = records.get(f"{way}-before")
        for record in records.values():
            if record["way"] != way:
                continue
            found = record["evaluations"]["test"]
            seed = str(record.get("seed", ""))
            change = ""
            steps = tokens = "-"
            if seed and before is not None:
                change = change_cell(compare_records(before["evaluations"]["test"], found))
                columns = record["steps"]["grpo"]
                steps = str(len(columns["time.step"]))
                tokens = f"{COMPLETIONS * sum(columns['completion/tokens']):,.0f}"
            cells = [way, seed or "before", accuracy_cell(found), change, steps, tokens]
            cells += [f"{found['mean_tokens']:.0f}", f"{100 * found['cut_off']:.0f}"]
            made.append(f"| {' | '.join(cells)} |")
    return made


def against_reasoning(records: dict[str, Record]) -> list[str]:
    """A row for each way beside reasoning, before training and by seed."""
    made = []
    for record in records.values():
        stage = "before" if "seed" not in record else str(record["seed"])
        other = records.get(f"reasoning-{stage}")
        if record["way"] == "reasoning" or other is None:
            continue
        paired = compare_records(other["evaluations"]["test"], record["evaluations"]["test"])
        made.append(f"| {record['way']} | {stage} | {change_cell(paired)} |")
    return made


def page(records: dict[str, Record]) -> str:
    """Write docs/results/programs.md."""
    problems = {len(record["evaluations"]["test"]["right"]) for record in records.values()}
    counts = " or ".join(str(count) for count in sorted(problems))
    lines = [
        "# Reasoning, programs and turns with Python",
        "",
        "Written by `python -m benchmarks.learning.programs`. Qwen2.5-Coder-0.5B-Instruct answers",
        "GSM8K in three ways: by [reasoning](../concepts.md#the-prompt-format) with the answer",
        "in a box, by [a program](../grading.md#programs-as-answers) whose output is the answer,",
        "and in [turns](../concepts.md#turns-with-tools) in which it may run Python. Each is",
        f"measured greedily on the first {counts} test problems, before and after GRPO with an",
        "adapter, where every run generated about as many tokens. Accuracy is in per cent with its",
        "95 % interval; changes are in points, paired by problem. Prompts, budgets and all other",
        "settings are in [`programs.yaml`](../../benchmarks/learning/programs.yaml); nothing was",
        "tuned for any way. The weights come from an 8-bit file (`make real-models`).",
        "",
        "| way | seed | accuracy | change | steps | tokens in all | of a completion | cut off, % |",
        "|---|---|---|---|---|---|---|---|",
        *rows(records),
        "",
        "Against reasoning, of the same seed:",
        "",
        "| way | seed | difference |",
        "|---|---|---|",
        *against_reasoning(records),
        "",
        *source_lines(list(records.values())),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", type=Path, help="folder of GSM8K's two files")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--model", default="coder05", help="its folder in real-models/")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--tokens", type=int, default=80_000, help="generated in a run")
    parser.add_argument("--problems", type=int, default=240, help="of the test set")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("outputs/programs"))
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the recipe")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    options = parser.parse_args()
    if not options.page:
        run(options.data.resolve(), options)
    PAGE.write_text(page(read_records(RESULT)))


if __name__ == "__main__":
    main()
