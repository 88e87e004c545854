"""Trackers: other places that receive the record of a run, which is the run folder in any case.

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
from grouper.rewards.calling import in_words, load_user_object
from grouper.runs.records import flat
from grouper.types import StepReport

log = logging.getLogger(__name__)

# Seconds that the end of a run waits for all its trackers together.
CLOSING_SECONDS = 10.0
# Seconds that a server may take to answer at the start; the run goes on meanwhile.
INIT_SECONDS = 30.0
# Seconds between flushes of TensorBoard's files.
FLUSH_SECONDS = 10
# Records that may wait for a tracker; later ones are not delivered to it.
CAPACITY = 1000
# Arguments of `trackio.init` that send something to another machine.
ELSEWHERE = ("space_id", "server_url", "bucket_id", "dataset_id", "webhook_url")
# Environment variables of a tracker's own, for settings that a recipe leaves out.
ENVIRONMENT = {("wandb", "project"): "WANDB_PROJECT", ("wandb", "run_name"): "WANDB_NAME"}

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run, as a tracker sees it."""

    name: str
    """How the tracker lists it."""
    project: str
    settings: TrackerConfig
    """What the recipe says of the tracker."""
    path: Path
    """The run folder; a tracker keeps what it writes below `<path>/trackers/`."""
    mark: str
    """8 hex digits that are the same when the run is resumed, and of no other run."""
    recipe: Mapping[str, Any]
    """The resolved recipe, as it would be written in YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A step or an evaluation; trackers of numbers take what follows its first field."""

    made: StepReport | EvaluationResult
    values: Mapping[str, float]
    histograms: Mapping[str, list[float]] = field(default_factory=dict)
    """Of rewards, one value per rollout."""
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
        """The mean of each metric, rewards also times their weights.

        Args:
            report: of the step.
            rewards: `total` and each component: one value per rollout that took part.
            weights: of the components.
            completions: as the field.
        """
        means = {name: tally.mean for name, tally in report.tallies.items() if tally.count}
        means |= {
            f"reward_weighted/{name}": weight * means[f"reward/{name}"]
            for name, weight in weights.items()
            if f"reward/{name}" in means
        }
        histograms = {f"rewards/{name}": values for name, values in rewards.items()}
        return cls(made=report, values=means, histograms=histograms, completions=completions)

    @classmethod
    def of_evaluation(cls, result: EvaluationResult) -> Record:
        """Each number after its split: `test/accuracy`, its interval `test/low` and `test/high`."""
        numbers = {
            f"{result.split}/{name}": float(value)
            for name, value in flat(result.numbers).items()
            if value is not None and not name.startswith(("by_", "rewards_by_"))
        }
        return cls(made=result, values=numbers)


