"""The optimizer steps of one step of a phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grouper.algorithms.batching import TrainBatch
from grouper.config.schema import GRPOConfig, SFTConfig
from grouper.training.optimizers import schedule
from grouper.training.state import TrainState
from grouper.training.update import Objective, UpdateResult, update


def take_optimizer_steps(
    state: TrainState,
    batches: Sequence[TrainBatch],
    objective: Objective,
    config: SFTConfig | GRPOConfig,
    *,
    dropout_seed: Callable[[int], int] | None = None,
) -> tuple[UpdateResult, ...]:
    """Take one optimizer step on each batch, at the learning rate of the state's step.

    Args:
        state: of the phase; its weights change.
        batches: one per optimizer step.
        objective: what is minimized.
        config: of the phase.
        dropout_seed: row -> seed of its dropout; left out: no dropout.

    Raises:
        ModelError: memory ran out and a step cannot be run again in smaller slices.
    """
    scale = schedule(config.optimizer, state.step, state.total)
    return tuple(
        update(
            state.replica,
            batch,
            objective,
            state.optimizer,
            scale=scale,
            max_grad_norm=config.optimizer.max_grad_norm,
            token_budget=config.tokens_per_micro_batch,
            dropout_seed=dropout_seed,
        )
        for batch in batches
    )
