"""Command lines as they are typed for other trainers, read before click does.

Several names behind one flag with blanks between them, `--bf16 true`, and what to type for an
argument that has another name here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

LISTS = ("--rewards", "--reward-funcs", "--tracker", "--report-to")
"""Flags that take several names: with commas between them, or blanks."""

SWITCHES = ("--bf16", "--gradient-checkpointing")
"""Flags that take no value, and in other trainers may have one."""

TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class TrainingCommand(click.Command):
    """A command whose flags may be written as other trainers want them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, self._joined(ctx, [*_switched(args)]))
        except click.NoSuchOption as error:
            counterpart = _counterpart(error.option_name, str(self.name))
            if counterpart is None:
                raise
            raise click.UsageError(
                f"There is no option {error.option_name}. {counterpart}", ctx
            ) from error

    def _joined(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """`--rewards a b` as `--rewards a,b`.

        A word without `=` that stands after a list belongs to it, but for RECIPE: where nothing
        else on the line can be it, it is the last of these words.
        """
        joined: list[str] = []
        rest = list(args)
        while rest:
            word = rest.pop(0)
            if word == "--":
                return [*joined, word, *rest]
            name, equals, value = word.partition("=")
            if name.replace("_", "-") not in LISTS or not (equals or rest):
                joined.append(word)
                continue
            names = [value if equals else rest.pop(0)]
            while rest and not rest[0].startswith("-") and "=" not in rest[0]:
                names.append(rest.pop(0))
            recipe = []
            if len(names) > 1 and not self._names_a_recipe(ctx, [*joined, *rest]):
                recipe = [names.pop()]
            joined += [name, ",".join(names), *recipe]
        return joined

    def _names_a_recipe(self, ctx: click.Context, args: list[str]) -> bool:
        options, _, _ = self.make_parser(ctx).parse_args(args)
        recipe = options.get("recipe")
        return isinstance(options.get("config"), str) or (
            isinstance(recipe, str) and "=" not in recipe
        )


def _switched(args: Sequence[str]) -> Iterator[str]:
    """`--bf16 true` and `--bf16=true` as `--bf16`, with false as `--no-bf16`."""
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if flag in SWITCHES and not equals and rest and rest[0].lower() in TRUTHS:
            value = rest.pop(0)
        if flag in SWITCHES and value.lower() in TRUTHS:
            word = flag if TRUTHS[value.lower()] else f"--no-{flag.removeprefix('--')}"
        yield word


def _counterpart(option: str, command: str) -> str | None:
    """What stands here for an argument that has its name from TRL, or None."""
    from grouper.config.aliases import aliases

    name = option.lstrip("-").replace("-", "_")
    row = aliases().get(name, {})
    row = aliases().get(row.get("now", name), {})
    if "why" in row:
        return f"There is nothing like TRL's {name} here: {row['why']}."
    keys = str(row.get("to") or row.get("computed") or "")
    if not keys:
        return None
    phase = "sft" if command == "sft" else "grpo"
    keys = keys.format(phase=phase)
    return (
        f"TRL's {name} is a setting here, {keys.replace(', ', ' or ')}: it is written as "
        f"section.key=value, without dashes (`grouper recipes fields` explains each)."
    )
