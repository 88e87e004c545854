"""Group relative policy optimization: sample, grade, reward, compare within groups, update."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from grouper.algorithms.batching import TrainBatch
from grouper.config.schema import Recipe
from grouper.runs.recorder import TokenLog
from grouper.sampling.base import draw_seed
from grouper.training.assemble import Assembled, Lessons, assemble
from grouper.training.collect import RolloutBatch
from grouper.training.optimizer_steps import take_optimizer_steps
from grouper.training.prepare import TEACHER_PROMPTS
from grouper.training.run import Run
from grouper.training.state import TrainState
from grouper.training.teachers import number_of
from grouper.training.update import Scorer, UpdateResult, grpo_objective


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoStep:
    """Everything that one step has drawn and done, for its record and its metrics."""

    rollouts: RolloutBatch
    assembled: Assembled
    updates: tuple[UpdateResult, ...]
    """One per optimizer step."""
    scored: tuple[TrainBatch, ...]
    """Batches that went through a forward alone."""
    token_log: TokenLog
    """Of the tokens that are recorded one by one."""


def grpo_step(run: Run, state: TrainState) -> GrpoStep:
    """Draw the rollouts of one step, and take the optimizer steps that they have a signal for.

    Args:
        run: recipe, problems, sampler, grader, rewards and processes.
        state: of the GRPO phase; advanced by one step.

    Raises:
        Interrupted: while sampling; nothing has changed yet.
        RewardError: a reward function failed on too many groups of the step.
        ModelError: memory ran out and the step cannot be run again in smaller slices.
    """
    config = run.recipe.grpo
    source = state.rollout_source
    rollouts = source.draw(state.replica.policy, step=state.step, total=state.total)
    with state.clock.updating():
        scorer = Scorer(state.replica, config.tokens_per_micro_batch, state.reference)
        assembled = assemble(
            rollouts.groups,
            config,
            scorer,
            max_new_tokens=run.prepared.max_new_tokens,
            orders=orders_of_passes(run.recipe, state.step, len(rollouts.groups)),
            lessons=lessons_of(run),
        )
        recorded_groups = run.recipe.tracking.token_groups
        token_log = TokenLog(rollouts.groups, assembled.advantages, recorded_groups)
        guide = None if state.teachers is None else state.teachers.guide
        objective = grpo_objective(config, token_log.observe, guide)
        updates = take_optimizer_steps(state, assembled.batches, objective, config)
    state.advance(updates, before=source.position, after=rollouts.position)
    source.advance(rollouts)
    return GrpoStep(
        rollouts=rollouts,
        assembled=assembled,
        updates=updates,
        scored=tuple(scorer.scored),
        token_log=token_log,
    )


def lessons_of(run: Run) -> Lessons:
    """Return what the algorithm of a run teaches its groups besides rewards."""
    prepared = run.prepared
    config = run.recipe.grpo
    teacher = config.teacher
    solution = None
    if config.solution_weight > 0:
        solution = prepared.solution_of
    if teacher is None:
        return Lessons(solution=solution)
    teacher_prompt = TEACHER_PROMPTS[teacher.prompt]
    return Lessons(
        solution=solution,
        teacher=lambda group: number_of(teacher, group.problem.source),
        teacher_prompt=None if teacher_prompt is None else partial(teacher_prompt, prepared),
    )


def orders_of_passes(recipe: Recipe, step: int, groups: int) -> list[list[int]]:
    """Return, for each pass over the groups of a step, the order in which it meets them.

    Args:
        recipe: how many passes, and the seed.
        step: steps finished before this one.
        groups: how many there are.
    """
    orders = []
    for number in range(recipe.grpo.num_iterations):
        key = draw_seed(recipe.seed, "deal", step, number)
        order: list[int] = np.random.default_rng(key).permutation(groups).tolist()
        orders.append(order)
    return orders
