"""The setting `save_path`: a copy of the trained model in a folder of its own, to be published."""

from __future__ import annotations

import shutil
from pathlib import Path

from grouper.config.loading import resolved_yaml
from grouper.config.schema import Recipe
from grouper.errors import RunFolderError
from grouper.files import os_errors_as, whole_folder
from grouper.models.folders import ADAPTER_FILE, BEST_FILE, RECIPE_FILE, STATE_FILE
from grouper.runs.folder import OUR_FOLDERS
from grouper.training.saved_state import is_complete


def check_save_path(recipe: Recipe, run: Path) -> None:
    """Refuse, before training, a folder that must not be replaced at the end.

    Args:
        recipe: names the folder.
        run: the run folder.

    Raises:
        RunFolderError: it holds anything but an earlier export, or is part of the run.
    """
    if recipe.save_path is None:
        return
    where = f"save_path: {recipe.save_path}"
    target = Path(recipe.save_path).expanduser()
    entries: list[Path] = []
    with os_errors_as(target):
        if target.is_dir():
            entries = list(target.iterdir())
        elif target.exists():
            entries = [target]
    if _overlaps_run(target.resolve(), run.resolve()):
        raise RunFolderError(
            "this folder is part of the run, or holds it, and would be replaced",
            where=where,
            fix="Name a separate folder.",
        )
    names = {entry.name for entry in entries}
    # A saved model has a recipe, and an adapter or a configuration.
    is_saved_model = {RECIPE_FILE} < names and names & {ADAPTER_FILE, "config.json"}
    if names and not is_saved_model:
        raise RunFolderError(
            "this holds something other than a model saved by a run, and would be replaced",
            where=where,
            fix="Name a new folder, or empty this one.",
        )
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    if folders:
        raise RunFolderError(
            f"{', '.join(folders)} in this folder is from elsewhere, and would be deleted",
            where=where,
            fix="Move it, or name a new folder.",
        )


def _overlaps_run(target: Path, run: Path) -> bool:
    """Return whether a folder holds the run folder, or is one of the folders that the run writes.

    Args:
        target: the resolved folder.
        run: the resolved run folder.
    """
    if run.is_relative_to(target):
        return True
    return any(target.is_relative_to(run / name) for name in OUR_FOLDERS)


def export_to_save_path(recipe: Recipe, run: Path) -> str | None:
    """Copy the last trained model of the run to `save_path`, completely or not at all.

    The folder gets the adapter alone if there is one, else the weights; tokenizer, chat template,
    generation config; and the recipe.

    Args:
        recipe: names the folder; written into it.
        run: the run folder.

    Returns:
        A message; None if there is nothing to do.

    Raises:
        RunFolderError: as `check_save_path`; the disk is full or not writable.
    """
    finals = [run / phase / "final" for phase in reversed(recipe.phases)]
    last_final = next(filter(is_complete, finals), None)
    if recipe.save_path is None or last_final is None:
        return None
    check_save_path(recipe, run)
    target = Path(recipe.save_path).expanduser()
    with whole_folder(target) as folder:
        for file in sorted(last_final.iterdir()):
            if file.is_file() and file.name not in (STATE_FILE, BEST_FILE):
                shutil.copyfile(file, folder / file.name)
        (folder / RECIPE_FILE).write_text(resolved_yaml(recipe), encoding="utf-8")
        noun = "the adapter" if (folder / ADAPTER_FILE).is_file() else "the model"
    return f"Saved {noun} of {last_final} to {target}."
