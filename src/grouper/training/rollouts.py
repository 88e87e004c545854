"""The source of rollouts of GRPO: which problems come next, and their rollouts."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from grouper.evaluation.items import checked
from grouper.files import dumps, write_atomic
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.rewards import RewardLog
from grouper.sampling.base import (
    AdmittingSampler,
    ModelSampler,
    Sampler,
    draw_seed,
)
from grouper.sampling.turns import TurnSampler
from grouper.sampling.vllm.sampler import VllmSampler
from grouper.training.begun import BegunGroup, requests_of_begun
from grouper.training.collect import RolloutBatch, requests_of, rewarded
from grouper.training.curriculum import DifficultyBand, ProblemStream
from grouper.training.resampling import Candidates, draw_candidates
from grouper.training.run import Run
from grouper.types import RolloutGroup

# In a resumable checkpoint: the rollouts of the next step, where they have been drawn already, or
# those that have begun.
ROLLOUTS_FILE = "ahead.json"
BEGUN_FILE = "begun.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """Which step draws rollouts, and from where on in the problem stream."""

    step: int
    """Steps finished before it."""
    total: int
    """Steps of the phase."""
    position: int
    band: DifficultyBand | None
    """Problems outside of it are passed over."""
    mixed_share: float | None = None
    """Of groups, as far as is known; None: none is drawn before it is certainly needed."""
    begun: tuple[BegunGroup, ...] = ()
    """The first groups of the step, which have begun in the step before."""
    ahead: bool = False
    """Whether groups of the next step may begin in this one."""


@dataclass(frozen=True, slots=True)
class TakenProblem:
    """A problem of the stream."""

    index: int
    position: int
    """In the stream, after it."""


class RolloutSource:
    """Draws the rollouts of one GRPO step after the other.

    With `grpo.max_staleness` a vLLM server draws the rollouts of the next step while this one is
    trained. The native sampler begins them in slots that the last sequences of this step leave
    free, and goes on with them in the next step, with the weights of that.

    Args:
        run: what is asked for problems, sampler, grader and rewards.
        stream: the order of the problems.
        band: passes over problems that are too easy or too hard.
    """

    def __init__(self, run: Run, stream: ProblemStream, band: DifficultyBand | None = None) -> None:
        self.stream = stream
        self.position = 0
        """Of the next step in the problem stream; problems passed over or replaced count, too."""
        self.band = band
        self.next_rollouts: Future[RolloutBatch] | None = None
        """Of the next step, where they are drawn while this one is trained."""
        self.begun: tuple[BegunGroup, ...] = ()
        """Of the next step, where they have begun in the last one."""
        self.seconds: dict[str, float] = {}
        """Where the time of the last `draw` went, named as the metrics `time.*` are."""
        self._run = run
        self._mixed_share = 1.0
        """Of the groups of the last step. It changes what is drawn early, and no result, so that no
        checkpoint needs it."""

    @property
    def epoch(self) -> int:
        """The pass over the problems that the position is in."""
        return self.position // self.stream.size

    def draw(self, policy: Policy, *, step: int, total: int) -> RolloutBatch:
        """Return the rollouts of a step, and begin to draw the next ones where the recipe says so.

        Args:
            policy: samples.
            step: steps finished before it.
            total: steps of the phase.

        Raises:
            Interrupted: while sampling; nothing has changed yet.
            RewardError: a reward function failed on too many groups.
        """
        sampler = self._run.models.sampler(policy)
        seconds_before = dict(sampler.seconds)
        ahead = bool(self._run.recipe.grpo.max_staleness) and step + 1 < total
        # A GPU reads the same weights for more rows, so that they cost little; a CPU has no room.
        # What begins for the next step fills that room, too, and must not depend on when grades
        # are there.
        early = policy.device.type == "cuda" and not ahead
        place = StepPlace(
            step=step,
            total=total,
            position=self.position,
            band=self.band,
            mixed_share=self._mixed_share if early else None,
            begun=self.begun,
            ahead=ahead and isinstance(sampler, AdmittingSampler),
        )
        if self.next_rollouts is None:
            rollouts = collect_step(self._run, self.stream, place, sampler)
            sampler.rest()
            sample_seconds = rollouts.sample_seconds
            grade_seconds = rollouts.grade_seconds
        else:
            rollouts, sample_seconds = self._wait_for_rollouts(self.next_rollouts)
            grade_seconds = 0.0
        spent = {name: value - seconds_before[name] for name, value in sampler.seconds.items()}
        decode_seconds = sample_seconds - math.fsum(spent.values())
        self.seconds = {**spent, "decode": decode_seconds, "grade": grade_seconds}
        if ahead and not place.ahead:
            self._begin_next(sampler, place, rollouts)
            self.seconds["push"] = sampler.seconds["push"] - seconds_before["push"]
        return rollouts

    def advance(self, rollouts: RolloutBatch) -> None:
        """Move past the rollouts of a finished step."""
        if self.band is not None:
            self.band.update(rollouts.all_groups, self.epoch)
        self.position = rollouts.position
        self.begun = rollouts.begun
        groups = rollouts.all_groups
        self._mixed_share = sum(group.mixed for group in groups) / len(groups)

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it, as JSON values."""
        return {
            "position": self.position,
            "difficulty": None if self.band is None else self.band.seen,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved` has returned; a band that is new begins afresh."""
        self.position = saved["position"]
        if self.band is not None and saved["difficulty"] is not None:
            self.band.seen = dict(saved["difficulty"])

    def count_left_out(self) -> int | None:
        """Count the problems outside the difficulty band; None without one."""
        if self.band is None:
            return None
        problems = self._run.prepared.train
        return sum(not self.band.allows(problem.id, self.epoch) for problem, _ in problems)

    def _wait_for_rollouts(self, pending: Future[RolloutBatch]) -> tuple[RolloutBatch, float]:
        """Wait for the rollouts that were drawn in the background; only the wait is of this step.

        Returns:
            The rollouts, and the seconds that they were waited for.
        """
        started = time.perf_counter()
        rollouts = self._run.processes.on_rank0(pending.result)
        self.next_rollouts = None
        return rollouts, time.perf_counter() - started

    def _begin_next(self, sampler: ModelSampler, place: StepPlace, rollouts: RolloutBatch) -> None:
        """Begin to draw the rollouts of the next step, with the weights as they are now."""
        assert isinstance(sampler, VllmSampler | TurnSampler)
        next_place = replace(
            place,
            step=place.step + 1,
            position=rollouts.position,
            begun=(),
            # A copy: this step is going to change the band.
            band=copy.deepcopy(self.band),
        )
        pinned = sampler.pinned()
        draw = partial(collect_step, self._run, self.stream, next_place, pinned, in_background=True)
        self.next_rollouts = self._run.background.begin_rollouts(draw)

    def write_next(self, checkpoint: Path) -> None:
        """Write what there is of the next step's rollouts to the folder of a checkpoint."""
        if self.begun:
            begun = to_jsonable_python(self.begun)
            write_atomic(checkpoint / BEGUN_FILE, dumps(begun).encode())
        pending = self.next_rollouts
        # If sampling has failed, the next step reports it.
        if pending is not None and pending.exception() is None:
            rollouts = to_jsonable_python(pending.result(), fallback=str)
            write_atomic(checkpoint / ROLLOUTS_FILE, dumps(rollouts).encode())

    def read_next(self, checkpoint: Path) -> None:
        """Read what `write_next` has written to an intact checkpoint."""
        begun = checkpoint / BEGUN_FILE
        if begun.exists():
            read = checked(TypeAdapter(tuple[BegunGroup, ...]).validate_json)
            self.begun = read(begun.read_text("utf-8"))
        rollouts = checkpoint / ROLLOUTS_FILE
        if rollouts.exists():
            ready = Future[RolloutBatch]()
            read_batch = checked(TypeAdapter(RolloutBatch).validate_json)
            ready.set_result(read_batch(rollouts.read_text("utf-8")))
            self.next_rollouts = ready


def collect_step(
    run: Run,
    stream: ProblemStream,
    place: StepPlace,
    sampler: Sampler,
    *,
    in_background: bool = False,
) -> RolloutBatch:
    """Draw the rollouts of a step, without problems outside the difficulty band.

    With dynamic sampling groups are drawn until enough of them are mixed, as `resampling` says;
    what is missing at its end is filled up with the first flat groups. Only correctness counts: a
    group whose rewards differ by format alone is replaced as well. The groups kept are the whole
    step: only they count in its denominators.

    Args:
        run: what is asked for problems, grader and rewards.
        stream: the order of the problems.
        place: the step, and where it begins in the stream.
        sampler: draws.
        in_background: the run trains meanwhile: nothing is displayed, and this process draws alone.
    """
    config = run.recipe.grpo
    seed = run.recipe.seed
    processes = ProcessGroup() if in_background else run.processes
    reward_log = RewardLog(
        place=f"grpo {place.step}", global_step=place.step, max_steps=place.total
    )
    taken, candidates = _candidates_of(run, stream, place)
    with _progress(run, place, in_background=in_background) as progress:
        sample_seconds = draw_candidates(
            candidates,
            sampler=sampler,
            grader=run.prepared.grader,
            processes=processes,
            progress=progress,
        )
    started = time.perf_counter()
    drawn, rounds = candidates.needed()
    items = [run.prepared.train[problem.index] for problem in taken[:drawn]]
    groups = rewarded(
        items,
        candidates.results(),
        rewards=run.prepared.rewards,
        params=run.params,
        reward_log=reward_log,
        processes=processes,
    )
    processes.on_rank0(lambda: run.prepared.rewards.end_step(reward_log))
    begun = []
    # There are more candidates than have begun.
    for problem, samples in zip(taken[drawn:], candidates.begun(), strict=False):
        group = BegunGroup(index=problem.index, position=problem.position, samples=tuple(samples))
        begun.append(group)
    kept, replaced = split_by_signal(groups, config.prompts_per_step)
    if config.shuffle_rewards:  # the control experiment
        kept = shuffle_rewards(kept, draw_seed(seed, "shuffle", place.step))
    return RolloutBatch(
        groups=kept,
        replaced=replaced,
        rounds=rounds,
        position=taken[drawn - 1].position,
        begun=tuple(begun),
        sample_seconds=sample_seconds,
        grade_seconds=candidates.wait_seconds + time.perf_counter() - started,
        logged=reward_log.tallies(),
        failed=reward_log.events,
        in_background=in_background,
    )


def _candidates_of(
    run: Run, stream: ProblemStream, place: StepPlace
) -> tuple[list[TakenProblem], Candidates]:
    """Return the problems that a step may need, those that have begun first, and their groups."""
    config = run.recipe.grpo
    # At most one step ahead: the next step needs at least as many groups as may begin now.
    ahead = config.prompts_per_step if place.ahead else 0
    most = config.prompts_per_step * (1 + config.dynamic_sampling_rounds) + ahead
    taken = [TakenProblem(group.index, group.position) for group in place.begun]
    position = taken[-1].position if taken else place.position
    following = stream.each(position, _allowed_by(place.band, run))
    for index, after in itertools.islice(following, most - len(taken)):
        taken.append(TakenProblem(index, after))
    items = [run.prepared.train[problem.index] for problem in taken]
    begun_items = items[: len(place.begun)]
    requests, references = requests_of_begun(begun_items, place.begun, run.params)
    new_requests, new_references = requests_of(
        items[len(place.begun) :],
        params=run.params,
        group_size=config.group_size,
        key=(run.recipe.seed, "grpo", place.step),
    )
    candidates = Candidates(
        requests + new_requests,
        references + new_references,
        group_size=config.group_size,
        count=config.prompts_per_step,
        rounds=config.dynamic_sampling_rounds,
        mixed_share=place.mixed_share,
        ahead=ahead,
    )
    samples = itertools.chain.from_iterable(group.samples for group in place.begun)
    for number, sample in enumerate(samples):
        if sample.completion is not None:
            grade = run.prepared.grader.submit(sample.completion.text, references[number])
            candidates.add(number, sample.completion, grade)
    return taken, candidates


def split_by_signal(
    groups: Sequence[RolloutGroup], count: int
) -> tuple[tuple[RolloutGroup, ...], tuple[RolloutGroup, ...]]:
    """Split groups into those of a step, mixed ones first, and those that are left out.

    Args:
        groups: in the order in which they were drawn, which both parts keep.
        count: of the step.
    """
    # Stable: among the mixed groups, and among the others, the first ones are kept.
    mixed_first = sorted(range(len(groups)), key=lambda index: not groups[index].mixed)
    kept = tuple(groups[index] for index in sorted(mixed_first[:count]))
    replaced = tuple(groups[index] for index in sorted(mixed_first[count:]))
    return kept, replaced


def _allowed_by(band: DifficultyBand | None, run: Run) -> Callable[[int, int], bool] | None:
    """Return what tells from (index, epoch) whether to sample a problem; None: all of them."""
    if band is None:
        return None
    problems = run.prepared.train
    return lambda index, epoch: band.allows(problems[index][0].id, epoch)


@contextmanager
def _progress(
    run: Run, place: StepPlace, *, in_background: bool
) -> Iterator[Callable[[int, int], None]]:
    """Yield what is called with (completions drawn, completions in all), and may interrupt."""
    if in_background:
        yield run.stop.raise_if_ended
        return
    config = run.recipe.grpo
    with run.display.within("sampling", config.prompts_per_step * config.group_size) as task:
        # Ctrl-C in the middle of sampling: the step has changed nothing yet.
        yield partial(run.stop.tick, task, f"sampling of grpo step {place.step}")


def shuffle_rewards(groups: Sequence[RolloutGroup], key: int) -> tuple[RolloutGroup, ...]:
    """Permute grades and rewards over all rollouts of a step: the control experiment.

    They are recorded as permuted, with texts that they do not belong to.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    order = np.random.default_rng(key).permutation(len(rollouts)).tolist()
    dealt = iter([rollouts[index] for index in order])
    shuffled = []
    for group in groups:
        mixed_up = tuple(
            replace(next(dealt), completion=rollout.completion) for rollout in group.rollouts
        )
        shuffled.append(replace(group, rollouts=mixed_up))
    return tuple(shuffled)
