"""Reproduce published numbers on one card, unattended: train, measure, compare, for several seeds.

    python -m benchmarks.learning.reproduce --dry-run            # can every case be run here?
    nohup python -m benchmarks.learning.reproduce &              # every case, three seeds each
    python -m benchmarks.learning.reproduce --cases gsm8k-0.5b --seeds 0
    python -m benchmarks.learning.reproduce --set model.path=./tiny --set grpo.steps=2 ...

Each seed is a `grouper run` of its own, so that one that fails, or is killed for its memory, leaves
the others alone: it is reported, and tried again by the next call. Stopped or killed, the script
goes on where it was when it is started again: finished seeds are kept, a begun one is resumed.

After every seed the results are written to outputs/reproduce (--outputs): results.json, and
results.md, which takes the place of docs/results/reproduce.md. The exit code is 0 if every seed is
finished.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grouper
from benchmarks.machine import where
from grouper.cli.results import stages
from grouper.cli.train import PR_SET_PDEATHSIG
from grouper.config.loading import recipe_hash
from grouper.errors import GrouperError
from grouper.files import write_atomic
from grouper.runs.folder import RunFolder

# The exit code of a run that was stopped and has saved.
STOPPED = 130


@dataclass(frozen=True)
class Case:
    """What is trained, and what is known of it."""

    recipe: str
    settings: tuple[str, ...]
    changed: str
    published: str
    """What others report for the trained kind of model, and where."""


# Settings for one card of 24 GB.
CASES = {
    "gsm8k-0.5b": Case(
        "gsm8k",
        (
            "model.path=Qwen/Qwen2.5-0.5B-Instruct",
            "model.lora=null",
            "model.dtype=float32",
            "grpo.optimizer.learning_rate=1e-6",
            "grpo.steps=300",
        ),
        "Qwen2.5-0.5B-Instruct, all weights, 300 steps",
        "49.6 -> 54.3 % of GSM8K, LoRA GRPO (verl's baseline page)",
    ),
    "gsm8k-1.5b": Case(
        "gsm8k",
        ("model.path=Qwen/Qwen2.5-1.5B-Instruct", "grpo.steps=300"),
        "Qwen2.5-1.5B-Instruct, LoRA, 300 steps",
        "77.9 % of GSM8K after LoRA GRPO (verl's baseline page)",
    ),
    "math-1.5b": Case(
        "math",
        (
            "model.path=Qwen/Qwen2.5-Math-1.5B",
            "model.dtype=bfloat16",
            "model.lora={rank: 64}",
            "grpo.optimizer.learning_rate=1e-5",
            "grpo.steps=300",
        ),
        "Qwen2.5-Math-1.5B, LoRA, 300 steps; measured on MATH-500",
        "79.7 % of MATH with a Python tool, Qwen2.5-Math-1.5B-Instruct (the maker's announcement)",
    ),
}


def overrides(case: str, seed: int, asked: argparse.Namespace) -> list[str]:
    """Every setting of a run that differs from its recipe."""
    own = [f"name={case}-seed{seed}", f"output_dir={asked.outputs}", f"seed={seed}"]
    return [*CASES[case].settings, *asked.settings, *own]


def is_finished(case: str, seed: int, asked: argparse.Namespace) -> bool:
    """Whether the run is there to its end, with these settings."""
    folder = RunFolder(asked.outputs / f"{case}-seed{seed}")
    recipe = grouper.load_recipe(CASES[case].recipe, overrides(case, seed, asked))
    return (
        (folder.path / "evaluations" / "grpo.json").exists()
        and recipe_hash(recipe) in folder.recipe_hashes()
        and folder.read_evaluation("grpo") is not None
    )


def run(case: str, seed: int, asked: argparse.Namespace) -> int:
    """One run to its end, resumed if it was begun; its exit code."""
    words = [sys.executable, "-m", "grouper", "run", CASES[case].recipe]
    words += ["--dry-run"] if asked.dry_run else ["--resume"]
    # Should this process be killed, the run saves and ends as well: else the next call would find
    # it still at work.
    end: Callable[[], object] | None = None
    if sys.platform == "linux":
        end = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    child = subprocess.Popen(
        [*words, *overrides(case, seed, asked)],
        preexec_fn=end,  # noqa: PLW1509 - one system call
    )
    # A terminal tells both of Ctrl-C; the run saves, and says so by its exit code.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    return child.wait()


def measured(asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of each case the seeds that are finished, pooled: of earlier calls, too."""
    found = {}
    for case in CASES:
        begun = sorted(
            int(p.name.rpartition("seed")[2]) for p in asked.outputs.glob(f"{case}-seed*")
        )
        seeds = [seed for seed in begun if is_finished(case, seed, asked)]
        if seeds:
            runs = [asked.outputs / f"{case}-seed{seed}" for seed in seeds]
            found[case] = {"runs": [*map(str, runs)], **stages(runs).numbers}
    return found


