"""`grouper data`: the sources there are, what they hold, and what is wrong with them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from grouper.cli.difficulty import difficulty_command
from grouper.cli.groups import NamingGroup
from grouper.cli.options import warn
from grouper.config import SourceConfig
from grouper.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from grouper.data import Overlap, ProblemSet
    from grouper.data.audit import Audit

__all__ = ["data_command"]

EXAMPLES = """\b
Examples:
  grouper data list
  grouper data show gsm8k --path ../shared/data/gsm8k --split test
  grouper data audit demo                              every part of a recipe, and its leaks
  grouper data audit math --path ../shared/data/math --split train --split validation
  grouper data audit mine.jsonl --output quarantine.jsonl
  grouper data difficulty demo                         pass rates for `grpo.difficulty`
"""

path_option = click.option(
    "--path", metavar="PATH", help="A local copy of the source, or the Hub name of `hub`."
)
split_option = click.option(
    "--split",
    "splits",
    multiple=True,
    help="The split to read; several are looked through for overlap, the first being the "
    "trained one.  [default: the source's first]",
)
limit_option = click.option("--limit", type=click.IntRange(min=1), help="Read at most this many.")


@click.group("data", cls=NamingGroup, epilog=EXAMPLES)
def data_command() -> None:
    """List the data sources, show problems as they are read, and find what is wrong with them.

    SOURCE is a source from the list, a file or folder, or a recipe, which stands for all its
    parts. A file or folder that is called like a source or recipe is given as a path (./demo).
    """


data_command.add_command(difficulty_command)


@data_command.command("list", short_help="List the data sources.")
def list_command() -> None:
    """List the data sources that `data.*.source` of a recipe and SOURCE may name."""
    from grouper.data import SOURCES

    rows = [(name, source.description) for name, source in SOURCES.items()]
    formatter = click.HelpFormatter(width=100)
    formatter.write_dl(rows, col_max=40)
    click.echo(formatter.getvalue(), nl=False)


@data_command.command("show", short_help="Print a few problems as they are read.")
@click.argument("source")
@path_option
@split_option
@click.option("--count", "-n", default=3, show_default=True, type=click.IntRange(min=1))
def show_command(source: str, *, path: str | None, splits: tuple[str, ...], count: int) -> None:
    """Print the first problems of SOURCE: question, answer, and the end of the solution."""
    for name, problems in _load(source, path, splits, limit=count).items():
        click.echo(click.style(f"{name}: {problems.name}", bold=True))
        for problem in problems.problems:
            facts = [problem.id, *filter(None, (problem.subject, problem.level))]
            click.echo(f"\n{'  '.join(facts)}\n{_short(problem.question)}")
            if problem.solution:
                click.echo(f"Solution: {_short(problem.solution)}")
            click.echo(f"Answer: {problem.answer}")
        click.echo()


@data_command.command("audit", short_help="Find what is wrong with a source.")
@click.argument("source")
@path_option
@split_option
@limit_option
@click.option("--show", default=5, show_default=True, help="Findings of each sort to print.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write every finding as a line of JSON: set, row, id, reason.",
)
def audit_command(
    source: str,
    *,
    path: str | None,
    splits: tuple[str, ...],
    limit: int | None,
    show: int,
    output: Path | None,
) -> None:
    """Look through SOURCE: references that cannot be read or do not equal themselves, questions
    asked twice, contradicting answers, problems that training and evaluation share, and what
    kinds of answers and lengths there are.
    """
    import json

    from grouper.data.audit import audit, quarantine_rows
    from grouper.tracking.files import write_atomic

    sets = _load(source, path, splits, limit=limit)
    audits = {name: audit(problems) for name, problems in sets.items()}
    for name, found in audits.items():
        _tell(name, found, show)
    leaks = _leaks(sets)
    _tell_leaks(sets, leaks, show)
    rows = list(quarantine_rows(list(audits.values()), [leak for _, leak in leaks]))
    if output is not None:
        text = "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)
        write_atomic(output, text.encode())
        click.echo(f"{len(rows):,} findings written to {output}")


# --- which sets ----------------------------------------------------------------------------------


def _load(
    source: str, path: str | None, splits: Sequence[str], *, limit: int | None
) -> dict[str, ProblemSet]:
    """The problem sets that SOURCE stands for, by part or split."""
    from grouper.data import load_problems

    configs, seed = _configs(source, path, splits)
    loaded = {}
    for name, config in configs.items():
        few = limit if config.limit is None else min(filter(None, (limit, config.limit)))
        loaded[name] = load_problems(config.model_copy(update={"limit": few}), seed=seed)
    return loaded


def _configs(
    source: str, path: str | None, splits: Sequence[str]
) -> tuple[Mapping[str, SourceConfig], int]:
    from grouper.data import SOURCES
    from grouper.recipe import list_recipes

    shipped = [recipe for recipe, _ in list_recipes()]
    here = Path(source).expanduser().exists()
    if here and source in (*SOURCES, *shipped):
        kind = "source" if source in SOURCES else "recipe"
        warn(f"{source} is taken as the built-in {kind}; what lies here is ./{source}")
    if source in SOURCES:
        chosen = splits or (None,)
        return {
            split or source: SourceConfig(source=source, path=path, split=split) for split in chosen
        }, 0
    if source in shipped or source.endswith((".yaml", ".yml")):
        return _of_recipe(source)
    if not here:
        raise ConfigError(
            f"{source!r} is no source, file, folder or recipe",
            where="SOURCE",
            fix=did_you_mean(source, [*SOURCES, *shipped]),
        )
    return {
        split or Path(source).name: SourceConfig(source="file", path=source, split=split)
        for split in splits or (None,)
    }, 0


def _of_recipe(name: str) -> tuple[Mapping[str, SourceConfig], int]:
    from grouper.recipe import load_recipe

    recipe = load_recipe(name)
    parts = {part: getattr(recipe.data, part) for part in ("sft", "train", "validation", "test")}
    return {part: config for part, config in parts.items() if config is not None}, recipe.seed


# --- what is told --------------------------------------------------------------------------------


def _tell(name: str, found: Audit, show: int) -> None:
    problems = found.problems
    click.echo(click.style(f"{name}: {problems.name}", bold=True))
    click.echo(f"  {len(problems):,} problems, fingerprint {problems.fingerprint}")
    click.echo(f"  answers     {_counts(found.answer_types)}")
    click.echo(f"  questions   {_counts(found.question_lengths)} (words)")
    if found.solution_lengths:
        click.echo(f"  solutions   {_counts(found.solution_lengths)} (words)")
    unusable = [f"row {row.row}: {row.reason}" for row in problems.quarantined]
    _list("rows that cannot be used", unusable, show)
    twice = [", ".join(r.problem_ids) for r in found.repeated if not r.contradicts]
    _list("questions asked more than once", twice, show)
    contradicting = [
        f"{', '.join(r.problem_ids)}: {' | '.join(r.answers)}" for r in found.contradictions
    ]
    _list("questions with different answers", contradicting, show)
    click.echo()


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in counts.items())


def _list(what: str, findings: Sequence[str], show: int) -> None:
    click.echo(f"  {len(findings):,} {what}")
    for finding in findings[:show]:
        click.echo(f"    {_short(finding)}")
    if len(findings) > show > 0:
        click.echo(f"    and {len(findings) - show:,} more")


def _leaks(sets: Mapping[str, ProblemSet]) -> list[tuple[str, Overlap]]:
    """(which pair, overlap) between every set that is trained on and every one that is not."""
    from grouper.data import find_overlap

    held_out = [name for name in sets if name in ("validation", "test")] or list(sets)[1:]
    trained = [name for name in sets if name not in held_out]
    return [
        (f"{test} of {train}", leak)
        for train, test in itertools.product(trained, held_out)
        for leak in find_overlap(sets[train].problems, sets[test].problems)
    ]


def _tell_leaks(
    sets: Mapping[str, ProblemSet], leaks: Sequence[tuple[str, Overlap]], show: int
) -> None:
    if len(sets) < 2:
        return
    click.echo(click.style("overlap between trained and held-out problems", bold=True))
    same = [(pair, leak) for pair, leak in leaks if leak.same_question]
    runs = [(pair, leak) for pair, leak in leaks if not leak.same_question]
    for what, found in (("held-out questions are trained on", same), ("share 13 words", runs)):
        _list(what, [f"{p}: {o.held_out_id} in {o.trained_id}" for p, o in found], show)


def _short(text: str, length: int = 300) -> str:
    text = " ".join(text.split())
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= length else f"{text[: length - 3]}..."
