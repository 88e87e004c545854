"""Group relative policy optimisation: sample, grade, reward, compare within groups, update."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from grouper.algorithms.advantages import ADVANTAGES, decoupled
from grouper.algorithms.batching import TrainBatch, rollout_rows, step_batches, with_gradient
from grouper.algorithms.losses import kl_k1
from grouper.algorithms.weighting import WEIGHTINGS
from grouper.config.schema import GRPOConfig
from grouper.evaluation.items import checked
from grouper.grading import Grader
from grouper.models.process_group import ProcessGroup
from grouper.rewards import Group, Notes, RewardStack
from grouper.runs import records
from grouper.runs.recorder import TokenLog
from grouper.runs.samples import format_sample
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.sampling.graded import draw_and_grade
from grouper.sampling.vllm import VllmSampler
from grouper.training.checkpoint import AHEAD_FILE, TrainState
from grouper.training.metrics import rollout_tallies, status_of
from grouper.training.optimizers import schedule
from grouper.training.run import Run
from grouper.training.update import Scorer, UpdateResult, grpo_objective, update
from grouper.types import (
    Problem,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
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
    rollouts = _rollouts(run, state)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Rollout groups that were drawn together, and the time spent on them."""

    groups: tuple[RolloutGroup, ...]
    """Those that take part in the step."""
    replaced: tuple[RolloutGroup, ...] = ()
    """Drawn by dynamic sampling and left out of the step."""
    rounds: int = 0
    """Further draws of dynamic sampling."""
    position: int = 0
    """In the problem stream, after them."""
    sample_seconds: float
    grade_seconds: float
    """Spent waiting for grades and rewards after the last completion."""
    logged: dict[str, Tally] = field(default_factory=dict)
    """What reward functions have logged, as metrics."""
    failed: list[str] = field(default_factory=list)
    """Where they failed, as events."""
    beside: bool = False
    """They were drawn while the step before was trained."""


