"""The update: one TrainBatch, one objective, one optimizer step; computed in slices, like scoring.

Slices add up to the same gradient however a step is split. If memory runs out, the step is run
again from its beginning in smaller slices: only the time, the last bits of a sum and the masks of
LoRA's dropout change. No second copy of the gradient is needed, because the partial gradient of the
failed attempt is discarded.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from grouper.algorithms.batching import TrainBatch, broken_rows, demonstration_batch
from grouper.algorithms.losses import (
    IMPORTANCE_WEIGHTS,
    KL_ESTIMATORS,
    LOG_RATIOS,
    SURROGATES,
    Bounds,
    kl_k3,
    log_ratio,
    nll,
)
from grouper.algorithms.weighting import token_mean
from grouper.errors import ModelError, first_line, is_out_of_memory
from grouper.models.merging import whole
from grouper.models.policy import Policy, TokenOutputs
from grouper.sampling.native import keep_no_engines
from grouper.training.optimizers import Optimizer
from grouper.training.parallel import ParallelPolicy, Slice
from grouper.types import Demonstration, Tally, merge_tallies

if TYPE_CHECKING:
    from grouper.config.schema import GRPOConfig

log = logging.getLogger(__name__)

Value = TypeVar("Value")

# Bound on the importance weights of `grpo.importance`.
IMPORTANCE_CAP = 2.0


# --- one optimizer step --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one update did."""

    tallies: dict[str, Tally]
    applied: bool
    """False when the loss or gradient was not finite: the optimizer was not stepped."""
    events: tuple[str, ...] = ()
    """What blocked it."""
    batch: TrainBatch | None = None
    """The step, if it was not applied."""


def update(
    replica: ParallelPolicy,
    batch: TrainBatch,
    objective: Objective,
    optimizer: Optimizer,
    *,
    scale: float,
    max_grad_norm: float | None,
    token_budget: int,
    dropout_seed: Callable[[int], int] | None = None,
) -> UpdateResult:
    """Take one optimizer step on `batch`, unless something is not finite.

    Log-probs and advantages are checked before the forward, loss and gradient after it.

    Args:
        replica: the policy, as this process runs it; its version counts the steps applied.
        batch: the step, normalisation included.
        objective: loss per token.
        optimizer: stepped once, or not at all.
        scale: learning-rate scale of this step, from `optimizers.schedule`.
        max_grad_norm: the gradient is scaled down to this 2-norm; None: never.
        token_budget: tokens in one forward and backward.
        dropout_seed: as in `accumulate_gradient`.

    Raises:
        ModelError: memory ran out and the step cannot be run again in smaller slices.
    """
    if broken := broken_rows(batch):
        name, rows = next(iter(broken.items()))
        which = f"row {int(rows.nonzero()[0])} ({int(rows.sum())} of {len(rows)} rows)"
        return UpdateResult({}, False, (f"not-finite: {name} of {which}; update skipped",), batch)
    policy = replica.policy
    loss, tallies = accumulate_gradient(
        replica, batch, objective, token_budget=token_budget, dropout_seed=dropout_seed
    )
    bound = math.inf if max_grad_norm is None else max_grad_norm
    norm = float(whole(nn.utils.clip_grad_norm_(policy.trainable().values(), bound)))
    # An objective that reports its loss per token, as SFT's does, says more than the sum.
    tallies = {"loss": Tally.of([loss]), **tallies, "grad_norm": Tally.of([norm])}
    applied = math.isfinite(loss) and math.isfinite(norm)
    if applied:
        optimizer.step(scale)
        policy.version += 1
    policy.zero_grad(set_to_none=True)
    if applied:
        return UpdateResult(tallies, True)
    event = f"not-finite: loss {loss:g}, gradient norm {norm:g}; update skipped"
    return UpdateResult(tallies, False, (event,), batch)


