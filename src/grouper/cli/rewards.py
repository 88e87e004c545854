"""`grouper rewards`: what pays what, tried on a text, and attacked."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from grouper.cli.groups import NamingGroup
from grouper.cli.options import open_recipe, output_console
from grouper.config.schema import GradingConfig, PromptConfig, RewardConfig
from grouper.errors import RewardError, did_you_mean

if TYPE_CHECKING:
    from grouper.rewards import ProbeResult
    from grouper.types import AnswerFormat

EXAMPLES = """\b
Examples:
  grouper rewards show dapo_answer               what it pays, its parameters, its source
  grouper rewards show gsm8k-xml                 the entries of a stack, ready to copy
  grouper rewards try demo "<answer>4</answer>" --answer 4
  grouper rewards probe demo                     attack the rewards of a recipe
  grouper rewards probe stack:openmath-dapo      ... or those of a stack
"""


@click.group("rewards", cls=NamingGroup, epilog=EXAMPLES)
def rewards_command() -> None:
    """List the rewards and stacks, try them on a text, or attack them.

    A recipe lists its rewards by name, each with a weight; the total is the weighted sum.
    """


@rewards_command.command("list")
def list_command() -> None:
    """List the built-in rewards and the named stacks."""
    from grouper.config.named import STACKS
    from grouper.rewards import REWARDS

    _columns(
        [(name, _doc(builder).split("\n")[0]) for name, builder in REWARDS.items()],
        "Rewards (rewards[].name)",
    )
    _columns(
        [(f"stack:{name}", stack.description) for name, stack in STACKS.items()],
        "Stacks (several rewards by one name)",
    )


def _columns(rows: Sequence[tuple[str, str]], title: str) -> None:
    formatter = click.HelpFormatter(width=100)
    with formatter.section(title):
        formatter.write_dl(rows, col_max=40)
    click.echo(formatter.getvalue(), nl=False)


@rewards_command.command("show")
@click.argument("name")
def show_command(name: str) -> None:
    """Show what a reward pays and its parameters, or the entries of a stack.

    NAME is a reward (`dapo_answer`) or a stack (`gsm8k-xml`).
    """
    from grouper.config.named import STACKS
    from grouper.rewards import REWARDS

    key = name.removeprefix("stack:")
    if key in STACKS:
        _show_stack(key)
    elif name in REWARDS:
        _show_reward(name)
    else:
        raise RewardError(
            f"there is no reward or stack {name!r}", fix=did_you_mean(name, [*REWARDS, *STACKS])
        )


def _show_reward(name: str) -> None:
    from grouper.rewards import REWARDS

    builder = REWARDS[name]
    click.echo(f"{name}: {_doc(builder)}")
    parameters = list(inspect.signature(builder).parameters.values())[1:]
    if not parameters:
        return
    click.echo("\nParameters (rewards[].params):")
    for parameter in parameters:
        required = parameter.default is inspect.Parameter.empty
        default = "required" if required else f"default {parameter.default}"
        click.echo(f"  {parameter.name} ({parameter.annotation}, {default})")


def _doc(builder: object) -> str:
    return inspect.getdoc(builder) or ""


def _show_stack(name: str) -> None:
    import yaml

    from grouper.config.named import STACKS
    from grouper.config.schema import stack
    from grouper.prompts import make_format
    from grouper.rewards import build_rewards

    shown, rewards = STACKS[name], stack(name)
    bounds = build_rewards(rewards, make_format(PromptConfig(format=shown.format))).bounds
    assert bounds is not None
    click.echo(f"# {name}: {shown.description}")
    click.echo(f"# Made for prompt.format: {shown.format}. Total: {bounds[0]:g} to {bounds[1]:g}.")
    click.echo(f"# Probes it fails: {', '.join(shown.fails) or 'none'}.")
    entries = [r.model_dump(mode="json", exclude_defaults=True) for r in rewards]
    click.echo(yaml.safe_dump({"rewards": entries}, sort_keys=False), nl=False)


# `\n` as people type a line break, and not the beginning of a LaTeX command.
_LINE_BREAK = re.compile(
    r"\\n(?!(?:abla|cong|e|earrow|eg|eq|exists|geq|leq|mid|ot|otin|parallel|rightarrow|subset|"
    r"subseteq|u|warrow)(?![A-Za-z]))"
)


@rewards_command.command("try")
@click.argument("recipe")
@click.argument("text")
@click.argument("overrides", nargs=-1, metavar="[section.key=value]...")
@click.option("--answer", required=True, help="The reference answer.")
@click.option("--question", default="(none was given)", help="What a reward may want to see.")
def try_command(
    recipe: str, text: str, overrides: tuple[str, ...], answer: str, question: str
) -> None:
    r"""Show what RECIPE's rewards pay for the completion TEXT, and why.

    RECIPE is a recipe, or stack:NAME. TEXT is what the model wrote after the prompt; `\n` in it
    is a line break, unless a LaTeX command such as `\neq` begins there.
    """
    from grouper.grading import Grader
    from grouper.rewards import build_rewards
    from grouper.rewards.attacks import score_texts
    from grouper.types import Problem

    fmt, rewards, grading = _open(recipe, overrides)
    text = _LINE_BREAK.sub("\n", text)
    problem = Problem(id="try/0", question=question, answer=answer, source="try")
    with Grader(fmt.contract, grading) as grader:
        stack = build_rewards(rewards, fmt)
        ((grade, reward),) = score_texts(stack, fmt, grader, problem, [text])
    click.echo(f"format      {fmt.name}" + (f", opened by {fmt.prefix!r}" if fmt.prefix else ""))
    click.echo(f"answer      {grade.extracted if grade.extracted is not None else '(none)'}")
    click.echo(f"verdict     {grade.verdict.value} by {grade.rung}: {grade.reason}")
    for name, value in reward.components.items():
        shown = "not scored" if value is None else f"{value:g}"
        click.echo(f"reward      {name} = {shown}, weight {reward.weights[name]:g}")
    total = reward.total
    click.echo(
        f"total       {'not scored: it leaves its group' if total is None else f'{total:g}'}"
    )


@rewards_command.command("probe")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[section.key=value]...")
@click.option("--texts", is_flag=True, help="Print the completions that earned too much.")
def probe_command(recipe: str, overrides: tuple[str, ...], texts: bool) -> int:
    """Attack the rewards of RECIPE; exit code 1 where cheating pays.

    RECIPE is a recipe, or stack:NAME. Each probe writes completions that deserve nothing and
    compares the best-paid one with an honest wrong answer: well-formed, of usual length, one
    wrong number.
    """
    from grouper.grading import Grader
    from grouper.rewards import build_rewards, probe

    fmt, rewards, grading = _open(recipe, overrides)
    with Grader(fmt.contract, grading) as grader:
        results = probe(build_rewards(rewards, fmt), fmt, grader)
    _print_results(results)
    failed = [result for result in results if not result.passed]
    for result in failed if texts else ():
        click.echo(f"\n--- {result.name}: earned {_number(result.earned)}")
        click.echo(result.text if len(result.text) <= 2000 else f"{result.text[:2000]} [cut]")
    if failed:
        click.echo(f"Cheating pays in {len(failed)} of {len(results)} probes.")
    else:
        click.echo(f"No attack pays: all {len(results)} probes passed.")
    return int(bool(failed))


def _print_results(results: Sequence[ProbeResult]) -> None:
    from rich.table import Table

    table = Table("probe", "", "earned", "honest", "graded", "what it tries", box=None)
    for result in results:
        table.add_row(
            result.name,
            "pass" if result.passed else "[bold red]FAIL[/]",
            _number(result.earned),
            _number(result.honest),
            result.verdict.value,
            result.what,
        )
    output_console().print(table)


def _number(value: float | None) -> str:
    return "not scored" if value is None else f"{value:.3f}"


def _open(
    name: str, overrides: Sequence[str]
) -> tuple[AnswerFormat, tuple[RewardConfig, ...], GradingConfig]:
    """Format, rewards and grading of a recipe, or of a stack in the format it is made for."""
    from grouper.config.named import PREFIX, STACKS
    from grouper.config.schema import stack
    from grouper.prompts import make_format

    if not name.startswith(PREFIX):
        recipe = open_recipe(name, overrides)
        return make_format(recipe.prompt), recipe.rewards, recipe.grading
    key = name.removeprefix(PREFIX)
    rewards = stack(key)
    if overrides:
        raise RewardError(
            "a stack has no settings to override", where=name, fix="Give a recipe that names it."
        )
    return make_format(PromptConfig(format=STACKS[key].format)), rewards, GradingConfig()
