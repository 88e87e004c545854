"""Group relative policy optimisation: sample, grade, reward, compare within groups, update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from grouper.runs import records
from grouper.runs.recorder import TokenLog
from grouper.runs.samples import format_sample
from grouper.sampling.base import draw_seed
from grouper.training.assemble import Assembled, advantages_of, assemble
from grouper.training.metrics import rollout_tallies, status_of
from grouper.training.optimizers import schedule
from grouper.training.rollouts import RolloutBatch, next_rollouts
from grouper.training.run import Run
from grouper.training.state import TrainState
from grouper.training.update import Scorer, UpdateResult, grpo_objective, update
from grouper.types import (
    StepReport,
    Tally,
    Verdict,
    merge_tallies,
)


def grpo_step(run: Run, state: TrainState) -> StepReport:
    """One rollout batch, and the optimizer steps that it has a signal for.

    Args:
        run: recipe, problems, sampler, grader, rewards, folder and processes.
        state: of the GRPO phase; advanced by one step.

    Raises:
        Interrupted: while sampling; nothing has changed yet.
        RewardError: a reward function failed on too many groups of the step.
        ModelError: memory ran out and the step cannot be run again in smaller slices.
    """
    config, clock, seed = run.recipe.grpo, state.clock, run.recipe.seed
    clock.begin()
    rollouts = next_rollouts(run, state)
    with clock.updating():
        scorer = Scorer(state.replica, config.tokens_per_micro_batch, state.reference)
        keys = [draw_seed(seed, "deal", state.step, n) for n in range(config.num_iterations)]
        shuffled = [np.random.default_rng(key).permutation(len(rollouts.groups)) for key in keys]
        assembled = assemble(
            rollouts.groups,
            config,
            scorer,
            max_new_tokens=run.prepared.max_new_tokens,
            orders=[order.tolist() for order in shuffled],
        )
        tokens = TokenLog(rollouts.groups, assembled.advantages, run.recipe.tracking.token_groups)
        objective = grpo_objective(config, tokens.see)
        updates = [
            update(
                state.replica,
                batch,
                objective,
                state.optimizer,
                scale=schedule(config.optimizer, state.step, state.total),
                max_grad_norm=config.optimizer.max_grad_norm,
                token_budget=config.tokens_per_micro_batch,
            )
            for batch in assembled.batches
        ]
    drawn = (*rollouts.groups, *rollouts.replaced)
    if state.difficulty is not None:
        state.difficulty.update(drawn, state.position // state.stream.size)
    state.advance(updates, state.position, rollouts.position)
    state.position = rollouts.position
    _record(run, state, rollouts, assembled.advantages, tokens)
    times = clock.tallies(() if rollouts.beside else drawn, scorer.scored, assembled.batches)
    return _report(run, state, rollouts, assembled, updates, times=times)


# --- sample, grade, reward -----------------------------------------------------------------------


# --- advantages, log-probs, weights --------------------------------------------------------------


# --- record, report ------------------------------------------------------------------------------


def _record(
    run: Run,
    state: TrainState,
    rollouts: RolloutBatch,
    advantages: Sequence[Sequence[float]],
    log: TokenLog,
) -> None:
    """Write every rollout drawn; those that took no part in the step have no advantage."""
    flat: list[float | None] = []
    for group, values in zip(rollouts.groups, advantages, strict=True):
        scored = iter(values)
        flat += [None if r.reward.total is None else next(scored) for r in group.rollouts]
    flat += [None for group in rollouts.replaced for _ in group.rollouts]
    tracking = run.recipe.tracking
    drawn = (*rollouts.groups, *rollouts.replaced)
    tokens = log.records(run.processes, run.token_text)
    ids = tracking.token_groups == "all"
    rows = records.rollout_rows("grpo", state.step, drawn, flat, with_ids=ids, tokens=tokens)
    run.folder.write_rollouts("grpo", state.step, rows)
    every = tracking.print_every_steps
    if every is not None and state.step % every == 0 and run.processes.rank == 0:
        run.display.sample(format_sample(drawn[0], state.step))


def _report(
    run: Run,
    state: TrainState,
    rollouts: RolloutBatch,
    assembled: Assembled,
    updates: Sequence[UpdateResult],
    *,
    times: Mapping[str, Tally],
) -> StepReport:
    config = run.recipe.grpo
    scale = schedule(config.optimizer, state.step - 1, state.total)
    tallies = {
        **rollouts.logged,
        **rollout_tallies(rollouts.groups, assembled.advantages),
        **assembled.tallies,
    }
    if config.dynamic_sampling_rounds:
        tallies["groups/replaced"] = Tally.of([len(rollouts.replaced)])
        tallies["resample_rounds"] = Tally.of([rollouts.rounds])
    sampler = run.sampler(state.replica.policy)
    if sampler.gap is not None:
        tallies["sampler_push_gap"] = Tally.of([sampler.gap])
    if sampler.update_share is not None:
        tallies["sampler_update_share"] = Tally.of([sampler.update_share])
    if state.difficulty is not None:
        band, epoch = state.difficulty, state.position // state.stream.size
        left_out = sum(not band.allows(problem.id, epoch) for problem, _ in run.prepared.train)
        tallies["problems/left_out"] = Tally.of([left_out])
    # What makes a run irreproducible is recorded: a grader that timed out or crashed.
    broken = [
        f"nondeterministic_event: grader {r.grade.verdict.value} on {group.problem.id}"
        for group in rollouts.groups
        for r in group.rollouts
        if r.grade.verdict in (Verdict.TIMEOUT, Verdict.CRASH)
    ]
    return StepReport(
        phase="grpo",
        step=state.step,
        tallies={
            **tallies,
            **merge_tallies([result.tallies for result in updates]),
            "updates": Tally.of([sum(result.applied for result in updates)]),
            "rewards/failed": Tally.of([len(rollouts.failed)]),
            "learning_rate": Tally.of([scale * config.optimizer.learning_rate]),
            **times,
        },
        status=status_of(
            rollouts.groups,
            # By the rewards alone: a KL that is taken off them differs within every group.
            signal=any(any(values) for values in advantages_of(rollouts.groups, config)),
            applied=any(result.applied for result in updates),
            tried=bool(updates),
        ),
        events=(
            *broken,
            *(event for result in updates for event in result.events),
            *rollouts.failed,
        ),
    )
