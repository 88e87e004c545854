"""Validation loss: the mean over held-out tokens, however they are cut."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_prompt, tiny_model, tokens

from grouper.algorithms.batching import demonstration_batch
from grouper.algorithms.weighting import token_mean
from grouper.models.policy import Policy
from grouper.training.parallel import Replica
from grouper.training.validation_loss import validation_loss
from grouper.types import Demonstration


def test_it_is_the_mean_over_tokens_whatever_the_budget() -> None:
    policy = Policy(tiny_model("qwen3"))
    shown = [
        Demonstration(
            prompt=make_prompt(i, 3 + i), token_ids=(*tokens(2 + 3 * i, i), 2), stop_token_id=2
        )
        for i in range(4)
    ]
    batch = demonstration_batch(shown, token_mean)
    with torch.no_grad():
        expected = float(-(policy(batch).logprobs * batch.weights).sum())
    for budget in (20, 10_000):
        loss = validation_loss(Replica(policy), shown, token_budget=budget)
        assert loss.mean == pytest.approx(expected, rel=1e-6)
        assert loss.count == sum(len(d.token_ids) for d in shown)
        assert loss.max >= loss.mean >= loss.min > 0
