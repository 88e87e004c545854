"""Where a model lies says how it is asked: its recipe, and what a run has trained."""

from __future__ import annotations

from pathlib import Path

from grouper.config import DataConfig, ModelConfig, PromptConfig, Recipe, SourceConfig
from grouper.errors import ConfigError, did_you_mean
from grouper.prompts import FORMATS
from grouper.recipe import load_recipe

__all__ = ["is_model", "model_in", "recipe_for", "trained_model", "with_sampling"]

RECIPE_FILE = "recipe.yaml"
"""What a run folder, and a folder made by `save_path`, keep the resolved recipe in."""
MODEL_FILES = ("config.json", "adapter_config.json")


def recipe_for(model: str, recipe: Recipe | None = None, format_name: str | None = None) -> Recipe:
    """The recipe given, else that of the run `model` lies in, with another format if told.

    Raises:
        ConfigError: neither is there and no format was given, or there is no such format.
    """
    if format_name is not None and format_name not in FORMATS:
        raise ConfigError(
            f"there is no prompt format {format_name!r}",
            where="--format",
            fix=did_you_mean(format_name, FORMATS),
        )
    beside = None if recipe is not None else _recipe_beside(Path(model).expanduser())
    if recipe is None and beside is not None:
        recipe = load_recipe(beside)
    if recipe is None and format_name is not None:
        recipe = Recipe(
            name="generate",
            model=ModelConfig(path=model),
            data=DataConfig(train=SourceConfig(source="arithmetic")),
        )
    if recipe is None:
        raise ConfigError(
            "it is not known how this model is to be asked: it does not lie in a run folder",
            where=model,
            fix="Give --recipe, or --format with one of " + ", ".join(FORMATS) + ".",
        )
    if format_name is None:
        return recipe
    return recipe.model_copy(update={"prompt": PromptConfig(format=format_name)})


def _recipe_beside(model: Path) -> Path | None:
    """`<run>/recipe.yaml` for `<run>`, `<run>/base`, `<run>/grpo/final`, ..."""
    if not model.is_dir():
        return None
    folder = model.resolve()
    places = (folder, *list(folder.parents)[:2])
    return next((p / RECIPE_FILE for p in places if (p / RECIPE_FILE).is_file()), None)


def model_in(path: str) -> str:
    """`path` itself; of a run folder, the model that the run has trained.

    Raises:
        ConfigError: the run has trained nothing yet.
    """
    folder = Path(path).expanduser()
    if not (folder / RECIPE_FILE).is_file() or is_model(folder):
        return path
    return trained_model(load_recipe(folder / RECIPE_FILE), folder)


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model or an adapter itself, as one that was handed over does."""
    return any((folder / name).is_file() for name in MODEL_FILES)


def trained_model(recipe: Recipe, run: Path) -> str:
    """What the run has trained, else the recipe's own model; a model folder is meant itself.

    Raises:
        ConfigError: the recipe makes a new model, and there is no run yet.
    """
    if is_model(run):
        return str(run)
    for phase in ("grpo", "sft"):
        final = run / phase / "final"
        if final.is_dir():
            return str(final)
    base = recipe.model.path or str(run / "base")
    if recipe.model.path is None and not Path(base).is_dir():
        raise ConfigError(
            "there is nothing to measure: the recipe makes a new model, and has not been run yet",
            where=str(run),
            fix="Name a model with --model, or train one with `grouper run`.",
        )
    return base


def with_sampling(
    recipe: Recipe,
    *,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    samples: int = 1,
    seed: int | None = None,
) -> Recipe:
    """The recipe with its evaluation section as told; what is None stays as it is.

    Raises:
        ConfigError: several samples at temperature 0.
    """
    if max_new_tokens is None and recipe.evaluation.max_new_tokens is None:
        max_new_tokens = _what_total_leaves(recipe)
    given = {"temperature": temperature, "max_new_tokens": max_new_tokens, "samples": samples}
    evaluation = recipe.evaluation.model_copy(
        update={name: value for name, value in given.items() if value is not None}
    )
    if samples > 1 and evaluation.temperature == 0:
        raise ConfigError(
            f"{samples} samples at temperature 0 would all be the same",
            where="--samples",
            fix="Add --temperature 1.0.",
        )
    changes = {"evaluation": evaluation, "seed": recipe.seed if seed is None else seed}
    return recipe.model_copy(update=changes)


def _what_total_leaves(recipe: Recipe) -> int | None:
    """Room behind the longest prompt allowed; the training data, which tell more, are not read."""
    total = recipe.sampling.max_total_tokens
    return None if total is None else max(1, total - recipe.prompt.max_prompt_tokens)
