"""Rollouts of a GRPO step: sampled, graded, rewarded, resampled."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from grouper.evaluation.items import checked
from grouper.grading import Grader
from grouper.models.process_group import ProcessGroup
from grouper.rewards import Group, Notes, RewardStack
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.sampling.graded import draw_and_grade
from grouper.sampling.vllm import VllmSampler
from grouper.training.checkpoint import ROLLOUTS_FILE
from grouper.training.run import Run
from grouper.training.state import TrainState
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
    sample_seconds: float
    grade_seconds: float
    """Spent waiting for grades and rewards after the last completion."""
    logged: dict[str, Tally] = field(default_factory=dict)
    """What reward functions have logged, as metrics."""
    failed: list[str] = field(default_factory=list)
    """Where they failed, as events."""
    beside: bool = False
    """They were drawn while the step before was trained."""


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
    notes: Notes | None = None,
    processes: ProcessGroup | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RolloutBatch:
    """Draw `group_size` rollouts of each item, graded while the next ones are sampled.

    Args:
        items: problems with their prompts; one that is listed twice makes two groups.
        sampler: draws completions.
        grader: grades each one as it comes in.
        rewards: scores each finished group.
        params: how to draw.
        group_size: rollouts per item.
        key: the rest of each draw's address, before (occurrence, problem id, sample index): run
            seed, purpose and step.
        seen: how often each problem has been drawn under this key; updated.
        notes: collects reward functions that fail; None: they are ignored.
        processes: they split the requests; rewards are computed by rank 0 alone, which sees whole
            groups.
        progress: called with (completions drawn, completions in all).
    """
    seen = Counter() if seen is None else seen
    notes = notes or Notes()
    requests = []
    for problem, prompt in items:
        occurrence = seen[problem.id]
        seen[problem.id] += 1
        requests += [
            SampleRequest(
                prompt=prompt, params=params, key=draw_seed(*key, occurrence, problem.id, sample)
            )
            for sample in range(group_size)
        ]
    references = [problem.answer for problem, _ in items for _ in range(group_size)]
    started = time.perf_counter()
    drawn, seconds = draw_and_grade(
        requests, references, sampler=sampler, grader=grader, processes=processes, progress=progress
    )
    parts = [drawn[start : start + group_size] for start in range(0, len(drawn), group_size)]

    to_score = (
        Group(*item, [one.completion for one in part], [one.grade for one in part])
        for item, part in zip(items, parts, strict=True)
    )
    earned = (processes or ProcessGroup()).on_rank0(lambda: [*rewards.score_all(to_score, notes)])
    groups = tuple(
        RolloutGroup(
            problem=problem,
            prompt=prompt,
            params=params,
            rollouts=tuple(
                Rollout(completion=one.completion, grade=one.grade, reward=reward)
                for one, reward in zip(part, scored, strict=True)
            ),
        )
        for (problem, prompt), part, scored in zip(items, parts, earned, strict=True)
    )
    return RolloutBatch(
        groups=groups,
        sample_seconds=seconds,
        grade_seconds=time.perf_counter() - started - seconds,
    )


def next_rollouts(run: Run, state: TrainState) -> RolloutBatch:
    """The rollouts of this step; those of the next one are begun where the recipe says so."""
    sampler, started = run.sampler(state.replica.policy), time.perf_counter()
    earlier = dict(sampler.seconds)
    if state.ahead is None:
        rollouts = _collect_step(run, state, sampler)
        sampler.rest()
        sample_seconds, grade_seconds = rollouts.sample_seconds, rollouts.grade_seconds
    else:  # only the wait for them is of this step
        rollouts = run.processes.on_rank0(state.ahead.result)
        sample_seconds, grade_seconds = time.perf_counter() - started, 0.0
        state.ahead = None
    spent = {name: value - earlier[name] for name, value in sampler.seconds.items()}
    decode = sample_seconds - math.fsum(spent.values())
    state.clock.seconds |= {**spent, "decode": decode, "grade": grade_seconds}
    if run.recipe.grpo.max_staleness and state.step + 1 < state.total:
        assert isinstance(sampler, VllmSampler)
        held = sampler.held()
        state.clock.seconds["push"] = sampler.seconds["push"] - earlier["push"]
        # As they are now: this step changes all of it.
        position, band = rollouts.position, copy.deepcopy(state.difficulty)
        later = replace(state, step=state.step + 1, position=position, difficulty=band)
        state.ahead = run.begin_ahead(partial(_collect_step, run, later, held, beside=True))
    return rollouts


def read_ahead(folder: Path) -> Future[RolloutBatch] | None:
    """The rollouts of the next step that an intact checkpoint holds, if any."""
    file = folder / ROLLOUTS_FILE
    if not file.exists():
        return None
    ready = Future[RolloutBatch]()
    ready.set_result(checked(TypeAdapter(RolloutBatch).validate_json)(file.read_text("utf-8")))
    return ready


def _collect_step(
    run: Run, state: TrainState, sampler: Sampler, *, beside: bool = False
) -> RolloutBatch:
    """The rollouts of the next step of a state, without problems outside the difficulty band.

    With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) groups are drawn until enough of
    them are mixed, in at most `dynamic_sampling_rounds` further draws; what is still missing then
    is filled up with the first flat groups. Only correctness counts: a group whose rewards differ
    by format alone is replaced as well. The groups kept are the whole step: only they count in its
    denominators.

    Args:
        run: as in `grpo_step`.
        state: of which step, position and difficulty are read.
        sampler: draws.
        beside: the run trains meanwhile: nothing is shown, and this process draws alone.
    """
    config, seed, train, step = run.recipe.grpo, run.recipe.seed, run.prepared.train, state.step
    processes = ProcessGroup() if beside else run.processes
    position, seen = state.position, Counter[str]()
    notes = Notes(place=f"grpo {step}", global_step=step, max_steps=state.total)
    band = state.difficulty
    allowed = None if band is None else lambda index, epoch: band.allows(train[index][0].id, epoch)

    wanted = missing = config.prompts_per_step
    drawn: list[RolloutBatch] = []
    groups: list[RolloutGroup] = []
    while missing > 0 and len(drawn) <= config.dynamic_sampling_rounds:
        indices, position = state.stream.take(position, missing, allowed)
        shown = run.display.within("sampling", missing * config.group_size)
        with nullcontext(run.raise_if_ending) if beside else shown as task:
            # Ctrl-C in the middle of sampling: the step has changed nothing yet.
            moved = partial(run.moved, task, f"sampling of grpo step {step}")
            found = collect(
                [train[i] for i in indices],
                sampler=sampler,
                grader=run.prepared.grader,
                rewards=run.prepared.rewards,
                params=run.params,
                group_size=config.group_size,
                key=(seed, "grpo", step),
                seen=seen,
                notes=notes,
                processes=processes,
                progress=task if beside else moved,
            )
        drawn.append(found)
        groups += found.groups
        missing = wanted - sum(group.mixed for group in groups)
    processes.on_rank0(lambda: run.prepared.rewards.end_step(notes))
    # Stable: mixed groups first, each kind in the order it was drawn.
    ranked = sorted(range(len(groups)), key=lambda i: not groups[i].mixed)
    kept = tuple(groups[i] for i in sorted(ranked[:wanted]))
    if config.shuffle_rewards:  # the control experiment
        kept = shuffle_rewards(kept, draw_seed(seed, "shuffle", step))
    return RolloutBatch(
        groups=kept,
        replaced=tuple(groups[i] for i in sorted(ranked[wanted:])),
        rounds=len(drawn) - 1,
        position=position,
        sample_seconds=math.fsum(batch.sample_seconds for batch in drawn),
        grade_seconds=math.fsum(batch.grade_seconds for batch in drawn),
        logged=notes.tallies(),
        failed=notes.events,
        beside=beside,
    )


def shuffle_rewards(groups: Sequence[RolloutGroup], key: int) -> tuple[RolloutGroup, ...]:
    """The control experiment: grades and rewards permuted over all rollouts of the step.

    They are recorded as permuted, with texts that they do not belong to.
    """
    everything = [rollout for group in groups for rollout in group.rollouts]
    order = np.random.default_rng(key).permutation(len(everything)).tolist()
    dealt = (everything[i] for i in order)
    return tuple(
        replace(
            group,
            rollouts=tuple(
                replace(next(dealt), completion=own.completion) for own in group.rollouts
            ),
        )
        for group in groups
    )