def accumulate_gradient(
    replica: ParallelPolicy,
    batch: TrainBatch,
    objective: Objective,
    *,
    token_budget: int,
    dropout_seed: Callable[[int], int] | None = None,
    together: bool = True,
) -> tuple[float, dict[str, Tally]]:
    """Set the gradients of the parameters to those of the whole step, slice by slice.

    Args:
        replica: the policy, as this process runs it; its existing gradients are discarded.
        batch: the step, the same one on every process.
        objective: loss per token.
        token_budget: tokens in one forward and backward; affects only time and memory.
        dropout_seed: micro-batch number -> seed of LoRA's dropout; None: no dropout.
        together: False if the gradient is not needed and each process may keep its part.

    Returns:
        The loss of the step and the merged tallies of its slices, the same on every process.

    Raises:
        ModelError: memory ran out and the step cannot be run again in smaller slices.
    """
    policy = replica.policy
    policy.zero_grad(set_to_none=True)

    def run(part: Slice) -> tuple[float, dict[str, Tally]]:
        rows = part.batch.to(policy.device)
        seed = None if dropout_seed is None else dropout_seed(part.number)
        with contextlib.nullcontext() if seed is None else _dropout(policy, seed):
            outputs = policy(rows, entropy_gradient=objective.entropy_gradient)
            per_token, tallies = objective.loss(outputs, rows)
            loss = (per_token * rows.weights).sum()
            replica.backward(loss, last=part.last)
        return float(loss.detach()), tallies

    results = _in_slices(replica, batch, token_budget, run)
    if together and replica.processes.size > 1:
        replica.sum_gradients()
    # Not `fsum`, which raises on infinities of both signs; a NaN skips the step.
    return sum(loss for loss, _ in results), merge_tallies([tallies for _, tallies in results])


@contextlib.contextmanager
def _dropout(policy: Policy, seed: int) -> Iterator[None]:
    """LoRA's dropout on, from `seed`; everything else stays in evaluation mode."""
    layers = [m for name, m in policy.named_modules() if ".lora_dropout." in name]
    with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []):
        torch.manual_seed(seed % 2**63)
        for layer in layers:
            layer.train()
        try:
            yield
        finally:
            for layer in layers:
                layer.eval()


# --- what is minimised ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss per token."""

    loss: Callable[[TokenOutputs, TrainBatch], tuple[Tensor, dict[str, Tally]]]
    """(outputs, slice) -> the loss [R, T], zero off the mask, and tallies over target tokens."""
    entropy_gradient: bool = False
    """Whether the entropies must carry a gradient."""


def _tally(values: Tensor, mask: Tensor) -> Tally:
    """Tally of the masked values of [R, T]."""
    picked = values.detach()[mask].cpu().double()  # mps has no float64
    if not picked.numel():
        return Tally.of([])
    low, high = picked.aminmax()
    return Tally(float(picked.sum()), float(picked.numel()), float(low), float(high))


def _nll(
    outputs: TokenOutputs, batch: TrainBatch, entropy_bonus: float = 0.0
) -> tuple[Tensor, dict[str, Tally]]:
    loss = nll(outputs.logprobs)
    tallies = {
        "loss": _tally(loss, batch.mask),
        "entropy": _tally(outputs.entropies, batch.mask),
    }
    if entropy_bonus > 0:
        loss = loss - entropy_bonus * outputs.entropies
    # `where` before any product: padding may hold anything, NaN included.
    return torch.where(batch.mask, loss, 0.0), tallies


sft_objective = Objective(_nll)
"""Negative log-likelihood of every demonstrated token."""


def rehearsal_objective(entropy_bonus: float) -> Objective:
    """Takes as much memory as the objective of a phase, and needs only tokens.

    The likelihood replaces the surrogate. The gradient of an entropy term makes the backward of the
    head keep more, so the term is included if the phase has one.
    """
    return Objective(partial(_nll, entropy_bonus=entropy_bonus), entropy_bonus > 0)


# (slice, log-probs [R, T] before the first update, clipped [R, T] or None).
See = Callable[[TrainBatch, Tensor, Tensor | None], None]


