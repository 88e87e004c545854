"""`grouper generate`: answers to one question, to a file of them, or in a conversation."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli.measure import progress
from grouper.cli.opening import models_not_here, open_recipe, require_new, show_plan
from grouper.data.reading import find_file, read_files
from grouper.errors import DataError
from grouper.files import dumps, write_atomic
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
    dry_run: bool,
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
    opened = with_sampling(recipe_for(model, named, format_name), **sampling)
    rows = None if input_file is None else _read_questions(input_file)
    if output_file is not None:
        require_new(output_file, f"--output {output_file}")
        if not output_file.resolve().parent.is_dir():
            folder = str(output_file.parent)
            raise DataError(
                f"there is no folder {folder!r}", where="--output", fix="Make it first."
            )
    require_model_folder(model, where="MODEL")
    if dry_run:
        questions = "questions as they come" if rows is None else f"{len(rows):,} questions"
        k, fmt = opened.evaluation.samples, opened.prompt.format
        sizes = [f"{model}: {questions} x {k} samples, format {fmt}"]
        show_plan(opened, sizes, unchecked=models_not_here(opened, model))
        return

    from grouper.api import Generator

    display = progress(quiet=quiet)
    with Generator(opened, model) as generator:
        if rows is not None:
            found = generator.answers([_question(row) for row in rows], display=display)
            _write(rows, found, opened.evaluation.samples, output_file)
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
    if path.is_dir():
        raise DataError("this is a folder, not a file", where=str(path), fix="Name one file.")
    rows = read_files(find_file(path, split="", subset=None))
    if not rows:
        raise DataError("there are no rows in it", where=str(path), fix="Check the file.")
    taken = sorted({name for row in rows for name in row} & set(ADDED))
    if taken:
        raise DataError(
            f"the rows already have a column {taken[0]!r}, which would be overwritten",
            where=str(path),
            fix="Rename it first.",
        )
    empty = [number for number, row in enumerate(rows, start=1) if not _question(row)]
    if empty:
        shown = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
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


def _write(
    rows: Sequence[Mapping[str, Any]],
    answers: Sequence[Sequence[Solution]],
    samples: int,
    output: Path | None,
) -> None:
    """All rows in order, one line for each row and sample; whole or not at all."""
    lines = []
    for row, found in zip(rows, answers, strict=True):
        # Columns of a Parquet file may hold dates and the like, which become text.
        kept = json.loads(json.dumps({str(name): row[name] for name in row}, default=str))
        for sample, one in enumerate(found or [None] * samples):
            kept["response"] = one and one.response
            kept["extracted"] = one and one.answer
            kept["finish_reason"] = one.finish_reason if one else "too_long"
            if samples > 1:
                kept["sample"] = sample
            lines.append(dumps(kept) + "\n")
    if output is None:
        click.echo("".join(lines), nl=False)
    else:
        write_atomic(output, "".join(lines).encode())
        click.echo(f"{output}: {len(lines):,} rows.")


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
    if typed := _typed():
        click.echo("One question a line; Ctrl-D ends.", err=True)
    asked = False
    while True:
        try:
            question = input("> " if typed else "").strip()
            if question:
                asked = True
                _show(question, generator)
        except DataError as error:  # a question that is too long ends nothing
            click.echo(error.paragraph(), err=True)
        except EOFError:
            break
    if not asked and not typed:
        click.echo("No question on standard input; see --question and --input.", err=True)


def _typed() -> bool:
    return sys.stdin.isatty()
