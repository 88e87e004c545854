"""The model before training: the one a recipe names, or a new random one."""

from __future__ import annotations

from pathlib import Path

from grouper.config.schema import Recipe
from grouper.models.new_model import make_new_model, save_new_model
from grouper.prompts import make_format
from grouper.training.problem_sets import ProblemSets

__all__ = ["make_base", "named_base"]


def named_base(recipe: Recipe) -> str | None:
    """The folder or Hub name of the model whose tokenizer a run uses; None: it is to be made."""
    if recipe.model.path is None and recipe.skip_sft:
        # A new model would bring a new tokenizer, which the starting model cannot read.
        return recipe.grpo.start_from
    return recipe.model.path


def make_base(recipe: Recipe, sets: ProblemSets, target: Path) -> str:
    """Make the recipe's random model in a new folder; the same arguments give the same weights.

    Args:
        recipe: describes it.
        sets: the data that its tokenizer is fitted to.
        target: where it is saved.

    Returns:
        A line that says what was made.
    """
    new = recipe.model.new
    assert new is not None, "a recipe has a path or a new model"
    model, tokenizer = make_new_model(
        new, sets.for_fitting, make_format(recipe.prompt), seed=recipe.seed
    )
    save_new_model(target, model, tokenizer)
    count = sum(p.numel() for p in model.parameters())
    return f"New random {new.architecture} model: {count:,} parameters, {len(tokenizer)} tokens."
