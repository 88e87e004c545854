"""From the trackers that a recipe names to what makes them."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from grouper.config.credentials import expanded
from grouper.config.schema import TRACKERS, Recipe, TrackerConfig, TrackingConfig
from grouper.errors import ConfigError, did_you_mean, raise_all, require_extra
from grouper.rewards.calling import load_user_object
from grouper.runs.sinks.base import Sink, TrackedRun, frozen
from grouper.runs.sinks.users import UsersSink

SINKS = {
    "tensorboard": ("grouper.runs.sinks.tensorboard", "TensorBoardSink"),
    "wandb": ("grouper.runs.sinks.wandb", "WandbSink"),
    "trackio": ("grouper.runs.sinks.trackio", "TrackioSink"),
}
"""Built-in trackers: name -> module and class, imported in the tracker's own thread."""


def check_trackers(tracking: TrackingConfig) -> None:
    """Make sure that every tracker is there, without opening any. Only training needs them.

    Raises:
        ConfigError: every problem at once: no tracker of that name, its package is not installed,
            or the user's own cannot be loaded.
    """
    problems: list[ConfigError] = []
    for tracker in tracking.trackers:
        try:
            _check_tracker(tracker)
        except ConfigError as error:
            problems.append(error)
    raise_all(problems)


def tracker_params(tracker: TrackerConfig) -> dict[str, Any]:
    """What a tracker is made with: its `params`, secrets included.

    Raises:
        ConfigError: a variable that they refer to is not set.
    """
    return dict(expanded(tracker.params, where="tracking.trackers", error=ConfigError))


def find_trackers(recipe: Recipe, folder: Path, *, started: str) -> dict[str, Callable[[], Sink]]:
    """What makes each tracker of a recipe, by its name; nothing is opened or imported yet.

    Args:
        recipe: names them.
        folder: of the run.
        started: when the run began, which tells it from another one in the same place.

    Raises:
        ConfigError: a tracker of the user's own that is not there.
    """
    mark = hashlib.sha256(f"{folder.resolve()} {started}".encode()).hexdigest()[:8]
    as_json = recipe.model_dump(mode="json")
    return {
        tracker.name: _builder(tracker, _run(tracker, recipe.name, folder, mark, as_json))
        for tracker in recipe.tracking.trackers
    }


ENVIRONMENT = {("wandb", "project"): "WANDB_PROJECT", ("wandb", "run_name"): "WANDB_NAME"}
"""Where a tracker's users say elsewhere what a recipe may say."""


def _run(
    tracker: TrackerConfig, name: str, folder: Path, mark: str, as_json: dict[str, Any]
) -> TrackedRun:
    return TrackedRun(
        name=_said(tracker, "run_name") or name,
        project=_said(tracker, "project") or "grouper",
        entity=tracker.entity,
        tags=tracker.tags,
        online=tracker.mode == "online",
        path=folder,
        mark=mark,
        recipe=frozen(as_json),
    )


def _said(tracker: TrackerConfig, key: str) -> str | None:
    """What the recipe says, else the environment."""
    variable = ENVIRONMENT.get((tracker.name, key), "")
    return getattr(tracker, key) or os.environ.get(variable)


def _builder(tracker: TrackerConfig, run: TrackedRun) -> Callable[[], Sink]:
    if tracker.name in SINKS:
        return partial(_build, *SINKS[tracker.name], run, tracker_params(tracker))
    function = load_user_object(
        tracker.name, kind="tracker", where="tracking.trackers", error=ConfigError
    )
    return partial(UsersSink, run, function=function, params=tracker_params(tracker))


def _build(module: str, name: str, run: TrackedRun, params: dict[str, Any]) -> Sink:
    sink: Sink = getattr(importlib.import_module(module), name)(run, **params)
    return sink


def _check_tracker(tracker: TrackerConfig) -> None:
    where = "tracking.trackers"
    tracker_params(tracker)
    if ":" in tracker.name:
        load_user_object(tracker.name, kind="tracker", where=where, error=ConfigError)
    elif tracker.name in TRACKERS:
        require_extra(tracker.name, tracker.name, where=where, instead="none (--no-trackers)")
    else:
        raise ConfigError(
            f"there is no tracker {tracker.name!r}",
            where=where,
            fix=f"{did_you_mean(tracker.name, TRACKERS)} Your own is named "
            "`path/to/file.py:function`.",
        )
