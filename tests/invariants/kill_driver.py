"""Runs of a recipe that are killed: `python kill_driver.py` reads one order a line.

One process imports everything and forks each run, which is much quicker than starting each. An
order is {"overrides", "resume", "folder"} and, as JSON too, either {"fault": [point, when, where,
count]} or {"delay": seconds} or neither; the answer is {"signal", "code", "seconds"}.

A fault kills the run before, inside or after the `count`th call of a point whose name contains
`where`. The points are functions of Grouper, wrapped in the child alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grouper import files
from grouper.advice import checks
from grouper.api import train
from grouper.config.loading import load_recipe
from grouper.runs import folder as run_folder
from grouper.runs.folder import RunFolder
from grouper.runs.progress import Progress
from grouper.training import checkpoint, rotation
from grouper.training import measure as measuring
from grouper.training.optimizers import Optimizer
from grouper.training.run import Run
from grouper.types import StepReport

Honest = Callable[..., Any]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def half_the_weights(honest: Honest, *args: Any) -> None:
    honest(*args)
    (weights,) = args[2].glob("*.safetensors")
    halve(weights)


def half_the_optimizer(honest: Honest, *args: Any, **metadata: Any) -> None:
    honest(*args, **metadata)
    halve(args[1])


def half_the_line(honest: Honest, run: RunFolder, report: StepReport) -> None:
    honest(run, report)
    file = run.path / "metrics.jsonl"
    text = file.read_text()
    file.write_text(text[: -len(text.splitlines()[-1]) // 2])


def half_the_file(honest: Honest, path: Path, *_: Any) -> None:
    """As `write_atomic` leaves it: under another name."""
    del honest
    path.parent.mkdir(exist_ok=True)
    path.with_name(f".{path.name}.1.tmp").write_bytes(b"half")


def half_the_folder(honest: Honest, folder: Path) -> None:
    """As `remove_folder` leaves it: renamed first."""
    del honest
    gone = folder.rename(folder.with_name(f".{folder.name}.1.gone.tmp"))
    next(file for file in gone.iterdir()).unlink()


def half_the_optimizer_folder(honest: Honest, folder: Path, **_: Any) -> None:
    """As a killed `rmtree` leaves it."""
    del honest
    next(file for file in folder.iterdir()).unlink()


def half_the_items(honest: Honest, *args: Any, **settings: Any) -> None:
    """Killed when half of an evaluation is drawn."""
    shown = settings["progress"]

    def progress(done: int, total: int) -> None:
        shown(done, total)
        if done >= total / 2:
            die()

    honest(*args, **{**settings, "progress": progress})


def of_path(position: int) -> Callable[..., str]:
    return lambda *args, **_: str(args[position])


# Point -> (owner, attribute, what is called on, how it is left half-done).
POINTS: dict[str, tuple[Any, str, Callable[..., str], Honest | None]] = {
    "weights": (checkpoint, "save_policy", of_path(2), half_the_weights),
    "optimizer": (checkpoint, "save_file", of_path(1), half_the_optimizer),
    "marker": (checkpoint, "write_state", of_path(0), None),
    "rename": (Path, "rename", of_path(0), None),
    "metrics": (
        RunFolder,
        "append_metrics",
        lambda _, report: f"{report.phase}-{report.step}",
        half_the_line,
    ),
    "rollouts": (run_folder, "write_lines", of_path(0), half_the_file),
    "summary": (run_folder, "write_atomic", of_path(0), half_the_file),
    "evaluation": (measuring, "measure", lambda what, *_, **__: what.name, half_the_items),
    "remove": (rotation, "remove_folder", of_path(0), half_the_folder),
    "strip": (shutil, "rmtree", of_path(0), half_the_optimizer_folder),
    "cut": (run_folder, "delete", of_path(0), None),
    "info": (RunFolder, "_write_info", lambda run, _: str(run.path), None),
    "update": (Optimizer, "step", lambda *_: "", None),
}


def lay(point: str, when: str, where: str, count: int) -> None:
    owner, name, describe, half = POINTS[point]
    honest = getattr(owner, name)
    seen = 0

    def trapped(*args: Any, **options: Any) -> Any:
        nonlocal seen
        here = where in describe(*args, **options)
        seen += here
        if not (here and seen == count):
            return honest(*args, **options)
        if when == "after":
            honest(*args, **options)
        if when == "inside":
            assert half is not None, f"{point} has no inside"
            half(honest, *args, **options)
        die()
        return None

    setattr(owner, name, trapped)


def run(order: dict[str, Any]) -> None:
    Path(order["folder"]).mkdir(parents=True, exist_ok=True)
    os.chdir(order["folder"])
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if order.get("fault"):
        lay(*order["fault"])
    recipe = load_recipe("demo", order["overrides"])
    with Run(recipe, Progress(quiet=True), resume=order["resume"]) as opened:
        train(opened)


def obey(order: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(order)
            code = 0
        finally:
            sys.stdout.flush()
            # Not the parent's way out: its clean-up is not the child's.
            if code:
                import traceback

                traceback.print_exc()
            os._exit(code)
    if order.get("delay"):
        time.sleep(order["delay"])
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    return {"signal": number, "code": code, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    assert files.write_atomic is run_folder.write_atomic
    torch.set_num_threads(1)
    # The checks have a state that must survive, too: one finds something whatever the run learns.
    checks.WINDOW, checks.FINDINGS["kl"]["above"] = 2, 1.0e-6
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), flush=True)
