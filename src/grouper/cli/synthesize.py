"""`grouper synthesize`: a model's correct answers as data for SFT."""

from __future__ import annotations

from pathlib import Path

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import flow, progress, warn
from grouper.errors import plural

EXAMPLES = """
grouper synthesize outputs/demo --samples 2 --output right.jsonl
"""


@click.command("synthesize", cls=Command, examples=EXAMPLES)
@options.recipe
@options.model
@click.option(
    "--samples",
    metavar="K",
    type=options.WholeNumber(1),
    default=4,
    show_default=True,
    help="Number of completions per problem.",
)
@click.option("--output", metavar="FILE", type=options.PATH, required=True, help="File to write.")
@options.quiet
def synthesize(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    samples: int,
    output: Path,
    quiet: bool,
) -> None:
    """Sample problems and save correct answers as SFT data.

    Samples the training problems of RECIPE (a recipe or a run folder) as GRPO would, grades the
    completions, and writes the correct ones to a JSONL file, each with its model, problem, sample
    and seed.
    """
    from grouper.cli.recipe_args import open_recipe, require_new, run_of
    from grouper.data.reading import source_named
    from grouper.models.folders import require_model_folder
    from grouper.models.trained import trained_model

    opened = open_recipe(recipe, overrides, trains=False)
    subject = model or trained_model(opened, run_of(recipe, opened), say=warn)
    require_model_folder(subject, where="--model")
    require_new(output, f"--output {output}")
    from grouper import api

    display = progress(quiet=quiet)
    with display.within("synthesize"):
        rows, completions = api.synthesize(
            opened, subject, output, samples=samples, display=display
        )
    click.echo(f"{output}: {plural(rows, 'right answer')} of {plural(completions, 'completion')}.")
    settings = source_named(str(output))
    if settings["source"] == "file":
        settings = settings | {"columns": {"response": "response"}}
    click.echo(f"Train on them with 'data.sft={flow(settings)}'.")
