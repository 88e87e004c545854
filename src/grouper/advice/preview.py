"""What GRPO would see: a few samples and, where there is nothing to learn from them, the reason.

Without a difference within a group there is no gradient. The usual causes are distinguished (see
`checks`): the tokenizer cannot write the tags or the stop token, every sample is cut off, the
samples are all the same text, the tags are missing, or the samples differ and get equal rewards.
"""

from __future__ import annotations

from collections.abc import Callable

from grouper.advice.checks import Samples
from grouper.models.policy import Policy
from grouper.training.grpo import advantages_of, collect
from grouper.training.prepare import Items, Prepared


def preview(
    prepared: Prepared,
    policy: Policy,
    items: Items,
    *,
    samples: int,
    progress: Callable[[int, int], None] | None = None,
) -> Samples:
    """Draw `samples` completions of each problem as GRPO would; `checks.find` says what is wrong.

    Args:
        prepared: of the recipe.
        policy: the model that GRPO would start from.
        items: the problems with their prompts.
        samples: of each; at least two, for one has nothing to differ from.
        progress: called with (samples drawn, samples in all).
    """
    recipe = prepared.recipe
    groups = collect(
        items,
        sampler=prepared.sampler(policy),
        grader=prepared.grader,
        rewards=prepared.rewards,
        params=prepared.training_params(),
        group_size=samples,
        key=(recipe.seed, "preview"),
        progress=progress,
    ).groups
    return Samples(
        groups=groups,
        signal=tuple(any(values) for values in advantages_of(groups, recipe.grpo)),
        prepared=prepared,
    )
