"""The loss on demonstrations that are not trained on: SFT's other measure beside accuracy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grouper.algorithms.batching import demonstration_batch
from grouper.algorithms.weighting import token_mean
from grouper.training.parallel import Replica
from grouper.training.scoring import Scorer
from grouper.types import Demonstration, Tally

__all__ = ["validation_loss"]


def validation_loss(
    replica: Replica, demonstrations: Sequence[Demonstration], *, token_budget: int
) -> Tally:
    """Negative log-likelihood of every demonstrated token, stop tokens among them; no dropout.

    Args:
        replica: the policy being trained; every process of its team calls this.
        demonstrations: held-out worked solutions.
        token_budget: tokens in one forward.
    """
    batch = demonstration_batch(demonstrations, token_mean)
    logprobs, _ = Scorer(replica, token_budget).current(batch)
    losses = -logprobs[batch.mask].double()
    low, high = torch.aminmax(losses)
    return Tally(float(losses.sum()), float(losses.numel()), float(low), float(high))
