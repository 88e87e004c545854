"""The files of examples/launch, as far as one machine without GPUs can try them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import TINY_RUN, data_from, write_problems
from torch.distributed.run import get_args_parser

from grouper import load_recipe
from grouper.runs.folder import RunFolder

LAUNCH = Path(__file__).resolve().parents[2] / "examples" / "launch"

# Programs that a file starts, here only recording what they were given.
STUB = '#!/bin/sh\nfor word in "$@"; do printf \'%s\\n\' "$word"; done\n'


def launched(name: str, folder: Path, *more: str, real: bool = False, **given: str) -> str:
    """What a file prints, with a stub or the real command line in place of each program."""
    for program, module in (("grouper", "grouper"), ("torchrun", "torch.distributed.run")):
        here = f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n' if real else STUB
        (folder / program).write_text(here)
        (folder / program).chmod(0o755)
    environment = {**os.environ, **given, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(LAUNCH / name), *more],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_says_what_it_lacks() -> None:
    files = sorted(LAUNCH.glob("*.sh"))
    assert len(files) == 3
    for file in files:
        bare = {k: v for k, v in os.environ.items() if k not in ("RECIPE", "NODES", "HEAD")}
        done = subprocess.run([file], env=bare, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "name a recipe" in done.stderr or "number of machines" in done.stderr


def test_a_dry_run_of_one_node(tmp_path: Path) -> None:
    write_problems(tmp_path)
    overrides = [*TINY_RUN, *data_from(str(tmp_path)), "--dry-run"]
    told = launched("one_node.sh", tmp_path, *overrides, real=True, RECIPE="demo", GPUS="2")
    assert "Dry run" in told


def test_the_settings_of_servers_on_own_cards(tmp_path: Path) -> None:
    """A dry run of these needs vLLM."""
    told = launched("vllm_own_cards.sh", tmp_path, "seed=1", RECIPE="demo", SERVERS="cuda:1,cuda:2")
    command, name, resume, *overrides = told.splitlines()
    assert (command, name, resume) == ("run", "demo", "--resume")
    recipe = load_recipe(name, overrides)
    assert recipe.sampling.vllm.servers == ("cuda:1", "cuda:2")
    assert recipe.sampling.engine == "vllm"
    assert recipe.grpo.importance == "truncate"


def test_the_arguments_of_torchrun(tmp_path: Path) -> None:
    given = {"NODES": "2", "GPUS": "4", "HEAD": "node-0:29500", "RECIPE": "demo"}
    words = launched("several_nodes.sh", tmp_path, "seed=1", **given).splitlines()
    parsed = get_args_parser().parse_args(words)
    assert (parsed.nnodes, parsed.nproc_per_node) == ("2", "4")
    assert parsed.rdzv_endpoint == "node-0:29500"
    assert parsed.module
    assert [parsed.training_script, *parsed.training_script_args] == [
        *("grouper", "run", "demo", "--resume", "seed=1")
    ]


# Ends its process without a word, once.
DIE = """
import os, pathlib, signal

def once(report):
    died = pathlib.Path("died")
    if (report.phase, report.step) == ("grpo", 3) and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_goes_on_by_itself_after_a_process_was_lost(tmp_path: Path) -> None:
    """Without a store of its own for each start they looked for each other at old addresses."""
    write_problems(tmp_path)
    (tmp_path / "die.py").write_text(DIE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        head = f"127.0.0.1:{probe.getsockname()[1]}"
    overrides = [*TINY_RUN, *data_from(str(tmp_path)), "output_dir=out", "hooks=[die.py:once]"]
    several = {"NODES": "1", "GPUS": "2", "HEAD": head, "RESTARTS": "1"}
    more = ["grpo.steps=4", "grpo.checkpoint_every=2", "device=cpu"]
    launched("several_nodes.sh", tmp_path, *overrides, *more, real=True, RECIPE="demo", **several)
    run = tmp_path / "out" / "demo"
    assert "Resuming grpo at step 2" in (run / "training.log").read_text()
    assert [r.step for r in RunFolder(run).read_metrics() if r.phase == "grpo"] == [1, 2, 3, 4]
