"""`grouper watch`: a run, followed from another terminal."""

from __future__ import annotations

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.run_args import open_run

EXAMPLES = """
grouper watch outputs/demo
"""


@click.command("watch", cls=Command, examples=EXAMPLES)
@click.argument("run", metavar="RUN")
@click.option(
    "--every",
    metavar="SECONDS",
    type=options.Number(0.2),
    default=2,
    show_default=True,
    help="Time between updates.",
)
def watch(run: str, *, every: float) -> None:
    """Follow a run from another terminal.

    Shows RUN while another process writes it: step, time left, every curve, the latest rollout
    and events. It writes nothing, so it works over ssh and on a read-only folder. It ends with
    the run; without a terminal it prints the state once.
    """
    from rich.console import Console

    from grouper.report.terminal import watch as follow

    follow(open_run(run), Console(), seconds=every)
