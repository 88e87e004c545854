"""`grouper generate`: answers to one question, to a file of them, or in a conversation."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli.measure import progress
from grouper.cli.opening import open_recipe, read_rows, require_new
from grouper.cli.text import write_rows
from grouper.errors import DataError
from grouper.models.folders import model_in, recipe_for, require_model_folder, with_sampling
from grouper.runs.samples import printable

if TYPE_CHECKING:
    from grouper.api import Generator, Solution

QUESTION_COLUMNS = ("question", "problem", "prompt")
# What the rows of an output file have beside the columns of the input.
ADDED = ("response", "extracted", "finish_reason", "sample")


def generate(
    model: str,
    *,
    question: str | None,
    input_file: Path | None,
    output_file: Path | None,
    recipe: str | None,
    format_name: str | None,
    engine: str | None,
    quiet: bool,
    **sampling: Any,
) -> None:
    """Check everything that can be checked before the model is loaded; then answer."""
    if question is not None and input_file is not None:
        raise click.UsageError("Give --question or --input, not both.")
    if output_file is not None and input_file is None:
        raise click.UsageError("--output belongs to --input.")
    if question is not None and not question.strip():
        raise click.UsageError("--question is empty.")
    model = model_in(model)
    named = None if recipe is None else open_recipe(recipe)
    asked = recipe_for(model, named, format_name)
    if engine is not None:
        asked = asked.override(f"sampling.engine={engine}")
    opened = with_sampling(asked, **sampling)
    rows = None if input_file is None else _read_questions(input_file)
    if output_file is not None:
        require_new(output_file, f"--output {output_file}")
    require_model_folder(model, where="MODEL")
    from grouper.api import Generator

    display = progress(quiet=quiet)
    with Generator(opened, model) as generator:
        if rows is not None:
            found = generator.answers([_question(row) for row in rows], display=display)
            lines = list(_answered(rows, found, opened.evaluation.samples))
            write_rows(lines, output_file)
            if output_file is not None:
                click.echo(f"{output_file}: {len(lines):,} rows.")
        elif question is not None:
            _show(question, generator)
        else:
            _converse(generator)


def _read_questions(path: Path) -> Sequence[Mapping[str, Any]]:
    """The rows of a file.

    Raises:
        DataError: not a file that can be read, no rows, no question in some, or columns of the
            names that would be added.
    """
    rows = read_rows(path)
    taken = sorted({name for row in rows for name in row} & set(ADDED))
    if taken:
        raise DataError(
            f"the rows already have a column {taken[0]!r}, which would be overwritten",
            where=str(path),
            fix="Rename it first.",
        )
    empty = [str(number) for number, row in enumerate(rows, start=1) if not _question(row)]
    if empty:
        shown = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
        raise DataError(
            f"{len(empty)} of {len(rows)} rows hold no question (row {shown})",
            where=str(path),
            fix=f"Put it in a column {' or '.join(QUESTION_COLUMNS)}; the columns of the first "
            f"row are {', '.join(map(str, rows[0]))}.",
        )
    return rows


def _question(row: Mapping[str, Any]) -> str:
    found = (row.get(name) for name in QUESTION_COLUMNS)
    return next((text for text in found if isinstance(text, str) and text.strip()), "")


def _answered(
    rows: Sequence[Mapping[str, Any]], answers: Sequence[Sequence[Solution]], samples: int
) -> Iterator[dict[str, Any]]:
    """All rows in order, one for each sample."""
    for row, found in zip(rows, answers, strict=True):
        for sample, one in enumerate(found or [None] * samples):
            # Columns of a Parquet file may hold dates and the like, which become text.
            kept = json.loads(json.dumps({str(name): row[name] for name in row}, default=str))
            kept["response"] = one and one.response
            kept["extracted"] = one and one.answer
            kept["finish_reason"] = one.finish_reason if one else "too_long"
            yield kept | ({"sample": sample} if samples > 1 else {})


def _show(question: str, generator: Generator) -> None:
    """Answer one question on standard output."""
    for solution in generator.answer(question):
        click.echo(printable(generator.prepared.format.prefix + solution.response))
        if solution.answer is None:
            click.echo(click.style(f"No answer: {solution.reason}.", fg="yellow"))
        else:
            answer = printable(f"Answer: {solution.answer}")
            click.echo(click.style(answer, fg="green", bold=True))
        if solution.finish_reason == "length":
            limit = generator.params.max_new_tokens
            click.echo(f"(cut off after {limit} tokens; see --max-new-tokens)")


def _converse(generator: Generator) -> None:
    """Answer every line, typed or piped in, until the end of input; each stands alone."""
    typed = _typed()
    if typed:
        click.echo("One question a line; Ctrl-D ends.", err=True)
    questions = 0
    with contextlib.suppress(EOFError):
        while True:
            question = input("> " if typed else "").strip()
            questions += bool(question)
            try:
                if question:
                    _show(question, generator)
            except DataError as error:  # a question that is too long ends nothing
                click.echo(error.paragraph(), err=True)
    if not questions and not typed:
        click.echo("No question on standard input; see --question and --input.", err=True)


def _typed() -> bool:
    return sys.stdin.isatty()
