"""Supervised fine-tuning: the model learns the answer format from worked solutions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grouper.algorithms.batching import TrainBatch, demonstration_batch
from grouper.algorithms.weighting import WEIGHTINGS
from grouper.sampling.base import draw_seed
from grouper.training.optimizer_steps import take_optimizer_steps
from grouper.training.run import Run
from grouper.training.state import TrainState
from grouper.training.update import UpdateResult, sft_objective


@dataclass(frozen=True, slots=True, kw_only=True)
class SftStep:
    """Everything that one step has done, for its metrics."""

    batch: TrainBatch
    updates: tuple[UpdateResult, ...]
    """One: SFT takes one optimizer step in each of its steps."""


def sft_step(run: Run, state: TrainState) -> SftStep:
    """Take one optimizer step on exactly the completion and stop token of each demonstration.

    Args:
        run: recipe, demonstrations and processes.
        state: of the SFT phase; advanced by one step.

    Raises:
        ModelError: memory ran out and the step cannot be run again in smaller slices.
    """
    config = run.recipe.sft
    step = state.step
    position = step * config.batch_size
    indices, position_after = state.stream.take(position, config.batch_size)
    batch = demonstration_batch(
        [run.prepared.demonstrations[index] for index in indices],
        WEIGHTINGS[config.weighting],
        weighting_constant=config.weighting_constant or 0.0,
    )
    guide = None
    if state.teachers is not None:
        guide = state.teachers.guide
        weight = state.teachers.config.weight
        batch = replace(batch, teacher_weights=weight * batch.weights)
    with state.clock.updating():
        updates = take_optimizer_steps(
            state,
            [batch],
            replace(sft_objective, guide=guide),
            config,
            dropout_seed=lambda number: draw_seed(run.recipe.seed, "dropout", step, number),
        )
    state.advance(updates, before=position, after=position_after)
    return SftStep(batch=batch, updates=updates)
