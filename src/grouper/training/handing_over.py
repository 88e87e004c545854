"""`save_path`: what a run has trained, once more in a folder of its own, ready to be passed on.

<save_path>/   the adapter alone where there is one, else the weights; tokenizer, chat template,
generation config; recipe.yaml, so that the model is asked as it was trained
"""

from __future__ import annotations

import shutil
from pathlib import Path

from grouper.config.loading import resolved_yaml
from grouper.config.schema import Recipe
from grouper.errors import RunFolderError
from grouper.files import refused, whole_folder
from grouper.models.folders import ADAPTER_FILE
from grouper.training.checkpoint import STATE_FILE, is_complete

__all__ = ["check_save_path", "hand_over"]

RECIPE_FILE = "recipe.yaml"
_OF_THE_RUN = ("sft", "grpo", "base", "rollouts", "evaluations", "eval_runs", "incident")


def check_save_path(recipe: Recipe, run: Path) -> None:
    """Refuse, before anything is trained, a folder that must not be replaced at the end.

    Args:
        recipe: names the folder.
        run: the run folder.

    Raises:
        RunFolderError: it holds something else than an earlier hand-over, or is part of the run.
    """
    if recipe.save_path is None:
        return
    target = Path(recipe.save_path).expanduser()
    here, there = run.resolve(), target.resolve()
    inside = there.relative_to(here).parts[:1] if there.is_relative_to(here) else ("",)
    if here.is_relative_to(there) or inside[0] in _OF_THE_RUN:
        raise RunFolderError(
            "this folder is part of the run, or holds it, and would be replaced",
            where=f"save_path: {recipe.save_path}",
            fix="Name a folder of its own.",
        )
    try:
        entries = list(target.iterdir()) if target.exists() else []
    except OSError as error:
        refused(error, target)
    content = {entry.name for entry in entries}
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    if content and not ({RECIPE_FILE} < content and content & {ADAPTER_FILE, "config.json"}):
        raise RunFolderError(
            "this folder holds something else than a model that a run has handed over, and would "
            "be replaced",
            where=f"save_path: {recipe.save_path}",
            fix="Name a new folder, or empty this one.",
        )
    if folders:
        raise RunFolderError(
            f"{', '.join(folders)} in this folder is from elsewhere, and would be deleted with it",
            where=f"save_path: {recipe.save_path}",
            fix="Move it, or name a new folder.",
        )


def hand_over(recipe: Recipe, run: Path) -> str | None:
    """Copy what the run has trained last to `save_path`, whole or not at all.

    Args:
        recipe: names the folder; written into it.
        run: the run folder.

    Returns:
        A line that says so; None where there is nothing to do.

    Raises:
        RunFolderError: as `check_save_path`; the disk is full or not writable.
    """
    finals = [run / phase / "final" for phase in ("grpo", "sft")]
    skipped = {"grpo": recipe.skip_grpo, "sft": recipe.skip_sft}
    trained = [f for f in finals if not skipped[f.parent.name] and is_complete(f)]
    if recipe.save_path is None or not trained:
        return None
    check_save_path(recipe, run)
    target = Path(recipe.save_path).expanduser()
    with whole_folder(target) as folder:
        for file in sorted(trained[0].iterdir()):
            if file.is_file() and file.name not in (STATE_FILE, "best.json"):
                shutil.copyfile(file, folder / file.name)
        (folder / RECIPE_FILE).write_text(resolved_yaml(recipe), encoding="utf-8")
        what = "the adapter" if (folder / ADAPTER_FILE).is_file() else "the model"
    return f"Saved {what} of {trained[0]} to {target}."
