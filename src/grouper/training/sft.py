"""Supervised fine-tuning: the model learns the answer format from worked solutions."""

from __future__ import annotations

from grouper.algorithms.batching import demonstration_batch
from grouper.algorithms.weighting import WEIGHTINGS
from grouper.sampling.base import address
from grouper.training.checkpoint import TrainState
from grouper.training.objectives import sft_objective
from grouper.training.optimizers import schedule
from grouper.training.session import Session
from grouper.training.metrics import StepTimes
from grouper.training.curriculum import ProblemStream, total_steps
from grouper.training.update import update
from grouper.types import StepReport, Tally

__all__ = ["SFTPhase"]


class SFTPhase:
    """Trains exactly the completion and its stop token of every demonstration."""

    name = "sft"

    def __init__(self, session: Session, state: TrainState) -> None:
        self.config = session.recipe.sft
        self.state = state
        self._seed = session.recipe.seed
        self._demonstrations = session.inputs.demonstrations
        size, per_step = len(self._demonstrations), self.config.batch_size
        self.total = total_steps(self.config, size=size, per_step=per_step)
        self._stream = ProblemStream(size=size, per_step=per_step, seed=self._seed, phase=self.name)
        self._times = StepTimes(state.policy, session.team.size)

    def step(self) -> StepReport:
        """One optimizer step."""
        self._times.begin()
        number, config, state = self.state.step, self.config, self.state
        batch = demonstration_batch(
            [self._demonstrations[i] for i in self._stream.at(number)],
            WEIGHTINGS[config.weighting],
            weighting_constant=config.weighting_constant or 0.0,
        )
        scale = schedule(config.optimizer, number, self.total)
        with self._times.updating():
            self._times.trained(batch)
            result = update(
                state.policy,
                batch,
                sft_objective,
                state.optimizer,
                scale=scale,
                max_grad_norm=config.optimizer.max_grad_norm,
                token_budget=config.tokens_per_micro_batch,
                dropout_seed=lambda micro: address(self._seed, "dropout", number, micro),
                replica=state.replica,
            )
        state.step += 1
        state.epoch_ended = self._stream.epoch_after(number) > self._stream.epoch_after(number - 1)
        state.count_update(applied=result.applied, batch=result.batch)
        tallies = {
            **result.tallies,
            "learning_rate": Tally.of([scale * config.optimizer.learning_rate]),
            "tokens": Tally.of([batch.target_tokens]),
            **self._times.tallies(),
        }
        return StepReport(
            phase=self.name,
            step=state.step,
            tallies=tallies,
            status="learning" if result.applied else "skipped:not-finite",
            events=result.events,
        )
