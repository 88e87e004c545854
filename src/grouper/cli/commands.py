"""Classes of commands and of groups: how help is laid out, and how flags and names are read."""

from __future__ import annotations

from typing import Any

import click

from grouper.compat.flags import flag_named, hint, normalized
from grouper.errors import did_you_mean

# Number of options at the top of a command's help.
FIRST = 5

CONTEXT_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    # Options may be written with underscores, or by the names that other trainers give them.
    "token_normalize_func": flag_named,
}

# Commands that users of other programs type -> what to type instead.
ELSEWHERE = {
    "train": "To train, use `grouper run RECIPE`: SFT, GRPO, and an evaluation of both.",
    "recipes rewards": "The rewards are listed by `grouper rewards list`.",
    "recipes sources": "The data sources are listed by `grouper data list`.",
}


def _epilog(examples: str) -> str | None:
    """Return the end of a help text: example commands, which click must not rewrap."""
    if not examples:
        return None
    lines = [f"  {line}\n" for line in examples.strip().splitlines()]
    return f"\b\nExamples:\n{''.join(lines)}"


class Command(click.Command):
    """A command whose help shows the options that people use first, then the others.

    Args:
        examples: commands for the end of the help text, one per line.
    """

    def __init__(self, name: str | None, *, examples: str = "", **settings: Any) -> None:
        settings.setdefault("context_settings", CONTEXT_SETTINGS)
        super().__init__(name, epilog=_epilog(examples), **settings)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record:
                records.append(record)
        # A section for a single option would not make the help shorter.
        count = FIRST if len(records) > FIRST + 1 else len(records)
        for title, rows in (("Options", records[:count]), ("More options", records[count:])):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class TrainingCommand(Command):
    """A command that also takes the flags of other trainers, in their spellings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, [*normalized(args)])
        except click.NoSuchOption as error:
            if not error.option_name.startswith("--"):
                raise
            raise click.UsageError(hint(error.option_name, args), ctx) from error


class Group(click.Group):
    """A group of commands that suggests the nearest name for a mistyped one.

    Args:
        examples: commands for the end of the help text, one per line.
    """

    command_class = Command

    def __init__(self, name: str | None = None, *, examples: str = "", **settings: Any) -> None:
        settings.setdefault("context_settings", CONTEXT_SETTINGS)
        super().__init__(name, epilog=_epilog(examples), **settings)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        # In the order of the file, where click would sort them.
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        typed = args[0]
        names = self.list_commands(ctx)
        if typed not in names and not typed.startswith("-"):
            command = f"{ctx.command_path} {typed}".partition(" ")[2]
            suggestion = did_you_mean(typed, names)
            message = f"{ctx.command_path} has no command {typed!r}. {suggestion}"
            from grouper.config.loading import shipped_recipes

            if typed.endswith((".yaml", ".yml")) or typed in shipped_recipes():
                message = f"{typed} is a recipe. Give the command, too: grouper run {typed}"
            ctx.fail(ELSEWHERE.get(command, message))
        return super().resolve_command(ctx, args)
