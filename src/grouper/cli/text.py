"""Output that several commands share: warnings, progress, tables, JSON and short texts.

Modules of commands import what needs time, such as rich, in their functions, so that help is fast.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.files import dumps, write_atomic
from grouper.printable import printable
from grouper.tables import Block, Table, for_terminal
from grouper.tables import table as make_table

if TYPE_CHECKING:
    from rich.console import Console

    from grouper.runs.folder import RunFolder
    from grouper.runs.progress import Progress


def is_follower() -> bool:
    """Tell whether this is one of several processes and not the one that prints, rank 0."""
    rank = os.environ.get("RANK", "0")
    return int(rank) > 0


def warn(text: str) -> None:
    """Show a warning on standard error, once for all processes of a run."""
    if not is_follower():
        click.echo(click.style("warning: ", fg="yellow") + text, err=True)


def warn_of_losses(folder: RunFolder) -> None:
    """Name the records that a run has lost, so that nothing is missing without a word."""
    from grouper.config.loading import load_recipe
    from grouper.errors import ConfigError
    from grouper.models.folders import RECIPE_FILE
    from grouper.runs.lock import is_running

    if is_running(folder.path):
        return
    try:
        recipe = load_recipe(folder.path / RECIPE_FILE)
    except ConfigError:
        # The commands that need the recipe report this.
        recipe = None
    for loss in folder.losses(recipe):
        warn(
            f"{folder.path} has lost {loss}: restore the files from a backup; what is shown goes "
            "without."
        )


def progress(*, quiet: bool = False, verbose: bool = False, log_every: int = 1) -> Progress:
    """Return a progress display, which log messages go to as well; only rank 0 shows one.

    Args:
        quiet: show results and warnings alone.
        verbose: show every metric of a step.
        log_every: steps between lines.
    """
    from grouper.runs.progress import Progress, setup_logging

    is_quiet = quiet or is_follower()
    display = Progress(quiet=is_quiet, verbose=verbose, log_every=log_every)
    setup_logging(None, console=None if is_follower() else display.console)
    return display


def definitions(rows: Iterable[tuple[str, str]], title: str = "") -> None:
    """Print names and their meanings, below a title where there is one."""
    formatter = click.HelpFormatter(width=100)
    with formatter.section(title) if title else contextlib.nullcontext():
        formatter.write_dl(list(rows), col_max=40)
    click.echo(formatter.getvalue(), nl=False)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    lines: bool = False,
) -> None:
    """Print a table, with numbers aligned to the right.

    Args:
        columns: titles of the columns.
        rows: rows of a text per column.
        title: a line above the table.
        lines: draw lines between the cells.
    """
    show(make_table(columns, rows, title=title, lines=lines))


def show(*things: str | Block) -> None:
    """Print tables and lines of text; a file or pipe is 120 columns wide."""
    console = output_console()
    for thing in things:
        if isinstance(thing, str):
            console.print(thing, highlight=False, markup=False, soft_wrap=True)
        else:
            console.print(for_terminal(thing), highlight=False)


def show_blocks(blocks: Sequence[Block]) -> None:
    """Print tables and lines, with an empty line after each table but the last block."""
    for block, next_block in itertools.zip_longest(blocks, blocks[1:]):
        show(block)
        if isinstance(block, Table) and next_block is not None:
            show("")


def output_console() -> Console:
    """Return the console of standard output."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=120)


def show_json(value: Any) -> None:
    """Print JSON that strict readers take, too: NaN and infinities are null."""
    from pydantic_core import to_json

    strict_value = json.loads(to_json(value, inf_nan_mode="null"))
    # ASCII is in every encoding of standard output.
    click.echo(json.dumps(strict_value, indent=2))


def short(text: str | None, length: int = 200) -> str:
    r"""Return text on one line that cannot steer the terminal, truncated where it is long.

    >>> short("red \x1b[31m\n" + "x" * 20, 16), short(None)
    ('red \\x1b[31m x...', 'none')
    """
    if text is None:
        return "none"
    line = printable(" ".join(text.split()))
    if len(line) <= length:
        return line
    return f"{line[: length - 1]}..."


def flow(value: Any) -> str:
    """Return a setting as YAML on one line."""
    import yaml

    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10_000
    )
    return text.removesuffix("...\n").strip()


def some(findings: Sequence[str], count: int, indent: str = "  ") -> None:
    """Print the first `count` lines, and how many more there are."""
    for finding in findings[:count]:
        click.echo(printable(f"{indent}{finding}"))
    if len(findings) > count > 0:
        click.echo(f"{indent}and {len(findings) - count:,} more")


def write_rows(rows: Iterable[Mapping[str, Any]], output: Path | None) -> None:
    """Write rows as JSON lines to a file, whole or not at all; None: to standard output."""
    text = "".join(dumps(row) + "\n" for row in rows)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_atomic(output, text.encode())
