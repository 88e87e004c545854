"""The setting `save_path`: a copy of the trained model in a folder of its own, to be published."""

from __future__ import annotations

import shutil
from pathlib import Path

from grouper.config.loading import resolved_yaml
from grouper.config.schema import Recipe
from grouper.errors import RunFolderError
from grouper.files import (
    refusing,
    whole_folder,
)
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
    target = Path(recipe.save_path).expanduser()
    here, there = run.resolve(), target.resolve()
    with refusing(target):
        entries = list(target.iterdir()) if target.is_dir() else [target] * target.exists()
    names = {entry.name for entry in entries}
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    if here.is_relative_to(there) or any(there.is_relative_to(here / n) for n in OUR_FOLDERS):
        what = "this folder is part of the run, or holds it, and would be replaced"
        fix = "Name a folder of its own."
    elif names and not ({RECIPE_FILE} < names and names & {ADAPTER_FILE, "config.json"}):
        what = "this holds something other than a model saved by a run, and would be replaced"
        fix = "Name a new folder, or empty this one."
    elif folders:
        what = f"{', '.join(folders)} in this folder is from elsewhere, and would be deleted"
        fix = "Move it, or name a new folder."
    else:
        return
    raise RunFolderError(what, where=f"save_path: {recipe.save_path}", fix=fix)


def export_to_save_path(recipe: Recipe, run: Path) -> str | None:
    """Copy the last trained model of the run to `save_path`, completely or not at all.

    The folder gets the adapter alone if there is one, else the weights; tokenizer, chat template,
    generation config; and the recipe.

    Args:
        recipe: names the folder; written into it.
        run: the run folder.

    Returns:
        A line that says so; None if there is nothing to do.

    Raises:
        RunFolderError: as `check_save_path`; the disk is full or not writable.
    """
    finals = [run / phase / "final" for phase in reversed(recipe.phases)]
    trained = next(filter(is_complete, finals), None)
    if recipe.save_path is None or trained is None:
        return None
    check_save_path(recipe, run)
    target = Path(recipe.save_path).expanduser()
    with whole_folder(target) as folder:
        for file in sorted(trained.iterdir()):
            if file.is_file() and file.name not in (STATE_FILE, BEST_FILE):
                shutil.copyfile(file, folder / file.name)
        (folder / RECIPE_FILE).write_text(resolved_yaml(recipe), encoding="utf-8")
        what = "the adapter" if (folder / ADAPTER_FILE).is_file() else "the model"
    return f"Saved {what} of {trained} to {target}."
