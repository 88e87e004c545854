"""Where a model lies: beside the work under its Hub name, or in a run, whose recipe says how it is
asked.
"""

from __future__ import annotations

from pathlib import Path

from grouper.config.loading import load_recipe
from grouper.config.schema import DataConfig, ModelConfig, PromptConfig, Recipe, SourceConfig
from grouper.errors import ConfigError, did_you_mean
from grouper.prompts import FORMATS

__all__ = ["is_model", "local_model", "model_in", "recipe_for", "trained_model", "with_sampling"]

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
    samples: int | None = None,
    seed: int | None = None,
) -> Recipe:
    """The recipe with another evaluation section; what is None stays as it is.

    At temperature 0, where all samples would be the same, one is drawn unless more are asked for.

    Raises:
        ConfigError: several samples at temperature 0.
    """
    if max_new_tokens is None and recipe.evaluation.max_new_tokens is None:
        max_new_tokens = _what_total_leaves(recipe)
    if samples is None and temperature == 0:
        samples = 1
    given = {"temperature": temperature, "max_new_tokens": max_new_tokens, "samples": samples}
    evaluation = recipe.evaluation.model_copy(
        update={name: value for name, value in given.items() if value is not None}
    )
    if evaluation.samples > 1 and evaluation.temperature == 0:
        raise ConfigError(
            f"{evaluation.samples} samples at temperature 0 would all be the same",
            where="--samples",
            fix="Add --temperature 1.0.",
        )
    changes = {"evaluation": evaluation, "seed": recipe.seed if seed is None else seed}
    return recipe.model_copy(update=changes)


def _what_total_leaves(recipe: Recipe) -> int | None:
    """Room after the longest prompt allowed; the training data, which tell more, are not read."""
    total = recipe.sampling.max_total_tokens
    return None if total is None else max(1, total - recipe.prompt.max_prompt_tokens)


MODEL_FOLDERS = ("models", ".models")
"""Where people keep models, below the folder that the command runs in."""


def local_model(name: str, beside: Path | None = None) -> str:
    """The local folder of a model, or its name unchanged where there is none.

    Args:
        name: a path or Hub name (`Qwen/Qwen2.5-0.5B`). A path that exists is left as it is;
            otherwise a folder of the whole name or its last part is looked for, in any case.
        beside: the folder whose `MODEL_FOLDERS` are searched; the current one by default.
    """
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~")):
        return name
    for places in MODEL_FOLDERS:
        for wanted in (name, name.rpartition("/")[2]):
            folder = _folder_of(Path(places), wanted, beside or Path.cwd())
            if folder is not None:
                return f"./{folder}"
    return name


def _folder_of(places: Path, wanted: str, beside: Path) -> Path | None:
    """`places/wanted` in any case of letters, if it holds a model or an adapter."""
    found = places
    for part in wanted.split("/"):
        here = beside / found
        names = [entry.name for entry in here.iterdir()] if here.is_dir() else []
        matching = [name for name in names if name.casefold() == part.casefold()]
        if not matching:
            return None
        found = found / (part if part in matching else min(matching))
    files = ("config.json", "adapter_config.json")
    return found if any((beside / found / file).is_file() for file in files) else None
