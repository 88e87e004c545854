"""Collect rollouts of given problems: sampled, graded while the next are sampled, rewarded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from grouper.grading import Grader
from grouper.models.process_group import ProcessGroup
from grouper.rewards import Group, RewardLog, RewardStack
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.sampling.sample_and_grade import Drawn, draw_and_grade
from grouper.training.begun import BegunGroup
from grouper.types import (
    Problem,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Tally,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Rollout groups that were drawn together, and the time spent on them."""

    groups: tuple[RolloutGroup, ...]
    """Those that take part in the step."""
    replaced: tuple[RolloutGroup, ...] = ()
    """Drawn by dynamic sampling and left out of the step."""
    rounds: int = 0
    """Further draws of dynamic sampling."""
    position: int = 0
    """In the problem stream, after them."""
    begun: tuple[BegunGroup, ...] = ()
    """Of the next step, where groups of it have begun in this one."""
    sample_seconds: float
    grade_seconds: float
    """Spent waiting for grades and rewards after the last completion."""
    logged: dict[str, Tally] = field(default_factory=dict)
    """What reward functions have logged, as metrics."""
    failed: list[str] = field(default_factory=list)
    """Where they failed, as events."""
    in_background: bool = False
    """They were drawn while the step before was trained."""

    @property
    def all_groups(self) -> tuple[RolloutGroup, ...]:
        """Every group that was drawn, those of the step first."""
        return (*self.groups, *self.replaced)


def requests_of(
    items: Sequence[tuple[Problem, Prompt]],
    *,
    params: SamplingParams,
    group_size: int,
    key: tuple[int | str, ...],
) -> tuple[list[SampleRequest], list[str]]:
    """Return the requests of each item's rollouts, neighbors in order, and their references.

    Args:
        items: problems with their prompts; one that is listed twice makes two groups.
        params: how to draw.
        group_size: rollouts per item.
        key: the rest of each draw's address, before (occurrence, problem id, sample index): run
            seed, purpose and step.
    """
    seen = Counter[str]()
    requests = []
    references = []
    for problem, prompt in items:
        occurrence = seen[problem.id]
        seen[problem.id] += 1
        for sample in range(group_size):
            address = draw_seed(*key, occurrence, problem.id, sample)
            requests.append(SampleRequest(prompt=prompt, params=params, key=address))
            references.append(problem.answer)
    return requests, references


def rewarded(
    items: Sequence[tuple[Problem, Prompt]],
    samples_of_items: Sequence[Sequence[Drawn]],
    *,
    rewards: RewardStack,
    params: SamplingParams,
    reward_log: RewardLog,
    processes: ProcessGroup,
) -> tuple[RolloutGroup, ...]:
    """Return the group of each item with the rewards of its samples.

    Args:
        items: problems with their prompts.
        samples_of_items: completions and grades of each.
        rewards: scores each group.
        params: how they were drawn.
        reward_log: collects reward functions that fail.
        processes: rewards are computed by rank 0 alone, which sees whole groups.
    """

    def to_score() -> Iterator[Group]:
        for (problem, prompt), graded in zip(items, samples_of_items, strict=True):
            completions = [sample.completion for sample in graded]
            yield Group(problem, prompt, completions, [sample.grade for sample in graded])

    rewards_of_items = processes.on_rank0(lambda: list(rewards.score_all(to_score(), reward_log)))
    groups = []
    for item, graded, scores in zip(items, samples_of_items, rewards_of_items, strict=True):
        problem, prompt = item
        rollouts = tuple(
            Rollout(completion=sample.completion, grade=sample.grade, reward=reward)
            for sample, reward in zip(graded, scores, strict=True)
        )
        groups.append(
            RolloutGroup(problem=problem, prompt=prompt, params=params, rollouts=rollouts)
        )
    return tuple(groups)


def collect(
    items: Sequence[tuple[Problem, Prompt]],
    *,
    sampler: Sampler,
    grader: Grader,
    rewards: RewardStack,
    params: SamplingParams,
    group_size: int,
    key: tuple[int | str, ...],
    progress: Callable[[int, int], None] | None = None,
) -> RolloutBatch:
    """Draw `group_size` rollouts of each item, graded while the next ones are sampled.

    Args:
        items: problems with their prompts; one that is listed twice makes two groups.
        sampler: draws completions.
        grader: grades each one as it comes in.
        rewards: scores each finished group; functions that fail are left out.
        params: how to draw.
        group_size: rollouts per item.
        key: as of `requests_of`.
        progress: called with (completions drawn, completions in all).
    """
    requests, references = requests_of(items, params=params, group_size=group_size, key=key)
    started = time.perf_counter()
    samples, sample_seconds = draw_and_grade(
        requests, references, sampler=sampler, grader=grader, progress=progress
    )
    starts = range(0, len(samples), group_size)
    groups = rewarded(
        items,
        [samples[start : start + group_size] for start in starts],
        rewards=rewards,
        params=params,
        reward_log=RewardLog(),
        processes=ProcessGroup(),
    )
    return RolloutBatch(
        groups=groups,
        sample_seconds=sample_seconds,
        grade_seconds=time.perf_counter() - started - sample_seconds,
    )
