"""docs/migrating.md, line by line: its commands are parsed, its settings and rewards exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

import grouper as grouper_package
from grouper import errors
from grouper.cli.main import cli
from grouper.compat.aliases import aliases
from grouper.compat.flags import flag_named, flags
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.rewards import REWARDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
TRAINING = ("run", "sft", "grpo")
ROWS = re.findall(r"^\| (.+) \| (.+) \|$", TEXT, re.MULTILINE)
OURS = [row[1] for row in ROWS]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grouper) -> Path:
    """A folder with the files that the page names; trackers are taken to be installed."""
    monkeypatch.chdir(tmp_path)
    for name in ("models/Qwen2.5-7B-Instruct", "outputs/other/sft/final", "data/math"):
        (tmp_path / name).mkdir(parents=True)
    for model in ("models/Qwen2.5-7B-Instruct", "outputs/other/sft/final"):
        Path(model, "config.json").write_text("{}")
    for name in ("mine.jsonl", "sft.jsonl", "data/math/sft.jsonl"):
        Path(name).write_text("{}\n")
    Path("system.txt").write_text("Write <reasoning> and <answer> tags.")
    Path("my_tracker.py").write_text(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0])
    for name in ("mine.yaml", "sft.yaml"):
        Path(name).write_text(grouper("recipes", "show", "demo").out)
    Path("grpo.yaml").write_text("num_generations: 8\nepsilon: 0.2\n")
    Path("train.py").write_text("GRPOConfig(num_generations=8)\n")
    Path("unique_256.yaml").write_text("sft_data_path: data/math/sft.jsonl\n")
    Path("my_config.yaml").write_text("grpo_training: {max_steps: 200}\n")
    Path("sft.json").write_text('{"learning_rate": 1e-5}')
    monkeypatch.setattr(errors, "find_spec", lambda name: True)
    monkeypatch.setattr("grouper.cli.train._dry_run", lambda recipe, _: print(recipe.name))
    monkeypatch.setattr("grouper.advice.recipe_checks.find_spec", lambda name: True)
    monkeypatch.setattr("grouper.advice.recipe_checks.require_extra", lambda *_, **__: None)
    return tmp_path


def test_the_page_has_commands_of_every_system():
    recipes = {"gsm8k-xml", "math-r1-zero", "gsm8k-lite", "openmath-dapo", "r1-zero-numina"}
    assert recipes <= {word for command in COMMANDS for word in command.split()}
    assert all(command.startswith("grouper ") for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(place, grouper, command):
    words = shlex.split(command)[1:]
    if words[0] in TRAINING:
        called = grouper(*words, *([] if "--dry-run" in words else ["--dry-run"]))
    elif words[:2] == ["recipes", "from"]:
        Path("mine.yaml").unlink()  # it writes over nothing
        called = grouper(*words)
    else:
        loaded = cli.get_command(click.Context(cli), words[0])
        assert loaded is not None
        loaded.make_context(words[0], words[1:])
        if words[0] != "generate":
            load_recipe(words[1])
        return
    assert called.code == 0, called.err


def test_what_from_wrote_can_be_run(place, grouper):
    Path("mine.yaml").unlink()
    assert grouper("recipes", "from", "grpo.yaml", "--output", "mine.yaml").code == 0
    assert grouper("run", "--config", "mine.yaml", "--dry-run").code == 0


SECTIONS = "|".join(Recipe.model_fields)


def settings_named() -> set[str]:
    """Dotted keys in the code of the right-hand columns and of the last table."""
    code = [word for cell in OURS for word in re.findall(r"`([^`]+)`", cell)]
    keys = {key for text in code for key in re.findall(rf"\b((?:{SECTIONS})\.[a-z_.]+)", text)}
    return {key for key in keys if not key.endswith((".py", ".jsonl", ".txt", ".yaml"))}


@pytest.mark.parametrize("key", sorted(settings_named()))
def test_a_setting_exists(key, grouper):
    fields = {line.split()[0] for line in _fields(grouper) if line and not line.startswith(" ")}
    found = [name for name in fields if name == key or name.startswith((f"{key}.", f"{key}["))]
    assert found, key


def _fields(grouper) -> list[str]:
    called = grouper("recipes", "fields")
    assert called.code == 0
    return list(called.out.splitlines())


def test_flags_of_the_tables_exist(grouper):
    helps = "".join(grouper(*words, "--help").out for words in (["run"], ["eval"], ["preview"]))
    named = {flag for cell in OURS for flag in re.findall(r"--[a-z][a-z-]+", cell)}
    assert len(named) > 20
    other_names = {flag for flag in named if flag_named(flag[2:]) in flags()}
    assert [flag for flag in sorted(named - other_names) if flag not in helps] == []


def test_trls_names_are_trls():
    table = TEXT.split("## gsm8k-xml")[0]
    left = [row[0] for row in re.findall(r"^\| (`.+) \| (.+) \|$", table, re.MULTILINE)]
    words = {w for cell in left for w in re.findall(r"`([a-z_]+\w*)`", cell)}
    # What else stands there in code: the values of loss_type.
    assert [w for w in sorted(words) if w not in aliases() and w not in ("dapo", "dr_grpo")] == []


def test_what_is_named_of_the_package_is_public():
    named = {w for cell in OURS for w in re.findall(r"`grouper\.([a-z_]+)`", cell)}
    assert len(named) >= 4
    assert named <= set(grouper_package.__all__)


def test_rewards_and_the_tracker_sections_are_valid():
    named = {w for cell in OURS for w in re.findall(r"`((?:xml|lite|dapo)_[a-z_]+)`", cell)}
    assert len(named) >= 5
    assert named <= REWARDS.keys()
    (section,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    trackers = yaml.safe_load(section)["tracking"]["trackers"]
    recipe = load_recipe(
        "demo", [f"tracking.trackers={yaml.safe_dump(trackers, default_flow_style=True)}"]
    )
    assert [t.name for t in recipe.tracking.trackers] == ["wandb", "my_tracker.py:log_record"]
