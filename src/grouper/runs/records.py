"""How the records of a run look as JSON, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from grouper.evaluation.metrics import metrics_of, rewards_by_subject
from grouper.evaluation.result import Accuracy, EvaluationItem, EvaluationResult
from grouper.types import FinishReason, Rollout, RolloutGroup, StepReport, Tally, Verdict


def report_to_json(report: StepReport) -> dict[str, Any]:
    """One line of `metrics.jsonl`."""
    return {
        "phase": report.phase,
        "step": report.step,
        "status": report.status,
        "events": list(report.events),
        "metrics": {
            name: {
                "mean": tally.mean,
                "sum": tally.sum,
                "count": tally.count,
                "min": tally.min,
                "max": tally.max,
            }
            for name, tally in report.tallies.items()
        },
    }


def report_from_json(line: Mapping[str, Any]) -> StepReport:
    """Back from one line of `metrics.jsonl`."""
    return StepReport(
        phase=line["phase"],
        step=line["step"],
        status=line["status"],
        events=tuple(line["events"]),
        tallies={name: _tally(values) for name, values in line["metrics"].items()},
    )


def _tally(values: Mapping[str, float | None]) -> Tally:
    if not values["count"]:
        return Tally.of([])
    numbers = (values["sum"], values["count"], values["min"], values["max"])
    # Not finite was written as null; which of NaN and the infinities it was is lost.
    return Tally(*(math.nan if number is None else number for number in numbers))


def rollouts_to_json(
    phase: str,
    step: int,
    groups: Sequence[RolloutGroup],
    advantages: Sequence[float | None],
    *,
    with_ids: bool,
) -> Iterator[dict[str, Any]]:
    """One record a rollout; `advantages` has one entry a rollout, in the order of the groups."""
    rollouts = [
        (group_index, group, sample, rollout)
        for group_index, group in enumerate(groups)
        for sample, rollout in enumerate(group.rollouts)
    ]
    for (group_index, group, sample, rollout), advantage in zip(rollouts, advantages, strict=True):
        yield {
            "phase": phase,
            "step": step,
            "group": group_index,
            "sample": sample,
            "problem_id": group.problem.id,
            "prompt": group.prompt.text,
            "text": rollout.completion.text,
            "answer": group.problem.answer,
            **_graded(rollout),
            "advantage": advantage,
            **(_ids(group, rollout) if with_ids else {}),
        }


def _graded(rollout: Rollout) -> dict[str, Any]:
    return {
        "finish_reason": rollout.completion.finish_reason.value,
        "tokens": len(rollout.completion.token_ids),
        "policy_version": rollout.completion.policy_version,
        "extracted": rollout.grade.extracted,
        "verdict": rollout.grade.verdict.value,
        "rung": rollout.grade.rung,
        "reason": rollout.grade.reason,
        "reward": dict(rollout.reward.components),
        "total": rollout.reward.total,
    }


def _ids(group: RolloutGroup, rollout: Rollout) -> dict[str, Any]:
    return {
        "prompt_token_ids": list(group.prompt.token_ids),
        "token_ids": list(rollout.completion.token_ids),
        "logprobs": list(rollout.completion.logprobs),
    }


def _accuracy(value: Accuracy) -> dict[str, Any]:
    interval = value.interval
    return {
        "accuracy": value.mean,
        "low": interval.low,
        "high": interval.high,
        "problems": value.problems,
    }


def evaluation_to_json(result: EvaluationResult) -> dict[str, Any]:
    """The summary of an evaluation: settings, and the derived numbers for people to read."""
    return {
        "name": result.name,
        "phase": result.phase,
        "step": result.step,
        "split": result.split,
        "samples": result.samples,
        "confidence": result.confidence,
        **_accuracy(result.overall),
        "lenient": _accuracy(result.lenient) if result.lenient is not None else None,
        "pass_at_k": {str(k): value for k, value in result.pass_at_k.items()},
        "outcomes": result.split_counts,
        "text_alone": dict(zip(("problems", "right"), result.text_alone, strict=True)),
        "cut_off": result.cut_off,
        "mean_tokens": result.mean_tokens,
        "metrics": None if (metrics := metrics_of(result)) is None else asdict(metrics),
        "rewards_by_subject": rewards_by_subject(result),
        "by_subject": {part: _accuracy(value) for part, value in result.by_subject.items()},
        "by_level": {part: _accuracy(value) for part, value in result.by_level.items()},
        "card": dict(result.card),
    }


def evaluation_items_to_json(result: EvaluationResult) -> Iterator[dict[str, Any]]:
    """The items of an evaluation, each with the outcome it was counted under."""
    for item in result.items:
        yield {**asdict(item), "outcome": item.outcome}


def evaluation_from_json(
    summary: Mapping[str, Any], items: Iterable[Mapping[str, Any]]
) -> EvaluationResult:
    """Back from both files; the derived numbers are computed again from the items."""
    settings = ("name", "phase", "step", "split", "samples", "confidence", "card")
    return EvaluationResult(
        **{key: summary[key] for key in settings}, items=tuple(_item(item) for item in items)
    )


def _item(line: Mapping[str, Any]) -> EvaluationItem:
    fields = {key: value for key, value in line.items() if key != "outcome"}
    fields["verdict"] = Verdict(fields["verdict"])
    fields["finish_reason"] = FinishReason(fields["finish_reason"])
    return EvaluationItem(**fields)
