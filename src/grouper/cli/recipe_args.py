"""Open the recipe of a command, its run folder and its model; print dry runs.

Commands import this in their functions, because it needs the schema of recipes, which takes time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from grouper.cli.text import warn
from grouper.config.loading import load_recipe, resolved_yaml, shipped_recipes
from grouper.config.schema import Recipe
from grouper.errors import ConfigError, DataError, GradingError
from grouper.files import read_lines, require_writable
from grouper.models.folders import (
    GGUF_RECORD,
    RECIPE_FILE,
    is_model,
    local_model,
    require_model_folder,
)

# Lines of a dry run before the recipe.
SUMMARY = 25


def open_recipe(
    name: str,
    overrides: Sequence[str] = (),
    *,
    runs_here: bool = True,
    packages: bool = True,
    trains: bool = True,
) -> Recipe:
    """Load a recipe with overrides, check it against all tables, and show its warnings.

    Args:
        name: a shipped name, a YAML file, or a run folder, which has its own recipe.
        overrides: `section.key=value`. A model in ./models or ./.models comes before the Hub.
        runs_here: refuse settings that need a file or library missing on this machine; defaults
            that do are replaced, with a warning.
        packages: as in `check_recipe`.
        trains: as in `check_recipe`; false for a command that trains nothing.

    Raises:
        ConfigError: every problem at once.
    """
    from grouper.advice.recipe_checks import check_recipe

    recipe = read_recipe(name, overrides)
    path = recipe.model.path or ""
    changes = []
    notes = []
    if runs_here:
        for override, note in fallbacks(name, recipe, overrides):
            changes.append(override)
            notes.append(note)
    local = local_model(path)
    if local != path:
        changes += [f"model.path={local}", "model.revision=null"]
        if (Path(local) / GGUF_RECORD).is_file():
            notes.append(
                f"{path} is read from {local}, a copy made of a GGUF file: {GGUF_RECORD} there "
                "says what it lost."
            )
    if changes:
        recipe = read_recipe(name, (*overrides, *changes))
    warnings = check_recipe(recipe, runs_here=runs_here, packages=packages, trains=trains)
    for text in (*notes, *warnings):
        warn(text)
    return recipe


def sampled_by(engine: str | None, overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the overrides, with the engine of `--engine`."""
    if engine is None:
        return tuple(overrides)
    return (*overrides, f"sampling.engine={engine}")


def read_recipe(name: str, overrides: Sequence[str]) -> Recipe:
    """Load a recipe with overrides, without checks; `name` is as in `open_recipe`."""
    folder = run_folder_of(name)
    source = name if folder is None else folder / RECIPE_FILE
    return load_recipe(source, overrides)


def run_folder_of(name: str) -> Path | None:
    """Return the run folder that RECIPE names, or None if it is a shipped name or a file.

    Raises:
        ConfigError: a folder without a recipe.
    """
    folder = Path(name).expanduser()
    if "/" not in name or not folder.is_dir():
        return None
    if not (folder / RECIPE_FILE).is_file():
        raise ConfigError(
            f"this folder has no {RECIPE_FILE}, so it is not the folder of a run",
            where=name,
            fix="Give a shipped recipe, a YAML file, or <output_dir>/<name> of a run.",
        )
    return folder


def run_of(name: str, recipe: Recipe) -> Path:
    """Return the run folder that RECIPE names, else that of a run of the recipe."""
    return run_folder_of(name) or recipe.run_folder


def chosen_model(model: str | None, recipe: Recipe, run: Path) -> str | None:
    """Return the model of `--model`, else the start of GRPO; None if that does not exist yet.

    Raises:
        ModelError: a folder that holds no model.
    """
    start = str(run) if is_model(run) else recipe.grpo.start_from
    sft = _existing_folder(run / "sft" / "final")
    base = _existing_folder(run / "base")
    subject = model or start or sft or recipe.model.path or base
    if subject is not None:
        require_model_folder(subject, where=str(run) if model is None else "--model")
    return subject


def _existing_folder(path: Path) -> str | None:
    return str(path) if path.is_dir() else None


