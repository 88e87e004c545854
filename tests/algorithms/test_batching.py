"""TrainBatch: weights are fixed over the step, slices add up, flat rows only save time."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_batch, make_group, make_prompt, one_step, tokens

from grouper.algorithms.batching import (
    demonstration_batch,
    micro_batches,
    rollout_rows,
    step_batches,
    with_gradient,
)
from grouper.algorithms.weighting import WEIGHTINGS, token_mean
from grouper.types import Demonstration


@pytest.mark.parametrize("budget", [1, 8, 20, 40, 10_000])
def test_slices_hold_every_row_once_with_its_own_weights(budget: int) -> None:
    batch = make_batch()
    slices = micro_batches(batch, budget)
    seen = torch.cat([s.sequence_ids for s in slices])
    assert sorted(seen.tolist()) == list(range(batch.rows))
    for part in slices:
        for row, sequence in enumerate(part.sequence_ids.tolist()):
            width = int(part.completion_lengths[row])
            assert torch.equal(part.weights[row, :width], batch.weights[sequence, :width])
            assert torch.equal(
                part.completion_ids[row, :width], batch.completion_ids[sequence, :width]
            )
            prompt = part.prompt_ids[part.prompt_index[row]]
            length = int(part.prompt_lengths[part.prompt_index[row]])
            full = batch.prompt_ids[batch.prompt_index[sequence]]
            assert torch.equal(prompt[:length], full[:length])


def test_slices_keep_to_the_budget_counting_each_prompt_once() -> None:
    for part in micro_batches(make_batch(), 24):
        used = int(part.prompt_lengths.sum() + part.completion_lengths.sum())
        assert used <= 24 or part.rows == 1


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="token_budget"):
        micro_batches(make_batch(), 0)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_groups_without_signal_count_in_the_denominator(name: str) -> None:
    live = make_group(0, [1.0, 0.0], [3, 5])
    flat = make_group(1, [1.0, 1.0], [4, 4])
    weighting = WEIGHTINGS[name]
    advantages = [[1.0, -1.0], [0.0, 0.0]]
    kept = one_step([live, flat], advantages, weighting, constant=7, keep_flat=True)
    cut = one_step([live, flat], advantages, weighting, constant=7)
    assert (kept.rows, cut.rows) == (4, 2)
    assert torch.equal(cut.weights, kept.weights[:2, :5])


def test_unscored_rollouts_are_not_in_the_batch_at_all() -> None:
    group = make_group(0, [1.0, None, 0.0], [3, 9, 5])
    batch = one_step([group], [[1.0, -1.0]], token_mean)
    assert batch.completion_lengths.tolist() == [3, 5]
    assert batch.weights.sum().item() == pytest.approx(1.0)


def test_the_ids_that_are_trained_are_the_ids_that_were_sampled() -> None:
    """T5: never text that was tokenized again; the stop token among them."""
    groups = [make_group(g, [1.0, 0.0], [3 + g, 7]) for g in range(2)]
    batch = one_step(groups, [[1.0, -1.0]] * 2, token_mean)
    sampled = [r.completion.token_ids for group in groups for r in group.rollouts]
    for row, ids in enumerate(sampled):
        assert tuple(batch.completion_ids[row][batch.mask[row]].tolist()) == ids


def test_nothing_to_learn_is_no_batch() -> None:
    rows = rollout_rows([make_group(0, [1.0, 1.0], [3, 4])])
    assert rows is not None
    assert [with_gradient(step) for step in step_batches(rows, token_mean)] == [None]
    assert rollout_rows([make_group(0, [None, None], [3, 4])]) is None


def test_demonstrations_train_the_whole_completion_stop_token_included() -> None:
    demonstrations = [
        Demonstration(prompt=make_prompt(i), token_ids=(*tokens(n, i), 2))
        for i, n in enumerate([2, 5])
    ]
    batch = demonstration_batch(demonstrations, token_mean)
    assert batch.mask.sum(1).tolist() == [3, 6]
    last = batch.completion_lengths - 1
    assert batch.completion_ids[torch.arange(2), last].tolist() == [2, 2]
    assert (batch.weights[torch.arange(2), last] > 0).all()
    # Padding is told by length: pad id 0 equals no id that is trained or left out.
    assert not batch.mask[0, 3:].any()
