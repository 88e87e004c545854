"""A first session on a card: does everything run there, and as fast as it should?

    python benchmarks/gpu_check.py                  # under 25 minutes
    python benchmarks/gpu_check.py --only step memory

Needs PyTorch, transformers and this package; what needs more (PEFT, pytest, TRL, a second card)
says "not measured" where it is missing. Every section (`gpu_sections.py`) is a process of its own,
so that one that breaks the card's context, runs out of memory or hangs costs only itself. Each
figure has its pass mark. On a CUDA device the outcome is written to benchmarks/results/gpu.json,
from which `python benchmarks/tables.py` makes the page in docs/speed.md; anywhere else the sections
run on toys, to see that they do, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_sections import SECTIONS, Outcome
from gpu_workload import RESULTS, machine

RESULT = RESULTS / "gpu.json"


def run_section(name: str, device: str) -> dict[str, Any]:
    """One section in a process of its own, within its time."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--section", name, "--found", str(found)]
        try:
            done = subprocess.run(
                [*command, "--device", device],
                timeout=SECTIONS[name].seconds,
                capture_output=True,
                text=True,
                check=False,
            )
            problem = done.stderr.strip()[-2000:] if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"it was ended after {SECTIONS[name].seconds} seconds"
        outcome: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {}
    outcome["seconds"] = round(time.perf_counter() - started, 1)
    if problem:
        outcome["problem"] = problem
    return outcome


def lines_of(name: str, outcome: dict[str, Any]) -> list[str]:
    """A section as text: its marks, then what is wrong or missing."""
    lines = [f"{name} ({outcome['seconds']} s)"]
    for mark in outcome.get("marks", []):
        verdict = "ok    " if mark["passed"] else "MISSED"
        lines.append(f"  {verdict} {mark['what']}: {mark['value']} (wanted: {mark['wanted']})")
    lines += [f"  not measured: {text}" for text in outcome.get("not_measured", [])]
    if "problem" in outcome:
        lines.append(f"  BROKEN {outcome['problem'].splitlines()[-1]}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.section is not None:
        outcome = Outcome(options.found, device)
        SECTIONS[options.section].run(device, outcome)
        return 0
    on_cuda = device.type == "cuda"
    kept = json.loads(RESULT.read_text()) if on_cuda and RESULT.exists() else {}
    found: dict[str, Any] = kept.get("sections", {})
    missed = 0
    for name in options.only:
        found[name] = {**run_section(name, options.device), "machine": machine(device)}
        print("\n".join(lines_of(name, found[name])), flush=True)
        missed += "problem" in found[name]
        missed += sum(not mark["passed"] for mark in found[name].get("marks", []))
        if on_cuda:
            RESULT.write_text(json.dumps({"sections": found}, indent=1) + "\n")
    print(f"gpu check: {missed} missed" if missed else "gpu check: nothing missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
