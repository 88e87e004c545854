"""A default that this machine cannot have gives way and says so; what was asked for is refused."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from grouper.advice.recipe_checks import missing_packages
from grouper.cli import recipe_args
from grouper.config.loading import load_recipe
from grouper.errors import ConfigError, ModelError, RunFolderError, raise_all


@pytest.fixture
def resolved(monkeypatch, grouper):
    def without_data(recipe, _):
        raise_all(missing_packages(recipe))  # as a dry run does, with what else is wrong
        print(recipe.model_dump_json())

    monkeypatch.setattr("grouper.cli.train._dry_run", without_data)

    def call(*arguments):
        called = grouper(*arguments, "--dry-run")
        return called, yaml.safe_load(called.out) if called.code == 0 else None

    return call


@pytest.fixture
def no_bitsandbytes(monkeypatch):
    real = recipe_args.find_spec
    without = lambda name: None if name == "bitsandbytes" else real(name)  # noqa: E731
    monkeypatch.setattr(recipe_args, "find_spec", without)
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


def test_no_fallback_where_it_is_not_needed(resolved, no_bitsandbytes):
    called, recipe = resolved("run", "demo")
    assert recipe is not None, called.err
    assert "bitsandbytes" not in called.err
    called, recipe = resolved("grpo", "openmath-dapo")
    assert recipe["sft"]["optimizer"]["name"] == "adamw_8bit"
    assert "sft.optimizer" not in called.err
    assert "grpo.optimizer.name is adamw instead" in called.err


def test_what_a_command_samples_from(tmp_path):
    """--model, the run itself if it is a model, start_from, SFT, the recipe's own, the base."""

    def made(name):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
        return str(tmp_path / name)

    demo, run = load_recipe("demo"), tmp_path / "run"
    assert recipe_args.chosen_model(None, demo, run) is None
    base = made("run/base")
    assert recipe_args.chosen_model(None, demo, run) == base
    named = demo.override("model={path: owner/name, new: null}")
    assert recipe_args.chosen_model(None, named, run) == "owner/name"
    sft = made("run/sft/final")
    assert recipe_args.chosen_model(None, named, run) == sft
    start = demo.override(f"grpo.start_from={made('start')}")
    assert recipe_args.chosen_model(None, start, run) == str(tmp_path / "start")
    assert recipe_args.chosen_model(None, start, Path(sft)) == sft
    assert recipe_args.chosen_model("owner/other", start, run) == "owner/other"
    with pytest.raises(ModelError, match=r"^--model: there is no folder"):
        recipe_args.chosen_model("./nowhere", start, run)
    gone = demo.override("grpo.start_from=./nowhere")
    with pytest.raises(ModelError, match=f"^{re.escape(str(run))}: there is no folder"):
        recipe_args.chosen_model(None, gone, run)


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError):
        recipe_args.require_new(tmp_path / "file" / "new.jsonl")
    with pytest.raises(ConfigError, match=r"^--output: .* exists already"):
        recipe_args.require_new(tmp_path / "file", "--output")
