"""From rollout groups to advantages, and what the step's rollouts say in numbers and one word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from grouper.algorithms.advantages import ADVANTAGES, decoupled
from grouper.config.schema import GRPOConfig
from grouper.types import Rollout, RolloutGroup, Tally, Verdict

__all__ = ["advantages_of", "repetition", "rollout_tallies", "shuffle_rewards", "status_of"]


def advantages_of(
    groups: Sequence[RolloutGroup],
    config: GRPOConfig,
    penalties: Sequence[float] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """Per group, the advantage of each scored rollout; rollouts without a reward are left out.

    With `shaping_needs_a_correct`, a group without one correct answer gets zeros: nothing is
    learned from who was wrong in the nicer format.

    Args:
        groups: all groups of a rollout batch.
        config: names the advantage.
        penalties: taken off the total of each scored rollout, in order (a KL in the reward).
    """
    scored = [r for group in groups for r in group.scored]
    if not scored:
        return tuple(() for _ in groups)
    ids = torch.tensor([g for g, group in enumerate(groups) for _ in group.scored])
    function = ADVANTAGES[config.advantage]
    if config.advantage_eps is not None:  # the configuration allows it where there is one
        function = partial(function, eps=config.advantage_eps)
    if config.decouple_rewards:
        values = decoupled(*_components(scored), ids, function)
    else:
        rewards = torch.tensor([r.reward.total for r in scored], dtype=torch.float64)
        if penalties is not None:
            rewards = rewards - torch.tensor(penalties, dtype=torch.float64)
        values = function(rewards, ids)
    flat = iter(values.tolist())
    result = []
    for group in groups:
        part = tuple(next(flat) for _ in group.scored)
        wasted = config.shaping_needs_a_correct and not group.solved
        result.append(tuple(0.0 for _ in part) if wasted else part)
    return tuple(result)


def _components(rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """Rewards [rows, components] and weights [components]; what weighs nothing is left out."""
    weights = {name: w for name, w in rollouts[0].reward.weights.items() if w != 0}
    rows = [[r.reward.components[name] for name in weights] for r in rollouts]
    return (
        torch.tensor(rows, dtype=torch.float64),
        torch.tensor(list(weights.values()), dtype=torch.float64),
    )


def shuffle_rewards(groups: Sequence[RolloutGroup], key: int) -> tuple[RolloutGroup, ...]:
    """The control experiment: grades and rewards dealt out anew over all rollouts of the step."""
    everything = [rollout for group in groups for rollout in group.rollouts]
    order = np.random.default_rng(key).permutation(len(everything)).tolist()
    dealt = [everything[i] for i in order]
    result, start = [], 0
    for group in groups:
        part = dealt[start : start + len(group.rollouts)]
        start += len(group.rollouts)
        rollouts = tuple(
            Rollout(completion=own.completion, grade=other.grade, reward=other.reward)
            for own, other in zip(group.rollouts, part, strict=True)
        )
        result.append(replace(group, rollouts=rollouts))
    return tuple(result)


def rollout_tallies(
    groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float]]
) -> dict[str, Tally]:
    """Everything the rollouts of a step say.

    Means are over rollouts, `groups/*` over groups, and `policy/*` over all tokens sampled.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    completions = [rollout.completion for rollout in rollouts]
    solved = [(group.solved, len(group.rollouts)) for group in groups]
    totals = [r.reward.total for r in rollouts]
    open_groups = [g for g, (s, n) in zip(groups, solved, strict=True) if s < n]
    tallies = {
        "reward/total": Tally.of([t for t in totals if t is not None]),
        "solve_rate": Tally.of([r.grade.correct for r in rollouts]),
        "groups/all_right": Tally.of([s == n for s, n in solved]),
        "groups/all_wrong": Tally.of([s == 0 for s, n in solved]),
        "groups/mixed": Tally.of([0 < s < n for s, n in solved]),
        "frac_groups_with_signal": Tally.of([any(values) for values in advantages]),
        "completion/tokens": Tally.of([len(r.completion.token_ids) for r in rollouts]),
        "completion/truncated": Tally.of([r.completion.truncated for r in rollouts]),
        "completion/repetition": Tally.of([repetition(r.completion.token_ids) for r in rollouts]),
        "completion/unique": Tally.of([_unique(group) for group in open_groups]),
        "policy/entropy": Tally.of([h for c in completions for h in c.entropies]),
        "policy/logprob": Tally.of([value for c in completions for value in c.logprobs]),
        "advantage/abs": Tally.of([abs(a) for values in advantages for a in values]),
        "rollouts/not_scored": Tally.of([t is None for t in totals]),
        "grader/timeouts": Tally.of([r.grade.verdict is Verdict.TIMEOUT for r in rollouts]),
    }
    for name in rollouts[0].reward.components:
        values = [r.reward.components[name] for r in rollouts]
        tallies[f"reward/{name}"] = Tally.of([v for v in values if v is not None])
    return tallies


def repetition(token_ids: Sequence[int], n: int = 4) -> float:
    """The share of the n-grams of a completion that it has had before.

    >>> repetition([1, 2, 3, 4, 5]), repetition([1, 2, 1, 2, 1, 2, 1]), repetition([7])
    (0.0, 0.5, 0.0)
    """
    if len(token_ids) < n:
        return 0.0
    # A set of tuples: several times as fast as sorting rows, which is felt in a small model's step.
    distinct = len(set(zip(*(token_ids[start:] for start in range(n)), strict=False)))
    return 1 - distinct / (len(token_ids) - n + 1)


def _unique(group: RolloutGroup) -> float:
    """How different a group's completions are: 0 where all are the same, 1 where no two are."""
    distinct, count = len({r.completion.token_ids for r in group.rollouts}), len(group.rollouts)
    return (distinct - 1) / (count - 1) if count > 1 else 1.0


def status_of(groups: Sequence[RolloutGroup], *, applied: bool, any_advantage: bool) -> str:
    """One word, and why when nothing was learned."""
    rollouts: list[Rollout] = [r for group in groups for r in group.rollouts]
    broken = {Verdict.TIMEOUT, Verdict.CRASH, Verdict.NOT_SCORED}
    reasons = {
        "learning": applied,
        "skipped:not-finite": any_advantage,
        "no-signal:truncated": all(r.completion.truncated for r in rollouts),
        "no-signal:grader-error": all(r.grade.verdict in broken for r in rollouts),
        "no-signal:not-scored": all(r.reward.total is None for r in rollouts),
        "no-signal:all-wrong": not any(group.solved for group in groups),
        "no-signal:all-right": all(group.solved == len(group.rollouts) for group in groups),
        "no-signal:equal-rewards": True,
    }
    return next(word for word, holds in reasons.items() if holds)
