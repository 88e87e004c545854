"""`grouper skill`: instructions for coding agents."""

from __future__ import annotations

import importlib.resources

import click

from grouper.cli.commands import Command

EXAMPLES = """
grouper skill
grouper skill > SKILL.md
"""


@click.command("skill", cls=Command, examples=EXAMPLES)
def skill() -> None:
    """Print instructions for coding agents.

    Prints how to train, evaluate and explain a run with Grouper, as a file SKILL.md: put it where
    your agent looks for skills, or paste it into its instructions.
    """
    text = importlib.resources.files("grouper.cli").joinpath("SKILL.md").read_text("utf-8")
    click.echo(text, nl=False)
