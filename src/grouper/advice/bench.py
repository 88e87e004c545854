"""Measurement of a few GRPO steps of a recipe; the run that takes them is deleted.

The steps are those of a run, except for what would distort the figures. Every group is given a
signal, so that the update has all its rows, whatever an untrained model answers. Nothing is
resampled or left out for its difficulty. The learning rate is so small that the model does not
change. Grading and the rewards of the recipe are computed as usual.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from grouper.advice.live_checks import Rehearsal
from grouper.config.schema import Recipe, RewardConfig
from grouper.errors import Interrupted
from grouper.kernels.switch import switched_off
from grouper.rewards import RewardStack
from grouper.rewards.call import RewardFunction
from grouper.rewards.core import find_reward
from grouper.runs.progress import TIME_PARTS, Progress
from grouper.training.metrics import matrix_rate
from grouper.training.observe import take_step
from grouper.training.pipeline import begin
from grouper.training.run import Run
from grouper.training.state import TrainState
from grouper.types import StepReport

# Settings of the measured run, without what would distort the figures. The learning rate changes no
# weight by more than rounding.
AS_MEASURED: dict[str, Any] = {
    "skip_sft": True,
    "skip_grpo": False,
    "save_path": None,
    "hooks": [],
    "data": {"validation": None, "validation_share": 0.0, "test": None, "test_share": 0.0},
    "tracking": {"trackers": []},
    "grpo": {
        "dynamic_sampling_rounds": 0,
        "difficulty": None,
        "require_correct_in_group": False,
        "shuffle_rewards": False,
        "overlong": "keep",
        "start_from": None,
        "optimizer": {"learning_rate": 1e-30, "muon_learning_rate": 1e-30},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measured steps, and the properties of recipe and machine that they depend on."""

    recipe: Recipe
    """The recipe with the settings of the measurement."""
    parameters: int
    device: str
    dtype: str
    """Dtype of matrix products."""
    threads: int
    matrix_rate: float
    """FLOP/s of large products in `dtype`, which are a utilization of 1."""
    warmup: int
    reports: tuple[StepReport, ...]
    """One per measured step."""
    plain_reports: tuple[StepReport, ...]
    """Reports of as many steps without Grouper's kernels; empty if they were not measured."""
    completion_tokens: int | None
    """Fixed length of every completion; None: as the model ends them."""
    peak_bytes: int
    """Peak memory: of a GPU's allocator, elsewhere of the whole process since its start."""
    memory_bytes: int | None
    """Memory of the GPU."""
    token_limit: int | None
    """Tokens of a slice since memory ran out; None: it never did."""
    recipe_steps: int
    """GRPO steps of the recipe."""

    def spread(self, name: str, *, plain: bool = False) -> dict[str, float]:
        """Return `min`, `median` and `max` of a metric over the steps; empty if no step has it.

        Args:
            name: of the metric.
            plain: over the steps without kernels.
        """
        reports = self.plain_reports if plain else self.reports
        values = [report.tallies[name].mean for report in reports if name in report.tallies]
        if not values:
            return {}
        return {"min": min(values), "median": statistics.median(values), "max": max(values)}

    def share(self, activity: str) -> float:
        """Return the share of all measured seconds that `prefill`, `decode`, ... took."""
        name = f"time.{activity}"
        seconds = sum(r.tallies[name].sum for r in self.reports if name in r.tallies)
        return seconds / sum(report.tallies["time.step"].sum for report in self.reports)

    @property
    def model(self) -> str:
        """The folder or Hub name of the model."""
        return self.recipe.model.path or "a new model"

    @property
    def hours(self) -> float:
        """Hours of the recipe's GRPO steps at the median, without evaluations and checkpoints."""
        return self.recipe_steps * self.spread("time.step")["median"] / 3600

    def as_dict(self) -> dict[str, Any]:
        """Return the measurement as JSON values, for `--json`."""
        names = sorted({name for report in self.reports for name in report.tallies})
        timed = [name for name in names if name.startswith(("time.", "completion/tokens"))]
        plain_fields = [
            field.name for field in fields(self) if not field.name.endswith(("recipe", "reports"))
        ]
        return {
            "recipe": self.recipe.name,
            **{name: getattr(self, name) for name in ("model", *plain_fields, "hours")},
            "steps": len(self.reports),
            "shares": {part: self.share(part) for part in TIME_PARTS},
            "metrics": {name: self.spread(name) for name in timed},
            "metrics_without_kernels": {name: self.spread(name, plain=True) for name in timed},
        }


