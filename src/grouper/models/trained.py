"""The trained model of a run: a phase's result, its newest checkpoint, or the one that is named.

    <run>/grpo/final, else <run>/grpo/checkpoint-<newest>, else the same of sft

It is never the untrained base of a run, which has to be named by its folder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.errors import ConfigError, RunFolderError
from grouper.files import read_json
from grouper.models.folders import (
    BEST_FILE,
    RECIPE_FILE,
    STATE_FILE,
    is_model,
    looks_local,
    require_model_folder,
)

log = logging.getLogger(__name__)

# Phases in the order of preference, the latest first.
_PHASES = ("grpo", "sft")
_DAMAGED = "the state of the checkpoint is damaged"
_UNMARKED = "the mark of the best checkpoint is damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete model that a phase of a run has saved."""

    phase: str
    step: int
    """Steps of the phase that it has taken."""
    total: int
    """Steps of the whole phase, as planned when it was saved."""
    folder: Path

    @property
    def is_final(self) -> bool:
        """Whether it is the result of the phase."""
        return self.folder.name == "final"


def model_in(
    path: str,
    *,
    where: str = "MODEL",
    checkpoint: str | None = None,
    say: Callable[[str], None] = log.warning,
) -> str:
    """Return the trained model of a run folder; any other path is returned as it is.

    Args:
        path: a run folder, a model or adapter folder, or a Hub name.
        where: the argument that names it.
        checkpoint: a model of the run; see `trained_model`.
        say: called with a message if the run is not finished.

    Raises:
        ConfigError: the run has trained nothing yet, or has no such checkpoint.
        ModelError: a folder that is missing or holds no model.
    """
    folder = Path(path).expanduser()
    if (folder / RECIPE_FILE).is_file() and not is_model(folder):
        recipe = load_recipe(folder / RECIPE_FILE)
        path = trained_model(recipe, folder, checkpoint=checkpoint, say=say)
    elif looks_local(path) and not folder.exists():
        require_model_folder(path, where=where)
    elif checkpoint is not None:
        raise _no_run(path)
    require_model_folder(path, where=where)
    return path


def trained_model(
    recipe: Recipe,
    run: Path,
    *,
    checkpoint: str | None = None,
    say: Callable[[str], None] = log.warning,
) -> str:
    """Return the model that a run has trained; the recipe's own model if there is no run yet.

    A phase without a result is represented by its newest checkpoint, and `say` is called. A model
    folder is returned as it is.

    Args:
        recipe: of the run.
        run: the run folder, which may not exist.
        checkpoint: `last`; `best`, by the accuracy in validation; or a step of the last phase that
            has saved it.
        say: called with a message if the run is not finished.

    Raises:
        ConfigError: the run has trained nothing yet, there is no such checkpoint, or there is
            neither a run nor a model in the recipe.
        RunFolderError: a checkpoint is damaged.
    """
    if is_model(run):
        if checkpoint is not None:
            raise _no_run(str(run))
        return str(run)
    saved = [*saved_models(run)]
    if not saved:
        # Without it, the folder holds only evaluations of a model before training.
        started = (run / RECIPE_FILE).is_file()
        if checkpoint is None and not (started and recipe.phases):
            return _untrained(recipe, run)
        raise _nothing_trained(run)
    if checkpoint is not None:
        return str(_chosen(saved, run, checkpoint).folder)
    latest = saved[0]
    if not latest.is_final:
        say(
            f"the {latest.phase} of {run} is not finished: this is its newest checkpoint, step "
            f"{latest.step} of {latest.total} ({latest.folder})."
        )
    elif latest.phase not in recipe.phases[-1:] and recipe.phases:
        say(
            f"{run} is not finished: its {recipe.phases[-1]} has saved nothing yet, and this is "
            f"the result of {latest.phase} ({latest.folder})."
        )
    return str(latest.folder)


