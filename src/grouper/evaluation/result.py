"""What an evaluation found: its items, and every number derived from them.

Only the items and the settings are stored; accuracies, splits and intervals are computed from
the items on construction, so that a summary can never disagree with its items.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, KeysView, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

from pydantic import ConfigDict

from grouper.evaluation.statistics import Interval, mean_interval, pass_at_k
from grouper.grading import TEXT_ALONE
from grouper.grading.normalise import canonical, tidy
from grouper.grading.numbers import TooLargeError, read_number
from grouper.types import FinishReason, Verdict

Thing = TypeVar("Thing")
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Outcome = Literal["correct", "wrong", "no_answer", "truncated", "timeout", "crash", "not_scored"]

# The four-way split, then what is not a verdict on the model and is counted apart.
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_WRONG = (Verdict.INCORRECT, Verdict.UNPARSEABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationItem:
    """One graded completion of one problem; fields shared with rollouts have the same names."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

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
    stage: str
    finish_reason: FinishReason
    tokens: int
    """Sampled tokens, the stop token included."""
    lenient: bool | None = None
    """Whether the maths is right wherever the answer is, in whatever format (never less than the
    verdict); None where the reference cannot be read, or this was not measured."""
    format: bool | None = None
    """Whether it is in the prompt's format, see `rewards.builtin.format_holds`. This and the next
    three are None where rewards were not measured."""
    reasoning: int | None = None
    """Characters of reasoning; 0: there is none."""
    rewards: Mapping[str, float | None] | None = None
    """The components of the run's reward; None within: not scored."""
    reward: float | None = None
    """Their weighted sum; also None where one that counts was not scored."""
    lenient_verdict: Verdict | None = None
    """The verdict on the answer found in any format; None where this was not measured."""

    @property
    def outcome(self) -> Outcome:
        """The four-way split: cut off before any answer is `truncated`, not `no_answer`."""
        return self._outcome(self.verdict)

    @property
    def lenient_outcome(self) -> Outcome | None:
        """The same, with the answer taken from anywhere."""
        return None if self.lenient_verdict is None else self._outcome(self.lenient_verdict)

    def _outcome(self, verdict: Verdict) -> Outcome:
        if verdict is Verdict.NO_ANSWER and self.finish_reason is FinishReason.LENGTH:
            return "truncated"
        # The other verdicts are outcomes of the same names.
        return "wrong" if verdict in _WRONG else cast("Outcome", verdict.value)

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
    def of(cls, scores: Sequence[Sequence[float]]) -> Accuracy:
        means = [math.fsum(samples) / len(samples) for samples in scores]
        return cls(mean=mean_of(means), interval=mean_interval(scores), problems=len(means))

    @property
    def numbers(self) -> dict[str, float]:
        """As summaries have it."""
        low, high = self.interval.low, self.interval.high
        return {"accuracy": self.mean, "low": low, "high": high, "problems": self.problems}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Five numbers of an evaluation, and the mean of each reward. NaN where nothing counts."""

    format_accuracy: float
    """Share of the completions in the format, see `rewards.builtin.format_holds`."""
    answer_accuracy: float
    """The evaluation's accuracy."""
    with_reasoning: float
    """Share of the completions that have any reasoning."""
    reasoning_length: float
    """Mean characters of reasoning, over those that have any."""
    reward: float
    """Mean total reward, over those that were scored."""
    rewards: Mapping[str, float]
    """Mean of each component before its weight, by name."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """One model measured once on one set of problems.

    A problem whose reference cannot be read is graded by text alone: it counts like any other, and
    `text_alone` counts them. Items that are `NOT_SCORED` anyway are left out of
    accuracy, pass@k and `scores`. Timeouts and crashes of the grader count as not correct.
    """

    name: str
    """`base`, `sft`, `grpo`, `validation-grpo-000020`, ...: the file names in the run folder."""
    phase: str
    """The phase that made the model: `base`, `sft` or `grpo`."""
    step: int
    """Optimizer steps of that phase the model had seen."""
    split: str
    """The set of problems: `test` or `validation`."""
    items: Sequence[EvaluationItem] = field(repr=False)
    """In the order of the problems, then of the samples; each exactly once. Those of a file
    (`StoredItems`) are read whenever they are looked at."""
    samples: int
    """Completions per problem."""
    card: Mapping[str, Any] = field(default_factory=dict)
    """What is needed to measure the same again: prompt of item 0, sampling, grader, n, k, seed."""

    def __post_init__(self) -> None:
        keys = {(item.problem_id, item.sample) for item in self.light}
        if len(keys) != len(self.light):
            raise ValueError(f"evaluation {self.name}: an item is listed twice")

    @property
    def light(self) -> Sequence[EvaluationItem]:
        """The items, perhaps without prompt, completion and reason: what every number is made of.

        Of a large evaluation only these are in memory.
        """
        light: Sequence[EvaluationItem] = getattr(self.items, "light", self.items)
        return light

    @property
    def problems(self) -> KeysView[tuple[str, str]]:
        """(id, reference) of each, in order: what makes two problems the same."""
        return dict.fromkeys((item.problem_id, item.answer) for item in self.light).keys()

    @cached_property
    def overall(self) -> Accuracy:
        """Accuracy over all scored problems, with its interval."""
        return Accuracy.of(list(self._scored.values()))

    @property
    def accuracy(self) -> float:
        return self.overall.mean

    @property
    def interval(self) -> Interval:
        return self.overall.interval

    @cached_property
    def lenient(self) -> Accuracy | None:
        """Accuracy with format left out; the gap to `overall` is format. None: not measured."""
        if any(item.lenient is None for item in self._scored_items):
            return None
        items = self._scored_items
        scores = _by(items, lambda item: item.problem_id, lambda item: float(bool(item.lenient)))
        return Accuracy.of(list(scores.values()))

    @cached_property
    def scores(self) -> dict[str, float]:
        """Problem id -> share of its samples that are correct."""
        return {name: mean_of(samples) for name, samples in self._scored.items()}

    @cached_property
    def pass_at_k(self) -> dict[int, float]:
        """Chance that at least one of k samples is correct, by k = 1, 2, 4 .. samples."""
        counts = [(len(s), round(sum(s))) for s in self._scored.values()]
        sizes = {2**i for i in range(self.samples.bit_length())} | {self.samples}
        return {
            k: mean_of([pass_at_k(n, c, k) for n, c in counts])
            for k in sorted(sizes)
            if counts and k <= min(n for n, _ in counts)
        }

    @cached_property
    def majority(self) -> float | None:
        """maj@k with k = `samples`: share of problems whose most frequent answer is right.

        Equal numbers are one answer however they are written. Of several that are equally frequent
        each counts with its share; no answer is no vote. None with one sample. Of pooled seeds
        each votes by itself: the mean of theirs.
        """
        if self.samples == 1:
            return None
        ballots = _by(
            self._scored_items,
            lambda item: (item.sample // self.samples, item.problem_id),
            lambda item: item,
        )
        return mean_of(_majority(ballot) for ballot in ballots.values())

    @cached_property
    def lenient_counts(self) -> dict[Outcome, int] | None:
        """As `split_counts`, with the answer taken from anywhere; None: not measured."""
        outcomes = [item.lenient_outcome for item in self.light]
        return None if None in outcomes else _counted(outcomes)

    @cached_property
    def split_counts(self) -> dict[Outcome, int]:
        """How many items (problems x samples) had each outcome."""
        return _counted(item.outcome for item in self.light)

    @cached_property
    def text_alone(self) -> tuple[int, int]:
        """Problems whose reference cannot be read, and how many of them are ever right."""
        unread = {item.problem_id for item in self.light if item.stage == TEXT_ALONE}
        right = {i.problem_id for i in self.light if i.problem_id in unread and i.correct}
        return len(unread), len(right)

    @cached_property
    def cut_off(self) -> float:
        """Share of all completions that ran into the token limit, with an answer or without."""
        return mean_of(item.finish_reason is FinishReason.LENGTH for item in self.light)

    @cached_property
    def mean_tokens(self) -> float:
        return mean_of(item.tokens for item in self.light)

    @cached_property
    def tokens_right(self) -> float:
        """Mean tokens of the right completions; NaN where there are none."""
        return mean_of(item.tokens for item in self.light if item.correct)

    @cached_property
    def tokens_wrong(self) -> float:
        """Mean tokens of all others."""
        return mean_of(item.tokens for item in self.light if not item.correct)

    @cached_property
    def by_subject(self) -> dict[str, Accuracy]:
        """Empty where no problem has a subject."""
        return self._parts(lambda item: item.subject)

    @cached_property
    def by_level(self) -> dict[str, Accuracy]:
        return self._parts(lambda item: item.level)

    @cached_property
    def by_length(self) -> dict[str, Accuracy]:
        """By sampled tokens, in ranges that double; a problem is in each that a sample is in."""
        ranges = _by(self._scored_items, lambda item: item.tokens.bit_length(), lambda i: i)
        found = {}
        for bits in sorted(ranges):
            scores = _by(ranges[bits], lambda i: i.problem_id, lambda i: float(i.correct))
            name = f"{2 ** (bits - 1)}-{2**bits - 1}"
            found[name] = Accuracy.of(list(scores.values()))
        return found

    @cached_property
    def metrics(self) -> Metrics | None:
        """Format, reasoning and rewards; None where they were not measured."""
        if any(item.rewards is None for item in self.light):
            return None
        lengths = [item.reasoning or 0 for item in self.light]
        return Metrics(
            format_accuracy=mean_of(item.format for item in self.light),
            answer_accuracy=self.accuracy,
            with_reasoning=mean_of(length > 0 for length in lengths),
            reasoning_length=mean_of(length for length in lengths if length > 0),
            reward=mean_of(item.reward for item in self.light),
            rewards=_mean_rewards(self.light),
        )

    @cached_property
    def rewards_by_subject(self) -> dict[str, dict[str, float]]:
        """Subject -> component (and `total`) -> mean. Empty where no problem has a subject."""
        return self._rewards_by(lambda item: item.subject)

    @cached_property
    def rewards_by_level(self) -> dict[str, dict[str, float]]:
        return self._rewards_by(lambda item: item.level)

    @property
    def numbers(self) -> dict[str, Any]:
        """All that is derived, by name, as summaries and trackers have it."""
        return {
            **self.overall.numbers,
            "lenient": None if self.lenient is None else self.lenient.numbers,
            "pass_at_k": {str(k): value for k, value in self.pass_at_k.items()},
            "maj_at_k": {} if self.majority is None else {str(self.samples): self.majority},
            "outcomes": self.split_counts,
            "outcomes_lenient": self.lenient_counts,
            "text_alone": dict(zip(("problems", "right"), self.text_alone, strict=True)),
            "cut_off": self.cut_off,
            "mean_tokens": self.mean_tokens,
            "tokens_right": self.tokens_right,
            "tokens_wrong": self.tokens_wrong,
            "metrics": None if self.metrics is None else asdict(self.metrics),
            "rewards_by_subject": self.rewards_by_subject,
            "rewards_by_level": self.rewards_by_level,
            "by_subject": {part: found.numbers for part, found in self.by_subject.items()},
            "by_level": {part: found.numbers for part, found in self.by_level.items()},
            "by_length": {part: found.numbers for part, found in self.by_length.items()},
        }

    @cached_property
    def _scored(self) -> dict[str, list[float]]:
        items = self._scored_items
        return _by(items, lambda item: item.problem_id, lambda item: float(item.correct))

    @cached_property
    def _scored_items(self) -> tuple[EvaluationItem, ...]:
        unreadable = {i.problem_id for i in self.light if i.verdict is Verdict.NOT_SCORED}
        return tuple(item for item in self.light if item.problem_id not in unreadable)

    def _rewards_by(
        self, part_of: Callable[[EvaluationItem], str | None]
    ) -> dict[str, dict[str, float]]:
        known = [item for item in self.light if item.rewards is not None]
        parts = _by(known, part_of, lambda item: item)
        return {
            name: {**_mean_rewards(items), "total": mean_of(item.reward for item in items)}
            for name, items in sorted(parts.items())
        }

    def _parts(self, part_of: Callable[[EvaluationItem], str | None]) -> dict[str, Accuracy]:
        part = {item.problem_id: part_of(item) for item in self.light}
        grouped = _by(self._scored.items(), lambda pair: part[pair[0]], lambda pair: pair[1])
        return {name: Accuracy.of(grouped[name]) for name in sorted(grouped)}


def _counted(outcomes: Iterable[Outcome | None]) -> dict[Outcome, int]:
    counts = Counter(outcomes)
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def _majority(ballot: Sequence[EvaluationItem]) -> float:
    """The share of the most frequent answers of one problem that are right."""
    votes = _by(ballot, lambda i: i.extracted and _as_vote(i.extracted), lambda i: i.correct)
    most = max(map(len, votes.values()), default=0)
    return mean_of(mean_of(vote) for vote in votes.values() if len(vote) == most) if most else 0.0


@lru_cache(maxsize=10_000)
def _as_vote(answer: str) -> str:
    r"""What equal answers have in common.

    >>> _as_vote(r"\frac12") == _as_vote("0.50"), _as_vote("x + 1") == _as_vote("x+1")
    (True, True)
    """
    text = tidy(answer)
    try:
        number = read_number(text)
    except TooLargeError:
        number = None
    return canonical(text) if number is None else f"{number.value}{'%' * number.percent}"


def mean_of(values: Iterable[float | None]) -> float:
    """The mean of what is known; NaN where nothing is.

    >>> mean_of([True, None, 0.5]), mean_of([])
    (0.75, nan)
    """
    known = [float(value) for value in values if value is not None]
    return math.fsum(known) / len(known) if known else math.nan


def _mean_rewards(items: Sequence[EvaluationItem]) -> dict[str, float]:
    names = dict.fromkeys(name for item in items for name in (item.rewards or {}))
    return {name: mean_of((item.rewards or {}).get(name) for item in items) for name in names}


def _by(
    things: Iterable[Thing], key: Callable[[Thing], Key | None], value: Callable[[Thing], Value]
) -> dict[Key, list[Value]]:
    """Values by key, in their order; what has no key is left out."""
    groups: dict[Key, list[Value]] = {}
    for thing in things:
        name = key(thing)
        if name is not None:
            groups.setdefault(name, []).append(value(thing))
    return groups