class Sink(Protocol):
    """Where records go. All calls come from one thread, in the order of the run."""

    def send(self, record: Record) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """One folder of events per phase: `tensorboard --logdir outputs` draws them in one chart.

    They are in `<run>/trackers/tensorboard/<phase>/`. Needs no network. TensorFlow is not imported,
    even where it is installed.

    Args:
        run: whose events they are.
        params: further keywords of PyTorch's `SummaryWriter`.
    """

    def __init__(self, run: TrackedRun, **params: Any) -> None:
        # TensorBoard takes TensorFlow for its file system where it finds one, unless this exists.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
        from torch.utils.tensorboard import SummaryWriter

        self._open = SummaryWriter
        self._run = run
        self._params = {"flush_secs": FLUSH_SECONDS, **params}
        self._writers: dict[str, Any] = {}

    def send(self, record: Record) -> None:
        phase, step = record.made.phase, record.made.step
        if phase not in self._writers:
            # Discards what an earlier process wrote about this step and later ones.
            folder = self._run.path / "trackers" / "tensorboard" / phase
            self._writers[phase] = self._open(str(folder), purge_step=step, **self._params)
            # TensorBoard reads Markdown, in which text indented by four is code.
            recipe = json.dumps(dict(self._run.recipe), indent=2).replace("\n", "\n    ")
            self._writers[phase].add_text("recipe", f"    {recipe}")
        for name, value in record.values.items():
            self._writers[phase].add_scalar(name, value, step)
        for name, values in record.histograms.items():
            self._writers[phase].add_histogram(name, np.asarray(values), step)
        if record.completions:
            self._writers[phase].add_text("completions", _markdown(record.completions), step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class LoggedRun:
    """A tracker that takes mappings: metrics as `<phase>/<metric>`, rewards as histograms.

    Args:
        run: of the tracker.
        histogram: makes a value of that tracker from a list of numbers.
        table: makes one from `columns` and `data`.
    """

    def __init__(
        self, run: Any, histogram: Callable[[list[float]], Any], table: Callable[..., Any]
    ) -> None:
        self._run = run
        self._histogram = histogram
        self._table = table

    def send(self, record: Record) -> None:
        made = {name: self._histogram(values) for name, values in record.histograms.items()}
        values = {"step": record.made.step, **record.values, **made}
        if rows := record.completions:
            data = [[*row.values()] for row in rows]
            values["completions"] = self._table(columns=[*rows[0]], data=data)
        self._run.log({f"{record.made.phase}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self._run.finish()


class WandbSink(LoggedRun):
    """Weights & Biases: offline by default; a run that the caller has opened is used.

    Offline runs are in `<run>/trackers/wandb` and are sent later with `wandb sync`. Unless the
    recipe says `online`, `WANDB_MODE` of the environment decides.

    Args:
        run: becomes the run of that name, project and entity.
        params: further keywords of `wandb.init`.
    """

    def __init__(self, run: TrackedRun, **params: Any) -> None:
        import wandb

        self._is_ours = wandb.run is None
        opened = _open_wandb(wandb, run, params) if wandb.run is None else wandb.run
        super().__init__(opened, wandb.Histogram, wandb.Table)
        if not self._is_ours:
            opened.config.update({"grouper": dict(run.recipe)}, allow_val_change=True)
        for phase in ("base", "sft", "grpo"):
            opened.define_metric(f"{phase}/step", hidden=True)
            opened.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def close(self) -> None:
        """End the run, but not one that the caller opened."""
        if self._is_ours:
            super().close()


def _open_wandb(wandb: Any, run: TrackedRun, params: dict[str, Any]) -> Any:
    folder = run.path / "trackers"
    folder.mkdir(parents=True, exist_ok=True)  # else it would write to a temporary one
    online = run.settings.mode == "online"
    mode = "online" if online else os.environ.get("WANDB_MODE", "offline")
    # A process that ends waits for W&B's own clean-up, which waits for these.
    limits = {"init_timeout": INIT_SECONDS, "finish_timeout": CLOSING_SECONDS}
    wanted = {"silent": True, "console": "off", **limits}
    known = wandb.Settings.model_fields
    settings = {name: value for name, value in wanted.items() if name in known}
    if mode == "offline":
        log.warning("Weights & Biases is offline; `wandb sync` sends it: %s", folder / "wandb")
    return wandb.init(
        **{
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
    )


class TrackioSink(LoggedRun):
    """Trackio: a local database, viewed with `trackio show`; a Space only on request.

    Everything stays in Trackio's own folder on this machine (`TRACKIO_DIR`), unless `params` names
    another place and the tracker's mode is online, or the environment does (`TRACKIO_SPACE_ID`,
    ...).

    Args:
        run: becomes the run of that name and project; a resumed run goes on in the same one.
        params: further keywords of `trackio.init`.

    Raises:
        ValueError: a place elsewhere while offline.
    """

    def __init__(self, run: TrackedRun, **params: Any) -> None:
        import trackio

        for name in ELSEWHERE:
            if params.get(name) and run.settings.mode != "online":
                raise ValueError(f"{name} sends to another machine: add mode: online")
        # Trackio prints what it does, but the standard output of a run is for its result.
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "trackio":
                vars(module).setdefault("print", _ignore)
        opened = trackio.init(
            **{
                "project": run.project,
                "name": f"{run.name}-{run.mark}",
                "config": dict(run.recipe),
                "resume": "allow",
                "embed": False,
                "auto_log_gpu": False,
                "auto_log_cpu": False,
                **params,
            }
        )
        super().__init__(opened, trackio.Histogram, trackio.Table)
        log.info("Trackio shows this run with `trackio show --project %s`.", run.project)


class UsersSink:
    """Calls what the user named with each `StepReport` and `EvaluationResult`.

    A function is called with the record and `params`. A class is made once with the `TrackedRun`
    and `params`; of its methods `step`, `evaluation` and `close`, those that exist are called.

    Args:
        run: for the class.
        function: what the user named.
        params: of the recipe.
    """

    def __init__(
        self, run: TrackedRun, *, function: Callable[..., Any], params: dict[str, Any]
    ) -> None:
        is_class = inspect.isclass(function)
        self._made = function(run, **params) if is_class else None
        self._otherwise = _ignore if is_class else partial(function, **params)

    def send(self, record: Record) -> None:
        # They get read-only views, since the run goes on with the record itself.
        made = record.made
        if isinstance(made, StepReport):
            report = replace(made, tallies=MappingProxyType({**made.tallies}))
            getattr(self._made, "step", self._otherwise)(report)
        else:
            result = replace(made, card=MappingProxyType({**made.card}))
            getattr(self._made, "evaluation", self._otherwise)(result)

    def close(self) -> None:
        getattr(self._made, "close", _ignore)()


def _markdown(rows: Sequence[Mapping[str, str]]) -> str:
    r"""A table in which no text is markup.

    >>> print(_markdown([{"answer": "|x|\n*y*"}]))
    | answer |
    | --- |
    | `¦x¦ *y*` |
    """
    lines = [[*rows[0]], ["---"] * len(rows[0])]
    for row in rows:
        plain = (
            " ".join(text.split()).replace("|", "¦").replace("`", "'") for text in row.values()
        )
        lines.append([f"`{text}`" for text in plain])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ignore(*_: object, **__: object) -> None:
    """Accepts everything and does nothing."""


# Built-in trackers.
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
        self._is_full = self._has_failed = False
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
        """Let the thread end once everything that waits is delivered; returns at once."""
        self._waiting.put(None)

    def wait(self, seconds: float) -> None:
        """Wait for the end, but no longer than this; reports what was not delivered."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._has_failed = True  # what it raises later needs no second report
            log.warning(
                "The tracker %s has not finished in time and is left behind; %d records wait for "
                "it. The run folder has everything.",
                self.name,
                max(0, self._waiting.qsize() - 1),  # the last one is the request to end
            )

    def _work(self) -> None:
        sink = self._safely(self._build)
        while (record := self._waiting.get()) is not None:
            if sink is not None:
                self._safely(partial(sink.send, record))
        if sink is not None:
            self._safely(sink.close)

    def _safely(self, action: Callable[[], Result]) -> Result | None:
        try:
            return action()
        except BaseException as error:  # noqa: BLE001 - whatever a tracker raises ends here
            if not self._has_failed:
                self._has_failed = True
                log.warning(
                    "The tracker %s failed, and the run goes on anyway (reported once): %s",
                    self.name,
                    in_words(error),
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
            _maker(tracker)
            if tracker.name in TRACKERS:
                without = "none (--tracker none)"
                require_extra(tracker.name, tracker.name, where=_WHERE, instead=without)
        except ConfigError as error:
            problems.append(error)
    raise_all(problems)


def find_trackers(recipe: Recipe, folder: Path, *, started: str) -> dict[str, Callable[[], Sink]]:
    """What makes each tracker of a recipe, by its name; nothing is opened or imported yet.

    Args:
        recipe: names them.
        folder: of the run.
        started: when the run began, which distinguishes it from another one in the same place.

    Raises:
        ConfigError: a tracker of the user's own that is not there.
    """
    mark = hashlib.sha256(f"{folder.resolve()} {started}".encode()).hexdigest()[:8]
    as_json = MappingProxyType(recipe.model_dump(mode="json"))

    def run(tracker: TrackerConfig) -> TrackedRun:
        return TrackedRun(
            name=_chosen(tracker, "run_name") or recipe.name,
            project=_chosen(tracker, "project") or "grouper",
            settings=tracker,
            path=folder,
            mark=mark,
            recipe=as_json,
        )

    return {one.name: partial(_maker(one), run(one)) for one in recipe.tracking.trackers}


_WHERE = "tracking.trackers"


def _maker(tracker: TrackerConfig) -> Callable[[TrackedRun], Sink]:
    """What makes a tracker, with its parameters, secrets included."""
    params = dict(expanded(tracker.params, where=_WHERE, error=ConfigError))
    if tracker.name in SINKS:
        return partial(SINKS[tracker.name], **params)
    function = load_user_object(
        tracker.name, kind="tracker", where=_WHERE, error=ConfigError, known=TRACKERS
    )
    return partial(UsersSink, function=function, params=params)


def _chosen(tracker: TrackerConfig, key: str) -> str | None:
    """The recipe's setting, or else that of the environment."""
    variable = ENVIRONMENT.get((tracker.name, key), "")
    return getattr(tracker, key) or os.environ.get(variable)
