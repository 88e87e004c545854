"""A look at what GRPO would see: a few samples, and why there is nothing to learn if there is not.

Without a difference within a group there is no gradient. The usual causes are told apart: the
tokenizer cannot write the tags or the stop token, every sample is cut off, the samples are all the
same text, the tags are missing, or the samples differ and are paid alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from grouper.config.schema import GRPOConfig
from grouper.errors import PromptError
from grouper.prompts import PromptFormat, StopTokens
from grouper.prompts.rendering import encode_completion
from grouper.prompts.tokenizer import Tokenizer
from grouper.rewards import RewardStack
from grouper.sampling.base import Sampler
from grouper.sampling.graded import Grader
from grouper.training.grpo import advantages_of, collect
from grouper.types import Problem, Prompt, Rollout, RolloutGroup, SamplingParams, Tally

__all__ = ["Cause", "Preview", "preview", "tags_in", "tokenisation_causes"]

LOW_TEMPERATURE = 0.7
"""Below this, equal samples are first of all a matter of the temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why rewards do not differ, or will not once training goes on.

    Example: `Cause(name="temperature", what="all 5 samples are the same text", fix="Raise it.")`.
    """

    name: str
    """`tokenisation`, `cut off`, `tags`, `temperature`, `certain`, or `equal rewards`."""
    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A few samples, graded and rewarded as in training, and what is wrong with them."""

    groups: tuple[RolloutGroup, ...]
    """One a problem."""
    signal: tuple[bool, ...]
    """Whether GRPO would learn from each group: some advantage is not 0."""
    causes: tuple[Cause, ...]
    """Empty: there is a signal in some group, and the tokenizer can write what it must."""

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All samples, problem by problem."""
        return tuple(rollout for group in self.groups for rollout in group.rollouts)

    @property
    def diversity(self) -> float:
        """How different the samples of a problem are: 0 where all are the same, 1 where no two."""
        return Tally.of(map(_diversity, self.groups)).mean

    @property
    def reward_variance(self) -> float:
        """Mean over the problems of the variance of the total reward (dividing by n)."""
        return Tally.of(map(_variance, self.groups)).mean

    @property
    def certainty(self) -> float:
        """Geometric mean of the probabilities with which the tokens were drawn."""
        logprobs = [value for r in self.rollouts for value in r.completion.logprobs]
        return math.exp(math.fsum(logprobs) / len(logprobs))


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
) -> Preview:
    """Draw `samples` completions of each problem as GRPO would, and look for what is wrong.

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
    broken = tokenisation_causes(fmt, tokenizer, stop_tokens, items[0][1], vocabulary)
    signal = tuple(any(values) for values in advantages_of(groups, config))
    seen = Preview(groups=groups, signal=signal, causes=())
    if any(signal):
        # Rewards may differ by accident among completions of which none comes to an end.
        cut_off = _cut_off(seen, fmt)
        return replace(seen, causes=broken if cut_off is None else (*broken, cut_off))
    return replace(seen, causes=(*broken, *_silent(seen, fmt)))


def _diversity(group: RolloutGroup) -> float:
    texts = [rollout.completion.token_ids for rollout in group.rollouts]
    return (len(set(texts)) - 1) / (len(texts) - 1) if len(texts) > 1 else 1.0


def _variance(group: RolloutGroup) -> float:
    totals = [r.reward.total for r in group.rollouts if r.reward.total is not None]
    if not totals:
        return math.nan
    mean = math.fsum(totals) / len(totals)
    return math.fsum((total - mean) ** 2 for total in totals) / len(totals)


def tags_in(text: str, fmt: PromptFormat) -> dict[str, bool]:
    r"""Tag -> whether it occurs, what the prompt has opened included; `\boxed` without tags."""
    wanted = fmt.tags or ("\\boxed",)
    return {tag: tag in fmt.prefix + text for tag in wanted}


def tokenisation_causes(
    fmt: PromptFormat,
    tokenizer: Tokenizer,
    stop_tokens: StopTokens,
    prompt: Prompt,
    vocabulary: int,
) -> tuple[Cause, ...]:
    """What the tokenizer cannot write or read back: the tags, the stop token, the prefix.

    Args:
        fmt: the prompt format.
        tokenizer: of the model.
        stop_tokens: that end a completion.
        prompt: any prompt of the format.
        vocabulary: rows of the model's embedding.
    """
    layout = f"{fmt.opening}1{fmt.middle}1{fmt.closing}".removeprefix(fmt.prefix)
    found: list[str] = []
    ids: list[int] = []
    for text in (*(fmt.tags or ()), layout):
        try:
            ids = encode_completion(tokenizer, text, "the format")
        except PromptError:
            found.append(f"{text!r} does not survive encoding and decoding")
            break
    if any(stop in ids for stop in stop_tokens.all):
        found.append("the format's own layout holds a stop token, so no completion gets past it")
    outside = [stop for stop in stop_tokens.all[:1] if not 0 <= stop < vocabulary]
    if outside:
        found.append(
            f"the stop token {outside[0]} lies outside the model's {vocabulary} tokens, so it can "
            "never be drawn"
        )
    ending = tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
    if prompt.prefix and not ending.endswith(prompt.prefix):
        found.append(f"the prompt should end in {prompt.prefix!r} and ends in {ending[-40:]!r}")
    fix = (
        "Use other tags (prompt.tags) or another prompt.format; check the model's tokenizer files."
    )
    return tuple(Cause(name="tokenisation", what=what, fix=fix) for what in found)


