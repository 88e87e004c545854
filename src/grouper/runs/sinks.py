"""Trackers: who else is told of a run. The record of a run is its folder, with them or without."""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Protocol

import numpy as np

from grouper.evaluation.result import EvaluationResult
from grouper.runs.records import flat
from grouper.types import StepReport

log = logging.getLogger(__name__)

# How long the end of a run waits for all its trackers together.
CLOSING_SECONDS = 10.0
# How long a server may take to answer at the start; the run goes on meanwhile.
INIT_SECONDS = 30.0
# How often TensorBoard's files are flushed.
FLUSH_SECONDS = 10
# Arguments of `trackio.init` that send something to another machine.
ELSEWHERE = ("space_id", "server_url", "bucket_id", "dataset_id", "webhook_url")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run, as a tracker sees it."""

    name: str
    """How the tracker lists it."""
    project: str
    entity: str | None
    tags: tuple[str, ...]
    online: bool
    """Whether the user asked to send while the run goes on."""
    path: Path
    """The run folder; a tracker keeps what it writes below `<path>/trackers/`."""
    mark: str
    """8 hex digits that are the same when the run is resumed, and of no other run."""
    recipe: Mapping[str, Any]
    """The resolved recipe, as it would be written in YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step and, in GRPO, the rewards behind it."""

    report: StepReport
    rewards: Mapping[str, tuple[float, ...]]
    """`total` and each component: one value per rollout that took part. Empty in SFT."""


class Sink(Protocol):
    """Somewhere to send what happens. All calls come from one thread, in the order of the run."""

    def step(self, step: Step) -> None: ...

    def evaluation(self, result: EvaluationResult) -> None: ...

    def close(self) -> None: ...


class NumbersSink:
    """A tracker of numbers and, of rewards, histograms; subclasses say where they go."""

    def step(self, step: Step) -> None:
        """The mean of each metric that has one."""
        report = step.report
        means = {name: tally.mean for name, tally in report.tallies.items() if tally.count}
        rewards = {f"rewards/{name}": list(values) for name, values in step.rewards.items()}
        self.send(report.phase, report.step, means, rewards)

    def evaluation(self, result: EvaluationResult) -> None:
        """Its numbers, under the name of the split."""
        numbers = {
            f"{result.split}/{name}": float(value)
            for name, value in flat(result.numbers).items()
            if value is not None and not name.startswith(("by_", "rewards_by_"))
        }
        self.send(result.phase, result.step, numbers, {})

    def send(
        self,
        phase: str,
        step: int,
        numbers: Mapping[str, float],
        histograms: Mapping[str, list[float]],
    ) -> None:
        """Hand over what belongs to one step of a phase."""
        raise NotImplementedError


class TensorBoardSink(NumbersSink):
    """One folder of events a phase: `tensorboard --logdir outputs` draws them in one chart.

    They lie in `<run>/trackers/tensorboard/<phase>/`. Needs no network. TensorFlow is not imported,
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
        self._folder = run.path / "trackers" / "tensorboard"
        # Indented by four: TensorBoard reads Markdown, in which that is code.
        lines = json.dumps(dict(run.recipe), indent=2).splitlines()
        self._recipe = "\n".join(f"    {line}" for line in lines)
        self._params = {"flush_secs": FLUSH_SECONDS, **params}
        self._writers: dict[str, Any] = {}

    def send(
        self,
        phase: str,
        step: int,
        numbers: Mapping[str, float],
        histograms: Mapping[str, list[float]],
    ) -> None:
        if phase not in self._writers:
            # What an earlier process wrote about this step and later ones is void.
            writer = self._open(str(self._folder / phase), purge_step=step, **self._params)
            writer.add_text("recipe", self._recipe)
            self._writers[phase] = writer
        for name, value in numbers.items():
            self._writers[phase].add_scalar(name, value, step)
        for name, values in histograms.items():
            self._writers[phase].add_histogram(name, np.asarray(values), step)

    def close(self) -> None:
        """End the files."""
        for writer in self._writers.values():
            writer.close()


