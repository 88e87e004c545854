"""Whole problem sets -> prompts and demonstrations; what does not fit is listed, never cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grouper.errors import PromptError
from grouper.prompts.formats import PromptFormat
from grouper.prompts.tokenizer import Tokenizer
from grouper.types import Demonstration, Problem, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A problem that is left out, and why.

    Example: `Dropped(problem_id="gsm8k/train/7", reason="the prompt has 612 tokens, above 512")`.
    """

    problem_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompts:
    """Prompts in the order of their problems, and what was left out."""

    items: tuple[tuple[Problem, Prompt], ...]
    dropped: tuple[Dropped, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDemonstrations:
    """Demonstrations in the order of their problems, and what was left out."""

    items: tuple[tuple[Problem, Demonstration], ...]
    dropped: tuple[Dropped, ...]


def prepare_prompts(
    problems: Sequence[Problem],
    fmt: PromptFormat,
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    max_percentile: float | None = None,
    fix: str = "Raise prompt.max_prompt_tokens.",
) -> PreparedPrompts:
    """The prompts of `problems` that have at most `max_prompt_tokens` tokens.

    Of those, with `max_percentile`, the ones that are no longer than this percentile of their
    lengths (interpolated linearly). `fix` is what helps where none is left.

    Raises:
        PromptError: the template fails, or no prompt is left.
    """
    items, dropped = [], []
    for problem in problems:
        prompt = fmt.render(problem, tokenizer)
        reason = _too_long("prompt", len(prompt.token_ids), max_prompt_tokens)
        if reason is None:
            items.append((problem, prompt))
        else:
            dropped.append(Dropped(problem_id=problem.id, reason=reason))
    _require_some(items, dropped, "prompt", fix)
    if max_percentile is not None:
        bound = np.percentile([len(prompt.token_ids) for _, prompt in items], max_percentile)
        longer = [(p, prompt) for p, prompt in items if len(prompt.token_ids) > bound]
        items = [(p, prompt) for p, prompt in items if len(prompt.token_ids) <= bound]
        dropped += [
            Dropped(
                problem_id=problem.id,
                reason=f"the prompt has {len(prompt.token_ids)} tokens, above {bound:g}, the "
                f"percentile {max_percentile:g}",
            )
            for problem, prompt in longer
        ]
    return PreparedPrompts(items=tuple(items), dropped=tuple(dropped))


def prepare_demonstrations(
    problems: Sequence[Problem],
    fmt: PromptFormat,
    tokenizer: Tokenizer,
    stop_token_id: int,
    *,
    max_prompt_tokens: int,
    max_completion_tokens: int | None = None,
    max_tokens: int | None = None,
) -> PreparedDemonstrations:
    """The demonstrations of `problems` that fit, each ending in the stop token.

    Left out: problems without a worked solution, solutions that do not survive the tokenizer,
    and prompts, completions (stop token included) or both together (`max_tokens`) that are too
    long.

    Raises:
        PromptError: the template fails, or no demonstration is left.
    """
    items, dropped = [], []
    for problem in problems:
        reason: str | None
        try:
            demonstration = fmt.demonstrate(problem, tokenizer, stop_token_id)
        except PromptError as error:
            # A template that fails on every problem leaves none, and is told below.
            reason = error.what
        else:
            asked, answered = len(demonstration.prompt.token_ids), len(demonstration.token_ids)
            reason = (
                _too_long("prompt", asked, max_prompt_tokens)
                or _too_long("completion", answered, max_completion_tokens)
                or _too_long("demonstration", asked + answered, max_tokens)
            )
            if reason is None:
                items.append((problem, demonstration))
                continue
        dropped.append(Dropped(problem_id=problem.id, reason=reason))
    _require_some(
        items,
        dropped,
        "demonstration",
        "SFT needs worked solutions that fit prompt.max_prompt_tokens and sft.max_tokens; raise "
        "them, set skip_sft, or use a source that has them.",
    )
    return PreparedDemonstrations(items=tuple(items), dropped=tuple(dropped))


def _too_long(part: str, tokens: int, limit: int | None) -> str | None:
    if limit is None or tokens <= limit:
        return None
    return f"the {part} has {tokens} tokens, above {limit}"


def _require_some(items: Sequence[object], dropped: Sequence[Dropped], noun: str, fix: str) -> None:
    if items:
        return
    first = f"; the first: {dropped[0].problem_id}: {dropped[0].reason}" if dropped else ""
    raise PromptError(f"no {noun} is left of {len(dropped)} problems{first}", fix=fix)
