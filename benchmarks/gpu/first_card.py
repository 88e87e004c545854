"""The parts of a first session on a card, one a call; `first_card.sh` runs them in turn.

    python -m benchmarks.gpu.first_card step --out OUT   # one part, its outcome in OUT/step.json
    python -m benchmarks.gpu.first_card --list           # the parts of the first quarter of an hour
    python -m benchmarks.gpu.first_card --summary OUT    # what was found, as text
    python -m benchmarks.gpu.first_card --keep OUT       # as benchmarks/results/gpu.json

A part writes what it finds at once, so that one that is killed leaves behind what came before. Each
figure has its pass mark (`sections.py`). Without a card the parts run on toys, to see that they
do: nothing of that is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkout import RESULTS
from benchmarks.gpu.sections import FIRST, PARTS, Outcome
from benchmarks.gpu.workload import machine

RESULT = RESULTS / "gpu.json"


def run_part(name: str, folder: Path, device: torch.device) -> None:
    """Run a part; its outcome, and the machine, are in the folder whatever becomes of it."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {**machine(device), "is_cuda": device.type == "cuda"}
    (folder / f"{name}.machine.json").write_text(json.dumps(described), encoding="utf-8")
    outcome = Outcome(folder / f"{name}.json", device)
    outcome.figure("started", time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()))
    PARTS[name].run(device, outcome)
    (folder / f"{name}.complete").touch()


def outcomes_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The outcome of each part that was begun, with what is wrong with it, by name."""
    outcomes: dict[str, dict[str, Any]] = {}
    for name in PARTS:
        described = folder / f"{name}.machine.json"
        log = folder / f"{name}.log"
        if not described.exists() and not log.exists():
            continue
        outcome: dict[str, Any] = {"figures": {}, "marks": [], "not_measured": []}
        file = folder / f"{name}.json"
        if file.exists():
            outcome = json.loads(file.read_text(encoding="utf-8"))
        outcome["machine"] = {}
        if described.exists():
            outcome["machine"] = json.loads(described.read_text(encoding="utf-8"))
        if not (folder / f"{name}.complete").exists():
            outcome["problem"] = _last_line(log) or "it ended before it was complete"
        outcomes[name] = outcome
    return outcomes


def _last_line(log: Path) -> str:
    if not log.exists():
        return ""
    lines = [
        line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line
    ]
    return lines[-1] if lines else ""


def missed(outcome: dict[str, Any]) -> int:
    """How many marks of a part were missed; one that did not end counts as one more."""
    return sum(not mark["passed"] for mark in outcome["marks"]) + ("problem" in outcome)


def summary(folder: Path) -> tuple[str, int]:
    """What was found, as text, and how many marks were missed."""
    lines = []
    total = 0
    for name, outcome in outcomes_in(folder).items():
        total += missed(outcome)
        lines.append(name)
        for mark in outcome["marks"]:
            verdict = "ok    " if mark["passed"] else "MISSED"
            lines.append(f"  {verdict} {mark['what']}: {mark['value']} (wanted: {mark['wanted']})")
        lines += [f"  not measured: {text}" for text in outcome["not_measured"]]
        if "problem" in outcome:
            lines.append(f"  BROKEN {outcome['problem']}")
    lines.append(f"first card: {total} missed" if total else "first card: nothing missed")
    return "\n".join(lines), total


def keep(folder: Path) -> str:
    """Write the outcomes of a card as the committed result; returns what was done."""
    outcomes = outcomes_in(folder)
    on_card = {n: o for n, o in outcomes.items() if o["machine"].get("is_cuda")}
    if not on_card:
        return "nothing kept: no part ran on a card"
    sections: dict[str, Any] = {}
    if RESULT.exists():
        sections = json.loads(RESULT.read_text(encoding="utf-8"))["sections"]
    sections.update(on_card)
    RESULT.write_text(json.dumps({"sections": sections}, indent=1) + "\n", encoding="utf-8")
    return f"kept in {RESULT}: {', '.join(on_card)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=list(PARTS))
    parser.add_argument("--out", type=Path, help="the folder of the outcomes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--summary", type=Path, metavar="OUT")
    parser.add_argument("--keep", type=Path, metavar="OUT")
    options = parser.parse_args()
    if options.list:
        for name in FIRST:
            print(f"{name}:{PARTS[name].seconds}")
        return 0
    if options.summary is not None:
        text, total = summary(options.summary)
        print(text)
        return 1 if total else 0
    if options.keep is not None:
        print(keep(options.keep))
        return 0
    if options.part is None or options.out is None:
        parser.error("name a part and --out, or one of --list, --summary, --keep")
    run_part(options.part, options.out, torch.device(options.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
