"""The group of commands: quick, light, helpful."""

from __future__ import annotations

import inspect
import os
import re
import resource
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest
import torch

from grouper.cli.commands import ELSEWHERE
from grouper.cli.main import COMMANDS, EXAMPLES, cli, main

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ["Train", "Evaluate", "Inspect", "Publish", "Look up"]
# Whose help is timed: the one with the most options, one that imports torch, and an inner one.
HELPED = ["run", "eval", "data audit"]


def processor_seconds(program, *arguments):
    """The processor time that a new Python needs for a program, and what it prints."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, done.stdout


@pytest.mark.parametrize(("command", "most"), [("", 3.5), *((name, 5) for name in HELPED)])
def test_help_answers_at_once(command, most):
    """In units of what a new Python with click alone costs, side by side: 0.05 to 0.08 s.

    A second of one machine is half a second of another. Numpy or pydantic alone add 1.3 units.
    """
    helps = []
    units = []
    for _ in range(5):
        seconds, _ = processor_seconds("import click")
        units.append(seconds)
        seconds, printed = processor_seconds(
            "import grouper.cli as c; c.main()", *command.split(), "--help"
        )
        helps.append(seconds)
    for name in COMMANDS if not command else ():
        assert f"\n  {name} " in printed
    assert min(helps) < most * min(units), (helps, units)


def test_help_imports_nothing_that_a_command_needs():
    program = textwrap.dedent("""
        import sys
        from grouper.cli.main import COMMANDS, _run
        assert _run(["--help"]) == 0
        # The table is all that the list of commands needs.
        assert not [name for name in sys.modules if name.startswith("grouper.cli.train")]
        for name in COMMANDS:
            assert _run([name, "--help"]) == 0
        heavy = ("torch", "transformers", "pydantic", "rich", "yaml", "numpy", "datasets", "sympy")
        print(*[name for name in heavy if name in sys.modules], file=sys.stderr)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr.split() == []


