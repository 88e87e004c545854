"""Assemble rollout groups into the batches of optimizer steps: advantages, log-probs, weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from grouper.algorithms.advantages import ADVANTAGES, decoupled
from grouper.algorithms.batching import TrainBatch, rollout_rows, step_batches, with_gradient
from grouper.algorithms.losses import kl_k1
from grouper.algorithms.weighting import WEIGHTINGS
from grouper.config.schema import GRPOConfig
from grouper.training.update import Scorer
from grouper.types import Demonstration, RolloutGroup, Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """Advantages of rollout groups, and the batches of the optimizer steps."""

    advantages: tuple[tuple[float, ...], ...]
    """Per group, one for each scored rollout."""
    batches: tuple[TrainBatch, ...]
    """One per optimizer step; those whose gradient is zero by construction are left out."""
    tallies: dict[str, Tally]

    @property
    def is_taught(self) -> bool:
        """Whether worked solutions or a teacher have a part in some step."""
        streams = [
            stream
            for batch in self.batches
            for stream in (batch.likelihood_weights, batch.teacher_weights)
        ]
        return any(stream is not None and bool(stream.any()) for stream in streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """What groups are taught by besides rewards; each is a function of a group."""

    solution: Callable[[RolloutGroup], Demonstration | None] | None = None
    """The worked solution of a group's problem; None: there is none."""
    teacher: Callable[[RolloutGroup], int] | None = None
    """The number of the teacher of its rows."""
    teacher_prompt: Callable[[RolloutGroup], Sequence[int]] | None = None
    """Token ids of the prompt that a teacher reads."""


NO_LESSONS = Lessons()


def assemble(
    groups: Sequence[RolloutGroup],
    config: GRPOConfig,
    scores: Scorer,
    *,
    max_new_tokens: int,
    orders: Sequence[Sequence[int] | None] = (None,),
    lessons: Lessons = NO_LESSONS,
) -> Assembled:
    """Assemble rollout groups into optimizer steps with the log-probs that the loss needs.

    Old log-probs are taken once, before the first update, and shared by all of them.

    Args:
        groups: the groups of the step.
        config: the algorithm.
        scores: log-probs under the policy and the reference; only those needed are computed.
        max_new_tokens: divisor of the constant weighting if the recipe names none.
        orders: one per pass: the order in which groups are assigned to its optimizer steps; None:
            the order of `groups`.
        lessons: worked solutions and teachers of the groups, where the algorithm uses them.
    """
    several_updates = len(orders) * config.updates_per_batch > 1
    rows = _rows_of(groups, config, lessons)
    tallies: dict[str, Tally] = {}
    penalties = None
    if rows is not None and config.kl_in_reward:
        index = rows.is_rollout.nonzero().flatten()
        rows = _scored(rows, index, config, scores, old=True)
        penalties = _penalties(rows, config, tallies)
    advantages = advantages_of(groups, config, penalties)
    if rows is None:
        return Assembled(advantages=advantages, batches=(), tallies=tallies)
    row_advantages = torch.zeros(rows.rows)
    sampled_advantages = [value for group_advantages in advantages for value in group_advantages]
    row_advantages[: len(sampled_advantages)] = torch.tensor(sampled_advantages)
    rows = replace(rows, advantages=row_advantages)
    if not config.kl_in_reward:
        has_gradient = row_advantages != 0
        if config.flat_rows_matter:
            has_gradient = rows.is_rollout
        index = has_gradient.nonzero().flatten()
        rows = _scored(rows, index, config, scores, old=several_updates)
    if not several_updates:
        # The old log-probs are the current ones, detached: the ratio is exactly 1.
        rows = replace(rows, old_logprobs=None)
    is_sampled = rows.is_completion
    assert rows.sampler_logprobs is not None
    if not rows.sampler_logprobs[is_sampled].isfinite().all():
        # The model is broken, whether or not rows have a signal: `update` has to see it.
        broken = replace(rows, mask=is_sampled)
        return Assembled(advantages=advantages, batches=(broken,) * len(orders), tallies=tallies)
    batches: list[TrainBatch] = []
    for order in orders:
        batches += _batches_of_pass(rows, config, order, max_new_tokens)
    return Assembled(advantages=advantages, batches=tuple(batches), tallies=tallies)


def _rows_of(
    groups: Sequence[RolloutGroup], config: GRPOConfig, lessons: Lessons
) -> TrainBatch | None:
    """Return a row of every scored rollout, then those of worked solutions; None without any."""
    solutions: dict[int, Demonstration] = {}
    if config.solution_weight > 0 and lessons.solution is not None:
        for number, group in enumerate(groups):
            solution = None if group.solved else lessons.solution(group)
            if solution is not None:
                solutions[number] = solution
    prompts = None
    if lessons.teacher_prompt is not None:
        prompts = [lessons.teacher_prompt(group) for group in groups]
    rows = rollout_rows(
        groups,
        mask_truncated=config.overlong == "mask",
        solutions=solutions,
        teacher_prompts=prompts,
    )
    if rows is not None and lessons.teacher is not None:
        teachers = torch.tensor([lessons.teacher(group) for group in groups])
        rows = replace(rows, teacher=teachers[rows.group_ids])
    return rows


