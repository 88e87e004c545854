"""The state of a phase between its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from grouper.algorithms.batching import TrainBatch
from grouper.config.schema import GRPOConfig, Recipe, SFTConfig
from grouper.evaluation.statistics import Interval
from grouper.training.curriculum import ProblemStream
from grouper.training.metrics import StepClock
from grouper.training.optimizers import Optimizer
from grouper.training.parallel import ParallelPolicy
from grouper.training.rollouts import RolloutSource
from grouper.training.saved_state import COUNTERS
from grouper.training.teachers import Teachers
from grouper.training.update import UpdateResult


@dataclass(slots=True)
class BestScore:
    """The best strict accuracy on the validation problems so far; of equal ones the earliest.

    >>> best = BestScore()
    >>> [best.offer(2, 0.5), best.offer(4, 0.5), best.offer(6, 0.75), best.step]
    [True, False, True, 6]
    """

    step: int | None = None
    accuracy: float = -1.0
    interval: list[float] | None = None
    """Both ends of the interval of the accuracy."""
    pending: int | None = None
    """A step that may be better: its validation has not ended."""

    def offer(self, step: int, accuracy: float, interval: Interval | None = None) -> bool:
        """Record an evaluation if it beats all earlier ones, and return whether it does."""
        if not accuracy > self.accuracy:  # a comparison with NaN is False
            return False
        self.step = step
        self.accuracy = accuracy
        self.interval = None
        if interval is not None:
            self.interval = [interval.low, interval.high]
        return True


@dataclass(slots=True, kw_only=True)
class TrainState:
    """The state of a phase: the content of a checkpoint, and what is rebuilt from the recipe.

    The schedule and SFT's position in the problem stream are functions of `step`, so they need no
    entry.
    """

    phase: str
    step: int
    """Steps finished in this phase."""
    replica: ParallelPolicy
    """The policy, as this process runs it."""
    optimizer: Optimizer
    total: int
    """Steps of the whole phase."""
    stream: ProblemStream
    """The order of the problems; a function of the recipe, so it is not saved."""
    clock: StepClock
    """The clock that times the steps; not saved."""
    reference: dict[str, Tensor] | None = None
    """GRPO: the reference weights of a KL term, sharded like the replica's; not saved."""
    teachers: Teachers | None = None
    """The teachers of the phase, whole on every process; not saved."""
    started_from: str = ""
    """The model folder the phase began with."""
    skipped: int = 0
    """Updates in a row that were skipped because something was not finite."""
    epoch_ended: bool = False
    """Whether the last step reached the end of an epoch."""
    rollouts: RolloutSource | None = None
    """GRPO: the source of each step's rollouts, with its position in the stream."""
    best: BestScore = field(default_factory=BestScore)
    checks: dict[str, Any] = field(default_factory=dict)
    """The memory of the live checks of the last steps, as JSON values."""
    asked: dict[str, str] = field(default_factory=dict)
    """Requests of hooks after the last step: request -> name of the hook."""
    suspect: TrainBatch | None = None
    """The batch of the last step, if it was skipped; not saved."""

    @property
    def rollout_source(self) -> RolloutSource:
        """The source of rollouts of a GRPO phase."""
        assert self.rollouts is not None, f"{self.phase} draws no rollouts"
        return self.rollouts

    def config(self, recipe: Recipe) -> SFTConfig | GRPOConfig:
        """Return the settings of the phase."""
        config: SFTConfig | GRPOConfig = getattr(recipe, self.phase)
        return config

    def advance(self, updates: Sequence[UpdateResult], before: int, after: int) -> None:
        """Count a finished step.

        Args:
            updates: results of its optimizer steps.
            before: position in the problem stream at its beginning.
            after: position at its end.
        """
        for result in updates:
            self.skipped = 0 if result.applied else self.skipped + 1
            self.suspect = result.batch
        self.step += 1
        self.epoch_ended = after // self.stream.size > before // self.stream.size

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore a fresh state from the content of `trainer_state.json`.

        Components that were added to the recipe since (`--allow-changes`) start afresh.
        """
        total = self.total
        for name in COUNTERS:
            setattr(self, name, saved[name])
        self.best = BestScore(**saved["best"])
        if self.rollouts is not None:
            self.rollouts.restore(saved)
        if total > self.total:
            # The phase was given more steps since a hook ended it.
            self.asked.pop("stop", None)
        self.total = total
