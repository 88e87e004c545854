"""Problem sets -> prompts and demonstrations; those that do not fit are listed, never cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from grouper.errors import PromptError
from grouper.prompts.rendering import Tokenizer, demonstrate, render
from grouper.types import AnswerFormat, Demonstration, Problem, Prompt

Item = TypeVar("Item", Prompt, Demonstration)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A problem that is left out, and why.

    Example: `Dropped(problem_id="gsm8k/train/7", reason="the prompt has 612 tokens, above 512")`.
    """

    problem_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedItems(Generic[Item]):
    """Prompts or demonstrations in the order of their problems, and what was left out."""

    items: tuple[tuple[Problem, Item], ...]
    dropped: tuple[Dropped, ...]


def prepare_prompts(
    problems: Sequence[Problem],
    fmt: AnswerFormat,
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    max_percentile: float | None = None,
    fix: str = "Raise prompt.max_prompt_tokens.",
) -> PreparedItems[Prompt]:
    """The prompts of `problems` that have at most `max_prompt_tokens` tokens.

    With `max_percentile`, of those the ones that are not longer than this percentile of their
    lengths (interpolated linearly). `fix` is the advice if none is left.

    Raises:
        PromptError: the template fails, or no prompt is left.
    """
    prompts = [(problem, render(problem, fmt, tokenizer)) for problem in problems]
    fitting = _fitting(prompts, lambda p: _too_long("prompt", len(p.token_ids), max_prompt_tokens))
    _require_some(fitting, "prompt", fix)
    if max_percentile is None:
        return fitting
    bound = np.percentile([len(p.token_ids) for _, p in fitting.items], max_percentile)
    percentile = f", the percentile {max_percentile:g}"
    shorter = _fitting(
        fitting.items, lambda p: _too_long("prompt", len(p.token_ids), bound, percentile)
    )
    return PreparedItems(items=shorter.items, dropped=fitting.dropped + shorter.dropped)


def prepare_demonstrations(
    problems: Sequence[Problem],
    fmt: AnswerFormat,
    tokenizer: Tokenizer,
    stop_token_id: int,
    *,
    max_prompt_tokens: int,
    max_completion_tokens: int | None = None,
    max_tokens: int | None = None,
) -> PreparedItems[Demonstration]:
    """The demonstrations of `problems` that fit, each ending in the stop token.

    Left out: problems without a worked solution, solutions that do not survive the tokenizer,
    and prompts, completions (stop token included) or both together (`max_tokens`) that are too
    long.

    Raises:
        PromptError: the template fails, or no demonstration is left.
    """
    made: list[tuple[Problem, Demonstration | str]] = []
    for problem in problems:
        try:
            made.append((problem, demonstrate(problem, fmt, tokenizer, stop_token_id)))
        except PromptError as error:
            # A template that fails on every problem leaves none, and is reported below.
            made.append((problem, error.what))

    def too_long(shown: Demonstration) -> str | None:
        asked, answered = len(shown.prompt.token_ids), len(shown.token_ids)
        return (
            _too_long("prompt", asked, max_prompt_tokens)
            or _too_long("completion", answered, max_completion_tokens)
            or _too_long("demonstration", asked + answered, max_tokens)
        )

    fitting = _fitting(made, too_long)
    _require_some(
        fitting,
        "demonstration",
        "SFT needs worked solutions that fit prompt.max_prompt_tokens and sft.max_tokens; raise "
        "them, set skip_sft, or use a source that has them.",
    )
    return fitting


def _fitting(
    made: Sequence[tuple[Problem, Item | str]], too_long: Callable[[Item], str | None]
) -> PreparedItems[Item]:
    """The items that are not too long; a string is the reason why there is no item."""
    items, dropped = [], []
    for problem, item in made:
        reason = item if isinstance(item, str) else too_long(item)
        if reason is not None:
            dropped.append(Dropped(problem_id=problem.id, reason=reason))
        elif not isinstance(item, str):
            items.append((problem, item))
    return PreparedItems(items=tuple(items), dropped=tuple(dropped))


def _too_long(part: str, tokens: int, limit: float | None, of: str = "") -> str | None:
    if limit is None or tokens <= limit:
        return None
    return f"the {part} has {tokens} tokens, above {limit:.10g}{of}"


def _require_some(fitting: PreparedItems[Item], noun: str, fix: str) -> None:
    if fitting.items:
        return
    dropped = fitting.dropped
    first = f"; the first: {dropped[0].problem_id}: {dropped[0].reason}" if dropped else ""
    raise PromptError(f"no {noun} is left of {len(dropped)} problems{first}", fix=fix)
