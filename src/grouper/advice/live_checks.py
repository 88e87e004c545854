"""The checks during a run: before GRPO, after every step, and after SFT."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import replace

import torch

from grouper.advice.checks import MOST, WINDOW, SampleSummary, find, watch
from grouper.algorithms.batching import Rows, worst_rows
from grouper.config.schema import GRPOConfig, Recipe, SFTConfig
from grouper.errors import CheckError, PreflightError
from grouper.models.policy import Policy
from grouper.models.process_group import share_of
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.engines import STRETCH
from grouper.training.curriculum import first_met
from grouper.training.hooks import Asked, Hook, UserHook
from grouper.training.optimizers import state_bytes
from grouper.training.run import Run
from grouper.training.saved_state import last_good
from grouper.training.state import TrainState
from grouper.training.update import accumulate_gradient, rehearsal_objective
from grouper.types import StepReport

log = logging.getLogger(__name__)

# Prompts that are sampled before GRPO: enough to see whether most completions are truncated, and an
# eighth of what a usual step samples.
PREFLIGHT_PROMPTS = 16
# Completions that are looked at after SFT.
STOP_SAMPLES = 10


def usual_hooks(recipe: Recipe) -> tuple[Hook, ...]:
    """The hooks of every run, and those of the recipe.

    Raises:
        ConfigError: one of these is not there.
    """
    return (Preflight(), Rehearsal(), LiveChecks(), *map(UserHook, recipe.hooks))


class LiveChecks(Hook):
    """Reports while a run goes on what goes wrong, and ends it where `on_finding` is `stop`."""

    def after_step(self, run: Run, state: TrainState, report: StepReport) -> Asked:
        # A metric may be of rank 0 alone: what rewards have logged is.
        raised = run.processes.on_rank0(lambda: watch(report, state.checks))
        if not raised:
            return Asked()
        texts = tuple(f"check {name}: {finding}" for name, finding in raised)
        if run.recipe.on_finding == "warn":
            return Asked(events=texts)
        phase, before = run.path / state.phase, state.step - WINDOW
        kept = run.processes.on_rank0(lambda: last_good(phase, before))
        error = CheckError(
            "; ".join(text.rstrip(".") for text in texts),
            where=f"{state.phase} step {state.step}",
            fix=f"on_finding is stop: nothing of the last step was saved; {kept}. Go on with "
            "--resume --allow-changes and another setting.",
        )
        return Asked(events=texts, error=error)


class Preflight(Hook):
    """Looks at a few samples: whether GRPO's budget is enough, and whether SFT taught to stop."""

    def __init__(self) -> None:
        self._looked = False

    def run_begins(self, run: Run, policy: Policy) -> None:
        """Look at once where GRPO begins with the base: measuring that may take far longer.

        Raises:
            PreflightError: as in `phase_begins`.
        """
        recipe = run.recipe
        begun = run.processes.on_rank0(run.has_begun)
        if recipe.phases[:1] == ("grpo",) and recipe.grpo.start_from is None and not begun:
            self._looked = True
            _require_room(run, policy, begun=False)

    def phase_begins(self, run: Run, state: TrainState) -> None:
        """Sample some prompts before the first step of GRPO.

        Raises:
            PreflightError: most would be truncated, and the recipe does not allow it.
        """
        if state.phase == "grpo" and state.step == 0 and not self._looked:
            begun = run.processes.on_rank0(run.has_begun)
            _require_room(run, state.replica.policy, begun=begun)

    def phase_ends(self, run: Run, state: TrainState) -> None:
        """Warn where few samples end by themselves after SFT."""
        if state.phase != "sft":
            return
        budget = run.prepared.max_new_tokens
        policy = state.replica.policy
        completions = list(_sample(run, policy, STOP_SAMPLES, budget, "stop check").values())
        drawn = SampleSummary(completions=completions, budget=budget)
        share, count = 1 - drawn.truncated, len(completions)
        run.display.say(f"Stop check: {share:.0%} of {count} samples end by themselves.")
        for found in find(drawn):
            log.warning("%s", found)


def _require_room(run: Run, policy: Policy, *, begun: bool) -> None:
    """Refuse GRPO where its budget truncates most completions of some prompts.

    Only where it does are the truncated ones sampled again with a larger budget, which says how
    large it would have to be; draws are addressed, so they begin with the same tokens. Where the
    recipe allows truncation there is nothing to decide, and nothing is sampled.

    Args:
        run: the open run.
        policy: what GRPO begins with.
        begun: whether anything of the run has been measured or trained.

    Raises:
        PreflightError: most would be truncated.
    """
    if run.recipe.grpo.allow_truncation:
        return
    budget, purpose = run.prepared.max_new_tokens, "pre-flight"
    lengths = _sample(run, policy, PREFLIGHT_PROMPTS, budget, purpose)
    drawn = SampleSummary(completions=[*lengths.values()], budget=budget)
    if drawn.truncated > MOST:
        truncated = [index for index, (_, ended) in lengths.items() if not ended]
        train, most = run.prepared.train, STRETCH * budget
        context = run.prepared.context
        if context is not None:
            most = min(most, context - max(len(train[i][1].token_ids) for i in truncated))
        if most > budget:
            lengths |= _sample(run, policy, PREFLIGHT_PROMPTS, most, purpose, only=truncated)
    drawn = SampleSummary(
        completions=[*lengths.values()], budget=budget, before="grpo", begun=begun
    )
    run.display.say(f"Pre-flight: of {len(drawn.completions)} samples, {drawn}.")
    for finding in find(drawn):
        raise PreflightError(finding.what, where=purpose, fix=finding.fix)


