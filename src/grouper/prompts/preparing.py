"""Problem sets -> prompts and demonstrations; items that do not fit are dropped, never cut."""

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
    """A problem that is left out, and the reason.

    Example: `Dropped(problem_id="gsm8k/train/7", reason="the prompt has 612 tokens, above 512")`.
    """

    problem_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedItems(Generic[Item]):
    """Prompts or demonstrations in the order of their problems, and the problems left out."""

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
    """Render the prompts of `problems`, and keep those of at most `max_prompt_tokens` tokens.

    With `max_percentile`, prompts that are longer than this percentile of the remaining lengths
    (interpolated linearly) are dropped as well. `fix` is the advice if none is left.

    Raises:
        PromptError: the template fails, or no prompt is left.
    """

    def above_limit(prompt: Prompt) -> str | None:
        return _too_long("prompt", len(prompt.token_ids), max_prompt_tokens)

    prompts = [(problem, render(problem, fmt, tokenizer)) for problem in problems]
    fitting = _fitting(prompts, above_limit)
    _require_some(fitting, "prompt", fix)
    if max_percentile is None:
        return fitting

    lengths = [len(prompt.token_ids) for _, prompt in fitting.items]
    bound = np.percentile(lengths, max_percentile)
    bound_name = f", the percentile {max_percentile:g}"

    def above_percentile(prompt: Prompt) -> str | None:
        return _too_long("prompt", len(prompt.token_ids), bound, bound_name)

    shorter = _fitting(fitting.items, above_percentile)
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
    """Make the demonstrations of `problems` that fit, each ending in the stop token.

    Left out: problems without a worked solution, solutions that do not survive the tokenizer,
    and prompts, completions (stop token included) or both together (`max_tokens`) that are too
    long.

    Raises:
        PromptError: the template fails, or no demonstration is left.
    """
    results: list[tuple[Problem, Demonstration | str]] = []
    for problem in problems:
        try:
            results.append((problem, demonstrate(problem, fmt, tokenizer, stop_token_id)))
        except PromptError as error:
            # A template that fails on every problem leaves none, and is reported below.
            results.append((problem, error.what))

    def above_limit(demonstration: Demonstration) -> str | None:
        prompt_tokens = len(demonstration.prompt.token_ids)
        completion_tokens = len(demonstration.token_ids)
        return (
            _too_long("prompt", prompt_tokens, max_prompt_tokens)
            or _too_long("completion", completion_tokens, max_completion_tokens)
            or _too_long("demonstration", prompt_tokens + completion_tokens, max_tokens)
        )

    fitting = _fitting(results, above_limit)
    _require_some(
        fitting,
        "demonstration",
        "SFT needs worked solutions that fit prompt.max_prompt_tokens and sft.max_tokens; raise "
        "them, set skip_sft, or use a source that has them.",
    )
    return fitting


def _fitting(
    results: Sequence[tuple[Problem, Item | str]], too_long: Callable[[Item], str | None]
) -> PreparedItems[Item]:
    """Keep the items that are not too long; a string is the reason why there is no item."""
    items = []
    dropped = []
    for problem, item in results:
        reason = item if isinstance(item, str) else too_long(item)
        if reason is not None:
            dropped.append(Dropped(problem_id=problem.id, reason=reason))
        elif not isinstance(item, str):
            items.append((problem, item))
    return PreparedItems(items=tuple(items), dropped=tuple(dropped))


def _too_long(noun: str, tokens: int, limit: float | None, limit_name: str = "") -> str | None:
    """Return the reason to drop an item, or None where it fits."""
    if limit is None or tokens <= limit:
        return None
    return f"the {noun} has {tokens} tokens, above {limit:.10g}{limit_name}"


def _require_some(fitting: PreparedItems[Item], noun: str, fix: str) -> None:
    if fitting.items:
        return
    example = ""
    if fitting.dropped:
        first = fitting.dropped[0]
        example = f"; the first: {first.problem_id}: {first.reason}"
    raise PromptError(f"no {noun} is left of {len(fitting.dropped)} problems{example}", fix=fix)
