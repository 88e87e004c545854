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
from grouper.sampling.factory import STRETCH
from grouper.training.curriculum import first_met
from grouper.training.hooks import Hook, HookReply, UserHook
from grouper.training.run import Run
from grouper.training.saved_state import last_good
from grouper.training.state import TrainState
from grouper.training.update import accumulate_gradient, rehearsal_objective
from grouper.types import StepReport

log = logging.getLogger(__name__)

# Prompts that are sampled before GRPO: enough to see whether most completions are truncated, and an
# eighth of the samples of a usual step.
PREFLIGHT_PROMPTS = 16
# Completions that are sampled after SFT.
STOP_SAMPLES = 10


def usual_hooks(recipe: Recipe) -> tuple[Hook, ...]:
    """Return the hooks of every run, and those of the recipe.

    Raises:
        ConfigError: a hook of the recipe does not exist.
    """
    return (Preflight(), Rehearsal(), LiveChecks(), *map(UserHook, recipe.hooks))


class LiveChecks(Hook):
    """Reports problems during a run, and ends it if `on_finding` is `stop`."""

    def after_step(self, run: Run, state: TrainState, report: StepReport) -> HookReply:
        # On rank 0, which alone has the metrics that rewards have logged.
        findings = run.processes.on_rank0(lambda: watch(report, state.checks))
        if not findings:
            return HookReply()
        texts = tuple(f"check {name}: {finding}" for name, finding in findings)
        if run.recipe.on_finding == "warn":
            return HookReply(events=texts)
        phase = run.path / state.phase
        # A checkpoint from before the window that the finding is about.
        checkpoint_hint = run.processes.on_rank0(lambda: last_good(phase, state.step - WINDOW))
        error = CheckError(
            "; ".join(text.rstrip(".") for text in texts),
            where=f"{state.phase} step {state.step}",
            fix=f"on_finding is stop: nothing of the last step was saved; {checkpoint_hint}. Go on "
            "with --resume --allow-changes and another setting.",
        )
        return HookReply(events=texts, error=error)


class Preflight(Hook):
    """Samples a few completions: does GRPO's budget suffice, and has SFT taught to stop?"""

    def __init__(self) -> None:
        self._is_done = False

    def run_begins(self, run: Run, policy: Policy) -> None:
        """Sample before the base is measured, which may take far longer, if GRPO begins with it.

        Raises:
            PreflightError: as in `phase_begins`.
        """
        recipe = run.recipe
        begun = run.processes.on_rank0(run.has_begun)
        if recipe.phases[:1] == ("grpo",) and recipe.grpo.start_from is None and not begun:
            self._is_done = True
            _require_room(run, policy, begun=False)

    def phase_begins(self, run: Run, state: TrainState) -> None:
        """Sample some prompts before the first step of GRPO.

        Raises:
            PreflightError: most would be truncated, and the recipe does not allow it.
        """
        if state.phase == "grpo" and state.step == 0 and not self._is_done:
            begun = run.processes.on_rank0(run.has_begun)
            _require_room(run, state.replica.policy, begun=begun)

    def phase_ends(self, run: Run, state: TrainState) -> None:
        """Warn after SFT if few samples end by themselves."""
        if state.phase != "sft":
            return
        budget = run.prepared.max_new_tokens
        lengths = _sample(run, state.replica.policy, STOP_SAMPLES, budget, "stop check")
        summary = SampleSummary(completions=list(lengths.values()), budget=budget)
        share = 1 - summary.truncated
        run.display.say(f"Stop check: {share:.0%} of {len(lengths)} samples end by themselves.")
        for finding in find(summary):
            log.warning("%s", finding)


def _require_room(run: Run, policy: Policy, *, begun: bool) -> None:
    """Refuse GRPO if its budget truncates most completions of some prompts.

    If it does, the truncated ones are sampled again with a larger budget, to find out which budget
    would suffice. Sampling is addressed, so that they begin with the same tokens. If the recipe
    allows truncation, or a teacher alone judges the tokens, nothing is sampled.

    Args:
        run: the open run.
        policy: the model that GRPO begins with.
        begun: whether anything of the run has been measured or trained.

    Raises:
        PreflightError: most completions would be truncated.
    """
    config = run.recipe.grpo
    if config.allow_truncation or config.advantage == "zero":
        return
    purpose = "pre-flight"
    budget = run.prepared.max_new_tokens
    lengths = _sample(run, policy, PREFLIGHT_PROMPTS, budget, purpose)
    summary = SampleSummary(completions=list(lengths.values()), budget=budget)
    if summary.truncated > MOST:
        truncated = [index for index, (_, ended) in lengths.items() if not ended]
        larger_budget = STRETCH * budget
        if run.prepared.context is not None:
            prompts = [run.prepared.train[index][1] for index in truncated]
            longest = max(len(prompt.token_ids) for prompt in prompts)
            larger_budget = min(larger_budget, run.prepared.context - longest)
        if larger_budget > budget:
            lengths |= _sample(
                run, policy, PREFLIGHT_PROMPTS, larger_budget, purpose, only=truncated
            )
    summary = SampleSummary(
        completions=list(lengths.values()), budget=budget, before="grpo", begun=begun
    )
    run.display.say(f"Pre-flight: of {len(summary.completions)} samples, {summary}.")
    findings = find(summary)
    if findings:
        raise PreflightError(findings[0].what, where=purpose, fix=findings[0].fix)


