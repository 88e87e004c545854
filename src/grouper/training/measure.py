"""Measure the policy of a run on its test or validation problems, and record what was found."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from grouper.evaluation.evaluate import Measurement, few_at_a_time, measure, weights_mark
from grouper.evaluation.result import EvaluationResult
from grouper.evaluation.result_tables import log_line
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.sampling.base import draw_seed
from grouper.training.prepare import Items
from grouper.training.run import Run
from grouper.training.update import validation_loss


def measure_policy(
    run: Run, policy: Policy, *, phase: str, step: int, split: str
) -> EvaluationResult:
    """Measure a policy on the test or validation problems, and record it.

    Args:
        run: the open run.
        policy: to measure.
        phase: that made it: `base`, `sft` or `grpo`.
        step: optimizer steps of that phase that it has seen.
        split: `test` or `validation`.

    Raises:
        Interrupted: the user has asked to stop; what was drawn is kept.
    """
    run.background.wait_for_rollouts()
    what = f"evaluation of {phase} on {split}"
    with run.display.track(f"evaluating {phase} on {split}") as task:
        loss = _demonstration_loss(run, policy, phase, split)
        sampler = run.models.sampler(policy)
        measurement = _measurement(
            run, policy, phase=phase, step=step, split=split, facts=loss, processes=run.processes
        )
        with few_at_a_time(sampler, policy):
            result = measure(
                measurement,
                sampler,
                run.prepared.grader,
                processes=run.processes,
                folder=run.path / "evaluations",
                resume=_may_resume(measurement),
                progress=partial(run.stop.tick, task, what),
            )
    # An evaluation may need far more cache than a training step.
    sampler.release()
    return record_evaluation(run, result)


def begin_validation(
    run: Run, policy: Policy, *, phase: str, step: int
) -> Future[EvaluationResult]:
    """Begin to measure a policy on the validation problems, on servers that do nothing else.

    They have its weights when this returns. The caller records the result, which is rank 0's.

    Raises:
        GrouperError: they cannot be started, or do not take the weights.
    """
    sampler = run.models.validation_sampler(policy)
    loss = _demonstration_loss(run, policy, phase, "validation")
    measurement = _measurement(
        run,
        policy,
        phase=phase,
        step=step,
        split="validation",
        facts=loss,
        processes=ProcessGroup(),
    )
    measure_on_servers = partial(
        measure,
        measurement,
        sampler.pinned(),
        run.prepared.grader,
        folder=run.path / "evaluations",
        resume=_may_resume(measurement),
        progress=run.stop.raise_if_ended,
    )
    return run.background.begin(measure_on_servers)


def record_evaluation(run: Run, result: EvaluationResult) -> EvaluationResult:
    """Display and write what an evaluation has found."""
    run.display.say(log_line(result))
    run.folder.write_evaluation(result)
    return result


def validation_name(phase: str, step: int) -> str:
    """Return the name of the evaluation on the validation problems after a step.

    >>> validation_name("grpo", 20)
    'validation-grpo-000020'
    """
    return f"validation-{phase}-{step:06d}"


def _measurement(
    run: Run,
    policy: Policy,
    *,
    phase: str,
    step: int,
    split: str,
    facts: Mapping[str, Any],
    processes: ProcessGroup,
) -> Measurement:
    """Describe the measurement of a policy.

    Args:
        run: the open run.
        policy: to measure.
        phase: that made it.
        step: optimizer steps of that phase that it has seen.
        split: `test` or `validation`.
        facts: further entries of the card.
        processes: the processes that measure together.
    """
    name = phase
    items = run.prepared.test
    seconds = None
    if split == "validation":
        name = validation_name(phase, step)
        items, seconds = _validation_items(run, processes)
    return run.prepared.measurement(
        name=name,
        phase=phase,
        step=step,
        split=split,
        items=items,
        facts=facts,
        weights=weights_mark(policy),
        seconds=seconds,
    )


def _may_resume(measurement: Measurement) -> bool:
    """Tell whether completions of an interrupted call may be used.

    With a limit of time they may not: the measurement would seem faster than it is.
    """
    return measurement.seconds is None


def _validation_items(run: Run, processes: ProcessGroup) -> tuple[Items, float | None]:
    """Return the problems of a validation, and the seconds that the first one may take.

    With `evaluation.validation_minutes` later validations have the problems of the first.
    """
    items = run.prepared.validation
    minutes = run.recipe.evaluation.validation_minutes
    if minutes is None:
        return items, None
    items_of_problems = {(item[0].id, item[0].answer): item for item in items}
    earlier = processes.on_rank0(lambda: _earlier_validation(run, frozenset(items_of_problems)))
    if earlier is not None:
        return tuple(items_of_problems[problem] for problem in earlier), None

    def place(item: Any) -> int:
        return draw_seed(run.recipe.seed, "validation", item[0].id)

    return tuple(sorted(items, key=place)), 60 * minutes


def _earlier_validation(
    run: Run, problems: frozenset[tuple[str, str]]
) -> tuple[tuple[str, str], ...] | None:
    """Return the (id, reference) of the first validation, if it was on some of these problems.

    Those before a change of the data were on other problems.
    """
    for result in run.folder.read_evaluations():
        if result.split == "validation" and result.problems <= problems:
            return tuple(result.problems)
    return None


def _demonstration_loss(run: Run, policy: Policy, phase: str, split: str) -> dict[str, Any]:
    """Measure the loss on held-out demonstrations, which says something else about SFT."""
    held_out = run.prepared.validation_demonstrations
    if phase != "sft" or split != "validation" or not held_out:
        return {}
    replica = run.models.replica(policy)
    budget = run.recipe.sft.tokens_per_micro_batch
    loss = validation_loss(replica, held_out, token_budget=budget)
    run.display.say(f"Validation loss: {loss.mean:.4f} over {loss.count:,.0f} tokens.")
    return {"loss": loss.mean, "loss_tokens": loss.count}
