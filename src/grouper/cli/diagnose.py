"""`grouper diagnose`: what went wrong in a run, from its logs alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from grouper.advice.checks import Finding

EXAMPLES = """\b
Examples:
  grouper diagnose outputs/demo
  grouper diagnose outputs/demo --json | jq '.findings[].name'
"""


@click.command("diagnose", epilog=EXAMPLES)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def diagnose_command(run: Path, *, as_json: bool) -> None:
    """Name what went wrong in RUN, with the evidence and the setting to change.

    RUN is a run folder, finished or not. Only its logs are read: nothing is loaded or sampled.
    The exit code is 1 where something was found, 0 where nothing was.
    """
    from grouper.advice.checks import find, read_record

    record = read_record(run.expanduser())
    findings = find(record)
    steps = {"sft": len(record.sft), "grpo": len(record.grpo)}
    if as_json:
        found = [asdict(finding) for finding in findings]
        click.echo(json.dumps({"run": str(run), "steps": steps, "findings": found}, indent=2))
    else:
        _show(run, steps, findings)
    if findings:
        sys.exit(1)


def _show(run: Path, steps: dict[str, int], findings: Sequence[Finding]) -> None:
    done = ", ".join(f"{count} steps of {phase}" for phase, count in steps.items() if count)
    click.echo(f"{run}: {done}")
    if not findings:
        click.echo("Nothing that Grouper knows of went wrong.")
    for finding in findings:
        first, last = finding.steps
        click.echo()
        click.echo(click.style(finding.name, bold=True) + f" ({finding.phase} {first}-{last})")
        click.echo(f"  {finding.what}.")
        click.echo(f"  {finding.fix}")
