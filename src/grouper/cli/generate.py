"""`grouper generate`, `chat` and `synthesize`: a model's answers, to people and to files."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli.measure import progress
from grouper.cli.recipe_args import open_recipe, read_rows, require_new, run_of, sampled_by
from grouper.cli.text import flow, warn, write_rows
from grouper.data.reading import source_named
from grouper.errors import DataError, plural
from grouper.files import append_line, delete, read_errors_as, whole_lines
from grouper.models.folders import (
    identity_of,
    recipe_for,
    require_model_folder,
    with_sampling,
)
from grouper.models.trained import model_in, trained_model
from grouper.runs.samples import printable
from grouper.types import Message

if TYPE_CHECKING:
    from grouper.api import Generator, Solution
    from grouper.config.schema import Recipe
    from grouper.runs.progress import Progress

QUESTION_COLUMNS = ("question", "problem", "prompt")
# What the rows of an output file have beside the columns of the input.
ADDED = ("response", "extracted", "finish_reason", "tokens", "sample")
Rows = Sequence[Mapping[str, Any]]


def generate(
    model: str,
    *,
    recipe: str | None,
    format_name: str | None,
    question: str | None = None,
    input_file: Path | None = None,
    output_file: Path | None = None,
    engine: str | None = None,
    checkpoint: str | None = None,
    quiet: bool = True,
    converse: bool = False,
    **sampling: Any,
) -> None:
    """Answer one question, a file of them, or those typed; first check all that can be checked."""
    if question is not None and input_file is not None:
        raise click.UsageError("Give --question or --input, not both.")
    if output_file is not None and input_file is None:
        raise click.UsageError("--output belongs to --input.")
    if question is not None and not question.strip():
        raise click.UsageError("--question is empty.")
    model = model_in(model, checkpoint=checkpoint, say=warn)
    named_recipe = None if recipe is None else open_recipe(recipe)
    model_recipe = recipe_for(model, named_recipe, format_name).override(*sampled_by(engine))
    opened = with_sampling(model_recipe, **sampling)
    require_new(output_file, f"--output {output_file}")
    display = progress(quiet=quiet)
    if input_file is not None:
        _answer_file(_read_questions(input_file), output_file, opened, model, display)
        return
    from grouper.api import Generator

    with Generator(opened, model) as generator:
        if question is not None:
            _show(question, generator)
        elif converse or sys.stdin.isatty():
            _converse(generator)
        else:
            _read_lines(generator)


def _read_questions(path: Path) -> Rows:
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

    Until all are finished, those for `output` are in a partial file beside it, whose name depends
    on model, recipe and rows: after an interruption the same call continues.
    """
    from grouper.api import Generator

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
        _show_answer(solution)
        if solution.finish_reason == "length":
            limit = generator.params.max_new_tokens
            click.echo(f"(cut off after {plural(limit, 'token')}; see --max-new-tokens)")


def _show_answer(solution: Solution) -> None:
    if solution.answer is None:
        click.echo(click.style(f"No answer: {solution.reason}.", fg="yellow"))
    else:
        answer = printable(f"Answer: {solution.answer}")
        click.echo(click.style(answer, fg="green", bold=True))


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


# --- grouper chat --------------------------------------------------------------------------------


def chat(model: str, **how: Any) -> None:
    """Converse in the terminal; the reasoning is dimmed, the answer is not."""
    generate(model, **how, samples=1, converse=True)


def _converse(generator: Generator) -> None:
    """Turn after turn where the model was trained in a chat, else question by question."""
    from grouper.prompts.rendering import uses_chat

    turns = uses_chat(generator.prepared.format, generator.prepared.tokenizer)
    note = "" if turns else " This model was trained on single questions: each stands alone."
    click.echo(f"/stats shows or hides numbers, /new starts over, Ctrl-D ends.{note}", err=True)
    earlier: list[Message] = []
    stats = False
    while True:
        try:
            line = input("> ").strip()
            if line == "/stats":
                stats = not stats
            elif line == "/new":
                earlier.clear()
            elif line:
                answer = _say(line, generator, earlier, stats=stats)
                if turns:
                    question = Message(role="user", content=line)
                    earlier += [question, answer]
        except EOFError:
            return
        except DataError as error:
            # A question that is too long does not end the conversation.
            click.echo(error.paragraph(), err=True)


def _say(
    question: str, generator: Generator, earlier: Sequence[Message], *, stats: bool
) -> Message:
    """Print an answer as it comes, dimmed up to the tag that opens it; returns the turn."""
    fmt = generator.prepared.format
    text = ""
    started = time.perf_counter()

    def show(piece: str) -> None:
        nonlocal text
        text += piece
        thinking = fmt.tags is not None and fmt.tags[2] not in text
        click.echo(click.style(printable(piece), dim=thinking), nl=False)

    show(fmt.prefix)
    (solution,) = generator.answer(question, 1, earlier=earlier, on_text=show)
    seconds = time.perf_counter() - started
    click.echo()
    _show_answer(solution)
    if stats:
        click.echo(
            f"{solution.tokens} tokens in {seconds:.1f} s ({solution.tokens / seconds:.0f} "
            f"per second), ended by {solution.finish_reason}, answer {solution.answer!r}",
            err=True,
        )
    return Message(role="assistant", content=fmt.prefix + solution.response)


# --- grouper synthesize --------------------------------------------------------------------------


def synthesize(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    samples: int,
    output: Path,
    quiet: bool,
) -> None:
    """Write right answers as data for SFT, and print how many there are."""
    opened = open_recipe(recipe, overrides)
    subject = model or trained_model(opened, run_of(recipe, opened), say=warn)
    require_model_folder(subject, where="--model")
    require_new(output, f"--output {output}")
    from grouper import api

    display = progress(quiet=quiet)
    with display.within("synthesize"):
        rows, drawn = api.synthesize(opened, subject, output, samples=samples, display=display)
    click.echo(f"{output}: {plural(rows, 'right answer')} of {plural(drawn, 'completion')}.")
    settings = source_named(str(output))
    if settings["source"] == "file":
        settings = settings | {"columns": {"response": "response"}}
    click.echo(f"Train on them with 'data.sft={flow(settings)}'.")
