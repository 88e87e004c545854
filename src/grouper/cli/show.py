"""`grouper show`: completions of training."""

from __future__ import annotations

import itertools

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.run_args import open_run
from grouper.cli.text import output_console, show_blocks

VERDICTS = [
    "correct",
    "incorrect",
    "no_answer",
    "truncated",
    "unparseable",
    "timeout",
    "crash",
    "not_scored",
]

EXAMPLES = """
grouper show outputs/demo                      the last step
grouper show outputs/demo --step 1 --worst -n 3
grouper show outputs/demo --verdict no_answer
grouper show outputs/demo --problem train/3
"""


@click.command("show", cls=Command, examples=EXAMPLES)
@click.argument("run", metavar="RUN")
@click.option("--step", metavar="N", type=options.WholeNumber(1), help="Show only this GRPO step.")
@click.option("--problem", metavar="ID", help="Show only problems whose id contains this.")
@click.option("--verdict", type=click.Choice(VERDICTS), help="Show only this verdict.")
@click.option("--best", is_flag=True, help="Show the highest rewards of the step first.")
@click.option("--worst", is_flag=True, help="Show the lowest rewards of the step first.")
@click.option(
    "--diff",
    metavar="STEP STEP",
    type=options.WholeNumber(0),
    nargs=2,
    help="Show the same problems at two steps.",
)
@click.option(
    "-n",
    "--count",
    metavar="N",
    type=options.WholeNumber(1),
    default=5,
    show_default=True,
    help="Number of completions to print.",
)
def show(
    run: str,
    *,
    step: int | None,
    problem: str | None,
    verdict: str | None,
    best: bool,
    worst: bool,
    diff: tuple[int, int] | None,
    count: int,
) -> None:
    """Print completions that a model wrote in training.

    Prints rollouts of RUN, the newest step first: prompt, completion, verdict, reward, advantage.

    --diff prints the same problems at two steps side by side: validation problems if both steps
    were evaluated, else the problems that were sampled at both.
    """
    if best and worst:
        raise click.UsageError("--best and --worst are opposite orders: give one.")
    if diff is not None and (step is not None or verdict or best or worst):
        raise click.UsageError("--diff compares two steps: only --problem and -n go with it.")
    from grouper.report.terminal import changes, rollout_text, rollouts

    folder = open_run(run)
    if diff is not None:
        show_blocks([*itertools.islice(changes(folder, *diff, problem), count)])
        return
    rows = rollouts(folder, step=step, problem=problem, verdict=verdict, best=best, worst=worst)
    row = None
    for row in itertools.islice(rows, count):
        output_console().print(rollout_text(row), highlight=False)
    if row is None:
        click.echo("No rollout matches.")
