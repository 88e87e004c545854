"""A pretrained model on word problems (`grouper run laptop`), and its control.

    make real-models MODELS=smollm2
    python -m benchmarks.learning.laptop                        # what has no record, and the page
    python -m benchmarks.learning.laptop --page                 # only the page
    python -m benchmarks.learning.laptop --seeds 0 --controls   # only one run

Killed, a run goes on where it was. A record of each is kept in benchmarks/results/laptop.json, and
docs/results/laptop.md, the picture and the rows of the README are written from them. The control of
a seed begins with its SFT model.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

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

# Of the package.
RECIPE = "laptop"
RESULT = RESULTS / "laptop.json"
PAGE = ROOT / "docs" / "results" / "laptop.md"
PICTURE = ROOT / "docs" / "images" / "laptop.png"
README = ROOT / "README.md"
SEEDS = (0, 1, 2)
CONTROL_SEEDS = (0,)


def control_changes(seed: int, folder: Path) -> list[str]:
    """Return the settings of a control: the same GRPO from the same SFT model.

    Rewards are dealt out anew over all rollouts of a step.
    """
    start = folder / f"seed-{seed}" / "sft" / "final"
    return ["skip_sft=true", f"grpo.start_from={start}", "grpo.shuffle_rewards=true"]


def run_once(name: str, seed: int, changes: Sequence[str], folder: Path, threads: int) -> None:
    """Run what has no record yet, and keep its record."""
    if name in read_records(RESULT):
        return
    places = [f"seed={seed}", f"name={name}", f"output_dir={folder}"]
    record = record_run(folder / name, ["run", RECIPE, *places, *changes], threads=threads)
    keep_record(RESULT, name, record)


# --- the page ------------------------------------------------------------------------------------


def minutes_cell(record: Record) -> str:
    """Minutes of the whole run and its memory; a dash where it was interrupted."""
    if "seconds" not in record:
        return "- | -"
    return f"{record['seconds'] / 60:.0f} | {record['peak_bytes'] / 2**30:.1f}"


def seed_rows(records: dict[str, Record]) -> list[str]:
    rows = []
    for name, record in records.items():
        if not name.startswith("seed-"):
            continue
        found = record["evaluations"]
        base, sft, grpo = (accuracy_cell(found[phase]) for phase in ("base", "sft", "grpo"))
        change = change_cell(compare_records(found["sft"], found["grpo"]))
        seed = name.removeprefix("seed-")
        rows.append(f"| {seed} | {base} | {sft} | {grpo} | {change} | {minutes_cell(record)} |")
    return rows


def control_rows(records: dict[str, Record]) -> list[str]:
    rows = []
    for name, record in records.items():
        if not name.startswith("control-"):
            continue
        seed = name.removeprefix("control-")
        sft = records[f"seed-{seed}"]["evaluations"]["sft"]
        grpo = record["evaluations"]["grpo"]
        change = change_cell(compare_records(sft, grpo))
        rows.append(f"| {seed} | {accuracy_cell(sft)} | {accuracy_cell(grpo)} | {change} |")
    return rows


def part_rows(records: dict[str, Record]) -> list[str]:
    """The mean over seeds of each part of the test problems."""
    runs = [record for name, record in records.items() if name.startswith("seed-")]
    rows = []
    for kind in ("by_subject", "by_level"):
        for part in runs[0]["evaluations"]["sft"][kind]:
            means = []
            for phase in ("base", "sft", "grpo"):
                values = [run["evaluations"][phase][kind][part]["accuracy"] for run in runs]
                means.append(f"{100 * statistics.fmean(values):.1f}")
            problems = runs[0]["evaluations"]["sft"][kind][part]["problems"]
            rows.append(f"| {part} | {problems:.0f} | {' | '.join(means)} |")
    return rows


def curve_rows(records: dict[str, Record]) -> list[str]:
    """Accuracy on the validation problems after every tenth step of GRPO."""
    rows = []
    for name, record in records.items():
        curve = record["validation"].get("grpo", {})
        cells = [f"{100 * curve[step]['accuracy']:.1f}" for step in curve]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def page(records: dict[str, Record]) -> str:
    """Write docs/results/laptop.md."""
    first = next(iter(records.values()))
    problems = len(first["evaluations"]["sft"]["right"])
    steps = list(first["validation"].get("grpo", {}))
    controls = control_rows(records)
    lines = [
        "# A pretrained model on a laptop, measured",
        "",
        "Written by `python -m benchmarks.learning.laptop`; every run that was finished is listed.",
        "[The recipe](../../src/grouper/config/recipes/laptop.yaml) trains",
        "SmolLM2-135M-Instruct on word problems that",
        "[`stories`](../data.md#generated-problems) makes. Accuracy is in",
        f"per cent, greedy, on {problems} test problems; about half of them are of stories that",
        "are never trained. Changes are in points, paired by problem, with 95 % intervals.",
        "",
        "| seed | base | after SFT | after GRPO | GRPO's gain | minutes | GiB |",
        "|---|---|---|---|---|---|---|",
        *seed_rows(records),
        "",
        "Where the machine below had one thread, two runs and other programs shared its two cores:",
        "the minutes are an upper bound. Seed 2 ran before products in bfloat16 had few sizes",
        "([memory](../memory.md#accuracy-of-the-plan)), while the sampler rounded the weights anew",
        "for every token; seed 3 ran after both were mended.",
        "",
        "The mean over these seeds, by kind of problem:",
        "",
        "| problems | how many | base | after SFT | after GRPO |",
        "|---|---|---|---|---|",
        *part_rows(records),
        "",
        f"On the validation problems, after {', '.join(steps)} steps of GRPO:",
        "",
        "| run | " + " | ".join(f"step {step}" for step in steps) + " |",
        "|---" * (len(steps) + 1) + "|",
        *curve_rows(records),
        "",
        "Control: the same GRPO from the same SFT model with `grpo.shuffle_rewards=true`, where",
        "rewards are dealt out anew over all rollouts of a step. The gain comes from the reward if",
        "it is gone here.",
        "",
    ]
    if controls:
        lines += [
            "| seed | after SFT | after GRPO | change |",
            "|---|---|---|---|",
            *controls,
            "",
        ]
    else:
        lines += ["Not measured yet.", ""]
    lines += [
        *source_lines(list(records.values())),
        "",
    ]
    return "\n".join(lines)


# --- the README ----------------------------------------------------------------------------------

# Steps over which the share of right rollouts is averaged in the picture.
SMOOTH = 4


def seeds_of(records: dict[str, Record]) -> dict[str, Record]:
    return {
        name.removeprefix("seed-"): record
        for name, record in records.items()
        if name.startswith("seed-")
    }


def readme_rows(records: dict[str, Record]) -> list[str]:
    rows = []
    for seed, record in seeds_of(records).items():
        found = record["evaluations"]
        sft, grpo = (accuracy_cell(found[phase]) for phase in ("sft", "grpo"))
        change = change_cell(compare_records(found["sft"], found["grpo"]))
        rows.append(f"| word problems, seed {seed} | {sft} | {grpo} | {change} |")
    return rows


def write_readme(records: dict[str, Record]) -> None:
    """Replace the rows between the marks in README.md."""
    begin = "<!-- written by benchmarks/learning/laptop.py -->"
    head = "| SmolLM2-135M-Instruct | after SFT | after GRPO | change |\n|---|---|---|---|"
    before, mark, rest = README.read_text().partition(begin)
    assert mark, f"README.md has no line {begin}"
    _, end, after = rest.partition("<!-- end -->")
    table = "\n".join([head, *readme_rows(records)])
    README.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}")


def draw_accuracies(axes: Axes, records: dict[str, Record]) -> None:
    """Draw the accuracy on the test problems with its interval, per phase and seed."""
    axes.set_title("Held-out problems solved (%)")
    names = ("base", "sft", "grpo")
    for place, record in enumerate(seeds_of(records).values()):
        shift = 0.12 * (place - (len(seeds_of(records)) - 1) / 2)
        for x, name in enumerate(names):
            found = record["evaluations"][name]
            middle = 100 * found["accuracy"]
            below, above = middle - 100 * found["low"], 100 * found["high"] - middle
            axes.errorbar(
                x + shift, middle, [[below], [above]], fmt="o", color=f"C{place}", capsize=3
            )
    axes.set_xticks(range(3), ["before", "after SFT", "after GRPO"])
    axes.set_xlim(-0.5, 2.5)
    axes.set_ylim(bottom=0)


def draw_rollouts(axes: Axes, records: dict[str, Record]) -> None:
    """Draw the share of right rollouts by step, a running mean; the control is dashed."""
    axes.set_title("Training rollouts correct (%)")
    for name, record in records.items():
        solved = record["steps"]["grpo"]["solve_rate"]
        means = [
            100 * statistics.fmean(solved[max(0, last - SMOOTH) : last])
            for last in range(1, len(solved) + 1)
        ]
        is_control = name.startswith("control-")
        label = f"control of seed {name[-1]}" if is_control else f"seed {name[-1]}"
        axes.plot(
            range(1, len(means) + 1),
            means,
            color="0.4" if is_control else f"C{list(seeds_of(records)).index(name[-1])}",
            linestyle="--" if is_control else "-",
            label=label,
        )
    axes.set_xlabel(f"step of GRPO (mean of {SMOOTH} steps)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def draw(records: dict[str, Record]) -> None:
    """Write the README's picture."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
    draw_accuracies(left, records)
    draw_rollouts(right, records)
    for axes in (left, right):
        axes.grid(axis="y", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--controls", nargs="*", type=int, default=list(CONTROL_SEEDS))
    parser.add_argument("--folder", type=Path, default=Path("outputs/laptop-seeds"))
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the recipe")
    parser.add_argument(
        "--threads", type=int, default=2, help="of a run; with 1, two run at a time"
    )
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    options = parser.parse_args()
    if not options.page:
        for seed in options.seeds:
            run_once(f"seed-{seed}", seed, options.set, options.folder, options.threads)
        for seed in options.controls:
            changes = [*control_changes(seed, options.folder), *options.set]
            run_once(f"control-{seed}", seed, changes, options.folder, options.threads)
    records = read_records(RESULT)
    PAGE.write_text(page(records))
    write_readme(records)
    draw(records)


if __name__ == "__main__":
    main()
