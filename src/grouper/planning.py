"""The sizes of a run, from its recipe and data alone: what a dry run prints."""

from __future__ import annotations

from grouper.config import Recipe
from grouper.training.problem_sets import ProblemSets, load_problem_sets
from grouper.training.stream import total_steps

__all__ = ["describe_sizes"]


def _sft_line(recipe: Recipe, sets: ProblemSets) -> str:
    assert sets.sft is not None
    size, batch = len(sets.sft), recipe.sft.batch_size
    steps = total_steps(recipe.sft, size=size, per_step=batch)
    return (
        f"SFT: {batch} demonstrations a step, {size:,} in all = {-(-size // batch):,} steps an "
        f"epoch; {steps:,} steps"
    )


def _grpo_line(recipe: Recipe, sets: ProblemSets) -> str:
    assert sets.train is not None
    config = recipe.grpo
    size, per_step = len(sets.train), config.prompts_per_step
    steps = total_steps(config, size=size, per_step=per_step)
    return (
        f"GRPO: {per_step} prompts x {config.group_size} samples = "
        f"{per_step * config.group_size} completions a step, {-(-size // per_step):,} steps an "
        f"epoch; {steps:,} steps, at most {recipe.sampling.max_new_tokens} tokens a completion"
    )


def describe_sizes(recipe: Recipe) -> list[str]:
    """One line per phase and measurement. Reads the data; loads no tokenizer and no model.

    Prompts that turn out too long are dropped later, when the tokenizer is known.

    Raises:
        DataError: the data cannot be used.
    """
    sets = load_problem_sets(recipe)
    lines = []
    if not recipe.skip_sft:
        lines.append(_sft_line(recipe, sets))
    if not recipe.skip_grpo:
        lines.append(_grpo_line(recipe, sets))
    for name, part in (("validation", sets.validation), ("test", sets.test)):
        if part is not None:
            k = recipe.evaluation.samples
            lines.append(f"Evaluation on {name}: {len(part):,} problems x {k} = {k * len(part):,}")
    return lines
