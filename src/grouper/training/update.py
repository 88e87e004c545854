"""The update: one TrainBatch, one optimizer step, shared by SFT and GRPO."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from grouper.algorithms.batching import TrainBatch
from grouper.models.policy import Policy
from grouper.training.memory import split_event, with_enough_memory
from grouper.training.nan_dump import not_finite
from grouper.training.objectives import Objective
from grouper.training.optimizers import Optimizer
from grouper.training.replica import Replica
from grouper.types import Tally, merge_tallies

__all__ = ["UpdateResult", "accumulate_gradient", "update"]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one update did."""

    tallies: dict[str, Tally]
    applied: bool
    """False when the loss or gradient was not finite: the optimizer was not stepped."""
    events: tuple[str, ...] = ()
    """What makes the step unrepeatable (memory ran out and it was cut anew), or kept it back."""
    batch: TrainBatch | None = None
    """The step, where it was not applied."""


def accumulate_gradient(
    policy: Policy,
    batch: TrainBatch,
    objective: Objective,
    *,
    token_budget: int,
    dropout_seed: Callable[[int], int] | None = None,
    replica: Replica | None = None,
    together: bool = True,
) -> tuple[float, dict[str, Tally]]:
    """Give the parameters the gradient of the whole step, made slice by slice.

    Where memory runs out the step is run again in smaller slices.

    Args:
        policy: the policy; what gradients it has are thrown away.
        batch: the step, the same one on every process.
        objective: loss per token.
        token_budget: tokens in one forward and backward; changes nothing but time and memory.
        dropout_seed: micro-batch number -> seed of LoRA's dropout; None: no dropout.
        replica: the policy as this process runs it; left out: alone.
        together: False where nobody wants the gradient: every process keeps its part of it.

    Returns:
        The loss of the step and the merged tallies of its slices, the same on every process.
    """
    replica = replica or Replica(policy)
    size = replica.team.size
    together = together or replica.split  # split weights cannot be kept apart

    def whole_step(
        parts: Sequence[TrainBatch], meet: Callable[[], None]
    ) -> tuple[float, dict[str, Tally]]:
        policy.zero_grad(set_to_none=True)
        total, reports = 0.0, []
        for part in replica.share(parts):
            bringing = part.last and together
            if bringing:
                meet()
            piece = part.batch.to(policy.device)
            with (
                _dropout(policy, None if dropout_seed is None else dropout_seed(part.number)),
                replica.accumulating(last=bringing),
            ):
                outputs = replica(piece, entropy_gradient=objective.entropy_gradient)
                per_token, tallies = objective(outputs, piece)
                loss = (per_token * piece.weights).sum()
                # The engines average over processes; the gradient of a step is a sum.
                (loss * size).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            total += float(loss.detach())
            reports += [tallies] if part.own else []
        if not together:
            meet()
        return total, merge_tallies(reports)

    budget = replica.token_budget(batch, token_budget)
    total, tallies = with_enough_memory(replica, batch, budget, whole_step)
    told = replica.team.gather((total, tallies))
    # Not `fsum`, which refuses infinities of both signs; the step is skipped with a NaN.
    return sum(loss for loss, _ in told), merge_tallies([report for _, report in told])


def update(
    policy: Policy,
    batch: TrainBatch,
    objective: Objective,
    optimizer: Optimizer,
    *,
    scale: float,
    max_grad_norm: float | None,
    token_budget: int,
    dropout_seed: Callable[[int], int] | None = None,
    replica: Replica | None = None,
) -> UpdateResult:
    """Take one optimizer step on `batch`; nothing that is not finite ever reaches it.

    Log-probs and advantages are looked at before the forward, loss and gradient after it.

    Args:
        policy: the policy; its version counts the steps applied.
        batch: the step, normalisation included.
        objective: loss per token.
        optimizer: stepped once, or not at all.
        scale: learning-rate scale of this step, from `optimizers.schedule`.
        max_grad_norm: the gradient is scaled down to this 2-norm; None: never.
        token_budget: tokens in one forward and backward.
        dropout_seed: as in `accumulate_gradient`.
        replica: as in `accumulate_gradient`.
    """
    broken = not_finite(batch)
    if broken is not None:
        return UpdateResult({}, False, (f"not-finite: {broken}; update skipped",), batch)
    replica = replica or Replica(policy)
    limit = policy.token_limit
    loss, tallies = accumulate_gradient(
        policy,
        batch,
        objective,
        token_budget=token_budget,
        dropout_seed=dropout_seed,
        replica=replica,
    )
    norm = replica.clip_grad_norm(math.inf if max_grad_norm is None else max_grad_norm)
    # An objective that reports its loss per token, as SFT's does, says more than the sum.
    tallies = {"loss": Tally.of([loss]), **tallies, "grad_norm": Tally.of([norm])}
    applied = math.isfinite(loss) and math.isfinite(norm)
    if applied:
        optimizer.step(scale)
        policy.version += 1
    optimizer.zero_grad()
    events = split_event(limit, policy.token_limit)
    if applied:
        return UpdateResult(tallies, applied, events)
    told = f"not-finite: loss {loss:g}, gradient norm {norm:g}; update skipped"
    return UpdateResult(tallies, applied, (*events, told), batch)


@contextlib.contextmanager
def _dropout(policy: Policy, seed: int | None) -> Iterator[None]:
    """LoRA's dropout on, from `seed`; everything else stays in evaluation mode."""
    layers = [m for name, m in policy.named_modules() if ".lora_dropout." in name]
    if seed is None or not layers:
        yield
        return
    with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []):
        torch.manual_seed(seed % 2**63)
        for layer in layers:
            layer.train()
        try:
            yield
        finally:
            for layer in layers:
                layer.eval()
