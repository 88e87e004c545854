"""`grouper stages`: several runs, each beginning with what earlier ones have made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import progress, show, show_blocks

if TYPE_CHECKING:
    from grouper.runs.progress import Progress

EXAMPLES = """
grouper stages four-stages.yaml
"""


@click.command("stages", cls=Command, examples=EXAMPLES)
@click.argument("file", metavar="FILE")
@options.quiet
def stages(file: str, *, quiet: bool) -> None:
    """Run a chain of recipes, such as distillation, then GRPO.

    FILE lists stages: what each changes in a common recipe, whose texts it trains on, and which
    evaluations are compared at the end. `{teacher}` in a setting is the final model of the stage
    `teacher`. Each stage is a run of its own in <output_dir>/<name>/<stage>; a repeated call goes
    on where the last one was. The comparison is also written to stages.md and stages.json there.
    """
    from grouper.evaluation import result_tables
    from grouper.stages import REPORT_FILE, load_stages, run_stages

    config = load_stages(file)

    def display_of(stage: str) -> Progress:
        if not quiet:
            show(f"Stage {stage}")
        return progress(quiet=quiet)

    result = run_stages(config, display_of)
    for title, comparison in result.comparisons.items():
        show(title)
        show_blocks(result_tables.comparison_blocks(comparison))
    click.echo(result.path / REPORT_FILE)
