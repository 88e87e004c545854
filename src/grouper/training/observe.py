"""One step of a phase, seen from outside: timed, recorded and reported.

A step function returns everything that it has drawn and done. What is written, displayed and
measured of it is decided here, so that the step itself is only its mathematics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from grouper.runs import records
from grouper.runs.samples import format_sample
from grouper.training.assemble import advantages_of
from grouper.training.grpo import GrpoStep, grpo_step
from grouper.training.metrics import rollout_tallies, status_of
from grouper.training.optimizers import schedule
from grouper.training.run import Run
from grouper.training.sft import SftStep, sft_step
from grouper.training.state import TrainState
from grouper.types import StepReport, Tally, Verdict, merge_tallies


class StepKind(NamedTuple):
    """How the steps of a phase are taken, and how they are reported."""

    take: Callable[[Run, TrainState], Any]
    report: Callable[[Run, TrainState, Any], StepReport]
    """Called with what `take` has returned, when the state has been advanced."""


def take_step(run: Run, state: TrainState) -> StepReport:
    """Take one step of the state's phase, record its rollouts and report it.

    Raises:
        GrouperError: see `sft_step` and `grpo_step`.
    """
    kind = STEP_KINDS[state.phase]
    state.clock.begin()
    step = kind.take(run, state)
    return kind.report(run, state, step)


# --- SFT -----------------------------------------------------------------------------------------


def report_sft(run: Run, state: TrainState, step: SftStep) -> StepReport:
    """Report the metrics of an SFT step."""
    (result,) = step.updates
    return StepReport(
        phase="sft",
        step=state.step,
        tallies={
            **result.tallies,
            "learning_rate": Tally.of([_learning_rate(run, state)]),
            "tokens": Tally.of([int(step.batch.mask.sum())]),
            **state.clock.tallies(trained=[step.batch]),
        },
        status="learning" if result.applied else "skipped:not-finite",
        events=result.events,
    )


# --- GRPO ----------------------------------------------------------------------------------------


def report_grpo(run: Run, state: TrainState, step: GrpoStep) -> StepReport:
    """Write the rollouts of a GRPO step, and report its metrics."""
    rollouts = step.rollouts
    state.clock.seconds |= state.rollout_source.seconds
    record_rollouts(run, state, step)
    times = state.clock.tallies(
        # What was drawn in the background took no time of this step.
        drawn=() if rollouts.in_background else rollouts.all_groups,
        scored=step.scored,
        trained=step.assembled.batches,
    )
    applied = [result.applied for result in step.updates]
    # By the rewards alone: a KL that is taken off them differs within every group.
    advantages = advantages_of(rollouts.groups, run.recipe.grpo)
    return StepReport(
        phase="grpo",
        step=state.step,
        tallies={
            **rollouts.logged,
            **rollout_tallies(rollouts.groups, step.assembled.advantages),
            **step.assembled.tallies,
            **_source_tallies(run, state, step),
            **merge_tallies([result.tallies for result in step.updates]),
            "updates": Tally.of([sum(applied)]),
            "rewards/failed": Tally.of([len(rollouts.failed)]),
            "learning_rate": Tally.of([_learning_rate(run, state)]),
            **times,
        },
        status=status_of(
            rollouts.groups,
            signal=step.assembled.is_taught or any(any(values) for values in advantages),
            applied=any(applied),
            tried=bool(step.updates),
        ),
        events=(
            *_grader_failures(step),
            *(event for result in step.updates for event in result.events),
            *rollouts.failed,
        ),
    )


def record_rollouts(run: Run, state: TrainState, step: GrpoStep) -> None:
    """Write every rollout drawn, and display one; those left out of the step have no advantage."""
    rollouts = step.rollouts
    advantages: list[float | None] = []
    for group, values in zip(rollouts.groups, step.assembled.advantages, strict=True):
        of_scored = iter(values)
        for rollout in group.rollouts:
            is_scored = rollout.reward.total is not None
            advantages.append(next(of_scored) if is_scored else None)
    for group in rollouts.replaced:
        advantages += [None] * len(group.rollouts)
    tracking = run.recipe.tracking
    rows = records.rollout_rows(
        "grpo",
        state.step,
        rollouts.all_groups,
        advantages,
        with_ids=tracking.token_groups == "all",
        tokens=step.token_log.records(run.processes, run.token_text),
    )
    run.folder.write_rollouts("grpo", state.step, rows)
    every = tracking.print_every_steps
    if every is not None and state.step % every == 0 and run.processes.rank == 0:
        run.display.sample(format_sample(rollouts.all_groups[0], state.step))


def _source_tallies(run: Run, state: TrainState, step: GrpoStep) -> dict[str, Tally]:
    """Return the metrics of where the rollouts came from: resampling, sampler, difficulty band."""
    tallies = {}
    if run.recipe.grpo.dynamic_sampling_rounds:
        tallies["groups/replaced"] = Tally.of([len(step.rollouts.replaced)])
        tallies["resample_rounds"] = Tally.of([step.rollouts.rounds])
    sampler = run.models.sampler(state.replica.policy)
    if sampler.gap is not None:
        tallies["sampler_push_gap"] = Tally.of([sampler.gap])
    if sampler.update_share is not None:
        tallies["sampler_update_share"] = Tally.of([sampler.update_share])
    left_out = state.rollout_source.count_left_out()
    if left_out is not None:
        tallies["problems/left_out"] = Tally.of([left_out])
    return tallies


def _grader_failures(step: GrpoStep) -> list[str]:
    """Return an event for each timeout and crash of the grader: the run is irreproducible there."""
    return [
        f"nondeterministic_event: grader {rollout.grade.verdict.value} on {group.problem.id}"
        for group in step.rollouts.groups
        for rollout in group.rollouts
        if rollout.grade.verdict in (Verdict.TIMEOUT, Verdict.CRASH)
    ]


def _learning_rate(run: Run, state: TrainState) -> float:
    """Return the learning rate of the step that the state has just finished."""
    config = state.config(run.recipe).optimizer
    return schedule(config, state.step - 1, state.total) * config.learning_rate


STEP_KINDS = {
    "sft": StepKind(sft_step, report_sft),
    "grpo": StepKind(grpo_step, report_grpo),
}
"""Phase -> how its steps are taken and reported."""
