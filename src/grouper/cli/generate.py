"""`grouper generate`: answers to one question, to a file of them, or in a conversation."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from grouper.cli.options import (
    dry_run_option,
    models_not_here,
    open_recipe,
    quiet_option,
    show_plan,
)
from grouper.config.schema import Recipe
from grouper.data.reading import find_file, read_files
from grouper.errors import DataError, RunFolderError
from grouper.grading import extract
from grouper.models.folders import model_in, recipe_for, with_sampling
from grouper.tracking.samples import printable
from grouper.types import Completion

if TYPE_CHECKING:
    from grouper.api import Generator
    from grouper.tracking.live import Progress

log = logging.getLogger(__name__)

QUESTION_COLUMNS = ("question", "problem", "prompt")
ADDED = ("response", "extracted", "finish_reason", "sample")
"""What the rows of an output file have beside the columns of the input."""

EXAMPLES = """\b
Examples:
  grouper generate outputs/demo/grpo/final --question \\
      "Eva has 7 eggs, drops 3 and then sells 2. How many eggs does Eva have?"
  grouper generate outputs/demo/grpo/final                 an interactive prompt
  grouper generate ./my-model --format boxed --input in.jsonl --output out.jsonl
"""


@click.command("generate", epilog=EXAMPLES)
@click.argument("model", metavar="MODEL")
@click.option("--question", "-Q", help="One question.")
@click.option(
    "--input",
    "input_file",
    type=click.Path(path_type=Path),
    help="Questions, one JSON object a line, in `question`, `problem` or `prompt`.",
)
@click.option(
    "--output",
    "output_file",
    type=click.Path(path_type=Path),
    help="Where the answered rows go, all columns kept.  [default: standard output]",
)
@click.option("--recipe", help="Whose prompt format is used.  [default: that of MODEL's run]")
@click.option("--format", "format_name", help="A prompt format; see `grouper recipes formats`.")
@click.option("--temperature", type=click.FloatRange(min=0), help="0 is greedy.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Longest answer.")
@click.option("--samples", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), help="Of the draws.  [default: the recipe's]")
@dry_run_option
@quiet_option
def generate_command(
    model: str,
    *,
    question: str | None,
    input_file: Path | None,
    output_file: Path | None,
    recipe: str | None,
    format_name: str | None,
    temperature: float | None,
    max_new_tokens: int | None,
    samples: int,
    seed: int | None,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Let MODEL (a folder, an adapter or a Hub name) answer questions, asked exactly as in
    training: same prompt format, same stop tokens, the extracted answer shown.

    A model inside a run folder knows its recipe; for any other give --recipe or --format. Settings
    that are left out are those of the recipe's evaluation.
    """
    if question is not None and input_file is not None:
        raise click.UsageError("Give --question or --input, not both.")
    if output_file is not None and input_file is None:
        raise click.UsageError("--output belongs to --input.")
    if question is not None and not question.strip():
        raise click.UsageError("--question is empty.")
    model = model_in(model)
    named = None if recipe is None else open_recipe(recipe, ())
    opened = with_sampling(
        recipe_for(model, named, format_name),
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        samples=samples,
        seed=seed,
    )
    rows = None if input_file is None else _read_questions(input_file)
    if output_file is not None:
        _check_output(output_file)
    if dry_run:
        _dry_run(opened, model, rows)
        return
    with _Answerer(opened, model, quiet=quiet) as answerer:
        if question is not None:
            answerer.show(question)
        elif rows is not None:
            answerer.answer_rows(rows, output_file)
        else:
            answerer.converse()