def require_new(path: Path | None, where: str = "") -> None:
    """Refuse, before anything slow, a file or folder that exists or cannot be written.

    None, where nothing is written to a file, passes.

    Raises:
        ConfigError: it exists.
        RunFolderError: its folder cannot be written.
    """
    if path is None:
        return
    if path.exists():
        fix = "Choose another name, or move it."
        raise ConfigError(f"{path} exists already", where=where, fix=fix)
    require_writable(path)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a file: JSONL, CSV, Parquet, or the stored rows of a run.

    Raises:
        DataError: it cannot be read, or holds no rows.
    """
    from grouper.data.reading import find_file, read_files

    if file.suffix == ".gz":
        rows = [*read_lines(file, _object)]
    else:
        files = find_file(file, split="", subset=None)
        rows = [dict(row) for row in read_files(files)]
    if not rows:
        raise DataError("there are no rows in it", where=str(file), fix="Check the file.")
    return rows


def _object(line: str) -> dict[str, Any]:
    """Parse a stored row; raise `ValueError` if it is none."""
    row: Any = json.loads(line)
    if isinstance(row, dict):
        return row
    raise ValueError("a row should be an object")


# --- dry runs ------------------------------------------------------------------------------------


def show_plan(
    recipe: Recipe,
    sizes: Sequence[str],
    warnings: Sequence[str] = (),
    *,
    leaks: Sequence[str] = (),
    unchecked: Sequence[str] = (),
) -> None:
    """Print a dry run: a summary as YAML comments, then the resolved recipe.

    Args:
        recipe: the recipe of the command.
        sizes: one line each; those that do not fit into the summary follow the recipe.
        warnings: texts for standard error.
        leaks: counts of held-out problems in the training data, for the last line.
        unchecked: the checks that were left out.
    """
    for text in warnings:
        warn(text)
    verdict = "All checks passed"
    if leaks:
        verdict = f"{verdict}, but {' and '.join(leaks)}"
    verdict = f"{verdict}."
    if unchecked:
        verdict = f"{verdict} Not checked: {'; '.join(unchecked)}."
    last_line = f"Dry run: no model was loaded and nothing was written. {verdict}"
    lines = [*sizes[: SUMMARY - 1], last_line]
    click.echo("".join(f"# {line}\n" for line in lines))
    click.echo(resolved_yaml(recipe))
    for line in sizes[SUMMARY - 1 :]:
        click.echo(f"# {line}")


def models_not_here(recipe: Recipe, *models: str) -> list[str]:
    """List the models that are not on this machine, as `show_plan` takes them."""
    from grouper.models.folders import on_this_machine

    missing = []
    for model in models:
        revision = recipe.model.revision_of(model)
        if not on_this_machine(model, revision):
            missing.append(f"the model {model!r}, which is not on this machine")
    return missing


# --- defaults that need a library which is missing here -------------------------------------------


def fallbacks(name: str, recipe: Recipe, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (override, warning) for each default that needs a missing library.

    Settings of the user are refused instead. The resolved recipe shows the overrides.

    Args:
        name: the name of the recipe, as typed.
        recipe: the recipe with `overrides`.
        overrides: `section.key=value`.
    """
    keys = {override.partition("=")[0].strip() for override in overrides}
    if name in shipped_recipes() and not find_spec("bitsandbytes"):
        for phase in recipe.phases:
            key = f"{phase}.optimizer.name"
            is_set_by_user = bool({phase, f"{phase}.optimizer", key} & keys)
            needs_library = getattr(recipe, phase).optimizer.name == "adamw_8bit"
            if needs_library and not is_set_by_user:
                change = f"{key} is adamw instead of adamw_8bit, the same update with more memory"
                yield f"{key}=adamw", f"bitsandbytes is not installed: {change}."
    from grouper.grading import require_symbolic

    try:
        require_symbolic(recipe.grading)
    except GradingError as error:
        if "symbolic" not in recipe.grading.model_fields_set:
            yield "grading.symbolic=false", f"{error.what}: it is off. {error.fix}"