def grpo_objective(config: GRPOConfig, see: See | None = None) -> Objective:
    """The surrogate, plus the KL and entropy terms of the recipe.

    Args:
        config: the algorithm.
        see: called with every slice, and what is known of its tokens.
    """
    ratio_of, surrogate = LOG_RATIOS[config.ratio], SURROGATES[config.surrogate]
    bounds = Bounds(low=config.clip_low, high=config.clip_high, dual=config.dual_clip)
    importance = IMPORTANCE_WEIGHTS.get(config.importance)
    kl_of = KL_ESTIMATORS[config.kl] if config.beta > 0 and not config.kl_in_reward else None

    def loss_of(outputs: TokenOutputs, batch: TrainBatch) -> tuple[Tensor, dict[str, Tally]]:
        logprobs, mask = outputs.logprobs, batch.mask
        # One update a batch: the old log-probs are the current ones, so the ratio is exactly 1.
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        ratios = ratio_of(logprobs, old, mask)
        advantages = batch.advantages[:, None].to(ratios.dtype)
        loss = surrogate(ratios, logprobs, advantages, bounds)
        tallies = {
            "trained/entropy": _tally(outputs.entropies, mask),
            "trained/logprob": _tally(logprobs, mask),
        }
        clipped: Tensor | None = None
        if batch.old_logprobs is not None:
            ratio = ratios.detach().exp()
            tallies["policy/ratio"] = _tally(ratio, mask)
            # Beyond the bound that the advantage pushes it towards.
            above = (ratio > 1 + bounds.high) & (advantages > 0)
            clipped = above | ((ratio < 1 - bounds.low) & (advantages < 0))
            tallies["policy/clip_fraction"] = _tally(clipped, mask)
        if see is not None:
            see(batch, old, clipped)
        if batch.sampler_logprobs is not None:
            difference = log_ratio(old, batch.sampler_logprobs)
            # Of samples that are to be older, it says more about their age than about the sampler.
            whose = "stale" if config.max_staleness else "sampler"
            tallies[f"{whose}_logprob_diff"] = _tally(difference.abs(), mask)
            # Of KL(sampler || trainer); rounding may leave it a little below 0.
            apart = kl_k3(batch.sampler_logprobs, old).clamp(min=0)
            tallies[f"{whose}_kl"] = _tally(apart, mask)
            if importance is not None:
                weights = importance(difference, IMPORTANCE_CAP)
                tallies["policy/importance"] = _tally(weights, mask)
                loss = weights * loss
        if kl_of is not None:
            assert batch.reference_logprobs is not None, "a KL term needs its reference"
            kl = kl_of(logprobs, batch.reference_logprobs, ratios)
            tallies["policy/kl"] = _tally(kl, mask)
            loss = loss + config.beta * kl
        if config.entropy_bonus > 0:
            loss = loss - config.entropy_bonus * outputs.entropies
        # `where` before any product: padding may hold anything, NaN included.
        return torch.where(mask, loss, 0.0), tallies

    return Objective(loss_of, entropy_gradient=config.entropy_bonus > 0)


# --- log-probs without a gradient ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scorer:
    """Log-probs of a batch in the update's own slices, no gradient."""

    replica: ParallelPolicy
    """The policy being trained, as this process runs it."""
    token_budget: int
    """Tokens in one forward."""
    reference_weights: dict[str, Tensor] | None = None
    """Weights of the reference of a KL term, sharded like the replica's."""
    scored: list[TrainBatch] = field(default_factory=list)
    """What it has scored so far."""

    def current(self, batch: TrainBatch) -> TokenOutputs:
        """Log-probs and entropies [R, T] of the policy as it is now."""
        return self._scores(batch, None)

    def reference(self, batch: TrainBatch) -> Tensor:
        """Log-probs [R, T] of the reference."""
        assert self.reference_weights is not None, "a KL term needs its reference"
        return self._scores(batch, self.reference_weights).logprobs

    def _scores(self, batch: TrainBatch, weights: dict[str, Tensor] | None) -> TokenOutputs:
        """Filled slice by slice; rows are found by their sequence id."""
        replica = self.replica

        def run(part: Slice) -> tuple[Tensor, Tensor, Tensor]:
            scored = replica.score(part.batch.to(replica.policy.device), weights)
            values = (scored.logprobs.to(batch.weights), scored.entropies.to(batch.weights))
            return part.batch.sequence_ids, *values

        self.scored.append(batch)
        place = torch.zeros(int(batch.sequence_ids.max()) + 1, dtype=torch.int64)
        place[batch.sequence_ids] = torch.arange(batch.rows)
        logprobs, entropies = (batch.weights.new_zeros(batch.mask.shape) for _ in range(2))
        for ids, *values in _in_slices(replica, batch, self.token_budget, run):
            for grid, part in zip((logprobs, entropies), values, strict=True):
                grid[place[ids], : part.shape[1]] = part
        return TokenOutputs(logprobs, entropies)


