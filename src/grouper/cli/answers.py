"""The model that answers in `grouper generate` and `chat`, and how an answer is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from grouper.cli.text import warn
from grouper.printable import printable

if TYPE_CHECKING:
    from grouper.api import Solution
    from grouper.config.schema import Recipe


def open_model(
    model: str,
    *,
    recipe: str | None,
    format_name: str | None,
    checkpoint: str | None,
    engine: str | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    seed: int | None = None,
) -> tuple[Recipe, str]:
    """Return the recipe that prompts a model, and the model's folder or name.

    Args:
        model: a model, or a run folder.
        recipe: another recipe than the model's own.
        format_name: another prompt format than the recipe's.
        checkpoint: of a run folder.
        engine: another sampling engine than the recipe's.
        samples: answers per question; None: as the recipe evaluates, like the next three.
        temperature: of sampling.
        max_new_tokens: longest answer.
        seed: of the random numbers.
    """
    from grouper.cli.recipe_args import open_recipe, sampled_by
    from grouper.models.folders import recipe_for, with_sampling
    from grouper.models.trained import model_in

    model = model_in(model, checkpoint=checkpoint, say=warn)
    named_recipe = None if recipe is None else open_recipe(recipe, trains=False)
    model_recipe = recipe_for(model, named_recipe, format_name).override(*sampled_by(engine))
    changed_recipe = with_sampling(
        model_recipe,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    return changed_recipe, model


def show_answer(solution: Solution) -> None:
    """Print the extracted answer, or why there is none."""
    if solution.answer is None:
        click.echo(click.style(f"No answer: {solution.reason}.", fg="yellow"))
    else:
        answer = printable(f"Answer: {solution.answer}")
        click.echo(click.style(answer, fg="green", bold=True))
