"""The checks during a run: before GRPO, after every step, and after SFT."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from grouper.advice.checks import WINDOW, SampleSummary, find, watch
from grouper.algorithms.batching import Rows, worst_rows
from grouper.config.schema import GRPOConfig, Recipe, SFTConfig
from grouper.errors import CheckError, PreflightError
from grouper.models.process_group import share_of
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.engines import STRETCH
from grouper.training.checkpoint import TrainState, last_good
from grouper.training.curriculum import first_met
from grouper.training.loop import Asked, Hook, UserHook
from grouper.training.optimizers import state_bytes
from grouper.training.run import Run
from grouper.training.update import accumulate_gradient, rehearsal_objective
from grouper.types import StepReport

log = logging.getLogger(__name__)

# Prompts that are sampled before GRPO.
PREFLIGHT_PROMPTS = 32
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

    def phase_begins(self, run: Run, state: TrainState) -> None:
        """Sample some prompts before the first step of GRPO.

        Raises:
            PreflightError: most would be cut off, and the recipe does not allow it.
        """
        config, budget = run.recipe.grpo, run.prepared.max_new_tokens
        if state.phase != "grpo" or state.step > 0:
            return
        train, most = run.prepared.train, STRETCH * budget
        limit = run.prepared.context
        if limit is not None:
            met = first_met(len(train), PREFLIGHT_PROMPTS, seed=run.recipe.seed)
            most = min(most, limit - max(len(train[i][1].token_ids) for i in met))
        drawn = SampleSummary(
            completions=_sample(run, state, PREFLIGHT_PROMPTS, max(budget, most), "pre-flight"),
            budget=budget,
            before=state.phase,
            begun=run.processes.on_rank0(run.has_begun),
        )
        run.display.say(f"Pre-flight: of {len(drawn.completions)} samples, {drawn}.")
        if not config.allow_truncation:
            for found in find(drawn):
                raise PreflightError(found.what, where="pre-flight", fix=found.fix)

    def phase_ends(self, run: Run, state: TrainState) -> None:
        """Warn where few samples end by themselves after SFT."""
        if state.phase != "sft":
            return
        budget = run.prepared.max_new_tokens
        completions = _sample(run, state, STOP_SAMPLES, budget, "stop check")
        drawn = SampleSummary(completions=completions, budget=budget)
        share, count = 1 - drawn.truncated, len(completions)
        run.display.say(f"Stop check: {share:.0%} of {count} samples end by themselves.")
        for found in find(drawn):
            log.warning("%s", found)


def _sample(
    run: Run, state: TrainState, count: int, limit: int, purpose: str
) -> list[tuple[int, bool]]:
    """Tokens of completions of the problems that GRPO meets first, and whether each one ended."""
    train, seed = run.prepared.train, run.recipe.seed
    params = run.prepared.training_params(max_new_tokens=limit)
    requests = [
        SampleRequest(prompt=prompt, params=params, key=draw_seed(seed, purpose, problem.id))
        for problem, prompt in (train[i] for i in first_met(len(train), count, seed=seed))
    ]
    drawn, processes, sampler = [], run.processes, run.sampler(state.replica.policy)
    mine = [requests[i] for i in share_of(requests, processes.rank, processes.size)]
    with run.display.track(f"{purpose}: sampling", len(mine)) as task:
        for _, completion in sampler.sample(mine):
            drawn.append((len(completion.token_ids), not completion.truncated))
            task.advance()
            run.raise_if_stopped()
    sampler.rest()
    return [one for part in processes.gather(drawn) for one in part]


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
