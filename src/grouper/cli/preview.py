"""`grouper preview`: a few samples, and whether GRPO can learn from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import progress
from grouper.errors import ConfigError, plural
from grouper.printable import printable
from grouper.runs.samples import describe_reward
from grouper.types import SamplingParams

if TYPE_CHECKING:
    from grouper.advice.checks import Finding, Samples
    from grouper.types import AnswerFormat, Rollout

EXAMPLES = """
grouper preview outputs/demo                        the model its GRPO starts from
grouper preview demo --model ./my-model --problems 16
grouper preview outputs/demo sampling.temperature=1.2
"""


@click.command("preview", cls=Command, examples=EXAMPLES)
@options.recipe
@options.model
@click.option(
    "--samples",
    metavar="N",
    type=options.WholeNumber(2),
    default=5,
    show_default=True,
    help="Number of samples per problem.",
)
@click.option(
    "--problems",
    metavar="N",
    type=options.WholeNumber(1),
    default=1,
    show_default=True,
    help="Number of problems of data.train: the first ones that GRPO would see.",
)
@options.engine
@options.quiet
def preview(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    engine: str | None,
    quiet: bool,
    samples: int,
    problems: int,
) -> int:
    """Check on a few samples whether GRPO can learn from them.

    Samples from a model with the GRPO settings of RECIPE (a recipe or a run folder), and prints
    prompts as the model reads them, texts, tags, rewards, and how much the samples differ.

    If GRPO cannot learn from them, the cause is named: a temperature that is too low, a model
    that is too certain, tags that are missing after SFT, truncated samples, or a tokenizer that
    cannot write the tags, the stop token or the prefix. The exit code is then 1, else 0.
    """
    from grouper.cli.recipe_args import chosen_model, open_recipe, run_of, sampled_by

    opened = open_recipe(recipe, sampled_by(engine, overrides))
    run = run_of(recipe, opened)
    subject = chosen_model(model, opened, run)
    if subject is None:
        raise ConfigError(
            "there is no model to sample from: the recipe makes a new one, and was not run yet",
            where=str(run),
            fix="Name a model with --model, or run SFT first with `grouper sft`.",
        )

    from grouper import api
    from grouper.advice.checks import find

    display = progress(quiet=quiet)
    with display.within("preview"):
        drawn = api.preview(opened, subject, samples=samples, problems=problems, display=display)
    causes = find(drawn)
    click.echo(f"Model:     {subject}")
    _show_samples(drawn)
    _summarize(drawn, causes)
    return 1 if causes else 0


def _show_samples(samples: Samples) -> None:
    defaults = dataclasses.asdict(SamplingParams())
    settings = []
    for name, value in dataclasses.asdict(samples.groups[0].params).items():
        is_always_shown = name in ("temperature", "max_new_tokens")
        default = None if is_always_shown else defaults.get(name)
        if value != default:
            settings.append(f"{name} {value}")
    click.echo(f"Sampling:  {', '.join(settings)}")
    for group in samples.groups:
        click.echo(click.style(f"\nProblem {group.problem.id}", bold=True))
        prompt = samples.prepared.text(group.prompt.token_ids)
        click.echo(printable(f"{prompt}\nReference: {group.problem.answer}"))
        for number, rollout in enumerate(group.rollouts, start=1):
            click.echo(click.style(f"\n[{number} of {len(group.rollouts)}] ", fg="cyan"), nl=False)
            _show_rollout(rollout, samples.prepared.format)


def _show_rollout(rollout: Rollout, fmt: AnswerFormat) -> None:
    from grouper.advice.checks import tags_in

    completion = rollout.completion
    grade = rollout.grade
    tags = tags_in(completion.text, fmt)
    missing = [tag for tag, is_present in tags.items() if not is_present]
    lines = (
        f"reward {describe_reward(rollout.reward)}",
        f"answer {grade.extracted or 'none'}: {grade.verdict.value} ({grade.reason})",
        f"tags {len(tags) - len(missing)} of {len(tags)}"
        + (f", missing {', '.join(missing)}" if missing else "")
        + f"; {len(completion.token_ids)} tokens, ended by {completion.finish_reason.value}",
        fmt.prefix + completion.text,
    )
    click.echo(printable("\n".join(lines)))


def _summarize(samples: Samples, causes: Sequence[Finding]) -> None:
    right = sum(rollout.grade.correct for rollout in samples.rollouts)
    click.echo(f"\nRight:     {right} of {plural(len(samples.rollouts), 'sample')}")
    click.echo(
        f"Diversity: {samples.diversity:.2f} (0: all the same, 1: no two the same); tokens drawn "
        f"with a mean probability of {samples.certainty:.3f}"
    )
    click.echo(
        f"Rewards:   mean variance {samples.reward_variance:.4f}; a learning signal on "
        f"{sum(samples.signal)} of {plural(len(samples.groups), 'problem')}"
    )
    for cause in causes:
        click.echo(click.style(f"Cause ({cause.name}): ", fg="red", bold=True) + f"{cause.what}.")
        click.echo(cause.fix)
    if not causes:
        fine = "rewards differ, and tags, stop token and prefix survive the tokenizer."
        click.echo(click.style("No problem found: ", fg="green", bold=True) + fine)