def _untrained(recipe: Recipe, run: Path) -> str:
    """Return the model of a recipe that trains nothing, or has not been run."""
    if recipe.model.path is not None:
        return recipe.model.path
    if (run / "base").is_dir():
        return str(run / "base")
    raise ConfigError(
        "there is nothing to measure: the recipe makes a new model, and has not been run yet",
        where=str(run),
        fix="Name a model with --model, or train one with `grouper run`.",
    )


def _nothing_trained(run: Path) -> ConfigError:
    """Return an error for a run that has no complete model."""
    incomplete = [phase for phase in _PHASES if (run / phase / "final").is_dir()]
    if incomplete:
        problem = (
            f"its {incomplete[0]}/final is incomplete (no {STATE_FILE}), and there is no checkpoint"
        )
        fix = "Restore the folder from a backup, or name it itself if its weights are all there."
    else:
        problem = "this run has trained nothing yet: it has neither a result nor a checkpoint"
        fix = "Continue it with --resume; its model before training can be named itself."
    return ConfigError(problem, where=str(run), fix=fix)


def _no_run(path: str) -> ConfigError:
    """Return an error for `--checkpoint` of a folder that is no run."""
    return ConfigError(
        f"{path} is a model itself, and has no checkpoints",
        where="--checkpoint",
        fix="Give the folder of the run, or leave the option out.",
    )


def saved_models(run: Path) -> Iterator[Saved]:
    """Yield every complete model: later phases and steps first, results before checkpoints."""
    for phase in _PHASES:
        folders = [run / phase / "final", *(run / phase).glob("checkpoint-*")]
        models = [_read(phase, folder) for folder in folders if (folder / STATE_FILE).is_file()]
        models.sort(key=lambda model: (model.step, model.is_final), reverse=True)
        yield from models


def _read(phase: str, folder: Path) -> Saved:
    """Read the state of a complete model.

    Raises:
        RunFolderError: it is damaged.
    """
    state = read_json(folder / STATE_FILE, _DAMAGED)
    step = state.get("step")
    total = state.get("total")
    if type(step) is not int or type(total) is not int:  # not isinstance: a bool is an int, too
        raise RunFolderError(
            f"{_DAMAGED} (step and total should be whole numbers)",
            where=str(folder / STATE_FILE),
            fix="Restore the file, or delete this folder.",
        )
    return Saved(phase=phase, step=step, total=total, folder=folder)


def _chosen(saved: list[Saved], run: Path, checkpoint: str) -> Saved:
    """Return the model of a run that `--checkpoint` names."""
    if checkpoint == "last":
        return saved[0]
    if checkpoint == "best":
        phase = saved[0].phase
        best = _best([model for model in saved if model.phase == phase])
        if best is not None:
            return best
        problem = f"no checkpoint of {phase} is marked as the best one: nothing was validated"
    else:
        for model in saved:
            if checkpoint == str(model.step):
                return model
        problem = f"there is no checkpoint {checkpoint!r}"
    steps = dict.fromkeys(f"{model.step} ({model.phase})" for model in saved)
    raise ConfigError(
        problem,
        where=f"--checkpoint: {run}",
        fix=f"This run has last and the steps {', '.join(steps)}.",
    )


def _best(models: list[Saved]) -> Saved | None:
    """Return the marked model of the highest accuracy, the earliest of equals; None if none is."""
    best = None
    best_rank: tuple[float, int] | None = None
    for model in models:
        accuracy = _accuracy(model)
        if accuracy is None:
            continue
        rank = (accuracy, -model.step)
        if best_rank is None or rank > best_rank:
            best = model
            best_rank = rank
    return best


def _accuracy(saved: Saved) -> float | None:
    """Return the validation accuracy of a model marked as the best of its phase; else None."""
    mark = saved.folder / BEST_FILE
    if not mark.is_file():
        return None
    accuracy: Any = read_json(mark, _UNMARKED).get("validation_accuracy")
    if not isinstance(accuracy, int | float):
        raise RunFolderError(
            f"{_UNMARKED} (it has no accuracy)",
            where=str(mark),
            fix="Restore the file, or delete it.",
        )
    return accuracy
