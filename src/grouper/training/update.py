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
from contextlib import AbstractContextManager
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
    SILENCED,
    SURROGATES,
    Bounds,
    kl_k3,
    log_ratio,
    nll,
)
from grouper.algorithms.weighting import token_mean
from grouper.errors import ModelError, first_line, is_out_of_memory
from grouper.models.divergences import Guidance
from grouper.models.merging import unsharded
from grouper.models.policy import Policy, TokenOutputs
from grouper.sampling.native import release_engines
from grouper.training.optimizers import Optimizer
from grouper.training.parallel import ParallelPolicy, Slice
from grouper.types import Demonstration, Tally, merge_tallies

if TYPE_CHECKING:
    from grouper.config.schema import GRPOConfig

log = logging.getLogger(__name__)

Value = TypeVar("Value")

# Gradients that overflow at this loss scale, too, are not finite for another reason.
_LEAST_SCALE = 1.0

# Bound on the importance weights of `grpo.importance`.
IMPORTANCE_CAP = 2.0


# --- one optimizer step --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of one update."""

    tallies: dict[str, Tally]
    applied: bool
    """False when the loss or gradient was not finite: the optimizer was not stepped."""
    events: tuple[str, ...] = ()
    """Reasons why it was not applied, or was computed again."""
    batch: TrainBatch | None = None
    """The batch, if it was not applied."""


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

    Log-probs and advantages are checked before the forward, loss and gradient after it. With a loss
    scale, gradients that have overflowed are computed again at half of it: no rollout is lost.

    Args:
        replica: the policy, as this process runs it; its version counts the steps applied.
        batch: the step, normalization included.
        objective: loss per token.
        optimizer: stepped once, or not at all.
        scale: learning-rate scale of this step, from `optimizers.schedule`.
        max_grad_norm: the gradient is scaled down to this 2-norm; None: never.
        token_budget: tokens in one forward and backward.
        dropout_seed: as in `accumulate_gradient`.

    Raises:
        ModelError: memory ran out and the step cannot be run again in smaller slices.
    """
    broken = broken_rows(batch)
    if broken:
        name, is_broken = next(iter(broken.items()))
        first = int(is_broken.nonzero()[0])
        count = int(is_broken.sum())
        event = (
            f"not-finite: {name} of row {first} ({count} of {len(is_broken)} rows); update skipped"
        )
        return UpdateResult({}, False, (event,), batch)
    policy = replica.policy
    bound = math.inf if max_grad_norm is None else max_grad_norm
    loss_scale = optimizer.loss_scale
    first_scale = 1.0 if loss_scale is None else loss_scale.value
    overflows: tuple[str, ...] = ()
    while True:
        loss, tallies = accumulate_gradient(
            replica,
            batch,
            objective,
            token_budget=token_budget,
            dropout_seed=dropout_seed,
            loss_scale=1.0 if loss_scale is None else loss_scale.value,
        )
        norm = float(unsharded(nn.utils.clip_grad_norm_(policy.trainable().values(), bound)))
        overflowed = math.isfinite(loss) and not math.isfinite(norm)
        if loss_scale is None or not overflowed or loss_scale.value <= _LEAST_SCALE:
            break
        overflows += (f"overflow: gradients at a loss scale of {loss_scale.value:g}",)
        loss_scale.halve()
    # An objective may report its loss per token instead of the sum, as SFT's does.
    tallies = {"loss": Tally.of([loss]), **tallies, "grad_norm": Tally.of([norm])}
    if loss_scale is not None:
        tallies["loss_scale"] = Tally.of([loss_scale.value])
    applied = math.isfinite(loss) and math.isfinite(norm)
    if applied:
        optimizer.step(scale)
        policy.reserved_bytes = 0
        policy.version += 1
        if loss_scale is not None:
            loss_scale.worked()
    elif loss_scale is not None:
        # No scale would have helped, so later steps keep the one that this step began with.
        loss_scale.value = first_scale
    policy.zero_grad(set_to_none=True)
    if applied:
        return UpdateResult(tallies, True, overflows)
    event = f"not-finite: loss {loss:g}, gradient norm {norm:g}; update skipped"
    return UpdateResult(tallies, False, (*overflows, event), batch)


def accumulate_gradient(
    replica: ParallelPolicy,
    batch: TrainBatch,
    objective: Objective,
    *,
    token_budget: int,
    dropout_seed: Callable[[int], int] | None = None,
    together: bool = True,
    loss_scale: float = 1.0,
) -> tuple[float, dict[str, Tally]]:
    """Accumulate the gradients of the whole step, slice by slice.

    Args:
        replica: the policy, as this process runs it; its existing gradients are discarded.
        batch: the step, the same one on every process.
        objective: loss per token.
        token_budget: tokens in one forward and backward; affects only time and memory.
        dropout_seed: micro-batch number -> seed of LoRA's dropout; None: no dropout.
        together: False if the gradient is not needed and each process may keep its part.
        loss_scale: a power of two that the loss is multiplied by within the backward alone; the
            gradients are those of the loss.

    Returns:
        The loss of the step and the merged tallies of its slices, the same on every process.

    Raises:
        ModelError: memory ran out and the step cannot be run again in smaller slices.
    """
    policy = replica.policy
    policy.zero_grad(set_to_none=True)

    def run(slice_: Slice) -> tuple[float, dict[str, Tally]]:
        """Run forward and backward of a slice; return its loss and tallies."""
        rows = slice_.batch.to(policy.device)
        dropout: AbstractContextManager[None] = contextlib.nullcontext()
        if dropout_seed is not None:
            dropout = _dropout(policy, dropout_seed(slice_.number))
        guidance = None
        if objective.guide is not None:
            guidance = objective.guide(rows)
        with dropout:
            outputs = policy(rows, entropy_gradient=objective.entropy_gradient, guidance=guidance)
            per_token, tallies = objective.loss(outputs, rows)
            loss = per_token.sum()
            (loss * loss_scale).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return float(loss.detach()), tallies

    results = _in_slices(replica, batch, token_budget, run)
    if together and replica.processes.size > 1:
        replica.sum_gradients()
    if loss_scale != 1.0:
        for parameter in policy.trainable().values():
            if parameter.grad is not None:
                parameter.grad /= loss_scale
    # Not `fsum`, which raises on infinities of both signs; a NaN skips the step.
    loss = sum(loss for loss, _ in results)
    return loss, merge_tallies([tallies for _, tallies in results])


@contextlib.contextmanager
def _dropout(policy: Policy, seed: int) -> Iterator[None]:
    """Switch on LoRA's dropout, from `seed`; all other modules stay in evaluation mode."""
    layers = [module for name, module in policy.named_modules() if ".lora_dropout." in name]
    devices = []
    if policy.device.type == "cuda":
        devices.append(policy.device)
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed % 2**63)
        for layer in layers:
            layer.train()
        try:
            yield
        finally:
            for layer in layers:
                layer.eval()


