"""`grouper rewards`: list rewards, try them on a text, attack them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence

import click
import yaml

from grouper.cli.opening import open_recipe
from grouper.cli.text import definitions, table
from grouper.config.overrides import PREFIX, STACKS
from grouper.config.schema import GradingConfig, PromptConfig, RewardConfig, stack
from grouper.errors import RewardError, did_you_mean
from grouper.grading import Grader
from grouper.prompts import make_format
from grouper.rewards import REWARDS, build_rewards, probe
from grouper.rewards.attacks import score_texts
from grouper.runs.samples import in_words
from grouper.types import AnswerFormat, Problem


def listed() -> None:
    """Print the first line of each reward, and the stacks."""
    definitions(
        [(n, _doc(b).split("\n")[0]) for n, b in REWARDS.items()], "Rewards (rewards[].name)"
    )
    stacks = [(f"{PREFIX}{name}", stack.description) for name, stack in STACKS.items()]
    definitions(stacks, "Stacks (several rewards by one name)")


def _doc(builder: object) -> str:
    return inspect.getdoc(builder) or ""


def show(name: str) -> None:
    """Print the documentation of a reward, or a stack as YAML."""
    key = name.removeprefix(PREFIX)
    if key in STACKS:
        shown, rewards = STACKS[key], stack(key)
        fmt = make_format(PromptConfig(format=shown.format))
        low, high = build_rewards(rewards, fmt).bounds or (0, 0)
        click.echo(f"# {key}: {shown.description}")
        click.echo(f"# Made for prompt.format: {shown.format}. Total: {low:g} to {high:g}.")
        click.echo(f"# Probes it fails: {', '.join(shown.fails) or 'none'}.")
        entries = [r.model_dump(mode="json", exclude_defaults=True) for r in rewards]
        click.echo(yaml.safe_dump({"rewards": entries}, sort_keys=False), nl=False)
        return
    if name not in REWARDS:
        near = did_you_mean(name, [*REWARDS, *STACKS])
        raise RewardError(f"there is no reward or stack {name!r}", fix=near)
    click.echo(f"{name}: {_doc(REWARDS[name])}")
    _, *parameters = inspect.signature(REWARDS[name]).parameters.values()
    usual = {p: "required" if p.default is p.empty else f"default {p.default}" for p in parameters}
    rows = [(p.name, f"({p.annotation}, {default})") for p, default in usual.items()]
    if rows:
        click.echo()
        definitions(rows, "Parameters (rewards[].params)")


def tried(
    recipe: str, text: str, overrides: tuple[str, ...], *, answer: str, question: str
) -> None:
    """Print what the rewards pay for a text."""
    if not answer.strip():
        raise click.UsageError("--answer is empty.")
    fmt, rewards, grading = _open(recipe, overrides)
    text = sys.stdin.read() if text == "-" else text
    problem = Problem(id="try/0", question=question, answer=answer, source="try")
    with Grader(fmt.contract, grading) as grader:
        stack = build_rewards(rewards, fmt)
        ((grade, reward),) = score_texts(stack, fmt, grader, problem, [text])
    click.echo(f"format      {fmt.name}" + (f", opened by {fmt.prefix!r}" if fmt.prefix else ""))
    click.echo(f"answer      {'(none)' if grade.extracted is None else grade.extracted}")
    click.echo(f"verdict     {grade.verdict.value} by {grade.stage}: {grade.reason}")
    for name, value in reward.components.items():
        shown = "not scored" if value is None else f"{value:g}"
        click.echo(f"reward      {name} = {shown}, weight {reward.weights[name]:g}")
    leaves = ": it leaves its group" if reward.total is None else ""
    click.echo(f"total       {in_words(reward).partition(' (')[0]}{leaves}")


def probed(recipe: str, overrides: tuple[str, ...], *, texts: bool) -> int:
    """Print what each attack earns; 1 if one pays."""
    fmt, rewards, grading = _open(recipe, overrides)
    with Grader(fmt.contract, grading) as grader:
        results = probe(build_rewards(rewards, fmt), fmt, grader)
    paid = {r.name: "not scored" if r.earned is None else f"{r.earned:.3f}" for r in results}
    columns = ("probe", "", "earned", "honest", "graded", "what it tries")
    rows = []
    for r in results:
        passed, honest = "pass" if r.passed else "FAIL", f"{r.honest:.3f}"
        rows.append((r.name, passed, paid[r.name], honest, r.verdict.value, r.what))
    table(columns, rows, box=None)
    failed = [r for r in results if not r.passed]
    for r in failed if texts else ():
        click.echo(f"\n--- {r.name}: earned {paid[r.name]}")
        click.echo(r.text if len(r.text) <= 2000 else f"{r.text[:2000]} [cut]")
    verdict = f"No attack pays: all {len(results)} probes passed."
    click.echo(f"Cheating pays in {len(failed)} of {len(results)} probes." if failed else verdict)
    return int(bool(failed))


def _open(
    name: str, overrides: Sequence[str]
) -> tuple[AnswerFormat, tuple[RewardConfig, ...], GradingConfig]:
    """Format, rewards and grading of a recipe, or of a stack in the format it is made for."""
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
