"""A few GRPO steps of a recipe, measured; of the run that takes them nothing is left.

The steps are those of a run, with what would falsify the figures taken out: every group is given
a signal, so that the update has all its rows, whatever an untrained model answers; nothing is
resampled or left out for its difficulty; and the learning rate is so small that the model stays
what it is. Grading and the recipe's own rewards are computed anyway.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from grouper.config.schema import Recipe
from grouper.errors import Interrupted
from grouper.models.policy import Policy
from grouper.rewards import RewardStack
from grouper.rewards.registry import find_reward, reward_label
from grouper.tracking.live import TIME_PARTS, Progress, setup_logging
from grouper.training.beginning import begin
from grouper.training.checkpoint import TrainState
from grouper.training.grpo import grpo_step
from grouper.training.metrics import matrix_rate
from grouper.training.rehearsal import Rehearsal
from grouper.training.run import Run
from grouper.types import StepReport

__all__ = ["Bench", "Spread", "bench"]

# A learning rate that moves no weight by anything that a sum would notice.
STILL = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One metric over the measured steps."""

    min: float
    median: float
    max: float


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
    """One a measured step."""
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

    def spread(self, name: str) -> Spread | None:
        """The smallest, middle and largest value of a metric; None where no step has it."""
        found = [r.tallies[name].mean for r in self.reports if name in r.tallies]
        if not found:
            return None
        return Spread(min=min(found), median=statistics.median(found), max=max(found))

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
        step = self.spread("time.step")
        assert step is not None, "every step has its seconds"
        return self.recipe_steps * step.median / 3600

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        names = sorted({name for report in self.reports for name in report.tallies})
        kept = [name for name in names if name.startswith(("time.", "completion/tokens"))]
        plain = [f.name for f in fields(self) if f.name not in ("recipe", "reports")]
        return {
            "recipe": self.recipe.name,
            **{name: getattr(self, name) for name in ("model", *plain, "hours")},
            "steps": len(self.reports),
            "shares": {part: self.share(part) for part in TIME_PARTS},
            "metrics": {name: asdict(s) for name in kept if (s := self.spread(name)) is not None},
        }


def bench(
    recipe: Recipe,
    *,
    model: str | None = None,
    warmup: int = 2,
    steps: int = 5,
    completion_tokens: int | None = None,
    progress: Progress | None = None,
) -> Bench:
    """Take `warmup` + `steps` GRPO steps in a folder that is removed again.

    Args:
        recipe: whose model, data and settings are measured.
        model: a model or adapter folder, or a Hub name; left out: the recipe's, or a new one.
        warmup: steps that are not counted: allocators and kernels settle in them.
        steps: that are.
        completion_tokens: make every completion this long; left out: as the model ends them.
        progress: where it is shown.

    Raises:
        GrouperError: as a run of the recipe would.
    """
    progress = progress or Progress(quiet=True)
    measured = _as_measured(recipe, model, completion_tokens)
    with tempfile.TemporaryDirectory(prefix="grouper-bench-") as folder:
        measured = measured.override(output_dir=folder, name=recipe.name)
        try:
            with Run(measured, Progress(quiet=True, console=progress.console)) as run:
                state = _state(run, progress)
                with progress.track("warming up", warmup) as task:
                    for _ in range(warmup):
                        _step(run, state, task.advance)
                if state.policy.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(state.policy.device)
                with progress.track("measuring", steps) as task:
                    reports = [_step(run, state, task.advance) for _ in range(steps)]
                return Bench(
                    recipe=run.recipe,
                    **_machine(state.policy),
                    warmup=warmup,
                    reports=tuple(reports),
                    completion_tokens=completion_tokens,
                    recipe_steps=state.total,
                )
        except Interrupted as error:
            raise Interrupted("stopped on request", fix="Nothing was written.") from error
        finally:
            setup_logging(None, console=progress.console)  # training.log goes with the folder


def _as_measured(recipe: Recipe, model: str | None, completion_tokens: int | None) -> Recipe:
    still = {"learning_rate": STILL, "muon_learning_rate": STILL}
    grpo = {
        "max_resample_rounds": 0,
        "difficulty": None,
        "shaping_needs_a_correct": False,
        "shuffle_rewards": False,
        "overlong": "keep",
        "start_from": None,
        "optimizer": still,
    }
    changes: dict[str, Any] = {
        "skip_sft": True,
        "skip_grpo": False,
        "save_path": None,
        "hooks": [],
        "data": {"validation": None, "validation_share": 0.0, "test": None},
        "tracking": {"trackers": []},
        "grpo": grpo,
    }
    if model is not None:
        revision = recipe.model.revision if model == recipe.model.path else None
        changes["model"] = {"path": model, "new": None, "revision": revision}
    if completion_tokens is not None:
        changes["sampling"] = {
            "max_total_tokens": None,
            "max_new_tokens": completion_tokens,
            "min_new_tokens": completion_tokens,
            "stop": [],
        }
    return recipe.override(**changes)


def _state(run: Run, progress: Progress) -> TrainState:
    """GRPO at its first step, with rewards that teach."""
    run.rewards = _teaching(run)
    with progress.track(f"loading {run.recipe.model.path or 'a new model'}"):
        state = begin(run, "grpo", None)
    Rehearsal().phase_begins(run, state)
    return state


def _machine(policy: Policy) -> dict[str, Any]:
    """What `Bench` says of the machine and of the model on it."""
    device, cuda = policy.device, policy.device.type == "cuda"
    dtype, threads = policy.compute_dtype or policy.model.dtype, torch.get_num_threads()
    return {
        "parameters": sum(p.numel() for p in policy.parameters()),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": threads,
        "matrix_rate": matrix_rate(device, dtype, threads),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else _peak(),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "token_limit": policy.token_limit,
    }


def _step(run: Run, state: TrainState, done: Callable[[], None]) -> StepReport:
    report = grpo_step(run, state)
    run.folder.append_metrics(report)
    run.raise_if_stopped("measuring")
    done()
    return report


def _teaching(run: Run) -> RewardStack:
    """The recipe's rewards at no weight, and one that differs within every group."""
    layout = run.prepared.format.layout
    own = [(reward_label(c.name), 0.0, find_reward(c, layout)) for c in run.recipe.rewards]
    limits = dict.fromkeys([name for name, _, _ in own], 1.0)
    return RewardStack([*own, ("every other", 1.0, _every_other)], limits)


def _every_other(*, completions: Sequence[Any], **_: Any) -> list[float]:
    return [float(place % 2) for place in range(len(completions))]


def _peak() -> int:
    """Bytes that the process has had at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
