"""The result of an evaluation: its items, and every number derived from them.

Only the items and the settings are stored; accuracies, splits and intervals are computed from
the items on construction, so that a summary can never disagree with its items.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, KeysView, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

from pydantic import ConfigDict

from grouper.evaluation.statistics import Interval, mean_interval, pass_at_k
from grouper.grading import TEXT_ALONE
from grouper.grading.normalize import canonical, tidy
from grouper.grading.numbers import TooLargeError, read_number
from grouper.types import FinishReason, Verdict

Element = TypeVar("Element")
Key = TypeVar("Key", bound=Hashable)
Outcome = Literal["correct", "wrong", "no_answer", "truncated", "timeout", "crash", "not_scored"]

# The four-way split, then the outcomes that are no verdict on the model and are counted apart.
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

OUTCOME_NAMES: dict[Outcome, str] = {
    "correct": "correct",
    "wrong": "wrong",
    "no_answer": "no answer",
    "truncated": "truncated",
    "timeout": "timeout",
    "crash": "crash",
    "not_scored": "not scored",
}
"""Outcome -> its name in tables, badges and filters."""

_WRONG = (Verdict.INCORRECT, Verdict.UNPARSEABLE)


def outcome_of(verdict: Verdict, finish_reason: FinishReason) -> Outcome:
    """Return the outcome of a completion: a wrong answer, none, or none before it was truncated.

    >>> outcome_of(Verdict.NO_ANSWER, FinishReason.LENGTH)
    'truncated'
    >>> outcome_of(Verdict.UNPARSEABLE, FinishReason.LENGTH)
    'wrong'
    """
    if verdict is Verdict.NO_ANSWER and finish_reason is FinishReason.LENGTH:
        return "truncated"
    if verdict in _WRONG:
        return "wrong"
    # The other verdicts are outcomes of the same names.
    return cast("Outcome", verdict.value)


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
    """True if the math is right wherever the answer is, in any format (never less than the
    verdict); None where the reference cannot be read, or this was not measured."""
    format: bool | None = None
    """True if it is in the prompt's format, see `rewards.builtin.format_holds`. This and the next
    three are None where rewards were not measured."""
    reasoning: int | None = None
    """Characters of reasoning; 0: there is none."""
    rewards: Mapping[str, float | None] | None = None
    """The components of the run's reward; None within: not scored."""
    reward: float | None = None
    """The weighted sum of the rewards; also None where one with a weight was not scored."""
    lenient_verdict: Verdict | None = None
    """The verdict on the answer found in any format; None where this was not measured."""
    logprob: float | None = None
    """Mean log-prob of the sampled tokens in nats: how certain the model was; None where it was not
    kept."""

    @property
    def outcome(self) -> Outcome:
        """The four-way split: a completion without an answer may be `truncated`."""
        return outcome_of(self.verdict, self.finish_reason)

    @property
    def lenient_outcome(self) -> Outcome | None:
        """The outcome with the answer taken from anywhere; None where this was not measured."""
        if self.lenient_verdict is None:
            return None
        return outcome_of(self.lenient_verdict, self.finish_reason)

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
        interval = mean_interval(scores)
        return cls(mean=mean_of(means), interval=interval, problems=len(scores))

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers by name, as in summaries."""
        return {
            "accuracy": self.mean,
            "low": self.interval.low,
            "high": self.interval.high,
            "problems": self.problems,
        }


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
    """Mean characters of reasoning, over the completions that have any."""
    reward: float
    """Mean total reward, over the completions that were scored."""
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
    """Items in the order of the problems, then of the samples; each exactly once. Those of a file
    (`StoredItems`) are read for each use."""
    samples: int
    """Completions per problem."""
    card: Mapping[str, Any] = field(default_factory=dict)
    """Settings for measuring the same again: prompt of item 0, sampling, grader, n, k, seed."""

    def __post_init__(self) -> None:
        keys = {(item.problem_id, item.sample) for item in self.slim}
        if len(keys) != len(self.slim):
            raise ValueError(f"evaluation {self.name}: an item is listed twice")

    @property
    def slim(self) -> Sequence[EvaluationItem]:
        """The items, perhaps without prompt, completion and reason; every number follows from them.

        Of a large evaluation only these are in memory.
        """
        slim: Sequence[EvaluationItem] = getattr(self.items, "slim", self.items)
        return slim

    @property
    def problems(self) -> KeysView[tuple[str, str]]:
        """(id, reference) of each problem, in order; two problems with equal ones are the same."""
        return dict.fromkeys((item.problem_id, item.answer) for item in self.slim).keys()

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
        """Accuracy in any format; the gap to `overall` is due to format. None: not measured."""
        if self._lenient_scored is None:
            return None
        return Accuracy.of(list(self._lenient_scored.values()))

    @property
    def lenient_scores(self) -> dict[str, float] | None:
        """Problem id -> share of its samples that are right in any format. None: not measured."""
        if self._lenient_scored is None:
            return None
        return {name: mean_of(samples) for name, samples in self._lenient_scored.items()}

    @cached_property
    def _lenient_scored(self) -> dict[str, list[float]] | None:
        """Problem id -> score of each sample in any format."""
        scores: dict[str, list[float]] = {}
        for item in self.scored_items:
            if item.lenient is None:
                return None
            scores.setdefault(item.problem_id, []).append(float(item.lenient))
        return scores

    @cached_property
    def scores(self) -> dict[str, float]:
        """Problem id -> share of its samples that are correct."""
        return {name: mean_of(samples) for name, samples in self._scored.items()}

    @cached_property
    def pass_at_k(self) -> dict[int, float]:
        """Chance that at least one of k samples is correct, by k = 1, 2, 4 .. samples."""
        counts = [(len(scores), round(sum(scores))) for scores in self._scored.values()]
        fewest = min((n for n, _ in counts), default=0)
        sizes = {2**i for i in range(self.samples.bit_length())}
        sizes.add(self.samples)
        chances = {}
        for k in sorted(sizes):
            if k <= fewest:
                chances[k] = mean_of(pass_at_k(n, correct, k) for n, correct in counts)
        return chances

    @cached_property
    def majority(self) -> float | None:
        """maj@k with k = `samples`: share of problems whose most frequent answer is right.

        Equal numbers are one answer however they are written. If several answers are equally
        frequent, each counts with its share; no answer is no vote. None with one sample. Pooled
        seeds vote separately, and the result is their mean.
        """
        if self.samples == 1:
            return None

        def ballot_of(item: EvaluationItem) -> tuple[int, str]:
            # The samples of pooled seeds are numbered consecutively.
            seed_number = item.sample // self.samples
            return seed_number, item.problem_id

        ballots = group_by(self.scored_items, ballot_of)
        return mean_of(majority_of(ballot) for ballot in ballots.values())

    @cached_property
    def lenient_counts(self) -> dict[Outcome, int] | None:
        """Number of items by outcome, with the answer taken from anywhere; None: not measured."""
        outcomes = [item.lenient_outcome for item in self.slim]
        if None in outcomes:
            return None
        return _count(outcomes)

    @cached_property
    def split_counts(self) -> dict[Outcome, int]:
        """Number of items (problems x samples) by outcome."""
        return _count(item.outcome for item in self.slim)

    @cached_property
    def text_alone(self) -> tuple[int, int]:
        """Problems whose reference cannot be read, and the number of them that are ever right."""
        unreadable = set()
        right = set()
        for item in self.slim:
            if item.stage == TEXT_ALONE:
                unreadable.add(item.problem_id)
            if item.correct:
                right.add(item.problem_id)
        return len(unreadable), len(unreadable & right)

    @cached_property
    def cut_off(self) -> float:
        """Share of all completions that ran into the token limit, with an answer or without."""
        return mean_of(item.finish_reason is FinishReason.LENGTH for item in self.slim)

    @cached_property
    def mean_tokens(self) -> float:
        return mean_of(item.tokens for item in self.slim)

    @cached_property
    def tokens_right(self) -> float:
        """Mean tokens of the correct completions; NaN where there are none."""
        return mean_of(item.tokens for item in self.slim if item.correct)

    @cached_property
    def tokens_wrong(self) -> float:
        """Mean tokens of all other completions."""
        return mean_of(item.tokens for item in self.slim if not item.correct)

    @cached_property
    def by_subject(self) -> dict[str, Accuracy]:
        """Accuracy by subject. Empty where no problem has one."""
        return self._accuracies(lambda item: item.subject)

    @cached_property
    def by_level(self) -> dict[str, Accuracy]:
        return self._accuracies(lambda item: item.level)

    @cached_property
    def by_length(self) -> dict[str, Accuracy]:
        """Accuracy by sampled tokens, in ranges that double.

        A problem is in each range that one of its samples is in.
        """
        ranges = group_by(self.scored_items, lambda item: item.tokens.bit_length())
        accuracies = {}
        for bits, items in sorted(ranges.items()):
            name = f"{2 ** (bits - 1)}-{2**bits - 1}"
            scores = _scores(items)
            accuracies[name] = Accuracy.of(list(scores.values()))
        return accuracies

    @cached_property
    def metrics(self) -> Metrics | None:
        """Format, reasoning and rewards; None where they were not measured."""
        if any(item.rewards is None for item in self.slim):
            return None
        lengths = [item.reasoning or 0 for item in self.slim]
        return Metrics(
            format_accuracy=mean_of(item.format for item in self.slim),
            answer_accuracy=self.accuracy,
            with_reasoning=mean_of(length > 0 for length in lengths),
            reasoning_length=mean_of(length for length in lengths if length > 0),
            reward=mean_of(item.reward for item in self.slim),
            rewards=_mean_rewards(self.slim),
        )

    @cached_property
    def rewards_by_subject(self) -> dict[str, dict[str, float]]:
        """Subject -> component (and `total`) -> mean. Empty where no problem has a subject."""
        return self._mean_rewards_by(lambda item: item.subject)

    @cached_property
    def rewards_by_level(self) -> dict[str, dict[str, float]]:
        return self._mean_rewards_by(lambda item: item.level)

    @property
    def numbers(self) -> dict[str, Any]:
        """All derived numbers by name, as in summaries and trackers."""
        unreadable, right = self.text_alone
        maj_at_k = {}
        if self.majority is not None:
            maj_at_k[str(self.samples)] = self.majority
        return {
            **self.overall.numbers,
            "lenient": None if self.lenient is None else self.lenient.numbers,
            "pass_at_k": {str(k): value for k, value in self.pass_at_k.items()},
            "maj_at_k": maj_at_k,
            "outcomes": self.split_counts,
            "outcomes_lenient": self.lenient_counts,
            "text_alone": {"problems": unreadable, "right": right},
            "cut_off": self.cut_off,
            "mean_tokens": self.mean_tokens,
            "tokens_right": self.tokens_right,
            "tokens_wrong": self.tokens_wrong,
            "metrics": None if self.metrics is None else asdict(self.metrics),
            "rewards_by_subject": self.rewards_by_subject,
            "rewards_by_level": self.rewards_by_level,
            "by_subject": _numbers_of(self.by_subject),
            "by_level": _numbers_of(self.by_level),
            "by_length": _numbers_of(self.by_length),
        }

    @cached_property
    def _scored(self) -> dict[str, list[float]]:
        """Problem id -> score of each sample."""
        return _scores(self.scored_items)

    @cached_property
    def scored_items(self) -> tuple[EvaluationItem, ...]:
        """The items of problems whose samples were all scored."""
        not_scored = {item.problem_id for item in self.slim if item.verdict is Verdict.NOT_SCORED}
        return tuple(item for item in self.slim if item.problem_id not in not_scored)

    def _mean_rewards_by(
        self, name_of: Callable[[EvaluationItem], str | None]
    ) -> dict[str, dict[str, float]]:
        """Return subject or level -> component (and `total`) -> mean."""
        with_rewards = [item for item in self.slim if item.rewards is not None]
        groups = group_by(with_rewards, name_of)
        means = {}
        for name in sorted(groups, key=_number_order):
            items = groups[name]
            total = mean_of(item.reward for item in items)
            means[name] = {**_mean_rewards(items), "total": total}
        return means

    def _accuracies(self, name_of: Callable[[EvaluationItem], str | None]) -> dict[str, Accuracy]:
        """Return subject or level -> accuracy; a problem belongs to that of its last item."""
        names = {item.problem_id: name_of(item) for item in self.slim}
        groups = group_by(self._scored, names.__getitem__)
        accuracies = {}
        for name in sorted(groups, key=_number_order):
            scores = [self._scored[problem_id] for problem_id in groups[name]]
            accuracies[name] = Accuracy.of(scores)
        return accuracies


def _number_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key by which `2 steps` comes before `10 steps`."""
    key = []
    for piece in re.findall(r"[0-9]{1,18}|[^0-9]+", name):
        if piece.isascii() and piece.isdigit():
            key.append((0, int(piece), ""))
        else:
            key.append((1, 0, piece))
    return key


