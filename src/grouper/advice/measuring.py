"""A few GRPO steps of a recipe, measured; the run that takes them is deleted.

The steps are those of a run, without what would distort the figures: every group is given
a signal, so that the update has all its rows, whatever an untrained model answers; nothing is
resampled or left out for its difficulty; and the learning rate is so small that the model stays
what it is. Grading and the recipe's own rewards are computed anyway.
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
from grouper.rewards.core import find_reward
from grouper.runs.progress import TIME_PARTS, Progress
from grouper.training.metrics import matrix_rate
from grouper.training.observe import take_step
from grouper.training.phases import begin
from grouper.training.run import Run
from grouper.training.state import TrainState
from grouper.types import StepReport

# Without what would distort the figures; such a learning rate changes no weight by more than
# rounding.
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
    """What was measured, and what of recipe and machine it depends on."""

    recipe: Recipe
    """As measured."""
    parameters: int
    device: str
    dtype: str
    """Of matrix products."""
    threads: int
    matrix_rate: float
    """FLOP/s of large products in `dtype`: what a utilisation of 1 would be."""
    warmup: int
    reports: tuple[StepReport, ...]
    """One per measured step."""
    plain_reports: tuple[StepReport, ...]
    """The same without our kernels; empty where they were not measured."""
    completion_tokens: int | None
    """Tokens that every completion was made to have."""
    peak_bytes: int
    """On a GPU of the allocator, elsewhere of the whole process since it began."""
    memory_bytes: int | None
    """Of the GPU."""
    token_limit: int | None
    """Tokens of a slice since memory ran out; None: it never did."""
    recipe_steps: int
    """GRPO steps of the recipe."""

    def spread(self, name: str, *, plain: bool = False) -> dict[str, float]:
        """`min`, `median` and `max` of a metric over the steps; empty where no step has it.

        Args:
            name: of the metric.
            plain: over the steps without kernels.
        """
        reports = self.plain_reports if plain else self.reports
        found = [r.tallies[name].mean for r in reports if name in r.tallies]
        if not found:
            return {}
        return {"min": min(found), "median": statistics.median(found), "max": max(found)}

    def share(self, part: str) -> float:
        """The part of all measured seconds that went into `prefill`, `decode`, ..."""
        whole = sum(report.tallies["time.step"].sum for report in self.reports)
        name = f"time.{part}"
        return sum(r.tallies[name].sum for r in self.reports if name in r.tallies) / whole

    @property
    def model(self) -> str:
        """Its folder or Hub name."""
        return self.recipe.model.path or "a new model"

    @property
    def hours(self) -> float:
        """Of the recipe's GRPO steps, at the median; evaluations and checkpoints come on top."""
        return self.recipe_steps * self.spread("time.step")["median"] / 3600

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        names = sorted({name for report in self.reports for name in report.tallies})
        timed = [name for name in names if name.startswith(("time.", "completion/tokens"))]
        plain = [f.name for f in fields(self) if not f.name.endswith(("recipe", "reports"))]
        return {
            "recipe": self.recipe.name,
            **{name: getattr(self, name) for name in ("model", *plain, "hours")},
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
    """Take `warmup` + `steps` GRPO steps in a folder that is removed again.

    Args:
        recipe: whose model, data and settings are measured.
        model: a model or adapter folder, or a Hub name; left out: the recipe's, or a new one.
        warmup: steps that are not counted: allocators and kernels settle in them.
        steps: that are.
        completion_tokens: make every completion this long; left out: as the model ends them.
        plain: measure as many steps again without our kernels.
        progress: where progress is shown.

    Raises:
        GrouperError: as a run of the recipe would.
    """
    progress = progress or Progress(quiet=True)
    changes = dict(AS_MEASURED)
    if model is not None:
        revision = recipe.model.revision if model == recipe.model.path else None
        changes["model"] = {"path": model, "new": None, "revision": revision}
    if completion_tokens is not None:
        length = {"max_new_tokens": completion_tokens, "min_new_tokens": completion_tokens}
        changes["sampling"] = {**length, "max_total_tokens": None, "stop": []}
    measured = recipe.override(**changes)
    with tempfile.TemporaryDirectory(prefix="grouper-bench-") as folder:
        measured = measured.override(output_dir=folder, name=recipe.name)
        try:
            with Run(measured, Progress(quiet=True, console=progress.console)) as run:
                run.prepared.rewards = _teaching(run)
                with progress.track(f"loading {measured.model.path or 'a new model'}"):
                    state = begin(run, "grpo", None)
                Rehearsal().phase_begins(run, state)
                _take(warmup, run, state, progress, "warming up")
                policy, threads = state.replica.policy, torch.get_num_threads()
                device, cuda = policy.device, policy.device.type == "cuda"
                if cuda:
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
                card = torch.cuda.get_device_properties(device) if cuda else None
                return Bench(
                    recipe=run.recipe,
                    parameters=sum(p.numel() for p in policy.parameters()),
                    device=device.type if card is None else card.name,
                    dtype=str(dtype).removeprefix("torch."),
                    threads=threads,
                    matrix_rate=matrix_rate(device, dtype, threads),
                    warmup=warmup,
                    reports=tuple(reports),
                    plain_reports=tuple(plain_reports),
                    completion_tokens=completion_tokens,
                    peak_bytes=round(reports[-1].mean("memory.peak_gib") * 2**30),
                    memory_bytes=None if card is None else card.total_memory,
                    token_limit=policy.token_limit,
                    recipe_steps=state.total,
                )
        except Interrupted as error:
            raise Interrupted("stopped on request", fix="Nothing was written.") from error


def _take(
    count: int, run: Run, state: TrainState, progress: Progress, what: str
) -> list[StepReport]:
    reports = []
    with progress.track(what, count) as task:
        for _ in range(count):
            reports.append(take_step(run, state))
            run.folder.append_metrics(reports[-1])
            run.stop.raise_if_requested("measuring")
            task.advance()
    return reports


def _teaching(run: Run) -> RewardStack:
    """The recipe's rewards at no weight, and one that differs within every group."""
    layout = run.prepared.format
    lenient = {"weight": 0.0, "max_failure_rate": 1.0}
    own = [(c.model_copy(update=lenient), find_reward(c, layout)) for c in run.recipe.rewards]
    # Never 0, which has no gradient without a baseline, nor the same in every group of one.
    turns = itertools.cycle((1.0, -1.0))

    def every_other(*, completions: Sequence[Any], **_: Any) -> list[float]:
        return [next(turns) for _ in completions]

    return RewardStack([*own, (RewardConfig(name="every other"), every_other)])
