"""The pages about recipes say what the recipes say, and their commands are commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from model_shapes import shape_folder

from grouper.advice.plan import plan_run
from grouper.cli.main import cli
from grouper.config.loading import list_recipes, load_recipe

DOCS = Path(__file__).resolve().parents[2] / "docs" / "recipes"
NEED_NOTHING = ("demo", "gsm8k-tiny")
# What came out of them here is on a page of results.
MEASURED = ("laptop",)
PAGES = sorted(file.stem for file in DOCS.glob("*.md") if file.stem != "README")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def overview() -> dict[str, list[str]]:
    """Recipe -> the other cells of its row."""
    rows = re.findall(r"^\| \[([\w-]+)\]\(\1\.md\) \| (.+) \|$", page("README"), re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in rows}


def test_every_recipe_has_a_page_and_a_row() -> None:
    shipped = {name for name, _ in list_recipes()} - set(NEED_NOTHING)
    assert set(PAGES) == set(overview()) == shipped
    assert all(f"`{name}`" in page("README") for name in NEED_NOTHING)


@pytest.mark.parametrize("name", PAGES)
def test_the_settings_of_a_page_are_the_recipe(name: str) -> None:
    settings = re.findall(r"^\| `([\w.]+)` \| (.+?) \| .+ \|$", page(name), re.MULTILINE)
    assert len(settings) >= 12
    recipe = load_recipe(name)
    said = dict(settings)
    assert {key: str(look_up(recipe, key)) for key in said} == said


def look_up(value: Any, key: str) -> Any:
    for part in key.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", PAGES)
def test_the_row_of_a_recipe_is_the_recipe(name: str) -> None:
    model, trained_on, phases, memory, command = overview()[name]
    recipe = load_recipe(name)
    path, _, lora = model.partition(", ")
    assert (path, lora == "LoRA") == (recipe.model.path, recipe.model.lora is not None)
    sources = [s.source for s in (recipe.data.sft, recipe.data.train) if s is not None]
    assert trained_on.split(", ") == [s for s in dict.fromkeys(sources) if s != "prompt-response"]
    assert phases == ("GRPO" if recipe.skip_sft else "SFT, GRPO")
    assert command == f"`grouper run {name}`"
    # The page has the same figure.
    assert memory in page(name)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_all_its_parts(name: str) -> None:
    titles = re.findall(r"^## (.+)$", page(name), re.MULTILINE)
    assert titles[:4] == [
        "What it teaches",
        "What to expect",
        "Memory and time",
        "What to change first",
    ]
    assert titles[4].startswith("Where it differs from")
    if name in MEASURED:
        assert f"(../results/{name}.md)" in page(name)
        return
    # No curve of ours is claimed, and no time.
    assert "Not measured by us" in page(name)
    assert re.search(r"Time:\s+not\s+measured\s+here", page(name))


@pytest.mark.parametrize("name", PAGES)
def test_the_settings_that_a_page_proposes_exist(name: str) -> None:
    """Inline code that looks like overrides loads; several in one piece of code belong together."""
    text = page(name).split("```")
    found = re.findall(r"`([^`]+)`", "".join(text[::2]).replace("\n", " "))
    proposals = [shlex.split(code) for code in found if re.match(r'"?[\w.]+=\S', code)]
    for overrides in proposals:
        load_recipe(name, [o for o in overrides if not o.endswith("=FOLDER")])
    assert proposals


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_parse(name: str) -> None:
    (block,) = re.findall(r"```bash\n(.+?)```", page(name), re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    commands = [line for line in lines if line[:1] == ["grouper"]]
    assert ["grouper", "run", name] in [line[:3] for line in commands]
    for _, verb, *arguments in commands:
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None
        context = command.make_context(verb, list(arguments))
        load_recipe(context.params["recipe"], context.params["overrides"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k-lite", "r1-zero-numina"])
def test_the_memory_of_a_page_is_what_plan_prints(name: str, tmp_path: Path) -> None:
    """The two that are traced fastest; the others were computed the same way."""
    path = load_recipe(name).model.path
    assert path is not None
    folder = shape_folder(tmp_path / "model", path)
    plan = plan_run(load_recipe(name, [f"model.path={folder}"]), device="cuda")
    assert overview()[name][3] == f"{plan.peak / 2**30:.1f} GiB"
