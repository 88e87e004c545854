"""`grouper report`: runs as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.run_args import open_run
from grouper.files import require_writable

EXAMPLES = """
grouper report outputs/demo
grouper report outputs/demo outputs/demo-1 --output both.html
"""


@click.command("report", cls=Command, examples=EXAMPLES)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--output",
    metavar="FILE",
    type=options.PATH,
    help="File to write.  [default: RUN/report.html; for several runs ./report.html]",
)
def report(runs: tuple[str, ...], *, output: Path | None) -> None:
    """Write runs as one HTML file to read and share.

    The file needs no network: facts and state of the run, whether the model improved, results with
    intervals, curves, all completions of a problem together, tokens with their log-probs, recipe,
    environment and findings. The curves of several runs are overlaid.

    A run writes its own report.html after evaluations and on every exit: finished, stopped by
    Ctrl-C or SIGTERM, or failed. The file stays below 3 MB and states which completions it holds.
    """
    paths = {Path(run).expanduser().resolve() for run in runs}
    if len(paths) < len(runs):
        raise click.UsageError("the same run is named twice.")
    folders = [open_run(run) for run in runs]
    default = Path() if len(runs) > 1 else folders[0].path
    target = (output or default).expanduser()
    if target.is_dir():
        target = target / "report.html"
    require_writable(target.absolute(), "Name another file with --output.")
    from grouper.report.page import write_report

    written = write_report(folders, target)
    click.echo(f"{written} ({written.stat().st_size / 1e6:.1f} MB)")
