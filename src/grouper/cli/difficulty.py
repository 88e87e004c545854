"""`grouper data difficulty`: how often a model solves each training problem."""

from __future__ import annotations

from pathlib import Path

import click

from grouper.cli.options import open_recipe, quiet_option, recipe_arguments, run_of
from grouper.config.schema import Recipe
from grouper.models.folders import trained_model

EXAMPLES = """\b
Examples:
  grouper data difficulty demo --model outputs/demo/sft/final --samples 8
  grouper run demo name=in-band \\
      "grpo.difficulty={path: outputs/demo/pass_rates.jsonl, band: [0.1, 0.9]}"
"""


@click.command("difficulty", epilog=EXAMPLES, short_help="Measure pass rates for the band.")
@click.option(
    "--model",
    metavar="PATH",
    help="A model folder, adapter folder or Hub name. Left out: what the run has trained.",
)
@click.option("--samples", default=8, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="JSON lines; a file that was begun is gone on with.  "
    "[default: <output_dir>/<name>/pass_rates.jsonl]",
)
@quiet_option
@recipe_arguments
def difficulty_command(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    samples: int,
    output: Path | None,
    quiet: bool,
) -> None:
    """Sample each training problem of RECIPE several times, as GRPO would, and write how often it
    is solved. A stopped measurement goes on where it was; `grpo.difficulty.path` reads the file.
    """
    from grouper.models.folders import require_model_folder

    opened = open_recipe(recipe, overrides)
    run = run_of(recipe, opened)
    if model is not None:
        require_model_folder(model, where="--model")
    subject = model or trained_model(opened, run)
    path = (output or run / "pass_rates.jsonl").expanduser()
    rates = _measure(opened, subject, path, samples, quiet=quiet)
    click.echo(_histogram([correct / total for correct, total in rates.values()]))
    click.echo(f"\n{len(rates):,} problems, {samples} samples each: {path}")


def _measure(
    recipe: Recipe, model: str, path: Path, samples: int, *, quiet: bool
) -> dict[str, tuple[int, int]]:
    from grouper.tracking.live import Progress, setup_logging
    from grouper.training.curriculum import PassRates, measure_pass_rates
    from grouper.training.prepare import prepare
    from grouper.training.problem_sets import ProblemSets, load_part

    progress = Progress(quiet=quiet)
    setup_logging(None, console=progress.console)
    sets = ProblemSets(train=load_part(recipe, "train"))
    with prepare(recipe, sets, model=model) as prepared:
        items = prepared.train
        wanted = PassRates(
            path=path,
            samples=samples,
            params=prepared.training_params(),
            model=model,
            seed=recipe.seed,
        )
        with progress.track("measuring pass rates", len(items)) as task:
            return measure_pass_rates(
                wanted,
                items,
                sampler=prepared.sampler(prepared.load(model)),
                grader=prepared.grader,
                progress=task,
            )


def _histogram(rates: list[float], width: int = 40) -> str:
    """Bars of the share of problems by pass rate; never and always stand apart."""
    edges = [0.2, 0.4, 0.6, 0.8]
    rows = [("never solved", [r for r in rates if r == 0])]
    for low, high in zip([0.0, *edges], [*edges, 1.0], strict=True):
        name = f"up to {high:.0%}" if high < 1 else "below 100%"
        rows.append((name, [r for r in rates if low < r <= high and r < 1]))
    rows.append(("always solved", [r for r in rates if r == 1]))
    most = max(len(found) for _, found in rows) or 1
    return "\n".join(
        f"{name:>13}  {len(found):>6,}  {'#' * round(width * len(found) / most)}".rstrip()
        for name, found in rows
    )
