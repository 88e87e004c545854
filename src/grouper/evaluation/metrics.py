"""What an evaluation says beside right and wrong: format, reasoning, and the run's rewards.

Five numbers follow how a run goes on held-out problems: format accuracy, answer accuracy, the share
of completions with reasoning, its mean length in characters, and the mean total reward. Only what
each completion gave is stored, with its item; the numbers are computed from the items.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table

from grouper.config.schema import Recipe
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.rewards import Notes, RewardStack
from grouper.rewards.builtin import format_holds
from grouper.types import AnswerFormat, AnswerKind, Problem, Prompt

if TYPE_CHECKING:
    from grouper.sampling.graded import Drawn  # which loads torch, and reading a result must not

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What one completion is like, whatever its answer is worth.

    Example: `Observed(format=True, reasoning=120, rewards={"correctness": 1.0}, reward=1.0)`.
    """

    format: bool
    """See `rewards.builtin.format_holds`."""
    reasoning: int
    """Characters of reasoning; 0: there is none."""
    rewards: Mapping[str, float | None]
    """The components; None where a function failed or did not score."""
    reward: float | None
    """Their weighted sum."""


class Behaviour:
    """Observes completions through a prompt format and the rewards of a run.

    Args:
        layout: the prompt format.
        rewards: the run's stack; what fails stops nothing.
        place: the name of the evaluation.
    """

    def __init__(self, layout: AnswerFormat, rewards: RewardStack, place: str = "") -> None:
        self._layout, self._rewards, self._place = layout, rewards, place

    @classmethod
    def where_wanted(
        cls, recipe: Recipe, layout: AnswerFormat, rewards: RewardStack, place: str = ""
    ) -> Behaviour | None:
        """None where `evaluation.rewards` is off."""
        return cls(layout, rewards, place) if recipe.evaluation.rewards else None

    def observe(
        self, items: Sequence[tuple[Problem, Prompt]], drawn: Sequence[Drawn], samples: int
    ) -> list[Observed]:
        """One a completion.

        Args:
            items: the problems with their prompts.
            drawn: `samples` completions of each problem, in order.
            samples: completions per problem.
        """
        found: list[Observed] = []
        notes = Notes(place=self._place)
        for number, (problem, prompt) in enumerate(items):
            group = drawn[number * samples : (number + 1) * samples]
            rewards = self._rewards.score(
                problem=problem,
                prompt=prompt,
                completions=[one.completion for one in group],
                grades=[one.grade for one in group],
                notes=notes,
            )
            for one, reward in zip(group, rewards, strict=True):
                text = one.completion.text
                found.append(
                    Observed(
                        format=format_holds(text, self._layout),
                        reasoning=len(reasoning_of(text, self._layout)),
                        rewards=dict(reward.components),
                        reward=reward.total,
                    )
                )
        if notes.events:
            log.warning(
                "Rewards failed on %d groups of the evaluation, which have none; the first: %s",
                len(notes.events),
                notes.events[0],
            )
        return found


def reasoning_of(text: str, layout: AnswerFormat) -> str:
    r"""The reasoning in a completion: what stands between its tags, else before the answer.

    Empty where a tag is missing. What the prompt has opened counts as written.

    >>> from grouper.prompts import FORMATS
    >>> reasoning_of(r"2 and 2, so \boxed{4}.", FORMATS["boxed"])
    '2 and 2, so'
    """
    if layout.tags is None:
        return _BEFORE_ANSWER[layout.contract.kind](text).strip()
    _, opened, rest = (layout.prefix + text).partition(layout.tags[0])
    inside, closed, _ = rest.partition(layout.tags[1])
    return inside.strip() if opened and closed else ""


