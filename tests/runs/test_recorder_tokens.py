"""Tokens that are recorded one by one: whose they are, and from which moment."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_group, tiny_model

from grouper.algorithms.batching import rollout_rows
from grouper.config.schema import GRPOConfig
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.runs.recorder import TokenLog
from grouper.training.assemble import assemble
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import Scorer, accumulate_gradient, grpo_objective


def test_tokens_are_recorded_of_groups_with_a_signal_first() -> None:
    """Each row's own log-probs, before the first of several updates, whatever slices it is in."""
    groups = [
        make_group(0, [1.0, 1.0], [2, 3]),
        make_group(1, [1.0, None, 0.0], [3, 2, 5]),
        make_group(2, [0.0, 1.0], [4, 1]),
    ]
    settings = GRPOConfig(num_iterations=2, require_correct_in_group=False)
    policy = Policy(tiny_model("qwen3"))
    scores = Scorer(ParallelPolicy(policy), 40)
    made = assemble(groups, settings, scores, max_new_tokens=8, orders=(None, None))
    log = TokenLog(groups, made.advantages, 1)
    for batch in made.batches:
        accumulate_gradient(
            ParallelPolicy(policy), batch, grpo_objective(settings, log.observe), token_budget=9
        )
    found = log.records(ProcessGroup(), str)
    assert list(found) == [(1, 0), (1, 1), (1, 2)]
    rows = rollout_rows(groups)
    assert rows is not None
    expected = scores.current(rows).logprobs
    assert found[1, 0]["trainer_logprobs"] == pytest.approx(expected[2, :3].tolist(), abs=6e-5)
    assert found[1, 2]["trainer_logprobs"] == pytest.approx(expected[3, :5].tolist(), abs=6e-5)
    assert "trainer_logprobs" not in found[1, 1]  # not scored, so not trained on
    ids = groups[1].rollouts[2].completion.token_ids
    assert found[1, 2]["token_texts"] == [str(token) for token in ids]
    assert TokenLog(groups, made.advantages, 0).records(ProcessGroup(), str) == {}


def test_clipped_tokens_of_all_updates_are_recorded() -> None:
    groups = [make_group(0, [1.0, 0.0], [3, 4])]
    rows = rollout_rows(groups)
    assert rows is not None
    log = TokenLog(groups, [[1.0, -1.0]], 2)
    clipped = torch.zeros(rows.mask.shape, dtype=torch.bool)
    clipped[1, 2] = True
    log.observe(rows, torch.full(rows.mask.shape, -2.0), clipped)
    part = rows.select(torch.tensor([1]))
    log.observe(part, torch.full(part.mask.shape, -9.0), part.mask & (torch.arange(4) == 0))
    found = log.records(ProcessGroup(), str)
    assert found[0, 1]["clipped"] == [0, 2]
    assert found[0, 0]["clipped"] == []
    assert found[0, 1]["trainer_logprobs"] == [-2.0] * 4
