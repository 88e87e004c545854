"""How long rows are: measured where data and tokenizer lie on this machine, else at most."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grouper.config.schema import Recipe
from grouper.errors import GrouperError
from grouper.models.loading import load_tokenizer, stop_ids_of
from grouper.models.new_model import fit_tokenizer
from grouper.prompts import (
    find_stop_tokens,
    make_format,
    prepare_demonstrations,
    prepare_prompts,
)
from grouper.training.problem_sets import ProblemSets

__all__ = ["Lengths", "find_lengths"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of the longest and the average rows."""

    sft_prompt: int
    sft_completion: int
    sft_mean: int
    """Prompt and completion together."""
    grpo_prompt: int
    grpo_mean_prompt: int
    completion: int
    """What GRPO may sample."""
    evaluation_completion: int
    vocabulary: int | None
    """Of a fitted tokenizer; None where the model's own is meant."""
    measured: bool


def find_lengths(recipe: Recipe, sets: ProblemSets | None, context: int | None) -> Lengths:
    """Measure what can be measured, and take the recipe's limits for the rest.

    Args:
        recipe: the run.
        sets: its problems, or None where they are not on this machine.
        context: the longest sequence the model takes, or None where it does not say.
    """
    new, total = recipe.sampling.max_new_tokens, recipe.sampling.max_total_tokens
    limit = recipe.prompt.max_prompt_tokens
    if total is not None:
        # Until the prompts are measured: they may be as short as one token, or as long as allowed.
        new, limit = total - 1, min(limit, total - 1)
    elif context is not None:
        limit = max(1, min(limit, context - new))
    # The longest demonstration, all but the shortest prompt of it trained.
    most = min(limit + new, recipe.sft.max_tokens or limit + new)
    bounds = Lengths(
        sft_prompt=min(limit, most - 1) if recipe.sft.max_tokens is None else 1,
        sft_completion=new if recipe.sft.max_tokens is None else max(1, most - 1),
        sft_mean=most,
        grpo_prompt=limit,
        grpo_mean_prompt=limit,
        completion=new,
        evaluation_completion=recipe.evaluation.max_new_tokens or new,
        vocabulary=None if recipe.model.new is None else recipe.model.new.vocab_size,
        measured=False,
    )
    try:
        return bounds if sets is None else _measured(recipe, sets, bounds, context)
    except GrouperError:
        return bounds  # a dry run reports what is wrong; sizes can be bounded anyway


def _measured(recipe: Recipe, sets: ProblemSets, bounds: Lengths, context: int | None) -> Lengths:
    """The bounds with what the tokenizer says: the model's own, or the one it would be given."""
    fmt, limit, path = make_format(recipe.prompt), bounds.grpo_prompt, recipe.model.path
    if path is not None:
        tokenizer = load_tokenizer(path, revision=recipe.model.revision)
        fmt.install(tokenizer)
    else:
        assert recipe.model.new is not None
        size = recipe.model.new.vocab_size
        tokenizer = fit_tokenizer(sets.for_fitting, fmt, vocab_size=size)
        bounds = replace(bounds, vocabulary=len(tokenizer))
    prompts: list[int] = []
    new, total = bounds.completion, recipe.sampling.max_total_tokens
    for part in filter(None, (sets.train, sets.validation, sets.test)):
        kept = prepare_prompts(
            part.problems,
            fmt,
            tokenizer,
            max_prompt_tokens=limit,
            max_percentile=recipe.prompt.max_percentile if part is sets.train else None,
        )
        prompts += [len(prompt.token_ids) for _, prompt in kept.items]
        if part is sets.train and total is not None:
            new = max(1, min(total, context or total) - max(prompts))
    found = replace(
        bounds,
        grpo_prompt=max(prompts),
        grpo_mean_prompt=-(-sum(prompts) // len(prompts)),
        completion=new,
        evaluation_completion=recipe.evaluation.max_new_tokens or new,
        measured=True,
    )
    if sets.sft is None or recipe.skip_sft:
        return replace(found, sft_prompt=0, sft_completion=0, sft_mean=0)
    ends = [] if path is None else stop_ids_of(path, recipe.model.revision)
    demonstrations = prepare_demonstrations(
        sets.sft.problems,
        fmt,
        tokenizer,
        find_stop_tokens(tokenizer, ends, fmt).trained,
        max_prompt_tokens=limit,
        max_completion_tokens=None if context is None else max(1, context - limit),
        max_tokens=recipe.sft.max_tokens,
    ).items
    asked = [len(d.prompt.token_ids) for _, d in demonstrations]
    answered = [len(d.token_ids) for _, d in demonstrations]
    mean = -(-(sum(asked) + sum(answered)) // len(demonstrations))
    return replace(found, sft_prompt=max(asked), sft_completion=max(answered), sft_mean=mean)
