"""`grouper generate`: answers to one question, to the questions of a file, or to those typed."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli import options
from grouper.cli.answers import open_model, show_answer
from grouper.cli.chat import converse
from grouper.cli.commands import Command
from grouper.cli.text import progress, write_rows
from grouper.errors import DataError, plural
from grouper.files import append_line, delete, read_errors_as, whole_lines
from grouper.printable import printable

if TYPE_CHECKING:
    from grouper.api import Generator, Solution
    from grouper.config.schema import Recipe
    from grouper.runs.progress import Progress

EXAMPLES = r"""
grouper generate outputs/demo/grpo/final --question \
    "Eva has 7 eggs, drops 3 and then sells 2. How many eggs does Eva have?"
echo "What is 3 + 4?" | grouper generate outputs/demo/grpo/final
grouper generate ./my-model --format boxed --input in.jsonl --output out.jsonl
"""

QUESTION_COLUMNS = ("question", "problem", "prompt")
# What the rows of an output file have in addition to the columns of the input.
ADDED = ("response", "extracted", "finish_reason", "tokens", "sample")
Rows = Sequence[Mapping[str, Any]]


@click.command("generate", cls=Command, examples=EXAMPLES)
@click.argument("model", metavar="MODEL")
@click.option("-Q", "--question", metavar="TEXT", help="A single question.")
@click.option(
    "--input",
    "input_file",
    metavar="FILE",
    type=options.EXISTING_FILE,
    help="File of questions, one JSON object per line, in `question`, `problem` or `prompt`.",
)
@click.option(
    "--output",
    "output_file",
    metavar="FILE",
    type=options.PATH,
    help="File for the answered rows, with all columns of the input.  [default: standard output]",
)
@options.format_name
@click.option(
    "--temperature",
    metavar="X",
    type=options.Number(0),
    help="Sampling temperature; 0 is greedy.",
)
@options.recipe_of_prompt
@options.max_new_tokens_of_answer
@click.option(
    "--samples",
    metavar="N",
    type=options.WholeNumber(1),
    default=1,
    show_default=True,
    help="Number of answers per question.",
)
@options.checkpoint
@options.seed
@options.engine
@options.quiet
def generate(
    model: str,
    *,
    question: str | None,
    input_file: Path | None,
    output_file: Path | None,
    recipe: str | None,
    format_name: str | None,
    checkpoint: str | None,
    engine: str | None,
    samples: int | None,
    temperature: float | None,
    max_new_tokens: int | None,
    seed: int | None,
    quiet: bool,
) -> None:
    """Answer one question, a file, or a conversation.

    MODEL (a folder, an adapter, a GGUF file or a Hub name) is prompted exactly as in training,
    with the same prompt format and stop tokens, and the extracted answer is printed as well.

    The recipe of a model inside a run folder is found there; any other model needs --recipe or
    --format. Sampling settings default to those of the recipe's evaluation.

    Rows of a file are printed as they are answered. With --output, the file is written when all
    rows are answered; after an interruption the same command continues.
    """
    if question is not None and input_file is not None:
        raise click.UsageError("Give --question or --input, not both.")
    if output_file is not None and input_file is None:
        raise click.UsageError("--output belongs to --input.")
    if question is not None and not question.strip():
        raise click.UsageError("--question is empty.")
    from grouper.cli.recipe_args import require_new

    # All that can be checked is checked before the model is loaded.
    opened, folder = open_model(
        model,
        recipe=recipe,
        format_name=format_name,
        checkpoint=checkpoint,
        engine=engine,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    require_new(output_file, f"--output {output_file}")
    display = progress(quiet=quiet)
    if input_file is not None:
        _answer_file(_read_questions(input_file), output_file, opened, folder, display)
        return
    from grouper.api import Generator

    with Generator(opened, folder) as generator:
        if question is not None:
            _show(question, generator)
        elif sys.stdin.isatty():
            converse(generator)
        else:
            _read_lines(generator)


def _read_questions(path: Path) -> Rows:
    """Return the rows of a file.

    Raises:
        DataError: not a file that can be read, no rows, no question in some, or columns of the
            names that would be added.
    """
    from grouper.cli.recipe_args import read_rows

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
        numbers = ", ".join(empty[:5])
        if len(empty) > 5:
            numbers += ", ..."
        raise DataError(
            f"{len(empty)} of {len(rows)} rows hold no question (row {numbers})",
            where=str(path),
            fix=f"Put it in a column {' or '.join(QUESTION_COLUMNS)}; the columns of the first "
            f"row are {', '.join(map(str, rows[0]))}.",
        )
    return rows


def _question(row: Mapping[str, Any]) -> str:
    for name in QUESTION_COLUMNS:
        text = row.get(name)
        if isinstance(text, str) and text.strip():
            return text
    return ""


def _answer_file(
    rows: Rows, output: Path | None, recipe: Recipe, model: str, display: Progress
) -> None:
    """Answer the rows of a file in their order, and write each at once.

    Until all are finished, those for `output` are in a partial file next to it, whose name depends
    on model, recipe and rows: after an interruption the same call continues.
    """
    from grouper.api import Generator
    from grouper.models.folders import identity_of

    partial_file = None
    answered: dict[int, list[dict[str, Any]]] = {}
    if output is not None:
        inputs = repr([identity_of(model, recipe.model.revision), recipe, rows]).encode()
        mark = hashlib.blake2b(inputs, digest_size=6).hexdigest()
        partial_file = output.with_name(f".{output.name}.{mark}.part")
        fix = "Restore the file, or delete it: its questions are then answered again."
        with read_errors_as(partial_file, "the answers that were kept cannot be read", fix):
            answered = {line["row"]: line["answers"] for line in whole_lines(partial_file)}
    unanswered = [number for number in range(len(rows)) if number not in answered]

    def write(number: int, solutions: Sequence[Solution]) -> None:
        row = unanswered[number]
        answered[row] = [*_answered(rows[row], solutions, recipe.evaluation.samples)]
        if partial_file is None:
            write_rows(answered[row], None)
        else:
            append_line(partial_file, {"row": row, "answers": answered[row]})

    with display.within("generate"), Generator(recipe, model) as generator:
        if answered:
            display.say(f"Answered before: {len(answered):,} of {plural(len(rows), 'row')}.")
        questions = [_question(rows[number]) for number in unanswered]
        generator.answers(questions, display=display, on_answers=write)
    if partial_file is not None and output is not None:
        lines = [line for number in range(len(rows)) for line in answered[number]]
        write_rows(lines, output)
        delete(partial_file)
        click.echo(f"{output}: {plural(len(lines), 'row')}.")


def _answered(
    row: Mapping[str, Any], solutions: Sequence[Solution], samples: int
) -> Iterator[dict[str, Any]]:
    """Yield the row once for each sample, with its answer."""
    for sample, solution in enumerate(solutions or [None] * samples):
        # Columns of a Parquet file may hold dates and the like, which become text.
        columns = json.loads(json.dumps({str(name): row[name] for name in row}, default=str))
        values: list[Any] = [None, None, "too_long", 0]
        if solution is not None:
            values = [solution.response, solution.answer, solution.finish_reason, solution.tokens]
        if samples > 1:
            values.append(sample)
        yield columns | dict(zip(ADDED, values, strict=False))


def _show(question: str, generator: Generator) -> None:
    """Answer one question on standard output."""
    for solution in generator.answer(question):
        click.echo(printable(generator.prepared.format.prefix + solution.response))
        show_answer(solution)
        if solution.finish_reason == "length":
            limit = generator.params.max_new_tokens
            click.echo(f"(truncated after {plural(limit, 'token')}; see --max-new-tokens)")


def _read_lines(generator: Generator) -> None:
    """Answer every line of standard input; each stands alone."""
    questions = 0
    for question in filter(None, map(str.strip, sys.stdin)):
        questions += 1
        try:
            _show(question, generator)
        except DataError as error:  # a question that is too long ends nothing
            click.echo(error.paragraph(), err=True)
    if not questions:
        click.echo("No question on standard input; see --question and --input.", err=True)