def validation_loss(
    replica: ParallelPolicy, demonstrations: Sequence[Demonstration], *, token_budget: int
) -> Tally:
    """Negative log-likelihood of every demonstrated token, stop tokens among them; no dropout.

    Args:
        replica: the policy being trained; every process calls this.
        demonstrations: held-out worked solutions.
        token_budget: tokens in one forward.
    """
    batch = demonstration_batch(demonstrations, token_mean)
    logprobs = Scorer(replica, token_budget).current(batch).logprobs
    return _tally(-logprobs, batch.mask)


# --- where memory runs out -----------------------------------------------------------------------


def _in_slices(
    replica: ParallelPolicy,
    batch: TrainBatch,
    token_budget: int,
    run: Callable[[Slice], Value],
) -> list[Value]:
    """Run a step slice by slice; if memory runs out, all of it again in slices of half the tokens.

    The budget that fits is kept in `policy.token_limit`, so that later steps start from it. All
    processes agree on it and make the same attempts.

    Args:
        replica: the policy as this process runs it.
        batch: the step.
        token_budget: tokens in one slice at first.
        run: runs one slice. What it returns must not hold memory of the device.

    Returns:
        What `run` returned of each slice, those of all processes, on every process.

    Raises:
        ModelError: a slice of one row is too large; or memory ran out while other processes were
            waiting, as they do in every slice if weights are split.
    """
    policy = replica.policy
    while True:
        limit: int | ModelError | None = None
        results: list[Value] = []
        current: TrainBatch | None = None
        try:
            for part in replica.slices(batch, token_budget):
                current = part.batch
                result = run(part)
                results += [result] if part.own else []
        except RuntimeError as error:
            if not is_out_of_memory(error) or current is None:
                raise
            if replica.split:
                raise ModelError(
                    f"memory ran out in a slice of {current.rows} rows while other processes "
                    f"waited for it, so the step cannot be run again: {first_line(error)}",
                    where="tokens_per_micro_batch",
                    fix=f"Set it to {max(1, _tokens(current, policy) // 2)} and go on with "
                    "--resume --allow-changes; `grouper plan` says what a slice takes.",
                ) from error
            limit = _smaller(current, policy, first_line(error))
        found = replica.processes.gather((limit, results))
        limits = [limit for limit, _ in found if limit is not None]
        if not limits:
            return [result for _, results in found for result in results]
        # The exception is gone by now, and with it what its traceback kept alive.
        _start_again(policy, limits)


def _start_again(policy: Policy, limits: Sequence[int | ModelError]) -> None:
    """Agree on the smallest limit, and free what the failed attempt and the samplers hold."""
    for problem in limits:
        if isinstance(problem, ModelError):
            raise problem
    policy.token_limit = min(limit for limit in limits if isinstance(limit, int))
    policy.zero_grad(set_to_none=True)
    keep_no_engines()
    gc.collect()
    torch.cuda.empty_cache()


def _smaller(part: TrainBatch, policy: Policy, reason: str) -> int | ModelError:
    """Half the tokens of a slice that did not fit, or why it cannot be split."""
    tokens = _tokens(part, policy)
    if part.rows > 1:
        log.warning(
            "Out of memory in a slice of %d rows (%s). The step is run again with at most %d "
            "tokens per slice, and so are later ones; the gradient is the same, except that LoRA's "
            "dropout, if there is any, draws its masks anew for each slice.",
            part.rows,
            reason,
            tokens // 2,
        )
        return max(1, tokens // 2)
    ways = ["shorter rows (sampling.max_new_tokens, prompt.max_prompt_tokens)"]
    if not policy.gradient_checkpointing:
        ways.append("model.gradient_checkpointing: true")
    if policy.adapter is None:
        ways.append("model.lora")
    if policy.products_dtype is torch.float32:
        ways.append("model.compute_dtype: bfloat16")
    return ModelError(
        f"one row of {tokens} tokens does not fit into the memory of {policy.device}: {reason}",
        where="tokens_per_micro_batch",
        fix=f"What helps: {', '.join(ways)}. `grouper plan` says what each part takes.",
    )


def _tokens(part: TrainBatch, policy: Policy) -> int:
    """Tokens of a slice as `micro_batches` counts them."""
    prompts = part.prompt_lengths if policy.native else part.prompt_lengths[part.prompt_index]
    return int(prompts.sum() + part.completion_lengths.sum())