def test_the_list_of_commands_has_sections_and_fits_a_terminal(grouper, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    printed = grouper("--help").out
    assert max(map(len, printed.splitlines())) <= 80
    assert re.findall(r"^([A-Z][a-z ]+):$", printed, re.MULTILINE) == ["Options", *SECTIONS]
    lines = printed.splitlines()
    for name, row in COMMANDS.items():
        assert f"  {name:<14}  {row.help}" in lines
        above = lines[: lines.index(f"  {name:<14}  {row.help}")]
        assert [line for line in above if line.endswith(":")][-1] == f"{row.section}:"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_its_own_first_sentence(name):
    command = cli.get_command(click.Context(cli), name)
    assert command.name == name
    assert COMMANDS[name].help == command.get_short_help_str(limit=200)


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

    monkeypatch.setattr("grouper.advice.bench.bench", full)
    first = next(iter(str(error).split(".")), "") or "MemoryError"
    grouper("bench", "demo").refused(f"memory ran out ({first}", "`grouper plan RECIPE`")


def test_other_errors_of_ours_keep_their_traceback(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("shape")

    monkeypatch.setattr("grouper.advice.bench.bench", broken)
    with pytest.raises(RuntimeError, match="shape"):
        main(["bench", "demo"])


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches_by_example(grouper, name):
    called = grouper(name, "--help")
    assert called.code == 0
    assert "Example" in called.out
    assert f"grouper {name} " in called.out
    assert "\b" not in called.out


def every_command():
    """(name, command) of every command that does something, those of groups included."""
    for name, command in TOP.items():
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", c) for inner, c in command.commands.items())
        else:
            yield name, command


TOP = {name: cli.get_command(click.Context(cli), name) for name in COMMANDS}


@pytest.mark.parametrize(("name", "command"), [*every_command()], ids=str)
def test_the_options_of_a_command_are_what_its_function_takes(grouper, name, command):
    """Every option has a help text and a parameter; parameters without an option have a default."""
    parameters = inspect.signature(command.callback).parameters
    several = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {parameter.name for parameter in command.params}
    assert given <= set(parameters) or several
    plain = (p for p in parameters.values() if p.kind is not p.VAR_KEYWORD)
    assert {p.name for p in plain if p.default is p.empty} <= given
    for parameter in command.params:
        assert parameter.param_type_name == "argument" or parameter.help or parameter.hidden
    help_text = grouper(*name.split(), "--help").out
    assert help_text.startswith(f"Usage: grouper {name} ")
    above, _, _ = help_text.partition("Examples:")
    assert max(map(len, above.splitlines())) <= 100
    shown = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    names = [*(next(opt for opt in p.opts if opt.startswith("--")) for p in shown), "--help"]
    options = above.partition("Options:\n")[2]
    listed = re.findall(r"^  (?:-\w, )?(--[\w-]+)", options, re.MULTILINE)
    assert listed == names
    # A title of its own is not worth it for one more.
    assert len(listed) > 6 or "More options" not in above


OPTIONS = [
    (name, option)
    for name, command in every_command()
    for option in command.params
    if isinstance(option.type, click.IntRange | click.FloatRange)
]


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=lambda one: getattr(one, "name", one))
def test_a_number_of_an_option_is_one_that_libraries_can_hold(grouper, name, option):
    beside = ["1"] * (option.nargs - 1)
    for value, what in (
        (str(10**30), "is not a number up to "),
        ("1" + "0" * 400, "is not a number up to "),
        ("nan", "nan is not a number up to | is not a valid whole number"),
        ("three", " is not a valid (whole )?number"),
    ):
        called = grouper(*name.split(), option.opts[-1], value, *beside)
        assert called.code == 2
        assert re.search(rf"Error: Invalid value for '.*{option.opts[-1]}'.*({what})", called.err)


def examples():
    """Every example of a help text, as words after `grouper`; continued lines are one."""
    texts = [EXAMPLES, *(command.epilog or "" for _, command in every_command())]
    texts += [group.epilog or "" for group in TOP.values()]
    for text in dict.fromkeys(texts):
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            bare = re.split(r"\s{3,}(?=[^-\"])", line.strip())[0]
            for command in re.split(r" && | > | \| ", bare):
                if command.startswith("grouper ") and "COMMAND" not in command:
                    yield shlex.split(command)[1:]


@pytest.mark.parametrize("words", [*examples()], ids=" ".join)
def test_every_example_of_the_help_parses(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").touch()
    command = TOP[words[0]]
    inner = getattr(command, "commands", {}).get(words[1] if len(words) > 1 else "")
    command, rest = (inner, words[2:]) if inner else (command, words[1:])
    context = command.make_context(words[0], list(rest))
    assert context.params.keys() >= {parameter.name for parameter in command.params} - {"help"}


def test_the_first_flags_are_those_that_people_use_first(grouper):
    shown = grouper("run", "--help").out.partition("\nOptions:")[2].partition("More options:")[0]
    assert re.findall(r"^  (--[a-z-]+)", shown, re.MULTILINE) == [
        "--dry-run",
        "--model",
        "--max-steps",
        "--resume",
        "--nproc",
    ]


@pytest.mark.parametrize("other", ELSEWHERE)
def test_a_command_of_another_program_says_what_to_type(grouper, other):
    told = grouper(*other.split(), "x")
    assert told.code == 2
    assert " ".join(ELSEWHERE[other].split()) in " ".join(told.err.split())


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "arguments", [["data", "list"], ["runs", "."], ["--version"]], ids=" ".join
)
def test_a_full_disk_or_a_closed_output_is_no_traceback(tmp_path, arguments):
    """Printed by click, by rich, and before any command."""
    program = shlex.join([sys.executable, "-c", "import grouper.cli as c; c.main()", *arguments])
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "recipe.yaml").touch()
    told = {}
    for where in ("/dev/full", "&-"):
        done = subprocess.run(
            f"{program} >{where}",
            shell=True,
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr
        told[where] = done.returncode, done.stderr
    assert told["&-"][0] == 0
    assert told["/dev/full"][0] == 2
    assert "error: nothing more can be written (No space left on device)" in told["/dev/full"][1]


def test_a_typo_in_a_command_names_the_nearest(grouper):
    called = grouper("rnu", "demo")
    assert called.code == 2
    assert "Did you mean 'run'?" in called.err
    called = grouper("recipes", "feilds")
    assert called.code == 2
    assert "Did you mean 'fields'?" in called.err
    assert "No such option" in grouper("--rnu").err


def test_the_version_is_printed(grouper):
    assert grouper("--version").out.startswith("grouper 0.")


def test_a_home_folder_that_nobody_has_is_one_paragraph(grouper):
    grouper("runs", "~nobody-of-this-name/outputs").refused("the ~ in a path stands for no folder")


def test_a_tilde_after_an_equals_sign_is_the_home_folder(grouper, tmp_path, monkeypatch):
    """Shells leave it as it is: afterwards there was a folder named ~, which invites `rm -r ~`."""
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    (home / "in.jsonl").write_text('{"response": "\\\\boxed{4}", "answer": "4"}\n')
    called = grouper("grade", "~/in.jsonl", "--format=boxed", "--output=~/graded.jsonl")
    assert called.code == 0, called.err
    assert (home / "graded.jsonl").exists()
    assert not [*here.iterdir()]


def test_a_text_where_a_path_is_meant_is_one_paragraph(grouper):
    """A question in place of the model: no file system has such names."""
    question = "What is 2 + 2? " * 30
    for command in (["generate", question], ["compare", question]):
        told = "the name of a file or folder is too long: 'What is 2 + 2?"
        grouper(*command).refused(told, "Is it a text where a path or a model is expected?")


def test_windows_gets_a_sentence():
    program = "import sys; sys.platform = 'win32'; import grouper.cli"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.stderr.startswith(b"error: Grouper runs on Linux and macOS.")
