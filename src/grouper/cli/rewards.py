"""`grouper rewards`: list rewards, try them on a text, attack them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from grouper.cli import options
from grouper.cli.commands import Group
from grouper.cli.text import definitions, table
from grouper.errors import RewardError, did_you_mean
from grouper.runs.samples import describe_reward
from grouper.types import AnswerFormat, Problem

if TYPE_CHECKING:
    from grouper.config.schema import GradingConfig, RewardConfig
    from grouper.rewards.attacks import ProbeResult

EXAMPLES = """
grouper rewards show dapo_answer               what it rewards, its parameters, its source
grouper rewards show gsm8k-xml                 the entries of a stack, ready to copy
grouper rewards try demo "<answer>4</answer>" --answer 4
grouper rewards probe demo                     attack the rewards of a recipe
grouper rewards probe stack:openmath-dapo      attack the rewards of a stack
"""


@click.group("rewards", cls=Group, examples=EXAMPLES)
def rewards() -> None:
    """List rewards, try them on a text, or attack them.

    A recipe lists its rewards by name, each with a weight; the total is the weighted sum.
    """


@rewards.command("list")
def list_rewards() -> None:
    """List the built-in rewards and the named stacks.

    A recipe gives these names in `rewards[].name`.
    """
    from grouper.config.overrides import PREFIX, STACKS
    from grouper.rewards import REWARDS

    rows = []
    for name, builder in REWARDS.items():
        first_line = _doc(builder).split("\n")[0]
        rows.append((name, first_line))
    definitions(rows, "Rewards (rewards[].name)")
    stacks = [(f"{PREFIX}{name}", stack.description) for name, stack in STACKS.items()]
    definitions(stacks, "Stacks (several rewards by one name)")


def _doc(builder: object) -> str:
    return inspect.getdoc(builder) or ""


@rewards.command("show")
@click.argument("name", metavar="NAME")
def show(name: str) -> None:
    """Show what a reward does, or the entries of a stack.

    Prints the documentation and the parameters of a reward (`dapo_answer`), or the entries of a
    stack (`gsm8k-xml`) as YAML.
    """
    from grouper.config.overrides import PREFIX, STACKS
    from grouper.rewards import REWARDS

    key = name.removeprefix(PREFIX)
    if key in STACKS:
        _show_stack(key)
        return
    if name not in REWARDS:
        suggestion = did_you_mean(name, [*REWARDS, *STACKS])
        raise RewardError(f"there is no reward or stack {name!r}", fix=suggestion)
    click.echo(f"{name}: {_doc(REWARDS[name])}")
    # The first parameter is the completion, or the group, to be scored.
    _, *parameters = inspect.signature(REWARDS[name]).parameters.values()
    rows = []
    for parameter in parameters:
        is_required = parameter.default is parameter.empty
        default = "required" if is_required else f"default {parameter.default}"
        rows.append((parameter.name, f"({parameter.annotation}, {default})"))
    if rows:
        click.echo()
        definitions(rows, "Parameters (rewards[].params)")


def _show_stack(name: str) -> None:
    """Print a stack as YAML, with its totals and weaknesses as comments."""
    import yaml

    from grouper.config.overrides import STACKS
    from grouper.config.schema import PromptConfig, stack
    from grouper.prompts import make_format
    from grouper.rewards import build_rewards

    row = STACKS[name]
    entries = stack(name)
    fmt = make_format(PromptConfig(format=row.format))
    low, high = build_rewards(entries, fmt).bounds or (0, 0)
    click.echo(f"# {name}: {row.description}")
    click.echo(f"# Made for prompt.format: {row.format}. Total: {low:g} to {high:g}.")
    click.echo(f"# Probes it fails: {', '.join(row.fails) or 'none'}.")
    settings = [reward.model_dump(mode="json", exclude_defaults=True) for reward in entries]
    click.echo(yaml.safe_dump({"rewards": settings}, sort_keys=False), nl=False)


@rewards.command("try")
@click.argument("recipe", metavar="RECIPE")
@click.argument("text", metavar="TEXT")
@options.overrides
@click.option("--answer", metavar="TEXT", required=True, help="Reference answer.")
@click.option(
    "--question",
    metavar="TEXT",
    default="(none was given)",
    show_default=True,
    help="Question, for rewards that read it.",
)
def try_rewards(
    recipe: str, text: str, overrides: tuple[str, ...], *, answer: str, question: str
) -> None:
    """Show the rewards of a recipe for a text, and why.

    RECIPE is a recipe, or stack:NAME. TEXT is what the model wrote after the prompt, or `-` for
    standard input.
    """
    from grouper.grading import Grader
    from grouper.rewards import build_rewards
    from grouper.rewards.attacks import score_texts

    if not answer.strip():
        raise click.UsageError("--answer is empty.")
    fmt, entries, grading = _open(recipe, overrides)
    if text == "-":
        text = sys.stdin.read()
    problem = Problem(id="try/0", question=question, answer=answer, source="try")
    with Grader(fmt.contract, grading) as grader:
        stack = build_rewards(entries, fmt)
        ((grade, reward),) = score_texts(stack, fmt, grader, problem, [text])
    opening = f", opened by {fmt.prefix!r}" if fmt.prefix else ""
    click.echo(f"format      {fmt.name}{opening}")
    click.echo(f"answer      {'(none)' if grade.extracted is None else grade.extracted}")
    click.echo(f"verdict     {grade.verdict.value} by {grade.stage}: {grade.reason}")
    for name, value in reward.components.items():
        score = "not scored" if value is None else f"{value:g}"
        click.echo(f"reward      {name} = {score}, weight {reward.weights[name]:g}")
    total = describe_reward(reward).partition(" (")[0]
    note = ": it leaves its group" if reward.total is None else ""
    click.echo(f"total       {total}{note}")


@rewards.command("probe")
@options.recipe
@click.option("--texts", is_flag=True, help="Print the completions that earned too much.")
def probe(recipe: str, overrides: tuple[str, ...], *, texts: bool) -> int:
    """Attack the rewards of a recipe.

    RECIPE is a recipe, or stack:NAME. Each probe writes completions that deserve no reward and
    compares the one with the highest reward to an honest wrong answer: well-formed, of usual
    length, with one wrong number. The exit code is 1 if cheating pays.
    """
    from grouper.grading import Grader
    from grouper.rewards import build_rewards
    from grouper.rewards import probe as probe_rewards

    fmt, entries, grading = _open(recipe, overrides)
    with Grader(fmt.contract, grading) as grader:
        results = probe_rewards(build_rewards(entries, fmt), fmt, grader)
    columns = ("probe", "", "earned", "honest", "graded", "what it tries")
    rows = []
    for result in results:
        row = (
            result.name,
            "pass" if result.passed else "FAIL",
            _earned(result),
            f"{result.honest:.3f}",
            result.verdict.value,
            result.what,
        )
        rows.append(row)
    table(columns, rows)
    failed = [result for result in results if not result.passed]
    if texts:
        for result in failed:
            text = result.text if len(result.text) <= 2000 else f"{result.text[:2000]} [cut]"
            click.echo(f"\n--- {result.name}: earned {_earned(result)}")
            click.echo(text)
    if failed:
        click.echo(f"Cheating is rewarded in {len(failed)} of {len(results)} probes.")
        return 1
    click.echo(f"No attack pays: all {len(results)} probes passed.")
    return 0


def _earned(result: ProbeResult) -> str:
    return "not scored" if result.earned is None else f"{result.earned:.3f}"


def _open(
    name: str, overrides: Sequence[str]
) -> tuple[AnswerFormat, tuple[RewardConfig, ...], GradingConfig]:
    """Return format, rewards and grading of a recipe, or of a stack in its own format."""
    from grouper.cli.recipe_args import open_recipe
    from grouper.config.overrides import PREFIX, STACKS
    from grouper.config.schema import GradingConfig, PromptConfig, stack
    from grouper.prompts import make_format

    if not name.startswith(PREFIX):
        recipe = open_recipe(name, overrides, trains=False)
        return make_format(recipe.prompt), recipe.rewards, recipe.grading
    key = name.removeprefix(PREFIX)
    entries = stack(key)
    if overrides:
        raise RewardError(
            "a stack has no settings to override", where=name, fix="Give a recipe that names it."
        )
    fmt = make_format(PromptConfig(format=STACKS[key].format))
    return fmt, entries, GradingConfig()
