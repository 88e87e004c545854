"""GSM8K on small pretrained models, on a CPU: base, SFT, GRPO, measured on all 1,319 test problems.

    make real-models
    python -m benchmarks.learning.real_gsm8k ../shared/data/gsm8k smollm2-full --seeds 0 1
    python -m benchmarks.learning.real_gsm8k --page

The folder holds train.jsonl and test.jsonl of GSM8K. A run takes hours; killed, it goes on where it
was when it is called again. A record of each run is kept in benchmarks/results/real_gsm8k.json, and
docs/results/real-models.md is written from them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
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
from grouper.advice.plan import plan_run
from grouper.config.loading import load_recipe

RECIPE = Path(__file__).with_name("real_gsm8k.yaml")
RESULT = RESULTS / "real_gsm8k.json"
PAGE = ROOT / "docs" / "results" / "real-models.md"


@dataclass(frozen=True)
class Case:
    """A model and what its runs have different from real_gsm8k.yaml."""

    model: str
    """Its name in real-models/."""
    title: str
    weights: str
    settings: tuple[str, ...] = ()


SMOLLM2 = "SmolLM2-135M-Instruct"
GEMMA = "Gemma 3 270M"
CODER = "Qwen2.5-Coder-0.5B-Instruct"

# Ten times the learning rate for an adapter, as everywhere in Grouper.
ADAPTER = (
    "model.lora={rank: 32, alpha: 64}",
    "sft.optimizer.learning_rate=1e-3",
    "grpo.optimizer.learning_rate=8e-5",
)
# It answers at length by itself: little SFT is enough to make it write as short as GSM8K does, and
# a step of it takes four times as long as one of SmolLM2.
CODER_SETTINGS = (
    "data.sft.limit=384",
    "sft.steps=24",
    "sft.optimizer.learning_rate=2e-5",
    "grpo.steps=16",
    "grpo.evaluate_every=8",
    "grpo.optimizer.learning_rate=5e-6",
    "sampling.max_new_tokens=200",
    "evaluation.max_new_tokens=320",
)

CASES = {
    "smollm2-full": Case("smollm2", SMOLLM2, "all weights"),
    "smollm2-lora": Case("smollm2", SMOLLM2, "LoRA", ADAPTER),
    "gemma270-full": Case("gemma270", GEMMA, "all weights", ("prompt.template=install",)),
    "gemma270-lora": Case("gemma270", GEMMA, "LoRA", ("prompt.template=install", *ADAPTER)),
    "coder05-full": Case("coder05", CODER, "all weights", CODER_SETTINGS),
    "coder05-lora": Case("coder05", CODER, "LoRA", (*CODER_SETTINGS, *ADAPTER)),
}


def settings_of(name: str, seed: int, data: Path, options: argparse.Namespace) -> list[str]:
    """What a run has different from real_gsm8k.yaml."""
    case = CASES[name]
    place = options.folder / f"{name}-{seed}"
    return [
        f"model.path={ROOT / 'real-models' / case.model}",
        f"data.sft.path={data / 'train.jsonl'}",
        f"data.train.path={data / 'train.jsonl'}",
        f"data.test.path={data / 'test.jsonl'}",
        f"threads={options.threads}",
        f"seed={seed}",
        f"name={place.name}",
        f"output_dir={options.folder}",
        *case.settings,
        *options.set,
    ]


def run(name: str, seed: int, data: Path, options: argparse.Namespace) -> Record:
    """One whole run."""
    place = options.folder / f"{name}-{seed}"
    command = ["run", str(RECIPE), *settings_of(name, seed, data, options)]
    return {"case": name, "seed": seed, **record_run(place, command, threads=options.threads)}


def planned_bytes(settings: list[str]) -> int:
    """What `grouper plan` says of the memory of a run."""
    plan = plan_run(load_recipe(str(RECIPE), settings), with_cards=False)
    return max(entry.peak for entry in plan.memory)


# --- the page ------------------------------------------------------------------------------------


def phase_rows(record: Record) -> list[str]:
    """A row for each phase that was measured: what it reached, and what the phase brought."""
    case = CASES[record["case"]]
    rows = []
    before = None
    for phase, found in record["evaluations"].items():
        change = "" if before is None else change_cell(compare_records(before, found))
        in_format = "-" if found["format"] is None else f"{100 * found['format']:.1f}"
        lenient = "-" if found["lenient"] is None else accuracy_cell(found["lenient"])
        cells = [
            f"{case.title}, {case.weights}",
            str(record["seed"]),
            phase,
            accuracy_cell(found),
            change,
            lenient,
            in_format,
            f"{found['mean_tokens']:.0f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
        before = found
    return rows


def hours_row(record: Record) -> str:
    """Steps, hours and memory of a run."""
    case = CASES[record["case"]]
    steps = record["steps"]
    counts = ", ".join(f"{phase} {len(steps[phase]['time.step'])}" for phase in steps)
    elapsed = max(columns["elapsed_s"][-1] for columns in steps.values())
    seconds = record.get("seconds", elapsed)
    memory = f"{record['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in record else "-"
    planned = f"{record['planned_bytes'] / 2**30:.1f}" if "planned_bytes" in record else "-"
    cells = [f"{case.title}, {case.weights}", str(record["seed"]), counts]
    cells += [f"{seconds / 3600:.1f}", memory, planned]
    return f"| {' | '.join(cells)} |"


def page(records: dict[str, Record]) -> str:
    """Write docs/results/real-models.md."""
    found = list(records.values())
    counts = {len(phase["right"]) for record in found for phase in record["evaluations"].values()}
    problems = " or ".join(f"{count:,}" for count in sorted(counts))
    missing = [name for name in CASES if not any(record["case"] == name for record in found)]
    lines = [
        "# GSM8K on small pretrained models",
        "",
        "Written by `python -m benchmarks.learning.real_gsm8k` from the records of its runs; every",
        f"run that was finished is listed. {problems} test problems, answered greedily; accuracy",
        "in per cent with its 95 % interval; changes in points against the row above, paired by",
        "problem.",
        "`anywhere` is the accuracy with the answer taken from anywhere in the text: a gain that",
        "is also there is not format alone. The prompt, the budget and every other setting are in",
        "[`real_gsm8k.yaml`](../../benchmarks/learning/real_gsm8k.yaml). The weights come from 4-",
        "to 8-bit files (`make real-models`), so that figures of the published weights may differ.",
        "",
        "| model | seed | after | accuracy | change | anywhere | in format | tokens |",
        "|---|---|---|---|---|---|---|---|",
        *[row for record in found for row in phase_rows(record)],
        "",
        "Hours are those of the whole run with all of its evaluations; where the machine below had",
        "one thread, two runs and other programs shared its cores: hours are an upper bound. GiB",
        "are the peak of the process with its libraries; `planned` is what `grouper plan` counts,",
        "tensors alone ([why the two differ](../memory.md#accuracy-of-the-plan)).",
        "",
        "| model | seed | steps | hours | GiB | planned |",
        "|---|---|---|---|---|---|",
        *map(hours_row, found),
        "",
    ]
    lines += [
        "A gain of GRPO over SFT is shown where the change of its row is better. SmolLM2 solves",
        "so few of these problems that most groups of rollouts have no right answer to learn from:",
        "the box alone is rewarded, and the share of answers in the format is what rises.",
        "",
    ]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        lines += [f"Not run yet, for want of hours on a faster machine: {names}.", ""]
    lines += [*source_lines(found), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", type=Path, help="folder of GSM8K's two files")
    parser.add_argument("cases", nargs="*", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("outputs/real-gsm8k"))
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the recipe")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    options = parser.parse_args()
    for unknown in set(options.cases) - CASES.keys():
        parser.error(f"there is no case {unknown!r}")
    for seed in options.seeds:
        for case in () if options.page else options.cases:
            name = f"{case}-{seed}"
            data = options.data.resolve()
            record = read_records(RESULT).get(name) or run(case, seed, data, options)
            if "planned_bytes" not in record:
                record["planned_bytes"] = planned_bytes(settings_of(case, seed, data, options))
            keep_record(RESULT, name, record)
    PAGE.write_text(page(read_records(RESULT)))


if __name__ == "__main__":
    main()
