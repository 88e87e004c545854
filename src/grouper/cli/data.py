"""`grouper data`: the sources there are, what they hold, what is wrong with them, and a copy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from grouper.cli.data_sets import load_sets, source_arguments
from grouper.cli.difficulty import difficulty_command
from grouper.cli.groups import NamingGroup
from grouper.cli.prepare import prepare_command

if TYPE_CHECKING:
    from grouper.data import Overlap, ProblemSet, Source
    from grouper.data.audit import Audit

EXAMPLES = """\b
Examples:
  grouper data list
  grouper data show gsm8k --path ../shared/data/gsm8k --split test
  grouper data show prompt-response --path ../shared/data/math/sft.jsonl only_correct=true
  grouper data prepare openmath-mini numeric_only=true limit=5000
  grouper data audit demo                              every part of a recipe, and its leaks
  grouper data audit math --path ../shared/data/math --split train --split validation
  grouper data audit mine.jsonl --output quarantine.jsonl
  grouper data difficulty demo                         pass rates for `grpo.difficulty`
"""

limit_option = click.option("--limit", type=click.IntRange(min=1), help="Read at most this many.")


@click.group("data", cls=NamingGroup, epilog=EXAMPLES)
def data_command() -> None:
    """List the data sources, show problems as they are read, find what is wrong with them, and
    prepare them for training.

    SOURCE is a source from the list, a file or folder, or a recipe, which stands for all its
    parts. A file or folder that is called like a source or recipe is given as a path (./demo).
    """


data_command.add_command(difficulty_command)
data_command.add_command(prepare_command)


@data_command.command("list", short_help="List the data sources.")
def list_command() -> None:
    """List the data sources that `data.*.source` of a recipe and SOURCE may name."""
    from grouper.data import SOURCES

    rows = [(name, _described(source)) for name, source in SOURCES.items()]
    formatter = click.HelpFormatter(width=100)
    formatter.write_dl(rows, col_max=40)
    click.echo(formatter.getvalue(), nl=False)


def _described(source: Source) -> str:
    if source.hub is None:
        return source.description
    subset = f", config {source.subset}" if source.subset else ""
    splits = "/".join(source.splits)
    return f"{source.description}; {source.hub} on the Hub{subset}, {splits}"


@data_command.command("show", short_help="Print a few problems as they are read.")
@source_arguments
@click.option("--count", "-n", default=3, show_default=True, type=click.IntRange(min=1))
def show_command(
    source: str,
    settings: tuple[str, ...],
    *,
    path: str | None,
    splits: tuple[str, ...],
    count: int,
) -> None:
    """Print the first problems of SOURCE: question, answer, and the start of the solution.

    Settings are those of data.train, such as numeric_only=true; only so many rows are read.
    """
    for name, (_, problems) in load_sets(source, path, splits, settings, limit=count).items():
        click.echo(click.style(f"{name}: {problems.name}", bold=True))
        for note in problems.notes:
            click.echo(note)
        for problem in problems.problems:
            facts = [problem.id, *filter(None, (problem.subject, problem.level))]
            click.echo(f"\n{'  '.join(facts)}\n{_short(problem.question)}")
            if problem.response or problem.solution:
                noun = "Response" if problem.response else "Solution"
                click.echo(f"{noun}: {_short(problem.response or problem.solution or '')}")
            click.echo(f"Answer: {problem.answer}")
        for row in problems.quarantined:
            click.echo(click.style(f"\nrow {row.row} is left out: {row.reason}", fg="yellow"))
        click.echo()


@data_command.command("audit", short_help="Find what is wrong with a source.")
@source_arguments
@limit_option
@click.option("--show", default=5, show_default=True, help="Findings of each sort to print.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write every finding as a line of JSON: set, row, id, reason.",
)
def audit_command(
    source: str,
    settings: tuple[str, ...],
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
    from grouper.files import write_atomic

    loaded = load_sets(source, path, splits, settings, limit=limit)
    sets = {name: problems for name, (_, problems) in loaded.items()}
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


# --- what is told --------------------------------------------------------------------------------


def _tell(name: str, found: Audit, show: int) -> None:
    problems = found.problems
    click.echo(click.style(f"{name}: {problems.name}", bold=True))
    click.echo(f"  {len(problems):,} problems, fingerprint {problems.fingerprint}")
    for note in problems.notes:
        click.echo(f"  {note}")
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
