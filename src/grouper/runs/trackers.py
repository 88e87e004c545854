"""Trackers: services and functions that receive the record of a run in addition to its folder.

Each tracker works in a thread of its own, so that the run neither waits for it nor fails with it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Protocol, TypeVar

import numpy as np

from grouper.config.credentials import expanded
from grouper.config.schema import TRACKERS, Recipe, TrackerConfig, TrackingConfig
from grouper.errors import ConfigError, raise_all, require_extra
from grouper.evaluation.result import EvaluationResult
from grouper.rewards.user_code import describe_exception, load_user_object
from grouper.runs.records import flat
from grouper.types import StepReport

log = logging.getLogger(__name__)

# Seconds that the end of a run waits for all its trackers together.
CLOSING_SECONDS = 10.0
# Seconds that a server may take to answer at the start; the run does not wait for it.
INIT_SECONDS = 30.0
# Seconds between flushes of TensorBoard's files.
FLUSH_SECONDS = 10
# Records that may wait for a tracker; later ones are not delivered to it.
CAPACITY = 1000
# Arguments of `trackio.init` that send data to another machine.
ELSEWHERE = ("space_id", "server_url", "bucket_id", "dataset_id", "webhook_url")
# (tracker, setting) -> environment variable of the tracker, used if the recipe has no value.
ENVIRONMENT = {("wandb", "project"): "WANDB_PROJECT", ("wandb", "run_name"): "WANDB_NAME"}

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Description of a run for a tracker."""

    name: str
    """Name under which the tracker lists it."""
    project: str
    settings: TrackerConfig
    """Settings of the tracker in the recipe."""
    path: Path
    """The run folder; a tracker writes its files below `<path>/trackers/`."""
    mark: str
    """8 hex digits that are the same when the run is resumed, and of no other run."""
    recipe: Mapping[str, Any]
    """The resolved recipe, as it would be written in YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A step or an evaluation, as it is sent to trackers."""

    made: StepReport | EvaluationResult
    """The step or evaluation itself, for a user's tracker; the others take the other fields."""
    values: Mapping[str, float]
    histograms: Mapping[str, list[float]] = field(default_factory=dict)
    """Values of rewards, one per rollout."""
    completions: Sequence[Mapping[str, str]] = ()
    """A few rollouts as rows of a table."""

    @classmethod
    def of_step(
        cls,
        report: StepReport,
        rewards: Mapping[str, list[float]],
        weights: Mapping[str, float],
        completions: Sequence[Mapping[str, str]] = (),
    ) -> Record:
        """Make the record of a step: the mean of each metric, rewards also times their weights.

        Args:
            report: of the step.
            rewards: `total` and each component: one value per rollout that took part.
            weights: of the components.
            completions: as the field.
        """
        means = {name: tally.mean for name, tally in report.tallies.items() if tally.count}
        for name, weight in weights.items():
            if f"reward/{name}" in means:
                means[f"reward_weighted/{name}"] = weight * means[f"reward/{name}"]
        histograms = {f"rewards/{name}": values for name, values in rewards.items()}
        return cls(made=report, values=means, histograms=histograms, completions=completions)

    @classmethod
    def of_evaluation(cls, result: EvaluationResult) -> Record:
        """Make the record of an evaluation: its numbers with the split before their names.

        For example `test/accuracy`, and the ends of its interval, `test/low` and `test/high`.
        """
        numbers = {}
        for name, value in flat(result.numbers).items():
            is_by_group = name.startswith(("by_", "rewards_by_"))
            if value is not None and not is_by_group:
                numbers[f"{result.split}/{name}"] = float(value)
        return cls(made=result, values=numbers)


