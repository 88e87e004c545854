"""A look at what GRPO would see: a few samples, and why there is nothing to learn if there is not.

Without a difference within a group there is no gradient. The usual causes are told apart: the
tokenizer cannot write the tags or the stop token, every sample is cut off, the samples are all the
same text, the tags are missing, or the samples differ and are paid alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grouper.advice.findings import Samples
from grouper.config.schema import GRPOConfig
from grouper.prompts import PromptFormat, StopTokens
from grouper.prompts.tokenizer import Tokenizer
from grouper.rewards import RewardStack
from grouper.sampling.base import Sampler
from grouper.sampling.graded import Grader
from grouper.training.group_signal import advantages_of
from grouper.training.rollouts import collect
from grouper.types import Problem, Prompt, SamplingParams

__all__ = ["preview"]


def preview(
    items: Sequence[tuple[Problem, Prompt]],
    *,
    samples: int,
    fmt: PromptFormat,
    tokenizer: Tokenizer,
    stop_tokens: StopTokens,
    vocabulary: int,
    sampler: Sampler,
    grader: Grader,
    rewards: RewardStack,
    config: GRPOConfig,
    params: SamplingParams,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Samples:
    """Draw `samples` completions of each problem as GRPO would; `checks.find` says what is wrong.

    Args:
        items: the problems with their prompts.
        samples: of each; at least two, for one has nothing to differ from.
        fmt: the prompt format.
        tokenizer: of the model.
        stop_tokens: that end a completion.
        vocabulary: rows of the model's embedding.
        sampler: of the model that GRPO would start from.
        grader: grades each sample.
        rewards: of the recipe.
        config: says which differences count.
        params: GRPO's.
        seed: of the draws.
        progress: called with (samples drawn, samples in all).
    """
    groups = collect(
        items,
        sampler=sampler,
        grader=grader,
        rewards=rewards.for_measuring(),
        params=params,
        group_size=samples,
        key=(seed, "preview"),
        progress=progress,
    ).groups
    return Samples(
        groups=groups,
        signal=tuple(any(values) for values in advantages_of(groups, config)),
        fmt=fmt,
        tokenizer=tokenizer,
        stop_tokens=stop_tokens,
        prompt=items[0][1],
        vocabulary=vocabulary,
    )
