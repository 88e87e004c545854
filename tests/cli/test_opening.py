"""A default that this machine cannot have gives way and says so; what was asked for is refused."""

from __future__ import annotations

import importlib.util

import pytest
import yaml

from grouper.cli import opening


@pytest.fixture
def resolved(monkeypatch, grouper):
    monkeypatch.setattr(
        "grouper.cli.train._dry_run", lambda recipe, _: print(recipe.model_dump_json())
    )

    def call(*arguments):
        called = grouper(*arguments, "--dry-run")
        return called, yaml.safe_load(called.out) if called.code == 0 else None

    return call


@pytest.fixture
def no_bitsandbytes(monkeypatch):
    real = opening.find_spec
    without = lambda name: None if name == "bitsandbytes" else real(name)  # noqa: E731
    monkeypatch.setattr(opening, "find_spec", without)
    monkeypatch.setattr("grouper.errors.find_spec", without, raising=False)


def test_the_optimizer_of_a_shipped_recipe_needs_no_bitsandbytes(resolved, no_bitsandbytes):
    called, recipe = resolved("run", "openmath-dapo")
    assert recipe is not None, called.err
    for phase in ("sft", "grpo"):
        assert recipe[phase]["optimizer"]["name"] == "adamw"
        assert f"bitsandbytes is not installed: {phase}.optimizer.name is adamw" in called.err


def test_who_asks_for_it_is_still_refused(resolved, no_bitsandbytes, grouper, tmp_path):
    called, _ = resolved("run", "openmath-dapo", "sft.optimizer.name=adamw_8bit")
    called.refused("bitsandbytes", "sft.optimizer.name")
    (tmp_path / "mine.yaml").write_text(grouper("recipes", "show", "openmath-dapo").out)
    called, _ = resolved("run", str(tmp_path / "mine.yaml"))
    called.refused("bitsandbytes")


def test_without_math_verify_the_symbolic_stage_is_off(resolved, monkeypatch):
    find_spec = importlib.util.find_spec
    missing = lambda name, *more: None if name == "math_verify" else find_spec(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    called, recipe = resolved("run", "demo")
    assert recipe is not None, called.err
    assert recipe["grading"]["symbolic"] is False
    assert "needs math_verify, not installed here: it is off. Install it with" in called.err
    _, recipe = resolved("run", "demo", "grading.symbolic=true")
    assert recipe is None or recipe["grading"]["symbolic"] is True


def test_a_run_is_continued_by_its_name(resolved, grouper, tmp_path, monkeypatch):
    shown = grouper("recipes", "show", "demo").out
    for folder in ("outputs", "elsewhere"):
        (tmp_path / folder / "mine").mkdir(parents=True)
        text = yaml.safe_dump(yaml.safe_load(shown) | {"name": "mine", "description": folder})
        (tmp_path / folder / "mine" / "recipe.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    for more, found in (
        ((), "outputs"),
        (("output_dir=elsewhere",), "elsewhere"),
        (("--output-dir", "elsewhere"), "elsewhere"),
    ):
        called, recipe = resolved("run", "--resume", "mine", *more)
        assert recipe is not None, called.err
        assert (recipe["name"], recipe["description"]) == ("mine", found)
    # A recipe's own name is the recipe, and only what is continued is named by its run.
    assert resolved("run", "--resume", "demo")[1]["name"] == "demo"
    resolved("run", "--resume", "nobody")[0].refused("nobody")
    resolved("run", "mine")[0].refused("mine")