class Sink(Protocol):
    """Receiver of records. All calls come from one thread, in the order of the run."""

    def send(self, record: Record) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """TensorBoard: a folder of events per phase, which it draws in one chart.

    They are in `<run>/trackers/tensorboard/<phase>/`; `tensorboard --logdir outputs` shows them.
    Needs no network. TensorFlow is not imported, even if it is installed.

    Args:
        run: the run to record.
        params: further keywords of PyTorch's `SummaryWriter`.
    """

    def __init__(self, run: TrackedRun, **params: Any) -> None:
        # TensorBoard uses TensorFlow's file system if it is installed, unless this module exists.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
        from torch.utils.tensorboard import SummaryWriter

        self._open = SummaryWriter
        self._run = run
        self._params = {"flush_secs": FLUSH_SECONDS, **params}
        self._writers: dict[str, Any] = {}

    def send(self, record: Record) -> None:
        step = record.made.step
        writer = self._writer(record.made.phase, step)
        for name, value in record.values.items():
            writer.add_scalar(name, value, step)
        for name, values in record.histograms.items():
            writer.add_histogram(name, np.asarray(values), step)
        if record.completions:
            writer.add_text("completions", _markdown(record.completions), step)

    def _writer(self, phase: str, step: int) -> Any:
        """Return the writer of a phase; the first call opens it at `step`."""
        if phase not in self._writers:
            folder = self._run.path / "trackers" / "tensorboard" / phase
            # `purge_step` discards the events of an earlier process from this step on.
            writer = self._open(str(folder), purge_step=step, **self._params)
            self._writers[phase] = writer
            # TensorBoard reads Markdown, in which text indented by four is code.
            recipe = json.dumps(dict(self._run.recipe), indent=2).replace("\n", "\n    ")
            writer.add_text("recipe", f"    {recipe}")
        return self._writers[phase]

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class LoggedRun:
    """A tracker that takes mappings: metrics as `<phase>/<metric>`, rewards as histograms.

    Args:
        run: of the tracker.
        histogram: makes a histogram of that tracker from a list of numbers.
        table: makes a table of that tracker from `columns` and `data`.
    """

    def __init__(
        self, run: Any, histogram: Callable[[list[float]], Any], table: Callable[..., Any]
    ) -> None:
        self._run = run
        self._histogram = histogram
        self._table = table

    def send(self, record: Record) -> None:
        values: dict[str, Any] = {"step": record.made.step, **record.values}
        for name, numbers in record.histograms.items():
            values[name] = self._histogram(numbers)
        rows = record.completions
        if rows:
            data = [list(row.values()) for row in rows]
            values["completions"] = self._table(columns=list(rows[0]), data=data)
        self._run.log({f"{record.made.phase}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self._run.finish()


class WandbSink(LoggedRun):
    """Weights & Biases, offline by default; a run that the caller has opened is used.

    Offline runs are in `<run>/trackers/wandb` and are sent later with `wandb sync`. Unless the
    recipe says `online`, `WANDB_MODE` of the environment decides.

    Args:
        run: becomes the run of that name, project and entity.
        params: further keywords of `wandb.init`.
    """

    def __init__(self, run: TrackedRun, **params: Any) -> None:
        import wandb

        self._is_ours = wandb.run is None
        wandb_run = wandb.run
        if wandb_run is None:
            wandb_run = _open_wandb(wandb, run, params)
        super().__init__(wandb_run, wandb.Histogram, wandb.Table)
        if not self._is_ours:
            wandb_run.config.update({"grouper": dict(run.recipe)}, allow_val_change=True)
        for phase in ("base", "sft", "grpo"):
            wandb_run.define_metric(f"{phase}/step", hidden=True)
            wandb_run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def close(self) -> None:
        """End the run, but not one that the caller opened."""
        if self._is_ours:
            super().close()


def _open_wandb(wandb: Any, run: TrackedRun, params: dict[str, Any]) -> Any:
    """Open a run of Weights & Biases; `params` take precedence over the settings of the run."""
    folder = run.path / "trackers"
    folder.mkdir(parents=True, exist_ok=True)  # otherwise W&B writes to a temporary folder
    mode = "online"
    if run.settings.mode != "online":
        mode = os.environ.get("WANDB_MODE", "offline")
    settings = {
        "silent": True,
        "console": "off",
        # At its end a process waits for the cleanup of W&B, which waits for these.
        "init_timeout": INIT_SECONDS,
        "finish_timeout": CLOSING_SECONDS,
    }
    # Versions of W&B differ in their settings.
    supported = wandb.Settings.model_fields
    settings = {name: value for name, value in settings.items() if name in supported}
    if mode == "offline":
        log.warning("Weights & Biases is offline; `wandb sync` sends it: %s", folder / "wandb")
    arguments = {
        "project": run.project,
        "entity": run.settings.entity,
        "name": run.name,
        "tags": run.settings.tags,
        "config": dict(run.recipe),
        "dir": str(folder),
        "mode": mode,
        "id": run.mark,
        "resume": "allow" if mode == "online" else None,
        "settings": wandb.Settings(**settings),
        **params,
    }
    return wandb.init(**arguments)


class TrackioSink(LoggedRun):
    """Trackio: a local database, viewed with `trackio show`; a Space only on request.

    It stays because it shows tables and histograms as wandb does, without an account or a network,
    and because recipes of TRL name it.

    Everything stays in Trackio's folder on this machine (`TRACKIO_DIR`), unless `params` names
    another place and the tracker's mode is online, or the environment does (`TRACKIO_SPACE_ID`,
    ...).

    Args:
        run: becomes the run of that name and project; a resumed run continues the same one.
        params: further keywords of `trackio.init`.

    Raises:
        ValueError: `params` names another machine, and the tracker's mode is not online.
    """

    def __init__(self, run: TrackedRun, **params: Any) -> None:
        import trackio

        for name in ELSEWHERE:
            if params.get(name) and run.settings.mode != "online":
                raise ValueError(f"{name} sends to another machine: add mode: online")
        # Trackio prints messages, but the standard output of a run is for its result.
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "trackio":
                vars(module).setdefault("print", _ignore)
        arguments = {
            "project": run.project,
            "name": f"{run.name}-{run.mark}",
            "config": dict(run.recipe),
            "resume": "allow",
            "embed": False,
            "auto_log_gpu": False,
            "auto_log_cpu": False,
            **params,
        }
        super().__init__(trackio.init(**arguments), trackio.Histogram, trackio.Table)
        log.info("Trackio shows this run with `trackio show --project %s`.", run.project)


class UsersSink:
    """Calls a user's function or class with each `StepReport` and `EvaluationResult`.

    A function is called with the record and `params`. A class is instantiated once with the
    `TrackedRun` and `params`; of its methods `step`, `evaluation` and `close`, those that exist are
    called.

    Args:
        run: for the class.
        function: the function or class.
        params: of the recipe.
    """

    def __init__(
        self, run: TrackedRun, *, function: Callable[..., Any], params: dict[str, Any]
    ) -> None:
        self._tracker: Any = None
        self._fallback: Callable[..., Any]
        """Called for methods that the tracker does not have."""
        is_class = inspect.isclass(function)
        if is_class:
            self._tracker = function(run, **params)
            self._fallback = _ignore
        else:
            self._fallback = partial(function, **params)

    def send(self, record: Record) -> None:
        # Read-only views, since the run itself uses the record, too.
        if isinstance(record.made, StepReport):
            tallies = MappingProxyType({**record.made.tallies})
            handle_step = getattr(self._tracker, "step", self._fallback)
            handle_step(replace(record.made, tallies=tallies))
        else:
            card = MappingProxyType({**record.made.card})
            handle_evaluation = getattr(self._tracker, "evaluation", self._fallback)
            handle_evaluation(replace(record.made, card=card))

    def close(self) -> None:
        handle_close = getattr(self._tracker, "close", _ignore)
        handle_close()


def _markdown(rows: Sequence[Mapping[str, str]]) -> str:
    r"""Write a table in which no text is markup.

    >>> print(_markdown([{"answer": "|x|\n*y*"}]))
    | answer |
    | --- |
    | `¦x¦ *y*` |
    """
    header = list(rows[0])
    lines = [header, ["---"] * len(header)]
    lines += [[_markdown_cell(text) for text in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_cell(text: str) -> str:
    """Write a text as code on one line, without characters that would end the cell or the code."""
    line = " ".join(text.split())
    line = line.replace("|", "¦").replace("`", "'")
    return f"`{line}`"


def _ignore(*_: object, **__: object) -> None:
    """Accept all arguments and do nothing."""


# Name -> class of the built-in trackers.
SINKS: dict[str, Callable[..., Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}


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
        self._waiting: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        """Records in order; None: the tracker may end."""
        self._is_full = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queue a record; returns at once."""
        if self._waiting.qsize() < self._capacity:
            self._waiting.put(record)
            return
        if not self._is_full:
            self._is_full = True
            log.warning(
                "The tracker %s is too slow: %d records wait for it, and what comes now is not "
                "delivered. The run folder has everything.",
                self.name,
                self._capacity,
            )

    def ask_to_end(self) -> None:
        """Let the thread end once all waiting records are delivered; returns at once."""
        self._waiting.put(None)

    def wait(self, seconds: float) -> None:
        """Wait for the end, but no longer than `seconds`; log the number of records not sent."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._has_failed = True  # a later exception needs no second report
            log.warning(
                "The tracker %s has not finished in time and is left behind; %d records wait for "
                "it. The run folder has everything.",
                self.name,
                max(0, self._waiting.qsize() - 1),  # the last one is the request to end
            )

    def _work(self) -> None:
        """Deliver records until the end; without a sink, which may fail to open, drop them."""
        sink = self._safely(self._build)
        while (record := self._waiting.get()) is not None:
            if sink is not None:
                self._safely(partial(sink.send, record))
        if sink is not None:
            self._safely(sink.close)

    def _safely(self, action: Callable[[], Result]) -> Result | None:
        """Run an action of the tracker; its first exception is logged, later ones are dropped."""
        try:
            return action()
        except BaseException as error:  # noqa: BLE001 - a tracker may raise anything
            if not self._has_failed:
                self._has_failed = True
                log.warning(
                    "The tracker %s failed, and the run continues without it (reported once): %s",
                    self.name,
                    describe_exception(error),
                )
            return None


def close_all(trackers: Sequence[Background], seconds: float = CLOSING_SECONDS) -> None:
    """End all trackers at the same time, within `seconds` in all."""
    deadline = time.monotonic() + seconds
    for tracker in trackers:
        tracker.ask_to_end()
    for tracker in trackers:
        tracker.wait(deadline - time.monotonic())


# --- the trackers of a recipe ---------------------------------------------------------------------


def check_trackers(tracking: TrackingConfig) -> None:
    """Check that every tracker is available, without opening any. Only training needs them.

    Raises:
        ConfigError: every problem at once: no tracker of that name, its package is not installed,
            a variable that its `params` refer to is not set, or the user's own cannot be loaded.
    """
    problems: list[ConfigError] = []
    for tracker in tracking.trackers:
        try:
            _maker(tracker)
            if tracker.name in TRACKERS:
                require_extra(
                    tracker.name, tracker.name, where=_WHERE, instead="none (--tracker none)"
                )
        except ConfigError as error:
            problems.append(error)
    raise_all(problems)


def find_trackers(recipe: Recipe, folder: Path, *, started: str) -> dict[str, Callable[[], Sink]]:
    """Return a constructor of each tracker of a recipe, by name; nothing is opened or imported yet.

    Args:
        recipe: names the trackers.
        folder: of the run.
        started: time of the run's start, which distinguishes it from another one in the same place.

    Raises:
        ConfigError: a tracker of the user does not exist.
    """
    mark = hashlib.sha256(f"{folder.resolve()} {started}".encode()).hexdigest()[:8]
    recipe_json = MappingProxyType(recipe.model_dump(mode="json"))
    builders: dict[str, Callable[[], Sink]] = {}
    for tracker in recipe.tracking.trackers:
        run = TrackedRun(
            name=_setting(tracker, "run_name") or recipe.name,
            project=_setting(tracker, "project") or "grouper",
            settings=tracker,
            path=folder,
            mark=mark,
            recipe=recipe_json,
        )
        builders[tracker.name] = partial(_maker(tracker), run)
    return builders


_WHERE = "tracking.trackers"


def _maker(tracker: TrackerConfig) -> Callable[[TrackedRun], Sink]:
    """Return the constructor of a tracker with its parameters, secrets included."""
    params = dict(expanded(tracker.params, where=_WHERE, error=ConfigError))
    if tracker.name in SINKS:
        return partial(SINKS[tracker.name], **params)
    function = load_user_object(
        tracker.name, kind="tracker", where=_WHERE, error=ConfigError, known=TRACKERS
    )
    return partial(UsersSink, function=function, params=params)


def _setting(tracker: TrackerConfig, name: str) -> str | None:
    """Return a setting of the recipe, or else of the environment."""
    variable = ENVIRONMENT.get((tracker.name, name), "")
    return getattr(tracker, name) or os.environ.get(variable)
