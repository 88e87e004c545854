"""Checks on a few samples before training starts: cut-off completions, stop tokens, prompts."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from grouper.errors import PreflightError
from grouper.models.loading import context_length
from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest, address
from grouper.training.curriculum import first_met
from grouper.training.prepare import Items
from grouper.training.session import Session
from grouper.types import Completion

__all__ = ["LengthReport", "check_lengths", "check_stopping", "length_report"]

log = logging.getLogger(__name__)

MAX_TRUNCATED = 0.5
STRETCH = 4
"""The pre-flight samples up to this many times the budget, to see how long answers want to be."""
STOP_SAMPLES = 10
MIN_STOPPED = 0.8


@dataclass(frozen=True, slots=True)
class LengthReport:
    """How long completions want to be, against a budget of `budget` tokens."""

    budget: int
    median: int
    p95: int
    truncated: float
    """Share that does not end within the budget."""
    open_ended: bool
    """Whether the 95th percentile itself was cut off, so that it is only a lower bound."""

    def __str__(self) -> str:
        at_least = "at least " if self.open_ended else ""
        return (
            f"completions take {self.median} tokens (median), {at_least}{self.p95} (95th "
            f"percentile); {self.truncated:.0%} do not end within {self.budget}"
        )


def length_report(lengths: Sequence[int], ended: Sequence[bool], budget: int) -> LengthReport:
    """Summary of sampled lengths [tokens] and whether each completion ended by itself.

    >>> print(length_report([10, 20, 30, 40], [True, True, True, False], 25))
    completions take 20 tokens (median), at least 40 (95th percentile); 50% do not end within 25
    """
    ordered = sorted(zip(lengths, ended, strict=True))
    p95, p95_ended = ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]
    late = sum(length > budget or not end for length, end in ordered)
    return LengthReport(
        budget=budget,
        median=ordered[(len(ordered) - 1) // 2][0],
        p95=p95,
        truncated=late / len(ordered),
        open_ended=not p95_ended,
    )


def _items(session: Session, count: int) -> Items:
    train = session.inputs.train
    return tuple(train[i] for i in first_met(len(train), count, seed=session.recipe.seed))


def _sample(
    session: Session, policy: Policy, count: int, limit: int, purpose: str
) -> list[Completion]:
    items = _items(session, count)
    params = session.training_params(max_new_tokens=limit)
    requests = [
        SampleRequest(
            prompt=prompt, params=params, key=address(session.recipe.seed, purpose, problem.id)
        )
        for problem, prompt in items
    ]
    drawn: list[Completion] = []
    with session.display.track(f"{purpose}: sampling", len(requests)) as task:
        for _, completion in session.sampler(policy).sample(requests):
            drawn.append(completion)
            task.advance()
            session.raise_if_stopped()
    return drawn


def check_lengths(session: Session, policy: Policy) -> None:
    """Sample `grpo.preflight_prompts` prompts and refuse a budget that cuts off most of them.

    Raises:
        PreflightError: more than half would be truncated, and the recipe does not allow it.
    """
    config, budget = session.recipe.grpo, session.max_new_tokens
    if config.preflight_prompts == 0:
        return
    items = _items(session, config.preflight_prompts)
    longest = max(len(prompt.token_ids) for _, prompt in items)
    sampler_limit = context_length(policy)
    room = STRETCH * budget if sampler_limit is None else sampler_limit - longest
    drawn = _sample(
        session,
        policy,
        config.preflight_prompts,
        max(budget, min(STRETCH * budget, room)),
        "pre-flight",
    )
    report = length_report(
        [len(c.token_ids) for c in drawn], [not c.truncated for c in drawn], budget
    )
    session.display.say(f"Pre-flight: of {len(drawn)} samples, {report}.")
    if report.truncated <= MAX_TRUNCATED or config.allow_truncation:
        return
    # What has been measured or trained before is kept, and the run can continue from it.
    begun = session.team.lead(session.has_begun)
    if report.open_ended:
        advice = "Most never stop at all: teach the stop token first (SFT), or check the format."
    else:
        how = ", with --resume --allow-changes to keep what is there, or --overwrite"
        advice = f"Set sampling.max_new_tokens={_round_up(report.p95)}{how if begun else ''}."
    raise PreflightError(
        f"{report.truncated:.0%} of {len(drawn)} sampled completions are cut off at "
        f"sampling.max_new_tokens={budget}; a cut-off answer earns nothing, so nothing would be "
        "learned",
        where="pre-flight",
        fix=f"{advice} To train anyway: {'--resume ' if begun else ''}grpo.allow_truncation=true.",
    )


def _round_up(tokens: int) -> int:
    """To the next multiple of 32, which is easier to read and to remember."""
    return math.ceil(tokens / 32) * 32


def check_stopping(session: Session, policy: Policy) -> float:
    """The share of a few samples after SFT that end by themselves; warns when it is low."""
    drawn = _sample(session, policy, STOP_SAMPLES, session.max_new_tokens, "stop check")
    share = sum(not c.truncated for c in drawn) / len(drawn)
    session.display.say(f"Stop check: {share:.0%} of {len(drawn)} samples end by themselves.")
    if share < MIN_STOPPED:
        log.warning(
            "Only %.0f%% of the samples end by themselves after SFT. Train longer, raise "
            "sampling.max_new_tokens, or look at the demonstrations' last token.",
            100 * share,
        )
    return share
