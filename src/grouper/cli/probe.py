"""`grouper probe`: whether a model can complete questions that it should not have seen."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from grouper import files
from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import progress, show, show_json, table, warn, write_rows

if TYPE_CHECKING:
    from grouper.config.schema import Recipe
    from grouper.data import ProblemSet
    from grouper.evaluation.contamination import Probe

EXAMPLES = """
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
    metavar="SUITES",
    required=True,
    help="Benchmark suites or files of problems, separated by commas.",
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
    on: str,
    limit: int,
    output: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check whether a model has seen the questions of benchmarks.

    MODEL is a run folder, a model or adapter folder, or a Hub name. It is given 60 % of each
    question as plain text and continues it greedily. A model that completes the questions word
    for word has read them, so that its accuracy on them says little. A control set of story
    problems that are made up now shows how many endings it can guess.
    """
    from grouper import api

    if output is not None:
        files.require_writable(output.parent)
    recipe, subject = _model_of(model)
    sets = [_problems_of(name.strip(), limit) for name in on.split(",")]
    control = _control(min(limit, _MOST_CONTROLS))
    probes = api.probe(recipe, subject, [*sets, control], display=progress(quiet=quiet))
    if output is not None:
        write_rows([row for found in probes for row in found.rows], output)
    if as_json:
        show_json({"probes": [found.numbers for found in probes]})
        return
    _show(probes)


def _model_of(name: str) -> tuple[Recipe, str]:
    """Return how to load a model, and its folder; of a run, the model that it has trained."""
    from grouper.cli.recipe_args import open_recipe
    from grouper.models.folders import RECIPE_FILE, is_model, recipe_for, require_model_folder
    from grouper.models.trained import trained_model

    folder = Path(name).expanduser()
    if (folder / RECIPE_FILE).is_file() and not is_model(folder):
        recipe = open_recipe(name, ())
        return recipe, trained_model(recipe, folder, say=warn)
    require_model_folder(name, where="MODEL")
    return recipe_for(name, None, "boxed"), name


def _problems_of(name: str, limit: int) -> ProblemSet:
    """Return the first problems of a suite or a file."""
    from grouper.data import load_problems
    from grouper.evaluation.suites import suite_named

    data = suite_named(name).data.model_copy(update={"limit": limit})
    return load_problems(data, seed=0, keep_unreadable=True)


def _control(count: int) -> ProblemSet:
    """Return story problems that were made just now, with numbers that nobody can have seen."""
    from grouper.config.schema import SourceConfig
    from grouper.data import load_problems

    settings = {"count": count, "seed": secrets.randbelow(2**31), "high": 900, "max_value": 9_000}
    return load_problems(SourceConfig(source="stories", split="test", options=settings), seed=0)


def _show(probes: list[Probe]) -> None:
    """Print the share of endings of each set, and which of them cannot have been guessed."""
    from grouper.evaluation.contamination import is_suspicious

    *sets, control = probes
    rows = []
    for found in probes:
        low, high = 100 * found.interval.low, 100 * found.interval.high
        name = "control (made now)" if found is control else found.name
        exact = f"{100 * found.exact:.1f} [{low:.1f}, {high:.1f}]"
        rows.append((name, str(len(found.completed)), exact, f"{100 * found.similarity:.0f}"))
    table(("problems", "questions", "completed word for word %", "ROUGE-L %"), rows)
    for found in sets:
        if is_suspicious(found, control):
            show(
                f"{found.name}: the model completes more of these questions than can be guessed, "
                "so it has probably read them. Its accuracy on them is no measure of what it can; "
                "`grouper eval --twins` measures on the same problems with other numbers."
            )
        else:
            show(f"{found.name}: no more than can be guessed. No evidence that it has read them.")