def bench(
    recipe: Recipe,
    *,
    model: str | None = None,
    warmup: int = 2,
    steps: int = 5,
    completion_tokens: int | None = None,
    plain: bool = False,
    progress: Progress | None = None,
) -> Bench:
    """Take `warmup` + `steps` GRPO steps in a folder that is removed afterwards.

    Args:
        recipe: its model, data and settings are measured.
        model: a model or adapter folder, or a Hub name; default: the recipe's, or a new one.
        warmup: steps that are not counted, in which allocators and kernels settle.
        steps: steps that are counted.
        completion_tokens: make every completion this long; default: as the model ends them.
        plain: measure as many steps again without Grouper's kernels.
        progress: shows the progress.

    Raises:
        GrouperError: as a run of the recipe would.
    """
    progress = progress or Progress(quiet=True)
    changes = dict(AS_MEASURED)
    if model is not None:
        revision = recipe.model.revision_of(model)
        changes["model"] = {"path": model, "new": None, "revision": revision}
    if completion_tokens is not None:
        changes["sampling"] = {
            "max_new_tokens": completion_tokens,
            "min_new_tokens": completion_tokens,
            "max_total_tokens": None,
            "stop": [],
        }
    measured = recipe.override(**changes)
    with tempfile.TemporaryDirectory(prefix="grouper-bench-") as folder:
        measured = measured.override(output_dir=folder, name=recipe.name)
        try:
            with Run(measured, Progress(quiet=True, console=progress.console)) as run:
                run.prepared.rewards = _rewards_with_signal(run)
                with progress.track(f"loading {measured.model.path or 'a new model'}"):
                    state = begin(run, "grpo", None)
                Rehearsal().phase_begins(run, state)
                _take(warmup, run, state, progress, "warming up")
                policy = state.replica.policy
                device = policy.device
                threads = torch.get_num_threads()
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                reports = _take(steps, run, state, progress, "measuring")
                plain_reports: list[StepReport] = []
                if plain:
                    # Steps that were recorded with kernels would be played back with them.
                    run.models.sampler(policy).release()
                    with switched_off():
                        _take(1, run, state, progress, "warming up without kernels")
                        plain_reports = _take(steps, run, state, progress, "without kernels")
                dtype = policy.products_dtype
                device_name = device.type
                memory_bytes = None
                if device.type == "cuda":
                    properties = torch.cuda.get_device_properties(device)
                    device_name = properties.name
                    memory_bytes = properties.total_memory
                return Bench(
                    recipe=run.recipe,
                    parameters=sum(parameter.numel() for parameter in policy.parameters()),
                    device=device_name,
                    dtype=str(dtype).removeprefix("torch."),
                    threads=threads,
                    matrix_rate=matrix_rate(device, dtype, threads),
                    warmup=warmup,
                    reports=tuple(reports),
                    plain_reports=tuple(plain_reports),
                    completion_tokens=completion_tokens,
                    peak_bytes=round(reports[-1].mean("memory.peak_gib") * 2**30),
                    memory_bytes=memory_bytes,
                    token_limit=policy.token_limit,
                    recipe_steps=state.total,
                )
        except Interrupted as error:
            raise Interrupted("stopped on request", fix="Nothing was written.") from error


def _take(
    count: int, run: Run, state: TrainState, progress: Progress, description: str
) -> list[StepReport]:
    """Take and record `count` steps."""
    reports = []
    with progress.track(description, count) as task:
        for _ in range(count):
            report = take_step(run, state)
            run.folder.append_metrics(report)
            reports.append(report)
            run.stop.raise_if_requested("measuring")
            task.advance()
    return reports


def _rewards_with_signal(run: Run) -> RewardStack:
    """Return the recipe's rewards without weight, and one that differs within every group."""
    rewards: list[tuple[RewardConfig, RewardFunction]] = []
    for config in run.recipe.rewards:
        without_weight = config.model_copy(update={"weight": 0.0, "max_failure_rate": 1.0})
        rewards.append((without_weight, find_reward(config, run.prepared.format)))
    # Never 0, which has no gradient without a baseline, nor the same in every group of one.
    signs = itertools.cycle((1.0, -1.0))

    def every_other(*, completions: Sequence[Any], **_: Any) -> list[float]:
        return [next(signs) for _ in completions]

    rewards.append((RewardConfig(name="every other"), every_other))
    return RewardStack(rewards)
