"""`grouper certify`: what the record of a run proves, on one page that others can check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import progress, show
from grouper.files import require_writable

if TYPE_CHECKING:
    from grouper.certificate.certificate import Certificate

EXAMPLES = """
grouper certify outputs/demo
grouper certify outputs/demo-seed0 outputs/demo-seed1 outputs/demo-seed2 --control outputs/control
grouper certify outputs/demo --replay                 also train its last steps again
grouper certify --check certificate.json
"""


@click.command("certify", cls=Command, examples=EXAMPLES)
@click.argument("runs", nargs=-1, metavar="RUN...")
@click.option(
    "--control",
    "controls",
    multiple=True,
    metavar="RUN",
    help="A run of the same recipe with grpo.shuffle_rewards=true; can be repeated.",
)
@click.option(
    "--replay",
    is_flag=True,
    help="Also train the steps after the last checkpoint again, and compare weights, rollouts and "
    "evaluation.",
)
@click.option(
    "--check",
    "file",
    metavar="FILE",
    type=options.PATH,
    help="Compute the certificate in FILE again from its runs, and report every difference.",
)
@click.option(
    "--output",
    metavar="FILE",
    type=options.PATH,
    help="File to write, .json; the page is beside it as .html.  [default: RUN/certificate.json; "
    "for several runs ./certificate.json]",
)
@options.quiet
def certify(
    runs: tuple[str, ...],
    *,
    controls: tuple[str, ...],
    replay: bool,
    file: Path | None,
    output: Path | None,
    quiet: bool,
) -> int:
    """Certify what the record of runs proves.

    Each RUN is a seed of one recipe. A certificate answers the objections to a result: luck, other
    conditions for the base, a chosen checkpoint, records that were edited, answers that were graded
    wrongly, a test set that was trained on or read before, a gain of format or of tokens alone, and
    a reward that can be cheated. Each item passes, fails, or is missing; a missing one names the
    command that would supply it.

    FILE has the digests of everything that it rests on. With --check it is computed again from the
    run folders. The exit code is 1 if an item fails, or if a check finds a difference.
    """
    if (file is None) == (not runs):
        raise click.UsageError("name either the runs, or a certificate with --check FILE.")
    if file is not None:
        if controls or replay or output is not None:
            raise click.UsageError("--check FILE repeats what the certificate says: give it alone.")
        return _check(file, quiet=quiet)
    from grouper.certificate import certificate as certificates
    from grouper.certificate.page import write_page
    from grouper.cli.run_args import open_run
    from grouper.runs.folder import CERTIFICATE_FILE

    folders = [open_run(run).path for run in runs]
    control_folders = [open_run(run).path for run in controls]
    default = folders[0] if len(folders) == 1 else Path()
    target = (output or default / CERTIFICATE_FILE).expanduser()
    if target.suffix != ".json":
        raise click.UsageError(f"--output {target}: a certificate is a .json file.")
    require_writable(target.absolute(), "Name another file with --output.")
    certificate = certificates.certify(
        folders,
        control_folders,
        folder=target.absolute().parent,
        with_replay=replay,
        display=progress(quiet=quiet),
    )
    certificates.write_certificate(certificate, target)
    page = write_page(certificate, target.with_suffix(".html"))
    _show(certificate)
    show(f"Certificate: {target}", f"Page: {page}")
    return 1 if certificate.count("fail") else 0


def _check(file: Path, *, quiet: bool) -> int:
    """Compute a certificate again, and print what differs."""
    from grouper.certificate import certificate as certificates

    checked = certificates.check(file, progress(quiet=quiet))
    if checked.differences:
        show(*checked.differences)
        show(f"{file} does not say what its runs show.")
        return 1
    _show(checked.computed)
    show(f"{file} says what its runs show.")
    return 0


def _show(certificate: Certificate) -> None:
    from grouper.certificate.page import items_table

    verdict = certificate.verdict
    show(items_table(certificate), f"{verdict[0].upper()}{verdict[1:]}.")
