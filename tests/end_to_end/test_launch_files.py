"""The files of examples/launch, as far as one machine without GPUs can try them."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import click
import pytest
import yaml
from tiny_runs import TINY_RUN, data_from, write_problems
from torch.distributed.run import get_args_parser

from grouper import load_recipe
from grouper.cli.main import cli
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


# --- files for a cluster and for clouds: parsed, and run with the programs of others replaced -----


def parsed_torchrun(text: str) -> Any:
    """The arguments that torchrun was given, as it reads them itself."""
    return get_args_parser().parse_args(text.splitlines())


def put_stubs(folder: Path, **scripts: str) -> dict[str, str]:
    """Put programs into a folder, and return an environment that finds them first."""
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


# Options of sbatch that the file may use.
SBATCH = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "time"),
    *("signal", "requeue", "open-mode", "output"),
}


def test_slurm_starts_one_launcher_per_node(tmp_path: Path) -> None:
    text = (LAUNCH / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert set(options) == SBATCH
    # Several tasks on a node would be several launchers.
    assert options["ntasks-per-node"] == "1"
    # The seconds before the limit are those that the launcher leaves for saving.
    several = (LAUNCH / "several_nodes.sh").read_text()
    (seconds,) = re.findall(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-(\d+)", several)
    assert options["signal"] == f"TERM@{seconds}"
    environment = put_stubs(
        tmp_path,
        scontrol="#!/bin/sh\nprintf 'node-7\\nnode-8\\n'\n",
        srun='#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n',
        torchrun=STUB,
    )
    environment |= {"SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    environment |= {"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "99", "RECIPE": "demo"}
    environment |= {"SLURM_SUBMIT_DIR": str(LAUNCH.parents[1])}
    words = [str(LAUNCH / "slurm.sbatch"), "seed=1"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    arguments = parsed_torchrun(done.stdout)
    assert (arguments.nnodes, arguments.nproc_per_node) == ("2", "4")
    assert (arguments.rdzv_endpoint, arguments.rdzv_id) == ("node-7:29500", "99")
    assert arguments.training_script_args == ["run", "demo", "--resume", "seed=1"]


def test_skypilot_runs_the_file_for_several_nodes(tmp_path: Path) -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert set(task) == {
        *("name", "num_nodes", "workdir", "resources", "envs", "file_mounts", "setup", "run"),
    }
    assert set(task["resources"]) <= {"accelerators", "cpus", "memory", "disk_size"}
    # What the setup reads is in the folder that is sent along.
    files = re.findall(r"--constraint (\S+)", task["setup"])
    assert all((LAUNCH.parents[1] / name).is_file() for name in files)
    makefile = (LAUNCH.parents[1] / "Makefile").read_text()
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", makefile, re.MULTILINE)
    assert torch in task["setup"]
    environment = put_stubs(tmp_path, torchrun=STUB) | task["envs"]
    environment |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    environment |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", task["run"]],
        env=environment,
        cwd=LAUNCH.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    arguments = parsed_torchrun(done.stdout)
    assert (arguments.nnodes, arguments.nproc_per_node) == ("2", "8")
    assert arguments.rdzv_endpoint == "10.0.0.1:29500"
    _, recipe, resume, *overrides = arguments.training_script_args
    assert resume == "--resume"
    # The runs lie in the bucket.
    assert load_recipe(recipe, overrides).output_dir in task["file_mounts"]


def test_modal_runs_a_recipe_in_the_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package, whose decorators leave functions as they are."""
    modal = ModuleType("modal")
    app = MagicMock()
    app.function = lambda **_: lambda function: function
    app.local_entrypoint = lambda: lambda function: function
    modal.App = lambda _: app  # type: ignore[attr-defined]  # a stand-in
    modal.Image = MagicMock()  # type: ignore[attr-defined]  # a stand-in
    modal.Volume = MagicMock()  # type: ignore[attr-defined]  # a stand-in
    monkeypatch.setitem(sys.modules, "modal", modal)
    names = runpy.run_path(str(LAUNCH / "modal_app.py"))
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: commands.append(words))
    names["train"]("gsm8k-lite", ["grpo.steps=100", "seed=1"])
    names["volume"].commit.assert_called_once_with()
    ((program, verb, *arguments),) = commands
    assert (program, verb) == ("grouper", "run")
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    params = command.make_context(verb, arguments).params
    assert params["resume"]
    recipe = load_recipe(params["recipe"], params["overrides"])
    assert (recipe.output_dir, recipe.grpo.steps) == (names["RUNS"], 100)


def test_the_commands_in_the_modal_file_name_its_parameters() -> None:
    tree = ast.parse((LAUNCH / "modal_app.py").read_text())
    documentation = ast.get_docstring(tree) or ""
    (line,) = re.findall(r"^modal run (.+)$", documentation, re.MULTILINE)
    file, *words = shlex.split(line)
    assert (LAUNCH.parents[1] / file).is_file()
    main = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    assert [word[2:] for word in words[::2]] == [argument.arg for argument in main.args.args]
    # What the image copies exists.
    copied = re.findall(r'add_local_\w+\("(.+?)"', ast.unparse(tree).replace("'", '"'))
    assert len(copied) == 5
    assert all((LAUNCH.parents[1] / name).exists() for name in copied)


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
