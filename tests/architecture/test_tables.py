"""A name that a recipe may hold is a row of a table, and every row can be named."""

from __future__ import annotations

import importlib.resources
import json
import re
import typing
from typing import Any

import click
import pytest
from codebase import ROOT, TESTS
from pydantic import BaseModel

from grouper.advice.recipe_checks import check_recipe
from grouper.algorithms.advantages import ADVANTAGES
from grouper.algorithms.losses import IMPORTANCE_WEIGHTS, KL_ESTIMATORS, LOG_RATIOS, SURROGATES
from grouper.algorithms.weighting import WEIGHTINGS
from grouper.cli.main import COMMANDS, cli
from grouper.config import schema
from grouper.config.loading import list_recipes, load_recipe, resolved_yaml
from grouper.config.overrides import PRESETS
from grouper.sampling.factory import SAMPLERS
from grouper.training.optimizers import OPTIMIZERS, SCHEDULES


def names_of(section: type[BaseModel], setting: str) -> Any:
    """The names that a setting may have."""
    return section.model_fields[setting].annotation


TABLES: list[tuple[Any, dict[str, Any]]] = [
    (schema.Algorithm, PRESETS),
    (schema.Advantage, ADVANTAGES),
    (names_of(schema.GRPOConfig, "ratio"), LOG_RATIOS),
    (names_of(schema.GRPOConfig, "surrogate"), SURROGATES),
    (names_of(schema.GRPOConfig, "kl"), KL_ESTIMATORS),
    (names_of(schema.GRPOConfig, "importance"), {"none": None, **IMPORTANCE_WEIGHTS}),
    (names_of(schema.GRPOConfig, "weighting"), WEIGHTINGS),
    (names_of(schema.OptimizerConfig, "name"), OPTIMIZERS),
    (schema.EngineName, SAMPLERS),
    (names_of(schema.OptimizerConfig, "schedule"), SCHEDULES),
]

RECIPES = sorted(
    f.name.removesuffix(".yaml")
    for f in (importlib.resources.files("grouper.config") / "recipes").iterdir()
    if f.name.endswith(".yaml")
)


@pytest.mark.parametrize(("names", "table"), TABLES)
def test_names_are_rows(names: Any, table: dict[str, Any]) -> None:
    assert sorted(typing.get_args(names)) == sorted(table)


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_are_valid(name: str, tmp_path: Any) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    # Files of the user's and optional libraries need not be on this machine.
    check_recipe(recipe, runs_here=False)
    copy = tmp_path / "copy.yaml"
    copy.write_text(resolved_yaml(recipe), encoding="utf-8")
    assert load_recipe(copy) == recipe


def test_recipes_are_listed() -> None:
    assert "demo" in RECIPES
    assert [name for name, _ in list_recipes()] == RECIPES


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_loaded_and_teaches(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.help
    assert len(command.help) > 40


def test_every_metric_of_the_recorded_runs_is_explained() -> None:
    explained = set(re.findall(r"`([a-z_/]+)`", (ROOT / "docs" / "metrics.md").read_text("utf-8")))
    metrics: set[str] = set()
    for file in (TESTS / "frozen" / "runs").glob("*.json"):
        for row in json.loads(file.read_text("utf-8"))["metrics"]:
            metrics |= row["metrics"].keys()
    # Rewards have names of their own, and a spread is that of the metric before it.
    plain = {
        name
        for name in metrics
        if not name.startswith("reward/") and not name.endswith(("/min", "/max", "/count"))
    }
    assert len(plain) > 20
    assert plain - explained == {"recipe_hash"}
