"""`grouper compare`: compare runs or models by evaluations that are on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.results import show_results, stages
from grouper.cli.text import short, show, show_json, table, warn, warn_of_losses
from grouper.errors import ConfigError, plural
from grouper.runs.lock import is_running

if TYPE_CHECKING:
    from grouper.evaluation.result import EvaluationItem, EvaluationResult

EXAMPLES = """
grouper compare outputs/demo outputs/demo-2
grouper compare outputs/demo --on test
grouper compare outputs/a-0,outputs/a-1 outputs/b-0,outputs/b-1
"""


@click.command("compare", cls=Command, examples=EXAMPLES)
@click.argument("arms", nargs=-1, required=True, metavar="A...")
@click.option(
    "--on",
    metavar="SET",
    default="test",
    show_default=True,
    help="Which evaluations to compare: test, validation, or the name of a benchmark.",
)
@click.option(
    "--items",
    metavar="N",
    type=options.WholeNumber(0),
    default=10,
    show_default=True,
    help="Number of problems won and of problems lost to print.",
)
@options.as_json
def compare(arms: tuple[str, ...], *, on: str, items: int, as_json: bool) -> None:
    """Compare runs or models by their recorded evaluations.

    Evaluations on disk are compared problem by problem: each difference with its interval and
    verdict (better, worse, no evidence), its sources (format, extraction, truncation, reasoning),
    and the problems won and lost. Only problems that are in all of the evaluations count.

    Each A is a run folder, a folder of eval_runs, or the .json file of an evaluation. Runs
    separated by commas are seeds of one recipe: one arm, with an interval over the seeds. A
    single run, or the seeds of a single recipe, are compared phase by phase.
    """
    from grouper.evaluation.compare import compare_arms

    places = []
    for arm in arms:
        names = [name for name in arm.split(",") if name]
        places.append([Path(name).expanduser() for name in names])
    every = [place for arm_places in places for place in arm_places]
    for place in every:
        _look_at(place)
    if not all(places):
        raise click.UsageError("a name is missing next to a comma.")
    if len({place.resolve() for place in every}) < len(every):
        raise click.UsageError("the same run cannot be two seeds of one arm, nor two arms.")
    if len(places) == 1 and len(places[0]) == 1 and not (places[0][0] / "run.json").exists():
        raise click.UsageError("name at least two things to compare, or one run.")
    if len(places) == 1:
        comparison = stages(places[0], on=on)
    else:
        recorded = {place: _recorded(place, on) for place in every}
        phases = {run: recorded[run].phase for run in every if (run / "run.json").exists()}
        if len(set(phases.values())) > 1:
            # Perhaps one of the runs was stopped.
            text = ", ".join(f"{run} after {phase}" for run, phase in phases.items())
            warn(f"these runs were not measured after the same phase: {text}.")
        results = [[recorded[place] for place in arm_places] for arm_places in places]
        comparison = compare_arms(dict(zip(_arm_names(places), results, strict=True)))
    if as_json:
        show_json(comparison.numbers)
        return
    show_results(comparison)
    show_changes(comparison.results[0], comparison.results[-1], items)


def _look_at(place: Path) -> None:
    """Warn of a run that goes on or has lost records; raise `ConfigError` for a missing path."""
    from grouper.runs.folder import RunFolder

    if not place.exists():
        raise ConfigError("there is nothing here", where=str(place), fix="Check the path.")
    if is_running(place):
        warn(f"the run in {place} is still in progress; these are its results so far.")
    elif (place / "run.json").exists():
        warn_of_losses(RunFolder(place))


def _recorded(place: Path, split: str) -> EvaluationResult:
    """Read a recorded evaluation: that of a run's last phase, or the latest in another folder.

    Args:
        place: a run folder, a folder of eval_runs, or the summary of one evaluation.
        split: `test`, `validation`, or the name of a suite.
    """
    from grouper.runs.folder import PHASES, RunFolder

    if _is_summary(place):
        summary = RunFolder(place.parent.parent).read_evaluation(place.stem)
        if summary:
            return summary
    is_run = (place / "run.json").exists()
    later = sorted((place / "eval_runs").glob("*")) if is_run else []
    pairs: list[tuple[Path, EvaluationResult]] = []
    for folder in (place, *later):
        results = RunFolder(folder).read_evaluations()
        pairs += [(folder, result) for result in results if result.split == split]
    if not pairs:
        raise ConfigError(
            f"there is no evaluation on {split} problems in it",
            where=str(place),
            fix="Measure it first with `grouper eval`, or name its model folder instead.",
        )

    def age(pair: tuple[Path, EvaluationResult]) -> tuple[float, ...]:
        folder, result = pair
        time = (folder / "evaluations" / f"{result.name}.json").stat().st_mtime
        return (PHASES.index(result.phase), result.step, time) if is_run else (time,)

    pairs_of_run = [pair for pair in pairs if pair[0] == place]
    _, result = max(pairs_of_run or pairs, key=age)
    return result


def _is_summary(place: Path) -> bool:
    return place.suffix == ".json" and place.absolute().parent.name == "evaluations"


def _arm_names(arms: Sequence[Sequence[Path]]) -> list[str]:
    """Name arms for tables: `demo`, `demo-grpo` for a summary of it; their paths if two names are
    the same.
    """
    paths = [arm[0].resolve() for arm in arms]
    names = []
    for path in paths:
        name = f"{path.parents[1].name}-{path.stem}" if _is_summary(path) else path.name
        names.append(name)
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    counts = [f" and {len(arm) - 1} more" if len(arm) > 1 else "" for arm in arms]
    return [f"{name}{count}" for name, count in zip(names, counts, strict=True)]


def _answer_of(item: EvaluationItem) -> str:
    return item.extracted or item.outcome.replace("_", " ")


def show_changes(before: EvaluationResult, after: EvaluationResult, count: int) -> None:
    """Print the problems won and lost, at most `count` of each, side by side."""
    from grouper.evaluation.compare import changed_problems, label

    changes = changed_problems(before, after)
    won = [change for change in changes if change[0] > 0]
    lost = [change for change in reversed(changes) if change[0] < 0]
    show(f"{plural(len(won), 'problem')} won and {len(lost)} lost by {label(after.name)}")
    rows = []
    for change, old, new in (*won[:count], *lost[:count]):
        row = (
            old.problem_id,
            f"{100 * change:+.0f}",
            short(old.answer, 30),
            short(_answer_of(old), 30),
            short(_answer_of(new), 30),
        )
        rows.append(row)
    if rows:
        columns = ("problem", "points", "reference", label(before.name), label(after.name))
        table(columns, rows, lines=True)
