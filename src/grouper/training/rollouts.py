"""Collecting rollouts: sample, grade while sampling goes on, then reward each group."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from grouper.models.team import Solo, Team
from grouper.rewards import RewardStack
from grouper.sampling.base import Sampler, SampleRequest, address
from grouper.sampling.graded import Drawn, Grader, draw_and_grade
from grouper.types import (
    Problem,
    Prompt,
    Reward,
    Rollout,
    RolloutGroup,
    SamplingParams,
)

__all__ = ["Collected", "collect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The rollouts of one step."""

    groups: tuple[RolloutGroup, ...]
    sample_seconds: float
    grade_seconds: float
    """Waiting for grades and rewards after the last completion came in."""


def collect(
    items: Sequence[tuple[Problem, Prompt]],
    *,
    sampler: Sampler,
    grader: Grader,
    rewards: RewardStack,
    params: SamplingParams,
    group_size: int,
    key: tuple[int | str, ...],
    seen: Counter[str] | None = None,
    team: Team | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Collected:
    """Draw `group_size` rollouts of each item.

    Args:
        items: problems with their prompts; one that is listed twice makes two groups.
        sampler: draws completions.
        grader: grades each one as it comes in.
        rewards: scores each finished group.
        params: how to draw.
        group_size: rollouts per item.
        key: what the draws depend on beside (occurrence, problem id, sample index): run seed,
            purpose and step.
        seen: how often each problem has been drawn under this key; counted on.
        team: the processes that share the requests out; rewards are given by rank 0 alone, which
            sees whole groups and keeps count of what fails.
        progress: called with (completions drawn, completions in all).
    """
    requests = _requests(items, params, group_size, key, Counter() if seen is None else seen)
    references = [problem.answer for problem, _ in items for _ in range(group_size)]
    started = time.perf_counter()
    drawn, seconds = draw_and_grade(
        requests, references, sampler=sampler, grader=grader, team=team, progress=progress
    )

    parts = list(_groups(drawn, group_size))
    scored = (team or Solo()).lead(lambda: _score(items, parts, rewards))
    groups = tuple(
        RolloutGroup(
            problem=problem,
            prompt=prompt,
            params=params,
            rollouts=tuple(
                Rollout(completion=one.completion, grade=one.grade, reward=reward)
                for one, reward in zip(part, earned, strict=True)
            ),
        )
        for (problem, prompt), part, earned in zip(items, parts, scored, strict=True)
    )
    return Collected(
        groups=groups,
        sample_seconds=seconds,
        grade_seconds=time.perf_counter() - started - seconds,
    )


def _score(
    items: Sequence[tuple[Problem, Prompt]], parts: Sequence[Sequence[Drawn]], rewards: RewardStack
) -> list[list[Reward]]:
    return [
        rewards.score(
            problem=problem,
            prompt=prompt,
            completions=[one.completion for one in part],
            grades=[one.grade for one in part],
        )
        for (problem, prompt), part in zip(items, parts, strict=True)
    ]


def _groups(drawn: Sequence[Drawn], size: int) -> Iterator[Sequence[Drawn]]:
    return (drawn[start : start + size] for start in range(0, len(drawn), size))


def _requests(
    items: Sequence[tuple[Problem, Prompt]],
    params: SamplingParams,
    group_size: int,
    key: tuple[int | str, ...],
    seen: Counter[str],
) -> list[SampleRequest]:
    requests = []
    for problem, prompt in items:
        occurrence = seen[problem.id]
        seen[problem.id] += 1
        requests += [
            SampleRequest(
                prompt=prompt, params=params, key=address(*key, occurrence, problem.id, sample)
            )
            for sample in range(group_size)
        ]
    return requests
