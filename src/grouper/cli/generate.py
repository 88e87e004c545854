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
from grouper.cli.opening import open_recipe, read_rows, require_new, run_of, sampled_by
from grouper.cli.text import flow, warn, write_rows
from grouper.data.reading import source_named
from grouper.errors import DataError, counted
from grouper.files import append_line, delete, reading, whole_lines
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
    named = None if recipe is None else open_recipe(recipe)
    asked = recipe_for(model, named, format_name).override(*sampled_by(engine))
    opened = with_sampling(asked, **sampling)
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


def _answer_file(
    rows: Rows, output: Path | None, recipe: Recipe, model: str, display: Progress
) -> None:
    """Answer the rows of a file in their order, and write each at once.

    Those for `output` lie beside it until all are there, under a name that says what they follow
    from: after an interruption the same call goes on.
    """
    from grouper.api import Generator

    part, answered = None, dict[int, list[dict[str, Any]]]()
    if output is not None:
        follows = repr([identity_of(model, recipe.model.revision), recipe, rows]).encode()
        mark = hashlib.blake2b(follows, digest_size=6).hexdigest()
        part = output.with_name(f".{output.name}.{mark}.part")
        fix = "Restore the file, or delete it: its questions are then answered again."
        with reading(part, "the answers that were kept cannot be read", fix):
            answered = {one["row"]: one["answers"] for one in whole_lines(part)}
    left = [number for number in range(len(rows)) if number not in answered]

    def write(number: int, found: Sequence[Solution]) -> None:
        row = left[number]
        answered[row] = [*_answered(rows[row], found, recipe.evaluation.samples)]
        if part is None:
            write_rows(answered[row], None)
        else:
            append_line(part, {"row": row, "answers": answered[row]})

    with display.within("generate"), Generator(recipe, model) as generator:
        if answered:
            display.say(f"Answered before: {len(answered):,} of {counted(len(rows), 'row')}.")
        generator.answers([_question(rows[n]) for n in left], display=display, on_answers=write)
    if part is not None and output is not None:
        lines = [line for number in range(len(rows)) for line in answered[number]]
        write_rows(lines, output)
        delete(part)
        click.echo(f"{output}: {counted(len(lines), 'row')}.")


def _answered(
    row: Mapping[str, Any], found: Sequence[Solution], samples: int
) -> Iterator[dict[str, Any]]:
    """The row once for each sample, with what was answered."""
    for sample, one in enumerate(found or [None] * samples):
        # Columns of a Parquet file may hold dates and the like, which become text.
        kept = json.loads(json.dumps({str(name): row[name] for name in row}, default=str))
        more: tuple[Any, ...] = (None, None, "too_long", 0)
        if one is not None:
            more = (one.response, one.answer, one.finish_reason, one.tokens)
        yield kept | dict(zip(ADDED, (*more, sample) if samples > 1 else more, strict=False))


def _show(question: str, generator: Generator) -> None:
    """Answer one question on standard output."""
    for solution in generator.answer(question):
        click.echo(printable(generator.prepared.format.prefix + solution.response))
        _show_answer(solution)
        if solution.finish_reason == "length":
            limit = generator.params.max_new_tokens
            click.echo(f"(cut off after {counted(limit, 'token')}; see --max-new-tokens)")


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
    kind = "" if turns else " This model was trained on single questions: each stands alone."
    click.echo(f"/stats shows or hides numbers, /new starts over, Ctrl-D ends.{kind}", err=True)
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
                asked = Message(role="user", content=line)
                earlier += [asked, answer] if turns else []
        except EOFError:
            return
        except DataError as error:  # what is too long ends nothing
            click.echo(error.paragraph(), err=True)


def _say(
    question: str, generator: Generator, earlier: Sequence[Message], *, stats: bool
) -> Message:
    """Print an answer as it comes, dimmed up to the tag that opens it; returns the turn."""
    fmt, text, started = generator.prepared.format, "", time.perf_counter()

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
    click.echo(f"{output}: {counted(rows, 'right answer')} of {counted(drawn, 'completion')}.")
    settings = source_named(str(output))
    own = {"columns": {"response": "response"}} if settings["source"] == "file" else {}
    click.echo(f"Train on them with 'data.sft={flow(settings | own)}'.")
