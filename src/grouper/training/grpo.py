"""Group relative policy optimisation: sample, grade, reward, compare within groups, update."""

from __future__ import annotations

import time
from dataclasses import replace

from torch import Tensor

from grouper.algorithms.weighting import WEIGHTINGS
from grouper.batching import TrainBatch, micro_batches, rollout_batch
from grouper.sampling.base import address
from grouper.training.checkpoint import TrainState
from grouper.training.group_signal import (
    advantages_of,
    rollout_tallies,
    shuffle_rewards,
    status_of,
)
from grouper.training.objectives import grpo_objective
from grouper.training.optimizers import schedule
from grouper.training.rollouts import Collected, collect
from grouper.training.session import Session
from grouper.training.stream import ProblemStream, total_steps
from grouper.training.update import UpdateResult, update
from grouper.types import RolloutGroup, StepReport, Tally, Verdict

__all__ = ["GRPOPhase"]


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
        self._reference = reference
        assert self.config.beta == 0 or reference is not None, "a KL term needs its reference"
        self._sampler = session.sampler(state.policy)
        self._objective = grpo_objective(self.config)
        size = len(session.inputs.train)
        per_step = self.config.prompts_per_step
        self.total = total_steps(self.config, size=size, per_step=per_step)
        self._stream = ProblemStream(size=size, per_step=per_step, seed=self._seed, phase=self.name)

    def step(self) -> StepReport:
        """One rollout batch and, where it holds a signal, one optimizer step."""
        started = time.perf_counter()
        number = self.state.step
        collected = self._collect(number)
        groups = self._credited(collected.groups, number)
        advantages = advantages_of(groups, self.config)
        update_started = time.perf_counter()
        result = self._update(groups, advantages, number)
        finished = time.perf_counter()

        self.state.step += 1
        applied = result is not None and result.applied
        self.state.skipped = 0 if result is None or applied else self.state.skipped + 1
        self._record(groups, advantages)
        failed = self._session.rewards.take_events()
        scale = schedule(self.config.optimizer, number, self.total)
        tallies = {
            **rollout_tallies(groups, advantages),
            **({} if result is None else result.tallies),
            "rewards/failed": Tally.of([len(failed)]),
            "learning_rate": Tally.of([scale * self.config.optimizer.learning_rate]),
            "time.sample": Tally.of([collected.sample_seconds]),
            "time.grade": Tally.of([collected.grade_seconds]),
            "time.update": Tally.of([finished - update_started]),
            "time.step": Tally.of([finished - started]),
        }
        return StepReport(
            phase=self.name,
            step=self.state.step,
            tallies=tallies,
            status=status_of(
                groups, applied=applied, any_advantage=any(any(values) for values in advantages)
            ),
            events=(*_events(groups), *failed),
        )

    def _collect(self, number: int) -> Collected:
        session = self._session
        items = [session.inputs.train[i] for i in self._stream.at(number)]
        with session.display.within("sampling", len(items) * self.config.group_size) as task:

            def progress(done: int, total: int) -> None:
                task(done, total)
                # Ctrl-C in the middle of sampling: the step has changed nothing yet.
                session.raise_if_stopped()

            return collect(
                items,
                sampler=self._sampler,
                grader=session.grader,
                rewards=session.rewards,
                params=session.training_params(),
                group_size=self.config.group_size,
                key=(self._seed, self.name, number),
                progress=progress,
            )

    def _credited(self, groups: tuple[RolloutGroup, ...], number: int) -> tuple[RolloutGroup, ...]:
        """The groups with the rewards they learn from: their own, but for the control run."""
        if not self.config.shuffle_rewards:
            return groups
        return shuffle_rewards(groups, address(self._seed, "shuffle", number))

    def _update(
        self,
        groups: tuple[RolloutGroup, ...],
        advantages: tuple[tuple[float, ...], ...],
        number: int,
    ) -> UpdateResult | None:
        """One optimizer step, or None when the gradient is zero by construction."""
        config, policy = self.config, self.state.policy
        batch = rollout_batch(
            groups,
            advantages,
            WEIGHTINGS[config.weighting],
            weighting_constant=config.weighting_constant or 0.0,
            keep_flat=config.beta > 0,
        )
        if batch is None:
            return None
        if config.beta > 0:
            batch = self._with_reference(batch)
        return update(
            policy,
            batch,
            self._objective,
            self.state.optimizer,
            scale=schedule(config.optimizer, number, self.total),
            max_grad_norm=config.optimizer.max_grad_norm,
            token_budget=config.tokens_per_micro_batch,
        )

    def _with_reference(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the log-probs of the frozen reference, in the update's own slices."""
        assert self._reference is not None
        policy = self.state.policy
        logprobs = batch.weights.new_zeros(batch.mask.shape)
        for part in micro_batches(
            batch, self.config.tokens_per_micro_batch, shared_prompts=policy.native
        ):
            values = policy.logprobs_with(self._reference, part.to(policy.device))
            logprobs[part.sequence_ids, : values.shape[1]] = values.to(logprobs)
        return replace(batch, reference_logprobs=logprobs)

    def _record(
        self, groups: tuple[RolloutGroup, ...], advantages: tuple[tuple[float, ...], ...]
    ) -> None:
        flat: list[float | None] = []
        for group, values in zip(groups, advantages, strict=True):
            scored = iter(values)
            flat += [None if r.reward.total is None else next(scored) for r in group.rollouts]
        self._session.folder.write_rollouts(
            self.name,
            self.state.step,
            groups,
            flat,
            with_ids=self._session.recipe.tracking.token_ids,
        )


def _events(groups: tuple[RolloutGroup, ...]) -> tuple[str, ...]:
    """What makes a run unrepeatable is written down: a grader that ran out of time or died."""
    broken = (Verdict.TIMEOUT, Verdict.CRASH)
    return tuple(
        f"nondeterministic_event: grader {r.grade.verdict.value} on {group.problem.id}"
        for group in groups
        for r in group.rollouts
        if r.grade.verdict in broken
    )
