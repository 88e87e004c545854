"""The four stages on the demonstration, whole and with one of them left out, over several seeds.

    python -m benchmarks.learning.stages --seeds 0 1 2 3 4
    python -m benchmarks.learning.stages --seeds 0 --large-teacher --variants "all four"
    python -m benchmarks.learning.stages --pretrained outputs/four-stages-laptop
    python -m benchmarks.learning.stages --page

Each seed trains one teacher; the student of every variant begins with the same random weights. A
record of each is kept in benchmarks/results/stages.json, that of a finished chain with a pretrained
model (`grouper stages examples/stages/four_stages_laptop.yaml`) in stages_pretrained.json, and
docs/results/stages.md is written from them.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import yaml

from benchmarks.checkout import RESULTS, ROOT
from benchmarks.learning.result_records import (
    Record,
    accuracy_cell,
    change_cell,
    compare_records,
    evaluation_record,
    keep_record,
    read_records,
    source_lines,
    step_columns,
)
from benchmarks.machine import where
from grouper.runs.folder import RunFolder
from grouper.stages import StagesConfig, run_stages

FILE = ROOT / "examples" / "stages" / "four_stages_demo.yaml"
RESULT = RESULTS / "stages.json"
PRETRAINED = RESULTS / "stages_pretrained.json"
PAGE = ROOT / "docs" / "results" / "stages.md"

# 25 million parameters beside the 1.4 million of FILE and the 0.5 million of the student.
LARGE_TEACHER = {"hidden_size": 512, "layers": 8, "intermediate_size": 1536}
LARGE = ", teacher of 25M"

WHOLE = "all four"

# What the last stage of the student is, and after which of its phases.
STEPS = ("warm-up", "distillation", "GRPO")
# The teacher's phases, as the page names them.
STAGES = {"sft": "SFT", "grpo": "GRPO"}


def variants(seed: int, folder: Path, *, large: bool = False) -> dict[str, StagesConfig]:
    """Return the chain of a seed, whole and with one stage left out.

    They share a folder, so that a stage that two of them have in common is run once.

    Args:
        seed: of all stages.
        folder: the runs of all seeds are there.
        large: with the large teacher.
    """
    whole = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    name = f"seed-{seed}-25M" if large else f"seed-{seed}"
    whole |= {"name": name, "output_dir": str(folder), "tables": {}}
    if large:
        whole["stages"][0]["settings"]["model.new"] = LARGE_TEACHER
    for stage in whole["stages"]:
        stage["settings"]["seed"] = seed

    def changed(name: str, change: Any) -> StagesConfig:
        data = copy.deepcopy(whole)
        change({stage["name"]: stage for stage in data["stages"]})
        data["stages"] = with_own_names(data["stages"], whole["stages"], name)
        return StagesConfig.model_validate(data)

    def no_teacher_rl(stages: dict[str, Any]) -> None:
        stages["teacher"]["settings"]["skip_grpo"] = True

    def no_warm_up(stages: dict[str, Any]) -> None:
        del stages["distilled"]["texts"]
        stages["distilled"]["settings"]["skip_sft"] = True
        # A student that has not learned when to stop is trained all the same.
        stages["reinforced"]["settings"]["grpo.allow_truncation"] = True

    def no_distillation(stages: dict[str, Any]) -> None:
        stages["distilled"]["settings"]["skip_grpo"] = True

    return {
        WHOLE: changed("whole", lambda _: None),
        "no RL of the teacher": changed("plain-teacher", no_teacher_rl),
        "no warm-up": changed("cold", no_warm_up),
        "no distillation": changed("undistilled", no_distillation),
    }


def with_own_names(stages: list[Any], whole: list[Any], name: str) -> list[Any]:
    """Rename stages that differ from the whole chain's, and those that begin with one of them.

    >>> whole = [{"name": "a", "settings": {}}, {"name": "b", "settings": {"path": "{a}"}}]
    >>> changed = [{"name": "a", "settings": {"seed": 1}}, whole[1]]
    >>> [stage["name"] for stage in with_own_names(changed, whole, "x")]
    ['a-x', 'b-x']
    """
    originals = {stage["name"]: stage for stage in whole}
    renamed: dict[str, str] = {}
    result = []
    for stage in stages:
        text = json.dumps(stage)
        for old, new in renamed.items():
            text = text.replace(f"{{{old}}}", f"{{{new}}}").replace(f"{{{old}.", f"{{{new}.")
            text = text.replace(f'"by": "{old}"', f'"by": "{new}"')
        own = json.loads(text)
        if own != originals[stage["name"]]:
            renamed[stage["name"]] = own["name"] = f"{stage['name']}-{name}"
        result.append(own)
    return result


def record(config: StagesConfig) -> Record:
    """Run a chain, and return what its student reached after each stage."""
    runs = [RunFolder(run) for run in run_stages(config).runs.values()]
    teacher, distilled, reinforced = runs[0], runs[-2], runs[-1]
    last = teacher.read_evaluation("grpo") or teacher.read_evaluation("sft")
    assert last is not None
    return {
        "machine": where(),
        "teacher": evaluation_record(last),
        "student": student_record(distilled, reinforced),
    }


def student_record(distilled: RunFolder, reinforced: RunFolder) -> Record:
    """Return what a student reached after each of its stages; those that it had."""
    found = {
        "warm-up": distilled.read_evaluation("sft"),
        "distillation": distilled.read_evaluation("grpo"),
        "GRPO": reinforced.read_evaluation("grpo"),
    }
    return {name: evaluation_record(result) for name, result in found.items() if result is not None}


def pretrained_record(folder: Path) -> Record:
    """Read a finished chain: the teacher's and the student's evaluations, in their order."""
    runs = [RunFolder(folder / name) for name in ("teacher", "distilled", "reinforced")]
    recipes = [(run.path / "recipe.yaml").read_text(encoding="utf-8") for run in runs]
    hosts = [run.read_info().host for run in runs]
    found = {name: runs[0].read_evaluation(name) for name in ("base", "sft", "grpo")}
    return {
        "machine": {
            **where(),
            "threads": hosts[0]["threads"],
            "commits": [host["commit"] for host in hosts],
        },
        "recipes": recipes,
        "steps": [len(step_columns(run)["grpo"]["loss"]) for run in runs],
        "teacher": {
            name: evaluation_record(result) for name, result in found.items() if result is not None
        },
        "student": student_record(*runs[1:]),
    }


def pretrained_lines(found: Record) -> list[str]:
    """Write what a chain with a pretrained model reached, each stage with the one before it."""
    teacher, student = found["teacher"], found["student"]
    rows = []
    for who, reached in (("teacher", teacher), ("student", {"base": teacher["base"], **student})):
        for (_, before), (stage, after) in itertools.pairwise(reached.items()):
            change = change_cell(compare_records(before, after))
            rows.append(
                f"| {who}: {STAGES.get(stage, stage)} | {accuracy_cell(after)} | {change} |"
            )
    last = compare_records(teacher["grpo"], student["GRPO"])
    steps = found["steps"]
    return [
        "## On a pretrained model",
        "",
        "[`four_stages_laptop.yaml`](../../examples/stages/four_stages_laptop.yaml) with",
        f"SmolLM2-135M-Instruct, seed 0, and {steps[0]}, {steps[1]} and {steps[2]} steps of GRPO,",
        "distillation and GRPO: the model teaches itself. Accuracy in per cent, greedy, on",
        f"{len(teacher['base']['right'])} test problems, at most 64 tokens; changes are from the",
        f"stage before, paired by problem. Before: {accuracy_cell(teacher['base'])}.",
        "",
        "| after | accuracy | change |",
        "|---|---|---|",
        *rows,
        "",
        f"The student after its last stage against the teacher: {change_cell(last)}.",
        "",
        f"Commits of the stages: {', '.join(found['machine']['commits'])}.",
    ]


def whole_of(variant: str) -> str:
    """Return the variant without anything left out, with the same teacher."""
    return WHOLE + LARGE if variant.endswith(LARGE) else WHOLE


def page(records: dict[str, Record]) -> str:
    """Write docs/results/stages.md."""
    by_variant: dict[str, list[Record]] = {}
    for one in records.values():
        by_variant.setdefault(one["variant"], []).append(one)
    wholes = {
        (variant, one["seed"]): one["student"]["GRPO"]
        for variant, runs in by_variant.items()
        for one in runs
        if variant.startswith(WHOLE)
    }
    rows = []
    for variant, runs in by_variant.items():
        for one in runs:
            reached = one["student"]
            cells = [accuracy_cell(reached[step]) if step in reached else "-" for step in STEPS]
            change = ""
            whole = wholes.get((whole_of(variant), one["seed"]))
            if not variant.startswith(WHOLE) and whole is not None:
                change = change_cell(compare_records(whole, reached["GRPO"]))
            row = [variant, str(one["seed"]), accuracy_cell(one["teacher"]), *cells, change]
            rows.append(f"| {' | '.join(row)} |")
    means = []
    for variant, runs in by_variant.items():
        mean = statistics.fmean(one["student"]["GRPO"]["accuracy"] for one in runs)
        means.append(f"- {variant}: {100 * mean:.1f} after GRPO, mean of {len(runs)} seed(s)")
    lines = [
        "# Teacher, warm-up, distillation, GRPO: each stage left out",
        "",
        "Written by `python -m benchmarks.learning.stages` from",
        "[`four_stages_demo.yaml`](../../examples/stages/four_stages_demo.yaml). Test accuracy in",
        "per cent, greedy, with 95 % intervals; the last column is the difference from all four",
        "stages of the same seed, in points, paired by problem. The teacher has 1.4 million",
        "parameters, or 25 million where the row says so; the student has 0.5 million.",
        "",
        "| variant | seed | teacher | warm-up | distillation | GRPO | against all four |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        *means,
        "",
        *source_lines(list(records.values())),
        "",
    ]
    for found in read_records(PRETRAINED).values():
        lines += [*pretrained_lines(found), "", *source_lines([found]), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--variants", nargs="+", help="only these, by their names on the page")
    parser.add_argument("--large-teacher", action="store_true", help="25M instead of 1.4M")
    parser.add_argument("--folder", type=Path, default=Path("outputs/stages"))
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    parser.add_argument("--pretrained", type=Path, help="a finished chain with a pretrained model")
    options = parser.parse_args()
    if options.pretrained is not None:
        keep_record(PRETRAINED, options.pretrained.name, pretrained_record(options.pretrained))
    only_page = options.page or options.pretrained is not None
    for seed in () if only_page else options.seeds:
        chains = variants(seed, options.folder, large=options.large_teacher)
        for variant, config in chains.items():
            if options.variants is not None and variant not in options.variants:
                continue
            kind = variant + LARGE if options.large_teacher else variant
            name = f"{kind}-{seed}"
            if name not in read_records(RESULT):
                keep_record(RESULT, name, {"variant": kind, "seed": seed, **record(config)})
    PAGE.write_text(page(read_records(RESULT)))


if __name__ == "__main__":
    main()
