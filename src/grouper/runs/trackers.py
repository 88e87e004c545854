"""Trackers at work: each in a thread of its own, so that the run neither waits nor fails."""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from grouper.config.credentials import expanded
from grouper.config.schema import TRACKERS, Recipe, TrackerConfig, TrackingConfig
from grouper.errors import ConfigError, did_you_mean, raise_all, require_extra
from grouper.evaluation.result import EvaluationResult
from grouper.rewards.calling import load_user_object
from grouper.runs.sinks import (
    CLOSING_SECONDS,
    Sink,
    Step,
    TensorBoardSink,
    TrackedRun,
    TrackioSink,
    UsersSink,
    WandbSink,
)

log = logging.getLogger(__name__)

# Records that may wait for a tracker; what comes on top is not delivered.
CAPACITY = 1000

# Built-in trackers.
SINKS: dict[str, Callable[..., Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}
# Where a tracker's users say elsewhere what a recipe may say.
ENVIRONMENT = {("wandb", "project"): "WANDB_PROJECT", ("wandb", "run_name"): "WANDB_NAME"}

Result = TypeVar("Result")


class Background:
    """Delivers records to one sink, in order.

    The thread is a daemon: an executor would wait for one that hangs when the process ends.

    Args:
        name: of the tracker, in messages.
        build: makes the sink; called in the thread, since it may take long or fail.
        capacity: records that may wait.
    """

    def __init__(self, name: str, build: Callable[[], Sink], capacity: int = CAPACITY) -> None:
        self.name = name
        self._build = build
        self._capacity = capacity
        self._waiting: queue.SimpleQueue[Step | EvaluationResult | None] = queue.SimpleQueue()
        self._lost = 0
        self._failures = 0
        self._left_behind = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, record: Step | EvaluationResult) -> None:
        """Hand over a record; returns at once."""
        if self._waiting.qsize() < self._capacity:
            self._waiting.put(record)
            return
        self._lost += 1
        if self._lost == 1:
            log.warning(
                "The tracker %s is too slow: %d records wait for it, and what comes now is not "
                "delivered. The run folder has everything.",
                self.name,
                self._capacity,
            )

    def ask_to_end(self) -> None:
        """Let the thread end once everything that waits is delivered; returns at once."""
        self._waiting.put(None)

    def wait(self, seconds: float) -> None:
        """Wait for the end, but no longer than this; reports what was not delivered."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._left_behind = True
            log.warning(
                "The tracker %s has not finished in time and is left behind; %d records wait for "
                "it. The run folder has everything.",
                self.name,
                self._waiting.qsize() - 1,  # the last one is the request to end
            )
        elif self._failures > 1:
            log.warning("The tracker %s failed %d times in all.", self.name, self._failures)
        if self._lost:
            log.warning("%d records were not delivered to the tracker %s.", self._lost, self.name)

    def _work(self) -> None:
        sink = self._safely(self._build)
        while (record := self._waiting.get()) is not None:
            if sink is None:
                continue
            if isinstance(record, Step):
                self._safely(partial(sink.step, record))
            else:
                self._safely(partial(sink.evaluation, record))
        if sink is not None:
            self._safely(sink.close)

    def _safely(self, action: Callable[[], Result]) -> Result | None:
        try:
            return action()
        except BaseException as error:  # noqa: BLE001 - whatever a tracker raises ends here
            self._failures += 1
            if self._failures == 1 and not self._left_behind:
                log.warning(
                    "The tracker %s failed, and the run goes on anyway (reported once): %s: %s",
                    self.name,
                    type(error).__name__,
                    error,
                )
            return None


def close_all(trackers: Sequence[Background], seconds: float = CLOSING_SECONDS) -> None:
    """End all of them at the same time, within this many seconds in all."""
    deadline = time.monotonic() + seconds
    for tracker in trackers:
        tracker.ask_to_end()
    for tracker in trackers:
        tracker.wait(deadline - time.monotonic())


# --- from the trackers that a recipe names to what makes them ------------------------------------


def check_trackers(tracking: TrackingConfig) -> None:
    """Make sure that every tracker is there, without opening any. Only training needs them.

    Raises:
        ConfigError: every problem at once: no tracker of that name, its package is not installed,
            a variable that its `params` refer to is not set, or the user's own cannot be loaded.
    """
    problems: list[ConfigError] = []
    for tracker in tracking.trackers:
        try:
            _params(tracker)
            _function(tracker)
            if tracker.name in TRACKERS:
                without = "none (--no-trackers)"
                require_extra(tracker.name, tracker.name, where=_WHERE, instead=without)
        except ConfigError as error:
            problems.append(error)
    raise_all(problems)


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
    as_json = MappingProxyType(recipe.model_dump(mode="json"))

    def builder(tracker: TrackerConfig) -> Callable[[], Sink]:
        run = TrackedRun(
            name=_chosen(tracker, "run_name") or recipe.name,
            project=_chosen(tracker, "project") or "grouper",
            entity=tracker.entity,
            tags=tracker.tags,
            online=tracker.mode == "online",
            path=folder,
            mark=mark,
            recipe=as_json,
        )
        function, params = _function(tracker), _params(tracker)
        if function is None:
            return partial(SINKS[tracker.name], run, **params)
        return partial(UsersSink, run, function=function, params=params)

    return {tracker.name: builder(tracker) for tracker in recipe.tracking.trackers}


_WHERE = "tracking.trackers"


def _params(tracker: TrackerConfig) -> dict[str, Any]:
    """What a tracker is made with, secrets included."""
    return dict(expanded(tracker.params, where=_WHERE, error=ConfigError))


def _function(tracker: TrackerConfig) -> Callable[..., Any] | None:
    """The user's own function or class; None for a built-in tracker."""
    if ":" in tracker.name:
        found: Callable[..., Any] = load_user_object(
            tracker.name, kind="tracker", where=_WHERE, error=ConfigError
        )
        return found
    if tracker.name not in TRACKERS:
        raise ConfigError(
            f"there is no tracker {tracker.name!r}",
            where=_WHERE,
            fix=f"{did_you_mean(tracker.name, TRACKERS)} Your own is named "
            "`path/to/file.py:function`.",
        )
    return None


def _chosen(tracker: TrackerConfig, key: str) -> str | None:
    """What the recipe says, else the environment."""
    variable = ENVIRONMENT.get((tracker.name, key), "")
    return getattr(tracker, key) or os.environ.get(variable)
