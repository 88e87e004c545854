"""Groups of commands that name the nearest one for a typo. Imports nothing heavy."""

from __future__ import annotations

import click

from grouper.errors import did_you_mean


class NamingGroup(click.Group):
    """A click group whose complaint about an unknown command helps."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            ctx.fail(
                f"{ctx.command_path} has no command {args[0]!r}. {did_you_mean(args[0], known)}"
            )
        return super().resolve_command(ctx, args)
