"""`grouper diagnose`: problems of a run, found in its logs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import show_json, warn, warn_of_losses
from grouper.errors import plural

EXAMPLES = """
grouper diagnose outputs/demo
grouper diagnose outputs/demo --json | jq '.findings[].name'
"""


@click.command("diagnose", cls=Command, examples=EXAMPLES)
@click.argument("run", metavar="RUN")
@options.as_json
def diagnose(run: str, *, as_json: bool) -> int:
    """Find problems of a run in its logs.

    Names each problem of RUN, with the evidence and the setting to change.

    RUN is a run folder, finished or not. Only its logs are read; nothing is loaded or sampled.
    The exit code is 1 if a problem was found, else 0.
    """
    from grouper.advice.checks import find, read_record

    record = read_record(Path(run).expanduser())
    warn_of_losses(record.folder)
    findings = find(record)
    for error in record.damaged:
        warn(f"left out: {error.paragraph()}")
    steps = {"sft": len(record.sft), "grpo": len(record.grpo)}
    if as_json:
        show_json({"run": run, "steps": steps, "findings": [*map(asdict, findings)]})
    else:
        done = [f"{plural(count, 'step')} of {phase}" for phase, count in steps.items() if count]
        click.echo(f"{run}: {', '.join(done)}")
        for finding in findings:
            first, last = finding.steps
            title = click.style(finding.name, bold=True)
            click.echo(f"\n{title} ({finding.phase} {first}-{last})")
            click.echo(f"  {finding.what}.\n  {finding.fix}")
        if not findings:
            click.echo("No issues detected.")
    return int(any(finding.is_fault for finding in findings))