def _sample(
    run: Run,
    policy: Policy,
    count: int,
    limit: int,
    purpose: str,
    *,
    only: Collection[int] | None = None,
) -> dict[int, tuple[int, bool]]:
    """Sample completions of the problems that GRPO uses first.

    Args:
        run: the open run.
        policy: the model to sample from.
        count: number of problems.
        limit: tokens of a completion at most.
        purpose: part of the address of each sample.
        only: indices of the problems to sample; default: all of these problems.

    Returns:
        Index of the problem -> (tokens of the completion, whether it ended by itself).
    """
    train = run.prepared.train
    seed = run.recipe.seed
    params = run.prepared.training_params(max_new_tokens=limit)
    indices = first_met(len(train), count, seed=seed)
    if only is not None:
        indices = [index for index in indices if index in only]
    requests = []
    for index in indices:
        problem, prompt = train[index]
        key = draw_seed(seed, purpose, problem.id)
        requests.append(SampleRequest(prompt=prompt, params=params, key=key))
    processes = run.processes
    sampler = run.models.sampler(policy)
    # The requests that this process samples.
    local_numbers = share_of(requests, processes.rank, processes.size)
    lengths: dict[int, tuple[int, bool]] = {}
    run.stop.raise_if_requested(purpose)
    with run.display.track(f"{purpose}: sampling", len(local_numbers)) as task:
        local_requests = [requests[number] for number in local_numbers]
        for position, completion in sampler.sample(local_requests):
            index = indices[local_numbers[position]]
            lengths[index] = (len(completion.token_ids), not completion.truncated)
            task.advance()
            run.stop.raise_if_requested(purpose)
    sampler.rest()
    all_lengths: dict[int, tuple[int, bool]] = {}
    for lengths_of_process in processes.gather(lengths):
        all_lengths.update(lengths_of_process)
    return all_lengths


# --- a rehearsal ----------------------------------------------------------------------------------


class Rehearsal(Hook):
    """Runs the largest slice of a phase once, on a GPU, before the first step.

    If it does not fit, this is known within a minute, and slices are made smaller before anything
    depends on them. The gradient is discarded; weights, optimizer and random numbers are unchanged.
    """

    # A host that runs out of memory swaps and kills processes: a rehearsal could not catch that.
    devices: tuple[str, ...] = ("cuda", "mps")

    def phase_begins(self, run: Run, state: TrainState) -> None:
        """Run one forward and backward of the rows that take the most memory.

        Raises:
            ModelError: not even one row fits.
        """
        config = state.config(run.recipe)
        policy = state.replica.policy
        if state.step >= state.total or policy.device.type not in self.devices:
            return
        budget = config.tokens_per_micro_batch
        bonus = config.entropy_bonus if isinstance(config, GRPOConfig) else 0.0
        started = time.perf_counter()
        # The optimizer state is allocated in the first step: until then its memory is reserved.
        reserved = torch.empty(policy.reserved_bytes, dtype=torch.uint8, device=policy.device)
        for candidate, most in worst_slices(config, *_longest(run, state.phase)):
            rows = candidate.filling(budget, most=most, shared=policy.native)
            slices = state.replica.processes.size  # every process takes part
            if rows.count < most:
                # A second slice needs its memory beside the gradient of the first.
                slices *= 2
            rows = replace(rows, count=rows.count * slices)
            batch = rows.batch(policy.vocabulary)
            guide = None
            if state.teachers is not None:
                guide = state.teachers.guide
                batch = replace(batch, teacher_weights=batch.weights)
            accumulate_gradient(
                state.replica,
                batch,
                rehearsal_objective(bonus, guide),
                token_budget=budget,
                together=False,
            )
        del reserved
        policy.zero_grad(set_to_none=True)
        run.display.say(
            f"Rehearsal of {state.phase}: the largest slice fits "
            f"({time.perf_counter() - started:.1f} s)."
        )


def _longest(run: Run, phase: str) -> tuple[int, int]:
    """Return the tokens of the longest prompt and the longest completion of a phase."""
    prepared = run.prepared
    if phase == "sft":
        prompts = [demonstration.prompt for demonstration in prepared.demonstrations]
        completion = max(len(demonstration.token_ids) for demonstration in prepared.demonstrations)
    else:
        prompts = [prompt for _, prompt in prepared.train]
        completion = prepared.max_new_tokens
    return max(len(prompt.token_ids) for prompt in prompts), completion


def worst_slices(
    config: SFTConfig | GRPOConfig, prompt: int, completion: int
) -> list[tuple[Rows, int]]:
    """Return the rows that may need the most memory, and how many one optimizer step has.

    Args:
        config: of the phase.
        prompt: tokens of the longest prompt.
        completion: tokens of the longest completion.
    """
    if isinstance(config, SFTConfig):
        return [(rows, config.batch_size) for rows in worst_rows(prompt, completion, 1)]
    rows_per_step = -(-config.prompts_per_step * config.group_size // config.updates_per_batch)
    return [(rows, rows_per_step) for rows in worst_rows(prompt, completion, config.group_size)]