def _numbers_of(accuracies: Mapping[str, Accuracy]) -> dict[str, dict[str, float]]:
    return {name: accuracy.numbers for name, accuracy in accuracies.items()}


def _scores(items: Iterable[EvaluationItem]) -> dict[str, list[float]]:
    """Return problem id -> score of each of its items, in order."""
    scores: dict[str, list[float]] = {}
    for item in items:
        scores.setdefault(item.problem_id, []).append(float(item.correct))
    return scores


def _count(outcomes: Iterable[Outcome | None]) -> dict[Outcome, int]:
    counts = Counter(outcomes)
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def majority_of(ballot: Sequence[EvaluationItem]) -> float:
    """Return the share of the most frequent answers of one problem that are right."""
    votes = group_by(ballot, lambda item: item.extracted and _as_vote(item.extracted))
    if not votes:
        return 0.0
    most = max(len(items) for items in votes.values())
    winners = [items for items in votes.values() if len(items) == most]
    return mean_of(mean_of(item.correct for item in items) for items in winners)


@lru_cache(maxsize=10_000)
def _as_vote(answer: str) -> str:
    r"""Put an answer in a form that is equal for equal answers.

    >>> _as_vote(r"\frac12") == _as_vote("0.50"), _as_vote("x + 1") == _as_vote("x+1")
    (True, True)
    """
    text = tidy(answer)
    try:
        number = read_number(text)
    except TooLargeError:
        number = None
    if number is None:
        return canonical(text)
    return f"{number.value}%" if number.percent else str(number.value)


def mean_of(values: Iterable[float | None]) -> float:
    """Return the mean of the values that are not None; NaN where there are none.

    >>> mean_of([True, None, 0.5]), mean_of([])
    (0.75, nan)
    """
    numbers = [float(value) for value in values if value is not None]
    if not numbers:
        return math.nan
    return math.fsum(numbers) / len(numbers)


def _mean_rewards(items: Sequence[EvaluationItem]) -> dict[str, float]:
    """Return the mean of each component."""
    rewards = [item.rewards or {} for item in items]
    names = dict.fromkeys(name for components in rewards for name in components)
    return {name: mean_of(components.get(name) for components in rewards) for name in names}


def group_by(
    elements: Iterable[Element], key: Callable[[Element], Key | None]
) -> dict[Key, list[Element]]:
    """Group elements by key, in their order; those without a key are left out."""
    groups: dict[Key, list[Element]] = {}
    for element in elements:
        name = key(element)
        if name is not None:
            groups.setdefault(name, []).append(element)
    return groups