def _sample(
    run: Run,
    policy: Policy,
    count: int,
    limit: int,
    purpose: str,
    *,
    only: Collection[int] | None = None,
) -> dict[int, tuple[int, bool]]:
    """Tokens of completions of the problems that GRPO meets first, and whether each one ended.

    Args:
        run: the open run.
        policy: what is sampled from.
        count: how many problems.
        limit: tokens of a completion at most.
        purpose: part of the address of each draw.
        only: the problems to sample; left out: all of these.

    Returns:
        By the index of the problem.
    """
    train, seed = run.prepared.train, run.recipe.seed
    params = run.prepared.training_params(max_new_tokens=limit)
    met = first_met(len(train), count, seed=seed)
    indices = [index for index in met if only is None or index in only]
    requests = []
    for index in indices:
        problem, prompt = train[index]
        key = draw_seed(seed, purpose, problem.id)
        requests.append(SampleRequest(prompt=prompt, params=params, key=key))
    processes, sampler = run.processes, run.models.sampler(policy)
    mine = share_of(requests, processes.rank, processes.size)
    drawn: list[tuple[int, tuple[int, bool]]] = []
    run.stop.raise_if_requested(purpose)
    with run.display.track(f"{purpose}: sampling", len(mine)) as task:
        for place, completion in sampler.sample([requests[i] for i in mine]):
            length = (len(completion.token_ids), not completion.truncated)
            drawn.append((indices[mine[place]], length))
            task.advance()
            run.stop.raise_if_requested(purpose)
    sampler.rest()
    return dict(one for part in processes.gather(drawn) for one in part)


# --- a rehearsal ----------------------------------------------------------------------------------


class Rehearsal(Hook):
    """Runs the largest slice of a phase once, on a GPU, before the first step.

    So what does not fit is known within a minute, and slices are made smaller before anything
    depends on them. The gradient is discarded; weights, optimizer and random numbers stay.
    """

    # A host that runs out of memory swaps and kills processes: a rehearsal could not catch that.
    devices: tuple[str, ...] = ("cuda", "mps")

    def phase_begins(self, run: Run, state: TrainState) -> None:
        """Run one forward and backward of the rows that take the most memory.

        Raises:
            ModelError: not even one row fits.
        """
        config, policy = state.config(run.recipe), state.replica.policy
        if state.step >= state.total or policy.device.type not in self.devices:
            return
        budget = config.tokens_per_micro_batch
        bonus = config.entropy_bonus if isinstance(config, GRPOConfig) else 0.0
        started = time.perf_counter()
        # The optimizer state appears with the first step: its memory is reserved meanwhile.
        there = any(part.state for part in state.optimizer.parts)
        size = 0 if there else state_bytes(config.optimizer, policy)
        held = torch.empty(size, dtype=torch.uint8, device=policy.device)
        prepared, longest = run.prepared, run.prepared.max_new_tokens
        prompts = [prompt for _, prompt in prepared.train]
        if state.phase == "sft":
            prompts = [shown.prompt for shown in prepared.demonstrations]
            longest = max(len(shown.token_ids) for shown in prepared.demonstrations)
        for kind, most in worst_slices(config, max(len(p.token_ids) for p in prompts), longest):
            rows = kind.filling(budget, most=most, shared=policy.native)
            # A second slice meets the gradient of the first, and every process takes part.
            slices = state.replica.processes.size * (2 if rows.count < most else 1)
            rows = replace(rows, count=rows.count * slices)
            accumulate_gradient(
                state.replica,
                rows.batch(policy.vocabulary),
                rehearsal_objective(bonus),
                token_budget=budget,
                together=False,
            )
        del held
        policy.zero_grad(set_to_none=True)
        run.display.say(
            f"Rehearsal of {state.phase}: the largest slice fits "
            f"({time.perf_counter() - started:.1f} s)."
        )


def worst_slices(
    config: SFTConfig | GRPOConfig, prompt: int, completion: int
) -> list[tuple[Rows, int]]:
    """The kinds of rows that may need the most memory, and how many one optimizer step has.

    Args:
        config: of the phase.
        prompt: tokens of the longest.
        completion: tokens of the longest.
    """
    if isinstance(config, SFTConfig):
        return [(kind, config.batch_size) for kind in worst_rows(prompt, completion, 1)]
    most = -(-config.prompts_per_step * config.group_size // config.updates_per_batch)
    return [(kind, most) for kind in worst_rows(prompt, completion, config.group_size)]