def page(found: dict[str, dict[str, Any]], *more: str) -> str:
    """What is measured, and then these lines, as docs/ has it."""
    rows = []
    for name, case in CASES.items():
        ours = ["not measured yet", "not measured yet", "-"]
        if name in found:
            results, gain = found[name]["results"], found[name]["differences"][-1]
            low, high = (100 * gain["paired"]["interval"][end] for end in ("low", "high"))
            points = f"{100 * gain['paired']['difference']:+.1f} [{low:+.1f}, {high:+.1f}] points"
            seeds = f"{len(found[name]['runs'])} seed(s)"
            ours = [
                _share(results[0]),
                _share(results[-1]),
                f"{points}: {gain['verdict']}; {seeds}",
            ]
        cells = [f"`{name}`", f"`{case.recipe}`: {case.changed}", case.published, *ours]
        rows.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join([*rows, *more]) + TAIL


HEAD = """# Reproducing published results on one GPU

Written by `python -m benchmarks.learning.reproduce`, which trains and evaluates every case on one
24 GB GPU, unattended and with three seeds. A seed that fails does not affect the others. After an
interruption, the same command continues where it stopped; `--dry-run` checks first that every case
can be run. Each number of ours has its 95 % interval; gains are paired by problem. "Not measured
yet" means that no machine with a GPU and the models was available.

| case | recipe: changed settings | published by others | before | after | gain |
|---|---|---|---|---|---|
"""
TAIL = """

Prompts and budgets of the published figures differ from ours: the base model is evaluated as well,
and the gain is the number to compare.

What was tried: the script from end to end with a tiny Qwen2 model on real problems of GSM8K and
MATH (killed, resumed, a seed that fails, several seeds pooled), and every case as it stands as a
dry run and as a plan for 24 GB, with a configuration of its model's own shape
(`tests/end_to_end/test_reproduce.py`).
"""


def _share(result: dict[str, Any]) -> str:
    low, high = 100 * result["low"], 100 * result["high"]
    return f"{100 * result['accuracy']:.1f} % [{low:.1f}, {high:.1f}]"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--outputs", type=Path, default=Path("outputs/reproduce"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args()
    failed: dict[str, str] = {}
    for case, seed in itertools.product(asked.cases, asked.seeds[: 1 if asked.dry_run else None]):
        place, code = f"{case}-seed{seed}", 0
        if asked.dry_run or not is_finished(case, seed, asked):
            print(f"{place} begins", flush=True)
            code = run(case, seed, asked)
        print(f"{place}: {f'exit code {code}' if code else 'done'}", flush=True)
        if code:
            failed[place] = f"exit code {code}; {asked.outputs / place}/training.log"
        if not asked.dry_run:
            write_results(failed, asked)
        if code == STOPPED:
            return code
    return int(bool(failed))


def write_results(failed: dict[str, str], asked: argparse.Namespace) -> None:
    """Both files, with what is known so far."""
    found, machine = measured(asked), where()
    record = {"machine": machine, "settings": asked.settings, "failed": failed, "cases": found}
    write_atomic(asked.outputs / "results.json", (json.dumps(record, indent=1) + "\n").encode())
    more = [f"Measured on {machine['cpu']}, torch {machine['torch']}, commit {machine['commit']}."]
    more += [f"With `{' '.join(asked.settings)}`."] if asked.settings else []
    more += [f"Not finished: {place}, {why}" for place, why in failed.items()]
    lines = [line for text in more for line in ("", text)]
    write_atomic(asked.outputs / "results.md", page(found, *lines).encode())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GrouperError as error:
        sys.exit(error.paragraph())
