"""`grouper chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from grouper.cli import options
from grouper.cli.answers import open_model, show_answer
from grouper.cli.commands import Command
from grouper.cli.text import progress
from grouper.errors import DataError
from grouper.printable import printable
from grouper.types import Message

if TYPE_CHECKING:
    from grouper.api import Generator

EXAMPLES = """
grouper chat outputs/demo
grouper chat outputs/demo --checkpoint last
"""


@click.command("chat", cls=Command, examples=EXAMPLES)
@click.argument("model", metavar="MODEL")
@click.option(
    "--temperature",
    metavar="X",
    type=options.Number(0),
    help="Sampling temperature; 0 is greedy.  [default: the recipe's]",
)
@options.max_new_tokens_of_answer
@options.seed
@options.format_name
@options.recipe_of_prompt
@options.checkpoint
def chat(
    model: str,
    *,
    temperature: float | None,
    max_new_tokens: int | None,
    seed: int | None,
    format_name: str | None,
    recipe: str | None,
    checkpoint: str | None,
) -> None:
    """Chat with a trained model in the terminal.

    MODEL is prompted as in training; it sees earlier turns if it has a chat template. Text is
    printed as it is sampled, the reasoning dimmed. /stats shows or hides numbers, /new starts
    over.
    """
    opened, folder = open_model(
        model,
        recipe=recipe,
        format_name=format_name,
        checkpoint=checkpoint,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        samples=1,
    )
    # This sets up the log messages, too.
    progress(quiet=True)
    from grouper.api import Generator

    with Generator(opened, folder) as generator:
        converse(generator)


def converse(generator: Generator) -> None:
    """Turn after turn where the model was trained in a chat, else question by question."""
    from grouper.prompts.rendering import uses_chat

    turns = uses_chat(generator.prepared.format, generator.prepared.tokenizer)
    note = (
        ""
        if turns
        else " This model was trained on single questions, so each message is answered on its own."
    )
    click.echo(f"/stats toggles statistics, /new starts a new chat, Ctrl-D exits.{note}", err=True)
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
    show_answer(solution)
    if stats:
        click.echo(
            f"{solution.tokens} tokens in {seconds:.1f} s ({solution.tokens / seconds:.0f} "
            f"per second), ended by {solution.finish_reason}, answer {solution.answer!r}",
            err=True,
        )
    return Message(role="assistant", content=fmt.prefix + solution.response)
