"""`grouper preview`: a few samples as GRPO would draw them, and why their rewards are all alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from grouper.cli.options import (
    chosen_model,
    dry_run_option,
    model_option,
    models_not_here,
    open_recipe,
    quiet_option,
    recipe_arguments,
    run_of,
    show_plan,
)
from grouper.config.schema import Recipe
from grouper.errors import ConfigError
from grouper.tracking.samples import printable

if TYPE_CHECKING:
    from grouper.advice.checks import Finding, Samples
    from grouper.types import AnswerFormat, Rollout, SamplingParams

EXAMPLES = """\b
Examples:
  grouper preview outputs/demo                        what its GRPO starts from
  grouper preview demo --model ./my-model --problems 16
  grouper preview outputs/demo sampling.temperature=1.2
"""


@click.command("preview", epilog=EXAMPLES)
@model_option
@click.option(
    "--samples",
    type=click.IntRange(min=2),
    default=5,
    show_default=True,
    help="Of each problem.",
)
@click.option(
    "--problems",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Of data.train: those GRPO meets first.",
)
@dry_run_option
@quiet_option
@recipe_arguments
def preview_command(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    samples: int,
    problems: int,
    dry_run: bool,
    quiet: bool,
) -> int:
    """Show a few samples drawn with the GRPO settings of RECIPE (a recipe or a run folder): their
    texts, tags, rewards, and how different they are.

    Where they give GRPO nothing to learn from, the cause is named: a temperature that is
    too low, a model too certain, tags that are missing after SFT, samples cut off, or a tokenizer
    that cannot write the tags, the stop token or the prefix. The exit code is then 1, else 0.
    """
    opened = open_recipe(recipe, overrides)
    subject = _chosen_model(model, opened, run_of(recipe, opened))
    if dry_run:
        _dry_run(opened, subject, samples, problems)
        return 0
    return _preview(opened, subject, samples, problems, quiet=quiet)


def _chosen_model(model: str | None, recipe: Recipe, run: Path) -> str:
    found = chosen_model(model, recipe, run)
    if found is None:
        raise ConfigError(
            "there is no model to sample from: the recipe makes a new one, and was not run yet",
            where=str(run),
            fix="Name a model with --model, or run SFT first with `grouper sft`.",
        )
    return found


def _dry_run(recipe: Recipe, model: str, samples: int, problems: int) -> None:
    unchecked = [*models_not_here(recipe, model), "the data and the rewards"]
    show_plan(recipe, [f"{model}: {problems} problems x {samples} samples"], unchecked=unchecked)


def _preview(recipe: Recipe, model: str, samples: int, problems: int, *, quiet: bool) -> int:
    from grouper.advice.checks import find
    from grouper.advice.preview import preview
    from grouper.tracking.live import Progress, setup_logging
    from grouper.training.curriculum import first_met
    from grouper.training.prepare import prepare
    from grouper.training.problem_sets import ProblemSets, load_part

    progress = Progress(quiet=quiet)
    setup_logging(None, console=progress.console)
    sets = ProblemSets(train=load_part(recipe, "train"))
    with prepare(recipe, sets, model=model) as prepared:
        items, policy = prepared.train, prepared.load(model)
        with progress.track("sampling", samples * min(problems, len(items))) as task:
            met = tuple(items[i] for i in first_met(len(items), problems, seed=recipe.seed))
            seen = preview(prepared, policy, met, samples=samples, progress=task)
    causes = find(seen)
    _show(seen, causes, model)
    return 1 if causes else 0


def _show(seen: Samples, causes: Sequence[Finding], model: str) -> None:
    click.echo(f"Model:     {model}")
    click.echo(f"Sampling:  {_sampling(seen.groups[0].params)}")
    for group in seen.groups:
        click.echo()
        click.echo(click.style(f"Problem {group.problem.id}", bold=True))
        asked = f"{group.problem.question}\nReference: {group.problem.answer}"
        click.echo(printable(asked))
        for number, rollout in enumerate(group.rollouts, start=1):
            click.echo()
            _show_rollout(rollout, seen.prepared.format, f"{number} of {len(group.rollouts)}")
    click.echo()
    _summarise(seen, causes)


def _sampling(params: SamplingParams) -> str:
    shown = {name: value for name, value in asdict(params).items() if name != "include_stop"}
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_new_tokens": 0, "stop": ()}
    return ", ".join(
        f"{name} {', '.join(map(repr, value)) if name == 'stop' else format(value, 'g')}"
        for name, value in shown.items()
        if off.get(name) != value
    )


def _show_rollout(rollout: Rollout, fmt: AnswerFormat, place: str) -> None:
    from grouper.advice.checks import tags_in

    completion, grade, reward = rollout.completion, rollout.grade, rollout.reward
    parts = ", ".join(
        f"{name} {'not scored' if value is None else format(value, 'g')}"
        for name, value in reward.components.items()
    )
    total = "not scored" if reward.total is None else f"{reward.total:.3f}"
    found = tags_in(completion.text, fmt)
    missing = [tag for tag, there in found.items() if not there]
    click.echo(click.style(f"[{place}] ", fg="cyan") + f"reward {total} ({parts})")
    found_answer = f"answer {grade.extracted or 'none'}: {grade.verdict.value} ({grade.reason})"
    click.echo(printable(found_answer))
    click.echo(
        f"tags {len(found) - len(missing)} of {len(found)}"
        + (f", missing {', '.join(missing)}" if missing else "")
        + f"; {len(completion.token_ids)} tokens, ended by {completion.finish_reason.value}"
    )
    click.echo(click.style(fmt.prefix, dim=True) + printable(completion.text))


def _summarise(seen: Samples, causes: Sequence[Finding]) -> None:
    count = len(seen.rollouts)
    right = sum(rollout.grade.correct for rollout in seen.rollouts)
    click.echo(f"Right:     {right} of {count} samples")
    click.echo(
        f"Diversity: {seen.diversity:.2f} (0: all the same, 1: no two the same); tokens drawn with "
        f"a mean probability of {seen.certainty:.3f}"
    )
    click.echo(
        f"Rewards:   mean variance {seen.reward_variance:.4f}; something to learn from on "
        f"{sum(seen.signal)} of {len(seen.groups)} problems"
    )
    for cause in causes:
        click.echo(click.style(f"Cause ({cause.name}): ", fg="red", bold=True) + f"{cause.what}.")
        click.echo(cause.fix)
    if not causes:
        click.echo(
            click.style("Nothing stands in the way: ", fg="green", bold=True)
            + "rewards differ, and tags, stop token and prefix survive the tokenizer."
        )