def _silent(seen: Preview, fmt: PromptFormat) -> tuple[Cause, ...]:
    """What explains why no rewards differ. Equal samples that are all cut off have two causes."""
    plain = tuple(cause for look in _PLAIN if (cause := look(seen, fmt)) is not None)
    return plain or next((cause,) for look in _LOOKS if (cause := look(seen, fmt)) is not None)


def _cut_off(seen: Preview, fmt: PromptFormat) -> Cause | None:
    del fmt
    if not all(rollout.completion.truncated for rollout in seen.rollouts):
        return None
    limit = seen.groups[0].params.max_new_tokens
    return Cause(
        name="cut off",
        what=f"all {len(seen.rollouts)} samples are cut off at {limit} tokens",
        fix="Raise sampling.max_new_tokens, or let SFT teach the stop token first.",
    )


def _same(seen: Preview, fmt: PromptFormat) -> Cause | None:
    del fmt
    if seen.diversity > 0:
        return None
    params = seen.groups[0].params
    what = (
        f"the samples of a problem are all the same text, drawn at temperature "
        f"{params.temperature:g} with a mean probability of {seen.certainty:.3f} a token"
    )
    if params.temperature < LOW_TEMPERATURE:
        return Cause(
            name="temperature",
            what=f"the temperature is too low: {what}",
            fix="Set sampling.temperature to 1.0 or more.",
        )
    if params.truncated:
        return Cause(
            name="temperature",
            what=f"top_p, top_k or min_p leave no choice: {what}",
            fix="Take them off, or raise sampling.temperature.",
        )
    return Cause(
        name="certain",
        what=f"the model is too certain: {what}",
        fix="Raise sampling.temperature, or shorten SFT (fewer steps, a lower learning rate).",
    )


def _no_tags(seen: Preview, fmt: PromptFormat) -> Cause | None:
    missing = [
        tag
        for tag in tags_in("", fmt)
        if not any(tags_in(rollout.completion.text, fmt)[tag] for rollout in seen.rollouts)
    ]
    if not missing:
        return None
    return Cause(
        name="tags",
        what=f"no sample has {', '.join(missing)}, so no answer is found and none is paid",
        fix=f"Teach the format {fmt.name} first: run SFT (longer, if this is after it), with the "
        "same `prompt` settings as here; or let prompt.system ask for the tags.",
    )


def _equal(seen: Preview, fmt: PromptFormat) -> Cause:
    del fmt
    rollouts = seen.rollouts
    problems = f"{len(seen.groups)} problem{'s' if len(seen.groups) > 1 else ''}"
    if all(r.reward.total is None for r in rollouts):
        told, fix = "no reward could be computed", "Try the rewards with `grouper rewards try`."
    elif any(group.has_signal for group in seen.groups):
        told = "none is right, and grpo.shaping_needs_a_correct lets no other reward teach"
        fix = (
            "Look at more problems (--problems 16); choose easier ones, train SFT longer, or set "
            "grpo.shaping_needs_a_correct: false."
        )
    elif all(r.grade.correct for r in rollouts):
        told = "every sample is right: too easy to learn from"
        fix = "Look at more problems (--problems 16); choose harder ones, or set grpo.difficulty."
    elif not any(r.grade.correct for r in rollouts):
        told = "every sample is wrong, and the other rewards pay them alike"
        fix = "Look at more problems (--problems 16); choose easier ones, or train SFT longer."
    else:
        told = "right and wrong samples are paid alike"
        fix = "Check `rewards`: a correctness reward with a weight above 0 is needed."
    return Cause(
        name="equal rewards", what=f"on {problems} the samples differ, but {told}", fix=fix
    )


_PLAIN = (_cut_off, _same)
"""Each is enough by itself."""
_LOOKS: tuple[Callable[[Preview, PromptFormat], Cause | None], ...] = (_no_tags, _equal)
"""From what explains the others to what is left; the last always finds something."""