def _batches_of_pass(
    rows: TrainBatch,
    config: GRPOConfig,
    order: Sequence[int] | None,
    max_new_tokens: int,
) -> list[TrainBatch]:
    """Return the batches of one pass over the rows, without those whose gradient is zero."""
    step_rows = step_batches(
        rows,
        WEIGHTINGS[config.weighting],
        weighting_constant=config.weighting_constant or float(max_new_tokens),
        updates=config.updates_per_batch,
        order=order,
        solution_weight=config.solution_weight,
        teacher_weight=0.0 if config.teacher is None else config.teacher.weight,
    )
    batches = []
    for batch in step_rows:
        live_rows: TrainBatch | None = batch
        if not config.flat_rows_matter:
            live_rows = with_gradient(batch)
        if live_rows is not None and live_rows.has_weight:
            batches.append(live_rows)
    return batches


def advantages_of(
    groups: Sequence[RolloutGroup],
    config: GRPOConfig,
    penalties: Sequence[float] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """Return the advantages of each group, one per scored rollout.

    With `require_correct_in_group`, a group without a correct answer gets zeros: nothing is learned
    from wrong answers in a nicer format.

    Args:
        groups: all groups of a rollout batch; their rollouts without a reward are left out.
        config: names the advantage.
        penalties: subtracted from the total of each scored rollout, in order (a KL in the reward).
    """
    scored = [rollout for group in groups for rollout in group.scored]
    if not scored:
        return tuple(() for _ in groups)
    sizes = torch.tensor([len(group.scored) for group in groups])
    group_ids = torch.arange(len(groups)).repeat_interleave(sizes)
    function = ADVANTAGES[config.advantage]
    if config.advantage_eps is not None:  # the configuration allows it where there is one
        function = partial(function, eps=config.advantage_eps)
    if config.advantage == "pass_at_k":
        function = partial(function, k=config.advantage_k)
    if config.decouple_rewards:
        # Components without a weight are left out.
        weights = {name: w for name, w in scored[0].reward.weights.items() if w != 0}
        component_rows = [[r.reward.components[name] for name in weights] for r in scored]
        components = torch.tensor(component_rows, dtype=torch.float64)
        component_weights = torch.tensor([*weights.values()], dtype=torch.float64)
        values = decoupled(components, component_weights, group_ids, function)
    else:
        rewards = torch.tensor([r.reward.total for r in scored], dtype=torch.float64)
        if penalties is not None:
            rewards = rewards - torch.tensor(penalties, dtype=torch.float64)
        values = function(rewards, group_ids)
    value_iterator = iter(values.tolist())
    advantages = []
    for group in groups:
        group_advantages = tuple(next(value_iterator) for _ in group.scored)
        if config.require_correct_in_group and not group.solved:
            group_advantages = (0.0,) * len(group_advantages)
        advantages.append(group_advantages)
    return tuple(advantages)


def _scored(
    rows: TrainBatch, index: Tensor, config: GRPOConfig, scores: Scorer, *, old: bool
) -> TrainBatch:
    """Add reference log-probs, token selection and, if `old`, old log-probs to rows.

    Args:
        rows: all rows of the step.
        index: the rows that are scored; the others have no gradient.
        config: the algorithm.
        scores: log-probs under the policy and the reference.
        old: whether old log-probs are needed.
    """
    if not index.numel():
        return rows
    scored_rows = rows.select(index)
    columns: dict[str, Tensor] = {}
    if old or config.top_entropy < 1:
        outputs = scores.current(scored_rows)
        if old:
            columns["old_logprobs"] = outputs.logprobs
        if config.top_entropy < 1:
            columns["selection"] = top_entropy_selection(
                outputs.entropies, scored_rows.sampled, config.top_entropy
            )
    if config.beta > 0:
        columns["reference_logprobs"] = scores.reference(scored_rows)
    for name, values in columns.items():
        grid = values.new_zeros(rows.mask.shape)
        grid[index, : values.shape[1]] = values
        columns[name] = grid
    return replace(rows, **columns)  # type: ignore[arg-type]  # only tensor fields


def top_entropy_selection(entropies: Tensor, mask: Tensor, share: float) -> Tensor:
    """Select the target tokens [R, T] whose entropy is among the highest `share` of all of them.

    Forking tokens carry most of what reinforcement learning changes (arXiv 2506.01939). Tokens
    that tie at the threshold are all selected.

    >>> entropies = torch.tensor([[0.1, 0.9, 0.5, 7.0]])
    >>> mask = torch.tensor([[True, True, True, False]])
    >>> top_entropy_selection(entropies, mask, 0.34).tolist()
    [[False, True, True, False]]
    """
    values = entropies[mask]
    if not values.numel():
        return mask
    count = max(1, math.ceil(share * values.numel()))
    threshold = values.topk(count).values[-1]
    return mask & (entropies >= threshold)


def _penalties(
    rows: TrainBatch, config: GRPOConfig, tallies: dict[str, Tally]
) -> tuple[float, ...]:
    """Return `beta * sum_t kl_t` of each row, which a KL in the reward subtracts from its total.

    The KL of every target token is added to `tallies`.
    """
    assert rows.old_logprobs is not None
    assert rows.reference_logprobs is not None
    kl = kl_k1(rows.old_logprobs, rows.reference_logprobs)
    kl = torch.where(rows.sampled, kl, 0.0).double()
    tallies["policy/kl"] = Tally.of(kl[rows.sampled].tolist())
    penalties = config.beta * kl[rows.is_rollout].sum(1)
    return tuple(penalties.tolist())