def collect(
    items: Sequence[tuple[Problem, Prompt]],
    *,
    sampler: Sampler,
    grader: Grader,
    rewards: RewardStack,
    params: SamplingParams,
    group_size: int,
    key: tuple[int | str, ...],
    seen: Counter[str] | None = None,
    notes: Notes | None = None,
    processes: ProcessGroup | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RolloutBatch:
    """Draw `group_size` rollouts of each item, graded while the next ones are sampled.

    Args:
        items: problems with their prompts; one that is listed twice makes two groups.
        sampler: draws completions.
        grader: grades each one as it comes in.
        rewards: scores each finished group.
        params: how to draw.
        group_size: rollouts per item.
        key: the rest of each draw's address, before (occurrence, problem id, sample index): run
            seed, purpose and step.
        seen: how often each problem has been drawn under this key; updated.
        notes: collects reward functions that fail; None: they are ignored.
        processes: they split the requests; rewards are computed by rank 0 alone, which sees whole
            groups.
        progress: called with (completions drawn, completions in all).
    """
    seen = Counter() if seen is None else seen
    notes = notes or Notes()
    requests = []
    for problem, prompt in items:
        occurrence = seen[problem.id]
        seen[problem.id] += 1
        requests += [
            SampleRequest(
                prompt=prompt, params=params, key=draw_seed(*key, occurrence, problem.id, sample)
            )
            for sample in range(group_size)
        ]
    references = [problem.answer for problem, _ in items for _ in range(group_size)]
    started = time.perf_counter()
    drawn, seconds = draw_and_grade(
        requests, references, sampler=sampler, grader=grader, processes=processes, progress=progress
    )
    parts = [drawn[start : start + group_size] for start in range(0, len(drawn), group_size)]

    to_score = (
        Group(*item, [one.completion for one in part], [one.grade for one in part])
        for item, part in zip(items, parts, strict=True)
    )
    earned = (processes or ProcessGroup()).on_rank0(lambda: [*rewards.score_all(to_score, notes)])
    groups = tuple(
        RolloutGroup(
            problem=problem,
            prompt=prompt,
            params=params,
            rollouts=tuple(
                Rollout(completion=one.completion, grade=one.grade, reward=reward)
                for one, reward in zip(part, scored, strict=True)
            ),
        )
        for (problem, prompt), part, scored in zip(items, parts, earned, strict=True)
    )
    return RolloutBatch(
        groups=groups,
        sample_seconds=seconds,
        grade_seconds=time.perf_counter() - started - seconds,
    )


def _rollouts(run: Run, state: TrainState) -> RolloutBatch:
    """The rollouts of this step; those of the next one are begun where the recipe says so."""
    sampler, started = run.sampler(state.replica.policy), time.perf_counter()
    earlier = dict(sampler.seconds)
    if state.ahead is None:
        rollouts = _collect_step(run, state, sampler)
        sampler.rest()
        sample_seconds, grade_seconds = rollouts.sample_seconds, rollouts.grade_seconds
    else:  # only the wait for them is of this step
        rollouts = run.processes.on_rank0(state.ahead.result)
        sample_seconds, grade_seconds = time.perf_counter() - started, 0.0
        state.ahead = None
    spent = {name: value - earlier[name] for name, value in sampler.seconds.items()}
    decode = sample_seconds - math.fsum(spent.values())
    state.clock.seconds |= {**spent, "decode": decode, "grade": grade_seconds}
    if run.recipe.grpo.max_staleness and state.step + 1 < state.total:
        assert isinstance(sampler, VllmSampler)
        held = sampler.held()
        state.clock.seconds["push"] = sampler.seconds["push"] - earlier["push"]
        # As they are now: this step changes all of it.
        position, band = rollouts.position, copy.deepcopy(state.difficulty)
        later = replace(state, step=state.step + 1, position=position, difficulty=band)
        state.ahead = run.begin_ahead(partial(_collect_step, run, later, held, beside=True))
    return rollouts


def read_ahead(folder: Path) -> Future[RolloutBatch] | None:
    """The rollouts of the next step that an intact checkpoint holds, if any."""
    file = folder / AHEAD_FILE
    if not file.exists():
        return None
    ready = Future[RolloutBatch]()
    ready.set_result(checked(TypeAdapter(RolloutBatch).validate_json)(file.read_text("utf-8")))
    return ready


def _collect_step(
    run: Run, state: TrainState, sampler: Sampler, *, beside: bool = False
) -> RolloutBatch:
    """The rollouts of the next step of a state, without problems outside the difficulty band.

    With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) groups are drawn until enough of
    them are mixed, in at most `dynamic_sampling_rounds` further draws; what is still missing then
    is filled up with the first flat groups. Only correctness counts: a group whose rewards differ
    by format alone is replaced as well. The groups kept are the whole step: only they count in its
    denominators.

    Args:
        run: as in `grpo_step`.
        state: of which step, position and difficulty are read.
        sampler: draws.
        beside: the run trains meanwhile: nothing is shown, and this process draws alone.
    """
    config, seed, train, step = run.recipe.grpo, run.recipe.seed, run.prepared.train, state.step
    processes = ProcessGroup() if beside else run.processes
    position, seen = state.position, Counter[str]()
    notes = Notes(place=f"grpo {step}", global_step=step, max_steps=state.total)
    band = state.difficulty
    allowed = None if band is None else lambda index, epoch: band.allows(train[index][0].id, epoch)

    wanted = missing = config.prompts_per_step
    drawn: list[RolloutBatch] = []
    groups: list[RolloutGroup] = []
    while missing > 0 and len(drawn) <= config.dynamic_sampling_rounds:
        indices, position = state.stream.take(position, missing, allowed)
        shown = run.display.within("sampling", missing * config.group_size)
        with nullcontext(run.raise_if_ending) if beside else shown as task:
            # Ctrl-C in the middle of sampling: the step has changed nothing yet.
            moved = partial(run.moved, task, f"sampling of grpo step {step}")
            found = collect(
                [train[i] for i in indices],
                sampler=sampler,
                grader=run.prepared.grader,
                rewards=run.prepared.rewards,
                params=run.params,
                group_size=config.group_size,
                key=(seed, "grpo", step),
                seen=seen,
                notes=notes,
                processes=processes,
                progress=task if beside else moved,
            )
        drawn.append(found)
        groups += found.groups
        missing = wanted - sum(group.mixed for group in groups)
    processes.on_rank0(lambda: run.prepared.rewards.end_step(notes))
    # Stable: mixed groups first, each kind in the order it was drawn.
    ranked = sorted(range(len(groups)), key=lambda i: not groups[i].mixed)
    kept = tuple(groups[i] for i in sorted(ranked[:wanted]))
    if config.shuffle_rewards:  # the control experiment
        kept = shuffle_rewards(kept, draw_seed(seed, "shuffle", step))
    return RolloutBatch(
        groups=kept,
        replaced=tuple(groups[i] for i in sorted(ranked[wanted:])),
        rounds=len(drawn) - 1,
        position=position,
        sample_seconds=math.fsum(batch.sample_seconds for batch in drawn),
        grade_seconds=math.fsum(batch.grade_seconds for batch in drawn),
        logged=notes.tallies(),
        failed=notes.events,
        beside=beside,
    )


def shuffle_rewards(groups: Sequence[RolloutGroup], key: int) -> tuple[RolloutGroup, ...]:
    """The control experiment: grades and rewards permuted over all rollouts of the step.

    They are recorded as permuted, with texts that they do not belong to.
    """
    everything = [rollout for group in groups for rollout in group.rollouts]
    order = np.random.default_rng(key).permutation(len(everything)).tolist()
    dealt = (everything[i] for i in order)
    return tuple(
        replace(
            group,
            rollouts=tuple(
                replace(next(dealt), completion=own.completion) for own in group.rollouts
            ),
        )
        for group in groups
    )


# --- advantages, log-probs, weights --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """What rollout groups teach: advantages, and the batches of the optimizer steps."""

    advantages: tuple[tuple[float, ...], ...]
    """Per group, one for each scored rollout."""
    batches: tuple[TrainBatch, ...]
    """One per optimizer step; those whose gradient is zero by construction are left out."""
    tallies: dict[str, Tally]


def assemble(
    groups: Sequence[RolloutGroup],
    config: GRPOConfig,
    scores: Scorer,
    *,
    max_new_tokens: int,
    orders: Sequence[Sequence[int] | None] = (None,),
) -> Assembled:
    """Advantages of rollout groups, and optimizer steps with the log-probs that the loss needs.

    Old log-probs are taken once, before the first update, and shared by all of them.

    Args:
        groups: those that take part in the step.
        config: the algorithm.
        scores: log-probs under the policy and the reference; only those needed are computed.
        max_new_tokens: divisor of the constant weighting where the recipe names none.
        orders: one per pass: the order in which groups are assigned to its optimizer steps; None:
            as they are.
    """
    several = len(orders) * config.updates_per_batch > 1
    rows = rollout_rows(groups, mask_truncated=config.overlong == "mask")
    tallies: dict[str, Tally] = {}
    penalties = None
    if rows is not None and config.kl_in_reward:
        rows = _scored(rows, torch.arange(rows.rows), config, scores, old=True)
        penalties = _penalties(rows, config, tallies)
    advantages = advantages_of(groups, config, penalties)
    if rows is None:
        return Assembled(advantages=advantages, batches=(), tallies=tallies)
    flat = torch.tensor([a for values in advantages for a in values], dtype=torch.float32)
    rows = replace(rows, advantages=flat)
    if not config.kl_in_reward:
        needed = torch.ones_like(flat) if config.flat_rows_matter else flat
        rows = _scored(rows, needed.nonzero().flatten(), config, scores, old=several)
    if not several:
        # The old log-probs are the current ones, detached: the ratio is exactly 1.
        rows = replace(rows, old_logprobs=None)
    drawn = torch.arange(rows.mask.shape[1]) < rows.completion_lengths[:, None]
    assert rows.sampler_logprobs is not None
    if not rows.sampler_logprobs[drawn].isfinite().all():
        # The model is broken, whether or not rows have a signal: `update` has to see it.
        broken = (replace(rows, mask=drawn),) * len(orders)
        return Assembled(advantages=advantages, batches=broken, tallies=tallies)
    batches: list[TrainBatch] = []
    for order in orders:
        parts = step_batches(
            rows,
            WEIGHTINGS[config.weighting],
            weighting_constant=config.weighting_constant or float(max_new_tokens),
            updates=config.updates_per_batch,
            order=order,
        )
        if not config.flat_rows_matter:
            parts = [live for part in parts if (live := with_gradient(part)) is not None]
        batches += [part for part in parts if part.weights.any()]
    return Assembled(advantages=advantages, batches=tuple(batches), tallies=tallies)


def advantages_of(
    groups: Sequence[RolloutGroup],
    config: GRPOConfig,
    penalties: Sequence[float] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """Per group, the advantage of each scored rollout; rollouts without a reward are left out.

    With `require_correct_in_group`, a group without a correct answer gets zeros: nothing is learned
    from wrong answers in a nicer format.

    Args:
        groups: all groups of a rollout batch.
        config: names the advantage.
        penalties: subtracted from the total of each scored rollout, in order (a KL in the reward).
    """
    scored = [r for group in groups for r in group.scored]
    if not scored:
        return tuple(() for _ in groups)
    ids = torch.tensor([g for g, group in enumerate(groups) for _ in group.scored])
    function = ADVANTAGES[config.advantage]
    if config.advantage_eps is not None:  # the configuration allows it where there is one
        function = partial(function, eps=config.advantage_eps)
    if config.decouple_rewards:
        # What weighs nothing is left out.
        weights = {name: w for name, w in scored[0].reward.weights.items() if w != 0}
        rows = [[r.reward.components[name] for name in weights] for r in scored]
        parts = torch.tensor(rows, dtype=torch.float64)
        shares = torch.tensor([*weights.values()], dtype=torch.float64)
        values = decoupled(parts, shares, ids, function)
    else:
        rewards = torch.tensor([r.reward.total for r in scored], dtype=torch.float64)
        if penalties is not None:
            rewards = rewards - torch.tensor(penalties, dtype=torch.float64)
        values = function(rewards, ids)
    flat = iter(values.tolist())
    found = [tuple(next(flat) for _ in group.scored) for group in groups]
    if config.require_correct_in_group:
        pairs = zip(groups, found, strict=True)
        found = [part if group.solved else (0.0,) * len(part) for group, part in pairs]
    return tuple(found)


def _scored(
    rows: TrainBatch, index: Tensor, config: GRPOConfig, scores: Scorer, *, old: bool
) -> TrainBatch:
    """The rows with reference log-probs, token selection and, if `old`, old log-probs.

    Only of those at `index`: the other rows have no gradient.
    """
    if not index.numel():
        return rows
    part = rows.select(index)
    changes: dict[str, Tensor] = {}
    if old or config.top_entropy < 1:
        now = scores.current(part)
        if old:
            changes["old_logprobs"] = now.logprobs
        if config.top_entropy < 1:
            share = config.top_entropy
            changes["selection"] = top_entropy_selection(now.entropies, part.mask, share)
    if config.beta > 0:
        changes["reference_logprobs"] = scores.reference(part)
    for name, values in changes.items():
        grid = values.new_zeros(rows.mask.shape)
        grid[index, : values.shape[1]] = values
        changes[name] = grid
    return replace(rows, **changes)  # type: ignore[arg-type]  # only tensor fields


def top_entropy_selection(entropies: Tensor, mask: Tensor, share: float) -> Tensor:
    """The target tokens [R, T] whose entropy is among the highest `share` of all of them.

    Forking tokens carry most of what reinforcement learning changes (arXiv 2506.01939). Tokens
    at the border that tie are all selected.

    >>> entropies = torch.tensor([[0.1, 0.9, 0.5, 7.0]])
    >>> mask = torch.tensor([[True, True, True, False]])
    >>> top_entropy_selection(entropies, mask, 0.34).tolist()
    [[False, True, True, False]]
    """
    values = entropies[mask]
    if not values.numel():
        return mask
    count = max(1, math.ceil(share * values.numel()))
    threshold = values.topk(count).values[-1]
    return mask & (entropies >= threshold)


def _penalties(
    rows: TrainBatch, config: GRPOConfig, tallies: dict[str, Tally]
) -> tuple[float, ...]:
    """`beta * sum_t kl_t` of each row: what a KL in the reward takes off its total."""
    assert rows.old_logprobs is not None
    assert rows.reference_logprobs is not None
    kl = kl_k1(rows.old_logprobs, rows.reference_logprobs)
    kl = torch.where(rows.mask, kl, 0.0).double()
    tallies["policy/kl"] = Tally.of(kl[rows.mask].tolist())
    return tuple((config.beta * kl.sum(1)).tolist())


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