def _read_questions(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """(question, row) of every row.

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
    found = [(_question(row), row) for row in rows]
    empty = [number for number, (question, _) in enumerate(found, start=1) if not question]
    if empty:
        shown = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise DataError(
            f"{len(empty)} of {len(rows)} rows hold no question (row {shown})",
            where=str(path),
            fix=f"Put it in a column {' or '.join(QUESTION_COLUMNS)}; the columns of the first "
            f"row are {', '.join(map(str, rows[0]))}.",
        )
    return found


def _question(row: Mapping[str, Any]) -> str:
    for name in QUESTION_COLUMNS:
        if isinstance(row.get(name), str) and row[name].strip():
            return str(row[name])
    return ""


def _check_output(path: Path) -> None:
    """Found out before the model works for hours, not after."""
    if path.exists():
        raise RunFolderError(
            "there is a file of this name already",
            where=f"--output {path}",
            fix="Name a new one, or delete it.",
        )
    if not path.resolve().parent.is_dir():
        raise RunFolderError(
            f"there is no folder {str(path.parent)!r}", where="--output", fix="Make it first."
        )


def _dry_run(recipe: Recipe, model: str, rows: Sequence[object] | None) -> None:
    from grouper.models.folders import require_model_folder

    require_model_folder(model, where="MODEL")
    k = recipe.evaluation.samples
    questions = "questions as they come" if rows is None else f"{len(rows):,} questions"
    sizes = [f"{model}: {questions} x {k} samples, format {recipe.prompt.format}"]
    show_plan(recipe, sizes, unchecked=models_not_here(recipe, model))


class _Answerer:
    """A loaded model that answers questions on standard output or into a file."""

    def __init__(self, recipe: Recipe, model: str, *, quiet: bool) -> None:
        from grouper.api import Generator
        from grouper.tracking.live import Progress, setup_logging

        self.recipe = recipe
        self.progress: Progress = Progress(quiet=quiet)
        setup_logging(None, console=self.progress.console)
        self.generator: Generator = Generator(recipe, model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.generator.close()

    def show(self, question: str) -> None:
        """Answer one question on standard output."""
        prompt = self.generator.prompt(question)
        self.generator.require_fitting(prompt)
        for _, completion in sorted(self.generator.draw([prompt]), key=lambda drawn: drawn[0]):
            solution = self.generator.solution(question, prompt, completion)
            click.echo(printable(prompt.prefix + solution.response))
            if solution.answer is None:
                click.echo(click.style(f"No answer: {solution.reason}.", fg="yellow"))
            else:
                answer = printable(f"Answer: {solution.answer}")
                click.echo(click.style(answer, fg="green", bold=True))
            if completion.truncated:
                limit = self.generator.params.max_new_tokens
                click.echo(f"(cut off after {limit} tokens; see --max-new-tokens)")

    def answer_rows(
        self, rows: Sequence[tuple[str, Mapping[str, Any]]], output: Path | None
    ) -> None:
        """Answer all rows, in order, one line a row and sample; whole or not at all."""
        from grouper.files import dumps, write_atomic

        prompts = [
            self.generator.prompt(question, number) for number, (question, _) in enumerate(rows)
        ]
        fitting = [number for number, prompt in enumerate(prompts) if self.generator.fits(prompt)]
        if len(fitting) < len(prompts):
            log.warning(
                "%d questions are too long for the model; their response is null.",
                len(prompts) - len(fitting),
            )
        k = self.recipe.evaluation.samples
        drawn: dict[tuple[int, int], Completion] = {}
        with self.progress.track("answering", len(fitting) * k) as task:
            for index, completion in self.generator.draw([prompts[number] for number in fitting]):
                drawn[fitting[index // k], index % k] = completion
                task.advance()
        lines = [
            dumps(_as_json({**row, **self._columns(drawn.get((number, sample)), sample)}))
            for number, (_, row) in enumerate(rows)
            for sample in range(k)
        ]
        text = "".join(line + "\n" for line in lines)
        if output is None:
            click.echo(text, nl=False)
        else:
            write_atomic(output, text.encode())
            click.echo(f"{output}: {len(lines):,} rows.")

    def converse(self) -> None:
        """Answer every line until the end of input; each question stands alone."""
        asked = False
        for question in _lines():
            asked = True
            try:
                self.show(question)
            except DataError as error:  # a question that is too long ends nothing
                click.echo(error.paragraph(), err=True)
        if not asked and not _typed():
            click.echo("No question on standard input; see --question and --input.", err=True)

    def _columns(self, completion: Completion | None, sample: int) -> dict[str, Any]:
        number = {"sample": sample} if self.recipe.evaluation.samples > 1 else {}
        if completion is None:
            return {"response": None, "extracted": None, "finish_reason": "too_long", **number}
        return {
            "response": completion.text,
            "extracted": extract(completion.text, self.generator.prepared.format.contract).answer,
            "finish_reason": completion.finish_reason.value,
            **number,
        }


def _as_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a Parquet file may hold dates and the like, which become text."""
    return {str(name): json.loads(json.dumps(value, default=str)) for name, value in row.items()}


def _lines() -> Iterator[str]:
    """Questions typed at a prompt, or the lines of what is piped in; empty ones are skipped."""
    typed = _typed()
    if typed:
        click.echo("One question a line; Ctrl-D ends.", err=True)
    while True:
        try:
            line = input("> ") if typed else sys.stdin.readline()
        except EOFError:
            click.echo(err=True)
            return
        if not typed and not line:
            return
        if line.strip():
            yield line.strip()


def _typed() -> bool:
    return sys.stdin.isatty()