class LoggedRun(NumbersSink):
    """A tracker that takes mappings: metrics as `<phase>/<metric>`, rewards as histograms.

    Args:
        run: of the tracker.
        histogram: makes a value of that tracker from a list of numbers.
    """

    def __init__(self, run: Any, histogram: Callable[[list[float]], Any]) -> None:
        self._run = run
        self._histogram = histogram

    def send(
        self,
        phase: str,
        step: int,
        numbers: Mapping[str, float],
        histograms: Mapping[str, list[float]],
    ) -> None:
        made = {name: self._histogram(values) for name, values in histograms.items()}
        values = {"step": step, **numbers, **made}
        self._run.log({f"{phase}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        """End the run of the tracker."""
        self._run.finish()


class WandbSink(LoggedRun):
    """Weights & Biases: offline unless asked otherwise; a run that the caller opened is used.

    Offline runs lie in `<run>/trackers/wandb` and are sent later with `wandb sync`. Where the
    recipe does not say `online`, `WANDB_MODE` of the environment is the user's own word.

    Args:
        run: becomes the run of that name, project and entity.
        params: further keywords of `wandb.init`.
    """

    def __init__(self, run: TrackedRun, **params: Any) -> None:
        import wandb

        self._is_ours = wandb.run is None
        opened = _open_wandb(wandb, run, params) if wandb.run is None else wandb.run
        super().__init__(opened, wandb.Histogram)
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
    mode = "online" if run.online else os.environ.get("WANDB_MODE", "offline")
    # A process that ends waits for W&B's own clean-up, which waits for these.
    limits = {"init_timeout": INIT_SECONDS, "finish_timeout": CLOSING_SECONDS}
    wanted = {"silent": True, "console": "off", **limits}
    known = wandb.Settings.model_fields
    settings = {name: value for name, value in wanted.items() if name in known}
    if mode == "offline":
        log.info("Weights & Biases writes to %s; send it with `wandb sync`.", folder / "wandb")
    return wandb.init(
        **{
            "project": run.project,
            "entity": run.entity,
            "name": run.name,
            "tags": run.tags,
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
    """Trackio: a local database, looked at with `trackio show`; a Space only when asked for.

    Everything stays in Trackio's own folder on this machine (`TRACKIO_DIR`), unless `params` names
    another place and the tracker's mode is online, or the environment does (`TRACKIO_SPACE_ID`,
    ...), which is the user's own word.

    Args:
        run: becomes the run of that name and project; a resumed run goes on in the same one.
        params: further keywords of `trackio.init`.

    Raises:
        ValueError: a place elsewhere while offline.
    """

    def __init__(self, run: TrackedRun, **params: Any) -> None:
        import trackio

        for name in ELSEWHERE:
            if params.get(name) and not run.online:
                raise ValueError(f"{name} sends to another machine: add mode: online")
        # Trackio prints what it does; on a run's standard output there is the result and no more.
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
        super().__init__(opened, trackio.Histogram)
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
        is_class = inspect.isclass(function)  # which mypy would take for a class without arguments
        if is_class:
            made = function(run, **params)
            self._step = getattr(made, "step", _ignore)
            self._evaluation = getattr(made, "evaluation", _ignore)
            self._close = getattr(made, "close", _ignore)
        else:
            self._step = self._evaluation = lambda record: function(record, **params)
            self._close = _ignore

    def step(self, step: Step) -> None:
        """What they get cannot be changed: the run goes on with it."""
        self._step(replace(step.report, tallies=MappingProxyType({**step.report.tallies})))

    def evaluation(self, result: EvaluationResult) -> None:
        """The same."""
        self._evaluation(replace(result, card=MappingProxyType({**result.card})))

    def close(self) -> None:
        """The last call."""
        self._close()


def _ignore(*_: object, **__: object) -> None:
    """In the place of what is not there, or is not to happen."""