_BEFORE_ANSWER: dict[AnswerKind, Callable[[str], str]] = {
    AnswerKind.TAG: lambda text: text,
    AnswerKind.BOXED: lambda text: text.rpartition("\\boxed")[0],
    AnswerKind.HASHES: lambda text: text.rpartition("####")[0],
    AnswerKind.LAST_NUMBER: lambda text: text,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The five numbers of an evaluation, and the mean of each reward. NaN where nothing counts."""

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


def metrics_of(result: EvaluationResult) -> Metrics | None:
    """The numbers of an evaluation; None where they were not asked for when it was made."""
    if any(item.rewards is None for item in result.items):
        return None
    lengths = [item.reasoning or 0 for item in result.items]
    return Metrics(
        format_accuracy=_mean(item.format for item in result.items),
        answer_accuracy=result.accuracy,
        with_reasoning=_mean(length > 0 for length in lengths),
        reasoning_length=_mean(length for length in lengths if length > 0),
        reward=_mean(item.reward for item in result.items),
        rewards=_components(result.items),
    )


def rewards_by_subject(result: EvaluationResult) -> dict[str, dict[str, float]]:
    """Subject -> component -> mean; `total` among them. Empty where no problem has a subject."""
    parts: dict[str, list[EvaluationItem]] = {}
    for item in result.items:
        if item.subject is not None and item.rewards is not None:
            parts.setdefault(item.subject, []).append(item)
    return {
        subject: {**_components(parts[subject]), "total": _mean(i.reward for i in parts[subject])}
        for subject in sorted(parts)
    }


def _components(items: Sequence[EvaluationItem]) -> dict[str, float]:
    names = dict.fromkeys(name for item in items for name in (item.rewards or {}))
    return {name: _mean((item.rewards or {}).get(name) for item in items) for name in names}


def _mean(values: Iterable[float | None]) -> float:
    known = [float(value) for value in values if value is not None]
    return math.fsum(known) / len(known) if known else math.nan


def metrics_line(result: EvaluationResult) -> str | None:
    """The five numbers in one line for a log; None where they are not known."""
    found = metrics_of(result)
    if found is None:
        return None
    length = found.reasoning_length
    shown = "" if math.isnan(length) else f" ({length:.0f} characters)"
    return (
        f"{result.name}: format {_percent(found.format_accuracy)} %, "
        f"answers {_percent(found.answer_accuracy)} %, "
        f"reasoning {_percent(found.with_reasoning)} %{shown}, "
        f"reward {_number(found.reward, 3)}"
    )


def render_metrics(results: Sequence[EvaluationResult]) -> RenderableType | None:
    """Format, reasoning and each reward, one row a result; None where nothing is known of them."""
    known = [(r.name, m) for r in results if (m := metrics_of(r)) is not None]
    if not known:
        return None
    names = list(dict.fromkeys(name for _, metrics in known for name in metrics.rewards))
    titles = ["format %", "reasoning %", "characters", "reward", *names]
    table = _table("model", titles)
    for name, metrics in known:
        table.add_row(
            name,
            _percent(metrics.format_accuracy),
            _percent(metrics.with_reasoning),
            _number(metrics.reasoning_length, 0),
            _number(metrics.reward, 3),
            *(_number(metrics.rewards.get(part, math.nan), 3) for part in names),
        )
    return table


def render_rewards_by_subject(result: EvaluationResult) -> RenderableType | None:
    """The mean of each reward by subject; None where no problem has one."""
    parts = rewards_by_subject(result)
    if not parts:
        return None
    names = list(dict.fromkeys(name for means in parts.values() for name in means))
    table = _table(f"rewards of {result.name}", names)
    for subject, means in parts.items():
        table.add_row(subject, *(_number(means.get(name, math.nan), 3) for name in names))
    return table


def _table(first: str, others: Sequence[str]) -> Table:
    style: dict[str, Any] = {"pad_edge": False, "padding": (0, 2, 0, 0), "header_style": "bold"}
    table = Table(box=None, **style)
    table.add_column(first, no_wrap=True)
    for title in others:
        table.add_column(title, justify="right")
    return table


def _percent(value: float) -> str:
    return _number(100 * value, 1)


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
