"""Group relative policy optimisation: sample, grade, reward, compare within groups, update."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from torch import Tensor

from grouper.algorithms.batching import TrainBatch
from grouper.config.schema import GRPOConfig
from grouper.sampling.base import address
from grouper.tracking.samples import format_sample
from grouper.training.checkpoint import TrainState
from grouper.training.difficulty import DifficultyBand, read_pass_rates
from grouper.training.experience import Experience, make_experience
from grouper.training.group_signal import rollout_tallies, shuffle_rewards, status_of
from grouper.training.objectives import grpo_objective
from grouper.training.optimizers import schedule
from grouper.training.resampling import Resampled, resample
from grouper.training.rollouts import Collected, collect
from grouper.training.scoring import Scorer
from grouper.training.session import Session
from grouper.training.metrics import StepTimes
from grouper.training.curriculum import ProblemStream, total_steps
from grouper.training.update import UpdateResult, update
from grouper.types import Problem, Prompt, RolloutGroup, StepReport, Tally, Verdict, merge_tallies

__all__ = ["GRPOPhase", "difficulty_band"]


class GRPOPhase:
    """Raises the probability of what scored better than the rest of its group.

    Args:
        session: the open run.
        state: policy and optimizer, at the step to go on from.
        reference: the weights the KL term holds on to; needed when `beta` is not 0.
    """

    name = "grpo"

    def __init__(
        self, session: Session, state: TrainState, reference: dict[str, Tensor] | None = None
    ) -> None:
        self.config = session.recipe.grpo
        self.state = state
        self._session = session
        self._seed = session.recipe.seed
        assert self.config.beta == 0 or reference is not None, "a KL term needs its reference"
        self._sampler = session.sampler(state.policy)
        self._times = StepTimes(state.policy, session.team.size)
        budget = self.config.tokens_per_micro_batch
        self._scorer = Scorer(state.replica, budget, reference, told=self._times.scored)
        self._objective = grpo_objective(self.config)
        size, per_step = len(session.inputs.train), self.config.prompts_per_step
        self.total = total_steps(self.config, size=size, per_step=per_step)
        self._stream = ProblemStream(size=size, per_step=per_step, seed=self._seed, phase=self.name)

    def step(self) -> StepReport:
        """One rollout batch and the optimizer steps it has a signal for."""
        self._times.begin()
        number = self.state.step
        epoch = self._stream.epoch(self.state.position)
        self._session.rewards.begin_step(number, self.total)
        found, position = self._collect(number)
        groups = self._credited(found.groups, number)
        with self._times.updating():
            experience = make_experience(
                groups,
                self.config,
                self._scorer,
                max_new_tokens=self._session.max_new_tokens,
            )
            results = self._update(experience, number)
        self._count(found, results, position, epoch)
        self._record(found, groups, experience.advantages)
        self._show_sample(groups)
        failed = self._session.rewards.take_events()
        scale = schedule(self.config.optimizer, number, self.total)
        tallies = {
            **self._session.rewards.logged(),
            **rollout_tallies(groups, experience.advantages),
            **experience.tallies,
            **self._signal_tallies(found),
            **merge_tallies([result.tallies for result in results]),
            "updates": Tally.of([sum(result.applied for result in results)]),
            "rewards/failed": Tally.of([len(failed)]),
            "learning_rate": Tally.of([scale * self.config.optimizer.learning_rate]),
            **self._times.tallies(),
        }
        return StepReport(
            phase=self.name,
            step=self.state.step,
            tallies=tallies,
            status=status_of(
                groups,
                applied=any(result.applied for result in results),
                any_advantage=any(any(values) for values in experience.advantages),
            ),
            events=(*_events(groups), *(e for result in results for e in result.events), *failed),
        )

    def _collect(self, number: int) -> tuple[Resampled, int]:
        """The groups of the step, and the position of the problem stream after them."""
        position, seen = self.state.position, Counter[str]()
        self._sampler.times.take()  # what an evaluation took is no part of the step

        def draw(count: int) -> Collected:
            nonlocal position
            indices, position = self._stream.take(position, count, self._wanted)
            return self._draw([self._session.inputs.train[i] for i in indices], number, seen)

        found = resample(
            draw, wanted=self.config.prompts_per_step, rounds=self.config.max_resample_rounds
        )
        prefill = self._sampler.times.take()
        self._times.sampled((*found.groups, *found.replaced))
        self._times.took(
            prefill=prefill, decode=found.sample_seconds - prefill, grade=found.grade_seconds
        )
        return found, position

    def _wanted(self, index: int, epoch: int) -> bool:
        band = self.state.difficulty
        return band is None or band.allows(self._session.inputs.train[index][0].id, epoch)

    def _draw(
        self, items: list[tuple[Problem, Prompt]], number: int, seen: Counter[str]
    ) -> Collected:
        session = self._session
        with session.display.within("sampling", len(items) * self.config.group_size) as task:

            def progress(done: int, total: int) -> None:
                task(done, total)
                # Ctrl-C in the middle of sampling: the step has changed nothing yet.
                session.raise_if_stopped(f"sampling of {self.name} step {number}")

            return collect(
                items,
                sampler=self._sampler,
                grader=session.grader,
                rewards=session.rewards,
                params=session.training_params(),
                group_size=self.config.group_size,
                key=(self._seed, self.name, number),
                seen=seen,
                team=session.team,
                progress=progress,
            )

    def _credited(self, groups: tuple[RolloutGroup, ...], number: int) -> tuple[RolloutGroup, ...]:
        """The groups with the rewards they learn from: their own, but for the control run."""
        if not self.config.shuffle_rewards:
            return groups
        return shuffle_rewards(groups, address(self._seed, "shuffle", number))

    def _update(self, experience: Experience, number: int) -> list[UpdateResult]:
        """The optimizer steps of all passes; none where the gradient is zero by construction."""
        return [
            self._one_update(batch, number)
            for pass_number in range(self.config.passes_per_batch)
            for batch in experience.steps(self._order(experience, number, pass_number))
        ]

    def _one_update(self, batch: TrainBatch, number: int) -> UpdateResult:
        config = self.config
        self._times.trained(batch)
        return update(
            self.state.policy,
            batch,
            self._objective,
            self.state.optimizer,
            scale=schedule(config.optimizer, number, self.total),
            max_grad_norm=config.optimizer.max_grad_norm,
            token_budget=config.tokens_per_micro_batch,
            replica=self.state.replica,
        )

    def _order(self, experience: Experience, number: int, pass_number: int) -> list[int] | None:
        """Group numbers as they are dealt out to the steps of a pass, each pass its own way."""
        if not self.config.several_updates:
            return None
        key = address(self._seed, "deal", number, pass_number)
        order: list[int] = (
            np.random.default_rng(key).permutation(len(experience.advantages)).tolist()
        )
        return order

    def _count(
        self, found: Resampled, results: list[UpdateResult], position: int, epoch: int
    ) -> None:
        """Move the state on; until here the step has changed nothing but the weights."""
        state = self.state
        state.step += 1
        state.position = position
        state.epoch_ended = self._stream.epoch(position) > epoch
        for result in results:
            state.count_update(applied=result.applied, batch=result.batch)
        if state.difficulty is not None:
            state.difficulty.update((*found.groups, *found.replaced), epoch)

    def _signal_tallies(self, found: Resampled) -> dict[str, Tally]:
        tallies = {}
        if self.config.max_resample_rounds:
            tallies["groups/replaced"] = Tally.of([len(found.replaced)])
            tallies["resample_rounds"] = Tally.of([found.rounds])
        if self.state.difficulty is not None:
            ids = [problem.id for problem, _ in self._session.inputs.train]
            epoch = self._stream.epoch(self.state.position)
            left_out = self.state.difficulty.left_out(ids, epoch)
            tallies["problems/left_out"] = Tally.of([left_out])
        return tallies

    def _record(
        self,
        found: Resampled,
        groups: tuple[RolloutGroup, ...],
        advantages: tuple[tuple[float, ...], ...],
    ) -> None:
        """Every rollout that was drawn; what took no part in the step has no advantage."""
        flat: list[float | None] = []
        for group, values in zip(groups, advantages, strict=True):
            scored = iter(values)
            flat += [None if r.reward.total is None else next(scored) for r in group.rollouts]
        flat += [None for group in found.replaced for _ in group.rollouts]
        self._session.folder.write_rollouts(
            self.name,
            self.state.step,
            (*groups, *found.replaced),
            flat,
            with_ids=self._session.recipe.tracking.token_ids,
        )

    def _show_sample(self, groups: tuple[RolloutGroup, ...]) -> None:
        """The first rollout of the step, on the console, every so many steps."""
        every = self._session.recipe.tracking.print_every_steps
        if every is not None and self.state.step % every == 0 and self._session.team.rank == 0:
            self._session.display.sample(format_sample(groups[0], self.state.step))


def difficulty_band(config: GRPOConfig) -> DifficultyBand | None:
    """The band at the start of a phase, with the pass rates that were measured before.

    Raises:
        ConfigError: the file of pass rates cannot be read.
    """
    if config.difficulty is None:
        return None
    file = config.difficulty.file
    known = None if file is None else read_pass_rates(Path(file).expanduser())
    return DifficultyBand(config.difficulty, known)


def _events(groups: tuple[RolloutGroup, ...]) -> tuple[str, ...]:
    """What makes a run unrepeatable is written down: a grader that ran out of time or died."""
    broken = (Verdict.TIMEOUT, Verdict.CRASH)
    return tuple(
        f"nondeterministic_event: grader {r.grade.verdict.value} on {group.problem.id}"
        for group in groups
        for r in group.rollouts
        if r.grade.verdict in broken
    )
