"""What can be found wrong, and what the checks look at to find it.

A check looks at one kind of data: the last steps of a metric (`Window`), everything that a run
has written down (`Record`), completions without their grades (`Drawn`), graded groups
(`Samples`), or what a plan stands on (`Assumed`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from grouper.config.loading import load_recipe
from grouper.config.schema import AlarmsConfig, Recipe
from grouper.errors import RunFolderError
from grouper.evaluation.result import EvaluationResult
from grouper.prompts import PromptFormat, StopTokens
from grouper.prompts.tokenizer import Tokenizer
from grouper.tracking.run_folder import RunFolder
from grouper.types import Prompt, Rollout, RolloutGroup, StepReport, Tally

__all__ = [
    "Assumed",
    "Drawn",
    "Finding",
    "Record",
    "Samples",
    "Window",
    "curve",
    "ends",
    "mean",
    "read_record",
    "span",
]

# Steps at the beginning and the end of a run that are compared.
COMPARED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Example: `Finding(name="temperature", what="all 5 samples are the same text", fix="Raise it.")`.
    """

    name: str
    what: str
    """One sentence, without its full stop."""
    fix: str = ""
    """The settings to change, in whole sentences."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers it rests on."""
    phase: str = "grpo"
    """Of a run: where it was found."""
    steps: tuple[int, int] = (0, 0)
    """Of a run: first and last step of the evidence."""

    def __str__(self) -> str:
        return f"{self.what}. {self.fix}".rstrip()

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "steps": list(self.steps), "evidence": dict(self.evidence)}


# --- the last steps of a metric --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """One metric, step by step: its mean in each step that had it."""

    first: Sequence[float]
    """The first window of the phase."""
    earlier: Sequence[float]
    """What lies before the last window, without the first one."""
    last: Sequence[float]
    """The last window."""
    limits: AlarmsConfig

    @property
    def start(self) -> float:
        """The mean over the first window."""
        return fmean(self.first)

    @property
    def now(self) -> float:
        """The mean over the last window."""
        return fmean(self.last)


# --- the record of a run ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a run has written down."""

    folder: RunFolder
    recipe: Recipe
    sft: Sequence[StepReport]
    grpo: Sequence[StepReport]
    evaluations: Sequence[EvaluationResult]


def read_record(path: Path) -> Record:
    """Read a run folder.

    Raises:
        RunFolderError: it is none, it is damaged, or no step has been done.
        ConfigError: its recipe cannot be read.
    """
    folder = RunFolder(path)
    folder.read_info()
    reports = folder.read_metrics()
    if not reports:
        raise RunFolderError(
            "there is nothing to diagnose: the run has not finished a step",
            where=str(path),
            fix="Continue it with --resume; training.log says how it ended.",
        )
    return Record(
        folder=folder,
        recipe=load_recipe(path / "recipe.yaml"),
        sft=[r for r in reports if r.phase == "sft"],
        grpo=[r for r in reports if r.phase == "grpo"],
        evaluations=folder.read_evaluations(),
    )


def curve(reports: Sequence[StepReport], name: str) -> list[float]:
    """The means of a metric in the steps that had it."""
    found = (r.tallies[name] for r in reports if name in r.tallies)
    return [t.mean for t in found if t.count and math.isfinite(t.mean)]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last steps, which do not overlap."""
    size = max(1, min(COMPARED, len(values) // 2))
    return fmean(values[:size]), fmean(values[-size:])


def span(reports: Sequence[StepReport]) -> tuple[int, int]:
    """First and last step."""
    return reports[0].step, reports[-1].step


def mean(values: Sequence[float]) -> float:
    """The mean, or NaN of nothing."""
    return fmean(values) if values else math.nan


# --- sampled completions ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """How long completions want to be, against a budget of `budget` tokens.

    >>> completions = ((10, True), (20, True), (30, True), (40, False))
    >>> print(Drawn(completions=completions, budget=25, before="grpo"))
    completions take 20 tokens (median), at least 40 (95th percentile); 50% do not end within 25
    """

    completions: Sequence[tuple[int, bool]]
    """Tokens of each completion, and whether it ended by itself."""
    budget: int
    before: str = ""
    """The phase that is about to begin; empty after SFT."""
    begun: bool = False
    """Whether anything of the run has been measured or trained."""

    @property
    def median(self) -> int:
        return sorted(self.completions)[(len(self.completions) - 1) // 2][0]

    @property
    def p95(self) -> int:
        """The 95th percentile in tokens."""
        return self._longest[0]

    @property
    def open_ended(self) -> bool:
        """Whether the 95th percentile itself was cut off, so that it is only a lower bound."""
        return not self._longest[1]

    @property
    def _longest(self) -> tuple[int, bool]:
        return sorted(self.completions)[math.ceil(0.95 * len(self.completions)) - 1]

    @property
    def truncated(self) -> float:
        """The share that does not end within the budget."""
        return mean([length > self.budget or not ended for length, ended in self.completions])

    def __str__(self) -> str:
        at_least = "at least " if self.open_ended else ""
        return (
            f"completions take {self.median} tokens (median), {at_least}{self.p95} (95th "
            f"percentile); {self.truncated:.0%} do not end within {self.budget}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A few samples, graded and rewarded as in training, and what wrote them."""

    groups: tuple[RolloutGroup, ...]
    """One per problem."""
    signal: tuple[bool, ...]
    """Whether GRPO would learn from each group: some advantage is not 0."""
    fmt: PromptFormat
    tokenizer: Tokenizer
    stop_tokens: StopTokens
    prompt: Prompt
    """Any prompt of the format."""
    vocabulary: int
    """Rows of the model's embedding."""

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All samples, problem by problem."""
        return tuple(rollout for group in self.groups for rollout in group.rollouts)

    @property
    def cut_off(self) -> bool:
        """Whether not one sample comes to an end."""
        return all(rollout.completion.truncated for rollout in self.rollouts)

    @property
    def diversity(self) -> float:
        """How different the samples of a problem are: 0 where all are the same, 1 where no two."""
        texts = [[r.completion.token_ids for r in group.rollouts] for group in self.groups]
        shares = [(len({*t}) - 1) / (len(t) - 1) if len(t) > 1 else 1.0 for t in texts]
        return Tally.of(shares).mean

    @property
    def reward_variance(self) -> float:
        """Mean over the problems of the variance of the total reward (dividing by n)."""
        return Tally.of(map(_variance, self.groups)).mean

    @property
    def certainty(self) -> float:
        """Geometric mean of the probabilities with which the tokens were drawn."""
        logprobs = [value for r in self.rollouts for value in r.completion.logprobs]
        return math.exp(math.fsum(logprobs) / len(logprobs))


def _variance(group: RolloutGroup) -> float:
    totals = [r.reward.total for r in group.rollouts if r.reward.total is not None]
    if not totals:
        return math.nan
    center = math.fsum(totals) / len(totals)
    return math.fsum((total - center) ** 2 for total in totals) / len(totals)


# --- a plan ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What a plan had to take for granted."""

    measured: bool
    """Whether data and tokenizer are on this machine, so that rows were measured."""
    native: bool
    """Whether the model runs with native attention."""
