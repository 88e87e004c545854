"""A rehearsal: the largest slice of a phase is run once before its first step.

What does not fit is known within the first minute, and slices are made smaller (see `update`)
before anything depends on them. The gradient is discarded; weights, optimizer and random numbers
are unchanged.
"""

from __future__ import annotations

import time

import torch

from grouper.algorithms.rows import Rows, worst_rows
from grouper.config.schema import GRPOConfig, SFTConfig
from grouper.training.checkpoint import TrainState
from grouper.training.loop import Hook
from grouper.training.optimizers import state_bytes
from grouper.training.run import Run
from grouper.training.update import accumulate_gradient, rehearsal_objective


class Rehearsal(Hook):
    """Runs the largest slice of a phase once, on a GPU."""

    # A host that runs out of memory swaps and kills processes: a rehearsal could not catch that.
    devices: tuple[str, ...] = ("cuda", "mps")

    def phase_begins(self, run: Run, state: TrainState) -> None:
        """Run one forward and backward of the rows that take the most memory.

        Raises:
            ModelError: not even one row fits.
        """
        config, policy = state.config(run.recipe), state.policy
        if state.step >= state.total or policy.device.type not in self.devices:
            return
        budget = config.tokens_per_micro_batch
        bonus = config.entropy_bonus if isinstance(config, GRPOConfig) else 0.0
        started = time.perf_counter()
        # The optimizer state appears with the first step: its memory is reserved meanwhile.
        there = any(part.state for part in state.optimizer.parts)
        size = 0 if there else state_bytes(config.optimizer, policy)
        held = torch.empty(size, dtype=torch.uint8, device=policy.device)
        for kind, most in worst_slices(config, *_longest(run, state.phase)):
            rows = kind.filling(budget, most=most, shared=policy.native)
            # A second slice meets the gradient of the first, and every process takes part.
            rows = rows.times(state.replica.processes.size * (2 if rows.count < most else 1))
            accumulate_gradient(
                policy,
                rows.batch(policy.vocabulary),
                rehearsal_objective(bonus),
                token_budget=budget,
                replica=state.replica,
                together=False,
            )
        del held
        policy.zero_grad(set_to_none=True)
        run.display.say(
            f"Rehearsal of {state.phase}: the largest slice fits "
            f"({time.perf_counter() - started:.1f} s)."
        )


def _longest(run: Run, phase: str) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest completion of a phase."""
    prepared = run.prepared
    if phase == "grpo":
        return max(len(p.token_ids) for _, p in prepared.train), prepared.max_new_tokens
    shown = prepared.demonstrations
    return max(len(d.prompt.token_ids) for d in shown), max(len(d.token_ids) for d in shown)


def worst_slices(
    config: SFTConfig | GRPOConfig, prompt: int, completion: int
) -> list[tuple[Rows, int]]:
    """The kinds of rows that may need the most memory, and how many one optimizer step has.

    Args:
        config: of the phase.
        prompt: tokens of the longest.
        completion: tokens of the longest.
    """
    if isinstance(config, SFTConfig):
        return [(kind, config.batch_size) for kind in worst_rows(prompt, completion, 1)]
    most = -(-config.prompts_per_step * config.group_size // config.updates_per_batch)
    return [(kind, most) for kind in worst_rows(prompt, completion, config.group_size)]
