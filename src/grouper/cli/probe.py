"""`grouper probe`: whether a model can complete questions that it should not have seen."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from grouper import files
from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import progress, show, show_json, warn, write_rows

if TYPE_CHECKING:
    from grouper.config.schema import Recipe
    from grouper.data import ProblemSet

EXAMPLES = """
grouper probe outputs/demo                         its own test and training problems
grouper probe ./my-model --on gsm8k,math500
grouper probe outputs/demo --on gsm8k=./gsm8k/test.jsonl --limit 200
grouper probe ./my-model --on ./train.jsonl --output probe.json
"""

# Problems of the control set at most; it has as many as each other set may have.
_MOST_CONTROLS = 200


@click.command("probe", cls=Command, examples=EXAMPLES)
@click.argument("model", metavar="MODEL")
@click.option(
    "--on",
    metavar="SETS",
    help="Benchmark suites or files of problems, separated by commas; of a run also test, "
    "validation, train and sft.  [default: test and train of a run]",
)
@click.option(
    "--limit",
    metavar="N",
    type=options.WholeNumber(1),
    default=100,
    show_default=True,
    help="Number of questions of each set: the first ones.",
)
@click.option(
    "--output", metavar="FILE", type=options.PATH, help="Also write every question as JSON lines."
)
@options.as_json
@options.quiet
def probe(
    model: str,
    *,
    on: str | None,
    limit: int,
    output: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check whether a model has seen the questions of benchmarks.

    MODEL is a run folder, a model or adapter folder, or a Hub name. It is given 60 % of each
    question as plain text and continues it greedily. A model that completes the questions word
    for word has read them, so that its accuracy on them says little. A control set of story
    problems that are made up now shows how many endings it can guess. What a run's model completes
    is recorded in RUN/probes, for the report, the model card and `grouper certify`.
    """
    from grouper import api
    from grouper.models.folders import identity_of
    from grouper.runs.probes import (
        PROBES_FOLDER,
        RecordedProbe,
        probe_lines,
        probe_table,
        write_probe,
    )

    if output is not None:
        files.require_writable(output.parent)
    recipe, run, subject = _model_of(model)
    names = _names(on, recipe, run)
    if run is not None:
        files.require_writable(run)
    sets = [_problems_of(name, recipe if run else None, limit) for name in names]
    control = _control(min(limit, _MOST_CONTROLS))
    probes = api.probe(recipe, subject, [*sets, control], display=progress(quiet=quiet))
    *probes_of_sets, probe_of_control = probes
    identity = identity_of(subject, recipe.model.revision)
    recorded = []
    for found in probes_of_sets:
        if not found.completed:
            warn(f"{found.name}: every question is too short to be completed from its first 60 %.")
            continue
        recorded.append(
            RecordedProbe(model=subject, model_hash=identity, probe=found, control=probe_of_control)
        )
    if output is not None:
        write_rows([row for found in probes for row in found.rows], output)
    if run is not None:
        for recorded_probe in recorded:
            write_probe(run, recorded_probe)
    if as_json:
        show_json({"probes": [found.numbers for found in probes]})
        return
    show(probe_table(recorded), *probe_lines(recorded))
    if run is not None:
        show(f"Recorded: {run / PROBES_FOLDER}")


def _model_of(name: str) -> tuple[Recipe, Path | None, str]:
    """Return how to load a model, its run if MODEL is one, and its folder."""
    from grouper.cli.recipe_args import open_recipe
    from grouper.models.folders import RECIPE_FILE, is_model, recipe_for, require_model_folder
    from grouper.models.trained import trained_model

    folder = Path(name).expanduser()
    if (folder / RECIPE_FILE).is_file() and not is_model(folder):
        recipe = open_recipe(name, trains=False)
        return recipe, folder, trained_model(recipe, folder, say=warn)
    require_model_folder(name, where="MODEL")
    return recipe_for(name, None, "boxed"), None, name


def _names(on: str | None, recipe: Recipe, run: Path | None) -> list[str]:
    """Return the names of the sets.

    Raises:
        UsageError: none are named, and the model is of no run.
    """
    if on is not None:
        return [name.strip() for name in on.split(",")]
    default_names = ["test", "train"] if run is not None else []
    names = [name for name in default_names if getattr(recipe.data, name) is not None]
    if not names:
        raise click.UsageError("name the problems with --on: a suite (gsm8k, math500) or a file.")
    return names


def _problems_of(name: str, recipe: Recipe | None, limit: int) -> ProblemSet:
    """Return the first problems of a part of a run's data, of a suite or of a file."""
    from grouper.data import load_problems
    from grouper.evaluation.suites import suite_named
    from grouper.training.problem_sets import PARTS, require_part

    if recipe is not None and name in PARTS:
        problems = require_part(recipe, name)
        return replace(problems, name=name, problems=problems.problems[:limit])
    data = suite_named(name).data.model_copy(update={"limit": limit})
    return load_problems(data, seed=0, keep_unreadable=True)


def _control(count: int) -> ProblemSet:
    """Return story problems that were made just now, with numbers that nobody can have seen."""
    from grouper.config.schema import SourceConfig
    from grouper.data import load_problems

    settings = {"count": count, "seed": secrets.randbelow(2**31), "high": 900, "max_value": 9_000}
    return load_problems(SourceConfig(source="stories", split="test", options=settings), seed=0)