# --- objectives ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss per token, with its weights."""

    loss: Callable[[TokenOutputs, TrainBatch], tuple[Tensor, dict[str, Tally]]]
    """(outputs, slice) -> the weighted loss [R, T], zero off the mask, and tallies over target
    tokens."""
    entropy_gradient: bool = False
    """Whether the entropies must carry a gradient."""
    guide: Callable[[TrainBatch], Guidance] | None = None
    """slice -> what the teachers of its rows say; None: there are none."""


def _tally(values: Tensor, mask: Tensor) -> Tally:
    """Return the tally of the masked values of [R, T]."""
    selected = values.detach()[mask].cpu().double()  # on the CPU: mps has no float64
    if not selected.numel():
        return Tally.of([])
    low, high = selected.aminmax()
    return Tally(float(selected.sum()), float(selected.numel()), float(low), float(high))


def _weighted(loss: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Return a loss [R, T] times its weights [R, T], and 0 off the mask.

    `where` before any product: padding may hold anything, NaN included.
    """
    return torch.where(mask, loss, 0.0) * weights


def _nll(
    outputs: TokenOutputs, batch: TrainBatch, entropy_bonus: float = 0.0
) -> tuple[Tensor, dict[str, Tally]]:
    """Return the negative log-likelihood [R, T], less an entropy bonus, and its tallies."""
    loss = nll(outputs.logprobs)
    tallies = {
        "loss": _tally(loss, batch.mask),
        "entropy": _tally(outputs.entropies, batch.mask),
    }
    if entropy_bonus > 0:
        loss = loss - entropy_bonus * outputs.entropies
    weighted = _weighted(loss, batch.weights, batch.mask)
    return _with_teacher(weighted, outputs, batch, tallies), tallies


def _with_teacher(
    loss: Tensor, outputs: TokenOutputs, batch: TrainBatch, tallies: dict[str, Tally]
) -> Tensor:
    """Add the stream of the teachers, if there is one, to a weighted loss [R, T].

    Their divergence is added to `tallies`.
    """
    if batch.teacher_weights is None:
        return loss
    assert outputs.divergences is not None, "weights of a teacher need its guidance"
    is_taught = batch.mask & (batch.teacher_weights > 0)
    tallies["teacher/divergence"] = _tally(outputs.divergences, is_taught)
    return loss + _weighted(outputs.divergences, batch.teacher_weights, batch.mask)


sft_objective = Objective(_nll)
"""Negative log-likelihood of every demonstrated token."""


def rehearsal_objective(
    entropy_bonus: float, guide: Callable[[TrainBatch], Guidance] | None = None
) -> Objective:
    """Return an objective that takes as much memory as that of a phase, and needs only tokens.

    The likelihood replaces the surrogate. The gradient of an entropy term makes the backward of the
    head keep more, so the term is included if the phase has one, and so are its teachers.
    """
    return Objective(partial(_nll, entropy_bonus=entropy_bonus), entropy_bonus > 0, guide)


# (slice, log-probs [R, T] before the first update, clipped [R, T] or None).
ObserveSlice = Callable[[TrainBatch, Tensor, Tensor | None], None]


def grpo_objective(
    config: GRPOConfig,
    observe: ObserveSlice | None = None,
    guide: Callable[[TrainBatch], Guidance] | None = None,
) -> Objective:
    """Return the objective of GRPO: the surrogate with the KL and entropy terms of the recipe, the
    likelihood of worked solutions, and the divergence from a teacher.

    Args:
        config: the algorithm.
        observe: called with every slice, its old log-probs, and which of its tokens are clipped.
        guide: what the teachers of a slice say; None: there are none.
    """
    return Objective(
        _GrpoLoss(config, observe), entropy_gradient=config.entropy_bonus > 0, guide=guide
    )


class _GrpoLoss:
    """The sum of three streams, each times its weights: surrogate, likelihood and teacher.

    Args:
        config: the algorithm.
        observe: as in `grpo_objective`.
    """

    def __init__(self, config: GRPOConfig, observe: ObserveSlice | None) -> None:
        self._config = config
        self._observe = observe
        self._ratio_of = LOG_RATIOS[config.ratio]
        self._surrogate = SURROGATES[config.surrogate]
        self._is_silenced = SILENCED[config.surrogate]
        self._bounds = Bounds(
            low=config.clip_low,
            high=config.clip_high,
            dual=config.dual_clip,
            gate_positive=config.gate_positive,
            gate_negative=config.gate_negative,
        )
        self._importance = IMPORTANCE_WEIGHTS.get(config.importance)
        self._kl_of = None
        if config.beta > 0 and not config.kl_in_reward:
            self._kl_of = KL_ESTIMATORS[config.kl]

    def __call__(self, outputs: TokenOutputs, batch: TrainBatch) -> tuple[Tensor, dict[str, Tally]]:
        """Return the weighted loss [R, T] of a slice, and its tallies."""
        loss, tallies = self._of_rewards(outputs, batch)
        weighted = _weighted(loss, batch.weights, batch.mask)
        if batch.likelihood_weights is not None:
            solutions = _weighted(nll(outputs.logprobs), batch.likelihood_weights, batch.mask)
            weighted = weighted + solutions
            tallies["solution/logprob"] = _tally(outputs.logprobs, batch.mask & ~batch.sampled)
        return _with_teacher(weighted, outputs, batch, tallies), tallies

    def _of_rewards(
        self, outputs: TokenOutputs, batch: TrainBatch
    ) -> tuple[Tensor, dict[str, Tally]]:
        """Return the surrogate [R, T] with the KL and entropy terms, and its tallies."""
        config = self._config
        logprobs = outputs.logprobs
        sampled = batch.sampled
        old = batch.old_logprobs
        if old is None:
            # One update per batch: the old log-probs are the current ones, the ratio is exactly 1.
            old = logprobs.detach()
        ratios = self._ratio_of(logprobs, old, sampled)
        advantages = batch.token_advantages.to(ratios.dtype)
        loss = self._surrogate(ratios, logprobs, advantages, self._bounds)
        tallies = {
            "trained/entropy": _tally(outputs.entropies, sampled),
            "trained/logprob": _tally(logprobs, sampled),
        }
        clipped: Tensor | None = None
        if batch.old_logprobs is not None:
            tallies["policy/ratio"] = _tally(ratios.detach().exp(), sampled)
            clipped = self._is_silenced(ratios, logprobs, advantages, self._bounds)
            tallies["policy/clip_fraction"] = _tally(clipped, sampled)
        if self._observe is not None:
            self._observe(batch, old, clipped)
        if batch.sampler_logprobs is not None:
            difference = log_ratio(old, batch.sampler_logprobs)
            # With stale samples the difference tells more about their age than about the sampler.
            prefix = "stale" if config.max_staleness else "sampler"
            tallies[f"{prefix}_logprob_diff"] = _tally(difference.abs(), sampled)
            # KL(sampler || trainer); rounding may leave it a little below 0.
            sampler_kl = kl_k3(batch.sampler_logprobs, old).clamp(min=0)
            tallies[f"{prefix}_kl"] = _tally(sampler_kl, sampled)
            if self._importance is not None:
                weights = self._importance(difference, IMPORTANCE_CAP)
                tallies["policy/importance"] = _tally(weights, sampled)
                loss = weights * loss
        if self._kl_of is not None:
            assert batch.reference_logprobs is not None, "a KL term needs its reference"
            kl = self._kl_of(logprobs, batch.reference_logprobs, ratios)
            tallies["policy/kl"] = _tally(kl, sampled)
            loss = loss + config.beta * kl
        if config.entropy_bonus > 0:
            loss = loss - config.entropy_bonus * outputs.entropies
        return loss, tallies


# --- log-probs without a gradient ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scorer:
    """Computes the log-probs of a batch in the slices of the update, without a gradient."""

    replica: ParallelPolicy
    """The policy being trained, as this process runs it."""
    token_budget: int
    """Tokens in one forward."""
    reference_weights: dict[str, Tensor] | None = None
    """Weights of the reference of a KL term, sharded like the replica's."""
    scored: list[TrainBatch] = field(default_factory=list)
    """The batches that have been scored so far."""

    def current(self, batch: TrainBatch) -> TokenOutputs:
        """Return log-probs and entropies [R, T] of the policy as it is now."""
        return self._scores(batch, None)

    def reference(self, batch: TrainBatch) -> Tensor:
        """Return the log-probs [R, T] of the reference."""
        assert self.reference_weights is not None, "a KL term needs its reference"
        return self._scores(batch, self.reference_weights).logprobs

    def _scores(self, batch: TrainBatch, weights: dict[str, Tensor] | None) -> TokenOutputs:
        """Score a batch slice by slice; slices are put together by sequence id."""
        replica = self.replica

        def run(slice_: Slice) -> tuple[Tensor, Tensor, Tensor]:
            """Return sequence ids [R], log-probs and entropies [R, T] of a slice."""
            outputs = replica.score(slice_.batch.to(replica.policy.device), weights)
            slice_logprobs = outputs.logprobs.to(batch.weights)
            slice_entropies = outputs.entropies.to(batch.weights)
            return slice_.batch.sequence_ids, slice_logprobs, slice_entropies

        self.scored.append(batch)
        row_of_id = torch.zeros(int(batch.sequence_ids.max()) + 1, dtype=torch.int64)
        row_of_id[batch.sequence_ids] = torch.arange(batch.rows)
        logprobs = batch.weights.new_zeros(batch.mask.shape)
        entropies = batch.weights.new_zeros(batch.mask.shape)
        results = _in_slices(replica, batch, self.token_budget, run)
        for ids, slice_logprobs, slice_entropies in results:
            rows = row_of_id[ids]
            columns = slice_logprobs.shape[1]
            logprobs[rows, :columns] = slice_logprobs
            entropies[rows, :columns] = slice_entropies
        return TokenOutputs(logprobs, entropies)


def validation_loss(
    replica: ParallelPolicy, demonstrations: Sequence[Demonstration], *, token_budget: int
) -> Tally:
    """Measure the negative log-likelihood of every demonstrated token; no dropout.

    Stop tokens are included.

    Args:
        replica: the policy being trained; every process calls this.
        demonstrations: held-out worked solutions.
        token_budget: tokens in one forward.
    """
    batch = demonstration_batch(demonstrations, token_mean)
    logprobs = Scorer(replica, token_budget).current(batch).logprobs
    return _tally(-logprobs, batch.mask)


# --- slices, and what happens when memory runs out -----------------------------------------------


# In the place of a limit: memory of a sampler has been freed, so the same slices may fit.
_AGAIN_WHOLE = 0


def _in_slices(
    replica: ParallelPolicy,
    batch: TrainBatch,
    token_budget: int,
    run: Callable[[Slice], Value],
) -> list[Value]:
    """Run a step slice by slice; if memory runs out, all of it again.

    The first time in the same slices, if a sampler has held memory between its calls, which is
    free now; then in slices of half the tokens. The budget that fits is kept in
    `policy.token_limit`, so that later steps start from it. All processes agree on it and make the
    same attempts.

    Args:
        replica: the policy as this process runs it.
        batch: the step.
        token_budget: tokens in one slice at first.
        run: runs one slice. Its result must not hold memory of the device.

    Returns:
        The results of `run` for the slices of all processes, on every process.

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
            for slice_ in replica.slices(batch, token_budget):
                current = slice_.batch
                result = run(slice_)
                if slice_.own:
                    results.append(result)
        except RuntimeError as error:
            if not is_out_of_memory(error) or current is None:
                raise
            if replica.split:
                smaller_budget = max(1, _tokens(current, policy) // 2)
                raise ModelError(
                    f"memory ran out in a slice of {current.rows} rows while other processes "
                    f"waited for it, so the step cannot be run again: {first_line(error)}",
                    where="tokens_per_micro_batch",
                    fix=f"Set it to {smaller_budget} and go on with "
                    "--resume --allow-changes; `grouper plan` says what a slice takes.",
                ) from error
            limit = _AGAIN_WHOLE
            if not release_engines():
                limit = _smaller_limit(current, policy, first_line(error))
        gathered = replica.processes.gather((limit, results))
        limits = [limit for limit, _ in gathered if limit is not None]
        if not limits:
            return [result for _, results in gathered for result in results]
        # After the `except` block: the exception's traceback kept tensors alive.
        _start_again(policy, limits)


def _start_again(policy: Policy, limits: Sequence[int | ModelError]) -> None:
    """Set the smallest limit, and free the memory of the failed attempt."""
    for limit in limits:
        if isinstance(limit, ModelError):
            raise limit
    smaller = [limit for limit in limits if isinstance(limit, int) and limit != _AGAIN_WHOLE]
    if smaller:
        policy.token_limit = min(smaller)
    else:
        log.info("Out of memory beside what the sampler holds: it is released, and made again.")
    policy.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()


def _smaller_limit(batch: TrainBatch, policy: Policy, reason: str) -> int | ModelError:
    """Return half the tokens of a slice that did not fit, or the error if it cannot be split."""
    tokens = _tokens(batch, policy)
    if batch.rows > 1:
        log.warning(
            "Out of memory in a slice of %d rows (%s). The step is run again with at most %d "
            "tokens per slice, and so are later ones; the gradient is the same, except that LoRA's "
            "dropout, if there is any, draws its masks anew for each slice.",
            batch.rows,
            reason,
            tokens // 2,
        )
        return max(1, tokens // 2)
    remedies = ["shorter rows (sampling.max_new_tokens, prompt.max_prompt_tokens)"]
    if not policy.gradient_checkpointing:
        remedies.append("model.gradient_checkpointing: true")
    if policy.adapter is None:
        remedies.append("model.lora")
    if policy.products_dtype is torch.float32:
        remedies.append("model.compute_dtype: bfloat16")
    return ModelError(
        f"one row of {tokens} tokens does not fit into the memory of {policy.device}: {reason}",
        where="tokens_per_micro_batch",
        fix=f"What helps: {', '.join(remedies)}. `grouper plan` says what each part takes.",
    )


def _tokens(batch: TrainBatch, policy: Policy) -> int:
    """Return the tokens of a slice as `micro_batches` counts them."""
    prompt_lengths = batch.prompt_lengths
    if not policy.native:  # a prompt is repeated for each of its completions
        prompt_lengths = prompt_lengths[batch.prompt_index]
    return int(prompt_lengths.sum() + batch.completion_lengths.sum())
