"""The group of commands: quick, light, helpful."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from grouper.cli.main import COMMANDS, cli, main

BIN = Path(sys.executable).parent / "grouper"


def test_help_answers_in_under_300_ms():
    command = (
        [str(BIN)] if BIN.exists() else [sys.executable, "-c", "import grouper.cli as c; c.main()"]
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - start)
        for name in COMMANDS:
            assert f"\n  {name} " in done.stdout
    assert min(times) < 0.3, times


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    ],
)
def test_a_model_that_does_not_fit_is_one_paragraph(grouper, monkeypatch, error):
    def full(*_, **__):
        raise error

    monkeypatch.setattr("grouper.advice.measuring.bench", full)
    first = next(iter(str(error).split(".")), "") or "MemoryError"
    grouper("bench", "demo").refused(f"memory ran out ({first}", "`grouper plan RECIPE`")


def test_other_errors_of_ours_keep_their_traceback(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("shape")

    monkeypatch.setattr("grouper.advice.measuring.bench", broken)
    with pytest.raises(RuntimeError, match="shape"):
        main(["bench", "demo"])


@pytest.mark.parametrize("arguments", [["--help"], ["recipes"], ["run", "demo", "--dry-run"]])
def test_what_loads_no_model_imports_no_framework(arguments, tmp_path):
    program = textwrap.dedent(f"""
        import sys
        from grouper.cli import main
        try:
            main({arguments!r})
        except SystemExit as end:
            assert not end.code, end.code
        heavy = ("torch", "transformers", "tensorflow", "datasets", "matplotlib", "sympy")
        print(*[name for name in heavy if name in sys.modules], file=sys.stderr)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stderr.split() == []


def test_tensorflow_is_never_imported_however_well_it_is_installed(tmp_path):
    for name in ("tensorflow", "jax", "flax", "keras"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text(f"raise RuntimeError('{name} was imported')\n")
        info = tmp_path / f"{name}-2.20.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.20.0\n")
    program = textwrap.dedent("""
        import importlib.util, sys
        assert importlib.util.find_spec("tensorflow") is not None
        import grouper.training.pipeline
        from grouper.models.loading import load_policy
        assert not [n for n in sys.modules if n.split(".")[0] in ("tensorflow", "jax", "keras")]
    """)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_teaches_by_example(grouper, name):
    called = grouper(name, "--help")
    assert called.code == 0
    assert "Example" in called.out
    assert f"grouper {name} " in called.out
    assert "\b" not in called.out


def test_every_option_of_every_command_says_what_it_is_for():
    context = cli.make_context("grouper", ["recipes"], resilient_parsing=True)
    for name in ("run", "sft", "grpo", "eval", "generate"):
        command = cli.get_command(context, name)
        assert command is not None
        for parameter in command.params:
            if parameter.name in ("split", "samples") or parameter.param_type_name == "argument":
                continue  # the name and the default say it
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["data", "list"], ["run", "--help"], ["rewards", "probe", "stack:gsm8k-lite"]],
    ids=" ".join,
)
def test_a_reader_that_leaves_early_is_no_error(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import grouper.cli as c; c.main()", *arguments],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 141  # as of `ls | head`


def test_a_typo_in_a_command_names_the_nearest(grouper):
    called = grouper("rnu", "demo")
    assert called.code == 2
    assert "Did you mean 'run'?" in called.err
    called = grouper("recipes", "feilds")
    assert called.code == 2
    assert "Did you mean 'fields'?" in called.err


def test_the_version_is_printed(grouper):
    assert grouper("--version").out.startswith("grouper 0.")
