"""What a run folder may not be taken for: another recipe's run, one in the way, or no run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grouper.errors import RunFolderError
from grouper.runs.identity import describe_changes, recipe_changes
from grouper.runs.lock import LOCK_FILE

_LEFTOVERS = {"recipe.yaml", "training.log", "eval_runs", LOCK_FILE}
"""What a run leaves without a `run.json`, where it was killed in its first moment or a model was
measured before anything was trained."""


def refuse_another_recipe(path: Path, there: str, ours: str, *, before: str, now: str) -> None:
    """Refuse a run whose recipe has another hash.

    Args:
        path: the run folder.
        there: hash of its recipe.
        ours: hash of the recipe that is to be run.
        before: its recipe as text; empty where it is not known.
        now: ours; empty where the differing settings need not be named.

    Raises:
        RunFolderError: the hashes differ.
    """
    if there == ours:
        return
    told = f": {describe_changes(recipe_changes(before, now))}" if before and now else ""
    raise RunFolderError(
        f"the folder holds a run of another recipe (hash {there}, yours is {ours}){told}",
        where=str(path),
        fix="Give this run another name or output_dir, go back to the settings in its "
        "recipe.yaml, delete it with --overwrite, or continue it anyway with --resume "
        "--allow-changes.",
    )


def refuse_the_run(path: Path, recipe_hash: str) -> None:
    """Refuse a run that is neither to be continued nor deleted. Raises `RunFolderError`."""
    raise RunFolderError(
        f"the folder already holds a run of this recipe (hash {recipe_hash})",
        where=str(path),
        fix="Continue it with --resume, start again with --overwrite, or give this run another "
        "name.",
    )


def refuse_unless_ours(path: Path, content: Sequence[str]) -> None:
    """Refuse a folder without a run that holds anything a run does not leave.

    Raises:
        RunFolderError: it does.
    """
    others = [name for name in content if name not in _LEFTOVERS and not name.endswith(".tmp")]
    if others:
        raise RunFolderError(
            f"the folder is not empty and not a run of Grouper (it holds {others[0]!r})",
            where=str(path),
            fix="Choose another name or output_dir for the run.",
        )
