"""`grouper skill` and AGENTS.md: what they tell coding agents to type and to set exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from cli.conftest import Grouper

from grouper.cli.main import cli
from grouper.config.checks import settings
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
SKILL = (ROOT / "src" / "grouper" / "cli" / "SKILL.md").read_text(encoding="utf-8")
AGENTS = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TEXTS = {"SKILL.md": SKILL, "AGENTS.md": AGENTS}


def lines_of(text: str) -> Iterator[list[str]]:
    """The words of each command in the blocks of a text; `a && b` is two commands."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            while "&&" in words:
                end = words.index("&&")
                yield words[:end]
                words = words[end + 1 :]
            if words:
                yield words


def command_of(words: list[str]) -> tuple[click.Command, str, list[str]]:
    """The command that `grouper WORDS` calls, its name and its arguments."""
    command: click.Command = cli
    name = "grouper"
    rest = list(words)
    while isinstance(command, click.Group) and rest:
        name = rest.pop(0)
        inner = command.get_command(click.Context(command), name)
        assert inner is not None, f"{name} of grouper {' '.join(words)}"
        command = inner
    return command, name, rest


GROUPER = [
    words[1:] for text in TEXTS.values() for words in lines_of(text) if words[0] == "grouper"
]


@pytest.mark.parametrize("words", GROUPER, ids=" ".join)
def test_a_command_parses(words: list[str]) -> None:
    command, name, rest = command_of(words)
    if isinstance(command, click.Group):
        # It prints its list.
        assert rest == []
        return
    command.make_context(name, rest)


def test_all_commands_are_found() -> None:
    assert len(GROUPER) >= 20


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_commands_in_sentences_exist(text: str) -> None:
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    commands = re.findall(r"`grouper ([^`]+)`", prose)
    for command in commands:
        words = [word for word in shlex.split(command) if not re.match(r"[-A-Z./]", word)]
        command_of(words)
    assert commands


def test_the_settings_that_are_named_exist() -> None:
    names = {key for key, _ in settings(Recipe)}
    prose = re.sub(r"```.*?```", "", SKILL, flags=re.DOTALL)
    prose = prose.replace("`section.key=value`", "")
    for code in re.findall(r"`([a-z]+\.[a-z_.]+(?:=[^`]+)?)`", prose):
        key, equals, _ = code.partition("=")
        assert key in names or any(name.startswith(f"{key}.") for name in names), code
        if equals:
            load_recipe("demo", [code])
    assert "grpo.shuffle_rewards=true" in prose


def test_a_reader_needs_at_most_twelve_commands() -> None:
    """From a file of problems to a model that was trained, evaluated and explained."""
    section = SKILL.partition("## From problems to an explained result")[2].partition("\n## ")[0]
    numbers = [int(number) for number in re.findall(r" # (\d+)\. ", section)]
    verbs = [words[1] for words in lines_of(section)]
    assert numbers == list(range(1, len(verbs) + 1))
    assert len(verbs) <= 12
    order = ["init", "run", "diagnose", "show", "compare", "report", "export"]
    positions = [verbs.index(verb) for verb in order]
    assert positions == sorted(positions)
    assert "eval" in verbs


def test_the_header_is_what_agents_look_for() -> None:
    header = yaml.safe_load(SKILL.split("---\n")[1])
    assert header["name"] == "grouper"
    assert 50 < len(header["description"]) < 1024


def test_it_is_printed_as_it_stands(grouper: Grouper) -> None:
    called = grouper("skill")
    assert (called.code, called.err) == (0, "")
    assert called.out == SKILL


def test_the_other_commands_of_agents_md_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    for program, *words in lines_of(AGENTS):
        if program == "make":
            assert {word for word in words if "=" not in word} <= targets
        elif program == ".venv/bin/python":
            files = [word for word in words if word.startswith("tests/")]
            assert files
            assert [name for name in files if not (ROOT / name).exists()] == []
        else:
            assert program in ("grouper", ".venv/bin/ruff", ".venv/bin/mypy")


def test_the_folders_of_agents_md_are_all_there_are() -> None:
    table = AGENTS.partition("## Where things are")[2].partition("## Rules")[0]
    rows = "\n".join(line for line in table.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`(\w+)/`", rows))
    package = ROOT / "src" / "grouper"
    rooms = {folder.name for folder in package.iterdir() if (folder / "__init__.py").is_file()}
    assert named == rooms
