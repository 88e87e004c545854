"""Reproduce published numbers on one card, unattended: train, measure, compare, for several seeds.

    python benchmarks/reproduce.py                      # every case
    python benchmarks/reproduce.py --cases gsm8k-0.5b --seeds 0
    python benchmarks/reproduce.py --set model.path=./tiny --set grpo.steps=2 ...

Stopped or killed, it goes on where it was when it is started again: finished seeds are kept, an
unfinished one is resumed. A seed that fails is reported, and the others go on. Writes
results/reproduce.json (or --output) after every seed; docs/results/reproduce.md is the page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workload import RESULTS, where

import grouper
from grouper.errors import GrouperError

RESULT = RESULTS / "reproduce.json"


@dataclass(frozen=True)
class Case:
    """What is trained, and what is known of it."""

    recipe: str
    settings: tuple[str, ...]
    published: str
    """Literature's accuracy in per cent of the trained kind of model, and where it is from."""


# Settings for one card of 24 GB. The figures are the makers' own of the instruction-tuned models.
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
        "49.6, Qwen2.5-0.5B-Instruct, 4-shot (Qwen2.5 technical report, arXiv 2412.15115)",
    ),
    "gsm8k-1.5b": Case(
        "gsm8k",
        ("model.path=Qwen/Qwen2.5-1.5B-Instruct", "grpo.steps=300"),
        "73.2, Qwen2.5-1.5B-Instruct, 4-shot (Qwen2.5 technical report, arXiv 2412.15115)",
    ),
    "math-1.5b": Case(
        "math",
        ("model.path=Qwen/Qwen2.5-Math-1.5B", "model.lora={rank: 64}", "grpo.steps=300"),
        "75.8 on MATH, Qwen2.5-Math-1.5B-Instruct (Qwen2.5-Math report, arXiv 2409.12122)",
    ),
}


def run_seed(case: str, seed: int, outputs: Path, settings: list[str]) -> dict[str, Any]:
    """One run to its end, resumed if it was begun; its test results and verdict."""
    spec = CASES[case]
    own = [f"name={case}-seed-{seed}", f"output_dir={outputs}", f"seed={seed}"]
    recipe = grouper.load_recipe(spec.recipe, [*spec.settings, *settings, *own])
    begun = (outputs / recipe.name / "run.json").exists()
    result = grouper.train(grouper.prepare(recipe), resume=begun)
    rows = [
        {
            "name": r.name,
            "accuracy": r.accuracy,
            "interval": [r.interval.low, r.interval.high],
            "problems": r.overall.problems,
        }
        for r in result.results
    ]
    last = result.comparison.differences[-1] if result.comparison else None
    return {
        "results": rows,
        "verdict": last and last.paired.verdict,
        "gain": last and last.paired.difference,
        "run": str(result.path),
    }


def summary(seeds: dict[str, Any]) -> dict[str, Any]:
    """Mean and spread over the seeds that are finished."""
    done = [seed["results"] for seed in seeds.values() if seed.get("results")]
    last = [results[-1]["accuracy"] for results in done]
    first = [results[0]["accuracy"] for results in done]
    return {
        "seeds": len(done),
        "before": statistics.mean(first) if done else None,
        "after": statistics.mean(last) if done else None,
        "spread": statistics.stdev(last) if len(last) > 1 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--outputs", type=Path, default=Path("outputs/reproduce"))
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    asked = parser.parse_args()
    found: dict[str, Any] = {"machine": where(), "settings": asked.settings, "cases": {}}
    if asked.output.exists():
        before = json.loads(asked.output.read_text(encoding="utf-8"))
        if before["settings"] == asked.settings:
            found["cases"] = before["cases"]
    for case in asked.cases:
        row = found["cases"].setdefault(case, {"published": CASES[case].published, "runs": {}})
        for seed in asked.seeds:
            if row["runs"].get(str(seed), {}).get("results"):
                continue
            try:
                row["runs"][str(seed)] = run_seed(case, seed, asked.outputs, asked.settings)
            except GrouperError as error:
                row["runs"][str(seed)] = {"failed": error.paragraph()}
            except Exception:  # noqa: BLE001 - the other seeds go on
                row["runs"][str(seed)] = {"failed": traceback.format_exc()}
            row["summary"] = summary(row["runs"])
            asked.output.parent.mkdir(parents=True, exist_ok=True)
            asked.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(case, seed, row["runs"][str(seed)], flush=True)


if __name__ == "__main__":
    main()
