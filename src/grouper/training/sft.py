"""Supervised fine-tuning: the model learns the answer format from worked solutions."""

from __future__ import annotations

from grouper.algorithms.batching import demonstration_batch
from grouper.algorithms.weighting import WEIGHTINGS
from grouper.sampling.base import draw_seed
from grouper.training.optimizers import schedule
from grouper.training.run import Run
from grouper.training.state import TrainState
from grouper.training.update import sft_objective, update
from grouper.types import StepReport, Tally


def sft_step(run: Run, state: TrainState) -> StepReport:
    """One optimizer step on exactly the completion and stop token of each demonstration.

    Args:
        run: recipe, demonstrations and processes.
        state: of the SFT phase; advanced by one step.

    Raises:
        ModelError: memory ran out and the step cannot be run again in smaller slices.
    """
    config, clock, step = run.recipe.sft, state.clock, state.step
    clock.begin()
    before = step * config.batch_size  # place in the problem stream
    indices, after = state.stream.take(before, config.batch_size)
    batch = demonstration_batch(
        [run.prepared.demonstrations[i] for i in indices],
        WEIGHTINGS[config.weighting],
        weighting_constant=config.weighting_constant or 0.0,
    )
    scale = schedule(config.optimizer, step, state.total)
    with clock.updating():
        result = update(
            state.replica,
            batch,
            sft_objective,
            state.optimizer,
            scale=scale,
            max_grad_norm=config.optimizer.max_grad_norm,
            token_budget=config.tokens_per_micro_batch,
            dropout_seed=lambda number: draw_seed(run.recipe.seed, "dropout", step, number),
        )
    state.advance([result], before, after)
    return StepReport(
        phase="sft",
        step=state.step,
        tallies={
            **result.tallies,
            "learning_rate": Tally.of([scale * config.optimizer.learning_rate]),
            "tokens": Tally.of([int(batch.mask.sum())]),
            **clock.tallies(trained=[batch]),
        },
        status="learning" if result.applied else "skipped:not-finite",
        events=result.events,
    )
