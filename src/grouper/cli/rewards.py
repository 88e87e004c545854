"""`grouper rewards`: list rewards, try them on a text, attack them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence

import click
import yaml

from grouper.cli.recipe_args import open_recipe
from grouper.cli.text import definitions, table
from grouper.config.overrides import PREFIX, STACKS
from grouper.config.schema import GradingConfig, PromptConfig, RewardConfig, stack
from grouper.errors import RewardError, did_you_mean
from grouper.grading import Grader
from grouper.prompts import make_format
from grouper.rewards import REWARDS, build_rewards, probe
from grouper.rewards.attacks import ProbeResult, score_texts
from grouper.runs.samples import describe_reward
from grouper.types import AnswerFormat, Problem


def listed() -> None:
    """Print the first line of each reward, and the stacks."""
    rewards = []
    for name, builder in REWARDS.items():
        first_line = _doc(builder).split("\n")[0]
        rewards.append((name, first_line))
    definitions(rewards, "Rewards (rewards[].name)")
    stacks = [(f"{PREFIX}{name}", stack.description) for name, stack in STACKS.items()]
    definitions(stacks, "Stacks (several rewards by one name)")


def _doc(builder: object) -> str:
    return inspect.getdoc(builder) or ""


def show(name: str) -> None:
    """Print the documentation of a reward, or a stack as YAML."""
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
    row = STACKS[name]
    rewards = stack(name)
    fmt = make_format(PromptConfig(format=row.format))
    low, high = build_rewards(rewards, fmt).bounds or (0, 0)
    click.echo(f"# {name}: {row.description}")
    click.echo(f"# Made for prompt.format: {row.format}. Total: {low:g} to {high:g}.")
    click.echo(f"# Probes it fails: {', '.join(row.fails) or 'none'}.")
    entries = [reward.model_dump(mode="json", exclude_defaults=True) for reward in rewards]
    click.echo(yaml.safe_dump({"rewards": entries}, sort_keys=False), nl=False)


def tried(
    recipe: str, text: str, overrides: tuple[str, ...], *, answer: str, question: str
) -> None:
    """Print the rewards of a text."""
    if not answer.strip():
        raise click.UsageError("--answer is empty.")
    fmt, rewards, grading = _open(recipe, overrides)
    if text == "-":
        text = sys.stdin.read()
    problem = Problem(id="try/0", question=question, answer=answer, source="try")
    with Grader(fmt.contract, grading) as grader:
        stack = build_rewards(rewards, fmt)
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


def probed(recipe: str, overrides: tuple[str, ...], *, texts: bool) -> int:
    """Print the reward of each attack; 1 if one pays."""
    fmt, rewards, grading = _open(recipe, overrides)
    with Grader(fmt.contract, grading) as grader:
        results = probe(build_rewards(rewards, fmt), fmt, grader)
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
        click.echo(f"Cheating pays in {len(failed)} of {len(results)} probes.")
        return 1
    click.echo(f"No attack pays: all {len(results)} probes passed.")
    return 0


def _earned(result: ProbeResult) -> str:
    return "not scored" if result.earned is None else f"{result.earned:.3f}"


def _open(
    name: str, overrides: Sequence[str]
) -> tuple[AnswerFormat, tuple[RewardConfig, ...], GradingConfig]:
    """Return format, rewards and grading of a recipe, or of a stack in its own format."""
    if not name.startswith(PREFIX):
        recipe = open_recipe(name, overrides)
        return make_format(recipe.prompt), recipe.rewards, recipe.grading
    key = name.removeprefix(PREFIX)
    rewards = stack(key)
    if overrides:
        raise RewardError(
            "a stack has no settings to override", where=name, fix="Give a recipe that names it."
        )
    fmt = make_format(PromptConfig(format=STACKS[key].format))
    return fmt, rewards, GradingConfig()
