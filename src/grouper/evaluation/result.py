"""What an evaluation found: its items, and every number derived from them.

Only the items and the settings are stored; accuracies, splits and intervals are computed from
the items on construction, so that a summary can never disagree with what it summarises.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from grouper.evaluation.statistics import Interval, mean_interval, pass_at_k
from grouper.grading import TEXT_ALONE
from grouper.types import FinishReason, Verdict

Outcome = Literal["correct", "wrong", "no_answer", "truncated", "timeout", "crash", "not_scored"]

OUTCOMES: tuple[Outcome, ...] = (
    "correct",
    "wrong",
    "no_answer",
    "truncated",
    "timeout",
    "crash",
    "not_scored",
)
"""The four-way split, then what is no verdict on the model and is counted apart."""

_OUTCOME_OF: Mapping[Verdict, Outcome] = {
    Verdict.CORRECT: "correct",
    Verdict.INCORRECT: "wrong",
    Verdict.UNPARSEABLE: "wrong",
    Verdict.NO_ANSWER: "no_answer",
    Verdict.TIMEOUT: "timeout",
    Verdict.CRASH: "crash",
    Verdict.NOT_SCORED: "not_scored",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationItem:
    """One graded completion of one problem."""

    problem_id: str
    subject: str | None
    level: str | None
    sample: int
    """0 .. samples-1."""
    prompt: str
    """The rendered prompt text."""
    completion: str
    """The completion's text."""
    answer: str
    """The reference answer."""
    extracted: str | None
    verdict: Verdict
    reason: str
    rung: str
    finish_reason: FinishReason
    tokens: int
    """Sampled tokens, the stop token included."""
    lenient: bool | None = None
    """Whether the maths is right wherever the answer stands, in whatever format (never less than
    the verdict); None where the reference cannot be read, or nobody asked."""
    format: bool | None = None
    """Whether it is in the prompt's format. This and the next three: see `evaluation.metrics`;
    None where nobody asked."""
    reasoning: int | None = None
    """Characters of reasoning."""
    rewards: Mapping[str, float | None] | None = None
    """The components of the run's reward; None within: not scored."""
    reward: float | None = None
    """Their weighted sum; also None where one that counts was not scored."""

    @property
    def outcome(self) -> Outcome:
        """The four-way split: cut off before any answer is `truncated`, not `no_answer`."""
        if self.verdict is Verdict.NO_ANSWER and self.finish_reason is FinishReason.LENGTH:
            return "truncated"
        return _OUTCOME_OF[self.verdict]

    @property
    def correct(self) -> bool:
        return self.verdict is Verdict.CORRECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Mean over problems of each problem's share of correct samples."""

    mean: float
    """NaN where nothing could be scored."""
    interval: Interval
    problems: int

    @classmethod
    def of(cls, scores: Sequence[Sequence[float]], confidence: float) -> Accuracy:
        means = [math.fsum(samples) / len(samples) for samples in scores]
        return cls(
            mean=math.fsum(means) / len(means) if means else math.nan,
            interval=mean_interval(scores, confidence),
            problems=len(means),
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """One model measured once on one set of problems.

    A problem whose reference cannot be read is graded by text alone: it counts like any other, and
    `text_alone` says how many there are. (In evaluations of earlier versions its items are
    `NOT_SCORED`: left out of accuracy, pass@k and `scores`, and in `split`.) Timeouts and crashes
    of the grader count as not correct.
    """

    name: str
    """`base`, `sft`, `grpo`, `validation-grpo-000020`, ...: the file names in the run folder."""
    phase: str
    """The phase that made the model: `base`, `sft` or `grpo`."""
    step: int
    """Optimizer steps of that phase the model had seen."""
    split: str
    """The set of problems: `test` or `validation`."""
    items: tuple[EvaluationItem, ...] = field(repr=False)
    """In the order of the problems, then of the samples; each exactly once."""
    samples: int
    """Completions per problem."""
    confidence: float
    """Of every interval, for example 0.95."""
    card: Mapping[str, Any] = field(default_factory=dict)
    """What is needed to measure the same again: prompt of item 0, sampling, grader, n, k, seed."""

    def __post_init__(self) -> None:
        keys = {(item.problem_id, item.sample) for item in self.items}
        if len(keys) != len(self.items):
            raise ValueError(f"evaluation {self.name}: an item is listed twice")

    @cached_property
    def overall(self) -> Accuracy:
        """Accuracy over all scored problems, with its interval."""
        return Accuracy.of(list(self._scored.values()), self.confidence)

    @property
    def accuracy(self) -> float:
        return self.overall.mean

    @property
    def interval(self) -> Interval:
        return self.overall.interval

    @cached_property
    def lenient(self) -> Accuracy | None:
        """Accuracy with format left out; the gap to `overall` is format. None: not measured."""
        scores: dict[str, list[float]] = {}
        for item in self._scored_items:
            if item.lenient is None:
                return None
            scores.setdefault(item.problem_id, []).append(float(item.lenient))
        return Accuracy.of(list(scores.values()), self.confidence)

    @cached_property
    def scores(self) -> dict[str, float]:
        """Problem id -> share of its samples that are correct."""
        return {name: math.fsum(s) / len(s) for name, s in self._scored.items()}

    @cached_property
    def pass_at_k(self) -> dict[int, float]:
        """Chance that at least one of k samples is correct, by k = 1, 2, 4 .. samples."""
        counts = [(len(s), round(sum(s))) for s in self._scored.values()]
        sizes = {2**i for i in range(self.samples.bit_length())} | {self.samples}
        return {
            k: math.fsum(pass_at_k(n, c, k) for n, c in counts) / len(counts)
            for k in sorted(sizes)
            if counts and k <= min(n for n, _ in counts)
        }

    @cached_property
    def split_counts(self) -> dict[Outcome, int]:
        """How many items (problems x samples) had each outcome."""
        counts = Counter(item.outcome for item in self.items)
        return {outcome: counts[outcome] for outcome in OUTCOMES}

    @cached_property
    def text_alone(self) -> tuple[int, int]:
        """Problems whose reference cannot be read, and how many of them are ever right."""
        unread = {item.problem_id for item in self.items if item.rung == TEXT_ALONE}
        right = {i.problem_id for i in self.items if i.problem_id in unread and i.correct}
        return len(unread), len(right)

    @cached_property
    def cut_off(self) -> float:
        """Share of all completions that ran into the token limit, with an answer or without."""
        cut = sum(item.finish_reason is FinishReason.LENGTH for item in self.items)
        return cut / len(self.items) if self.items else math.nan

    @cached_property
    def mean_tokens(self) -> float:
        count = len(self.items)
        return sum(item.tokens for item in self.items) / count if count else math.nan

    @cached_property
    def by_subject(self) -> dict[str, Accuracy]:
        """Empty where no problem has a subject."""
        return self._by(lambda item: item.subject)

    @cached_property
    def by_level(self) -> dict[str, Accuracy]:
        return self._by(lambda item: item.level)

    @cached_property
    def _scored(self) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {}
        for item in self._scored_items:
            scores.setdefault(item.problem_id, []).append(float(item.correct))
        return scores

    @cached_property
    def _scored_items(self) -> tuple[EvaluationItem, ...]:
        unreadable = {i.problem_id for i in self.items if i.verdict is Verdict.NOT_SCORED}
        return tuple(item for item in self.items if item.problem_id not in unreadable)

    def _by(self, part_of: Callable[[EvaluationItem], str | None]) -> dict[str, Accuracy]:
        parts = {item.problem_id: part_of(item) for item in self.items}
        grouped: dict[str, list[list[float]]] = {}
        for problem_id, samples in self._scored.items():
            part = parts[problem_id]
            if part is not None:
                grouped.setdefault(part, []).append(samples)
        return {part: Accuracy.of(grouped[part], self.confidence) for part in sorted(grouped)}
