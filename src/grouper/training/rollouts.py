"""Collecting rollouts: sample, grade while sampling goes on, then reward each group."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from grouper.evaluation.evaluate import Grader
from grouper.rewards import RewardStack
from grouper.sampling.base import Sampler, SampleRequest, address
from grouper.types import (
    Completion,
    Grade,
    Problem,
    Prompt,
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
        progress: called with (completions drawn, completions in all).
    """
    requests = _requests(items, params, group_size, key, Counter() if seen is None else seen)
    completions: dict[int, Completion] = {}
    grades: dict[int, Future[Grade]] = {}
    started = time.perf_counter()
    for index, completion in sampler.sample(requests):
        completions[index] = completion
        grades[index] = grader.submit(completion.text, items[index // group_size][0].answer)
        if progress is not None:
            progress(len(completions), len(requests))
    sampled = time.perf_counter()
    groups = []
    for number, (problem, prompt) in enumerate(items):
        indices = range(number * group_size, (number + 1) * group_size)
        drawn = [completions[i] for i in indices]
        graded = [grades[i].result() for i in indices]
        scored = rewards.score(problem=problem, prompt=prompt, completions=drawn, grades=graded)
        rollouts = tuple(
            Rollout(completion=c, grade=g, reward=r)
            for c, g, r in zip(drawn, graded, scored, strict=True)
        )
        groups.append(
            RolloutGroup(problem=problem, prompt=prompt, params=params, rollouts=rollouts)
        )
    return Collected(
        groups=tuple(groups),
        sample_seconds=sampled - started,
        grade_seconds=time.perf_counter() - sampled,
    )


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
