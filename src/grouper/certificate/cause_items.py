"""Items about the cause of a gain: mathematics, not format, tokens, or a cheated reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grouper.certificate.comparison_items import other_condition
from grouper.certificate.evidence import Evidence, RunEvidence
from grouper.certificate.finding import (
    ROUNDING,
    Finding,
    failed,
    judged,
    missing,
    not_measured,
    paired_numbers,
)
from grouper.errors import GrouperError
from grouper.evaluation.budgets import budget_curve
from grouper.evaluation.compare import compare, compare_arms, label
from grouper.evaluation.result import EvaluationResult
from grouper.evaluation.statistics import paired_comparison
from grouper.grading import Grader
from grouper.prompts import make_format
from grouper.rewards import build_rewards
from grouper.rewards import probe as attack
from grouper.rewards.user_code import code_fingerprints
from grouper.runs.folder import PHASES
from grouper.runs.records import that_differ
from grouper.types import Verdict

# Share of the wrong completions that may earn as much as right ones to the same problem: penalties
# for length or format may do that to a few, a reward that is cheated does it to many.
MOST_PAID = 0.05


def judge_reasoning(evidence: Evidence) -> Finding:
    """Tell whether the model does more math right, in whatever format."""
    gain = evidence.gain
    if gain is None or evidence.comparison is None:
        return not_measured(evidence)
    before, after = evidence.comparison.results
    first = before.lenient_scores
    second = after.lenient_scores
    if first is None or second is None:
        return missing("Answers in other formats were not graded.")
    shared = [problem for problem in first if problem in second]
    paired = paired_comparison(
        [first[problem] for problem in shared],
        [second[problem] for problem in shared],
        samples=round(len(before.slim) / len(before.problems)),
    )
    return judged(
        paired.verdict == "better",
        f"With answers read from any format: {100 * paired.before:.1f} -> "
        f"{100 * paired.after:.1f} %, {paired.points}, {paired.verdict}.",
        **paired_numbers(paired),
        causes=dict(gain.causes),
    )


def judge_tokens(evidence: Evidence) -> Finding:
    """Tell whether the model is better than its base with no more tokens than that used."""
    if evidence.comparison is None:
        return not_measured(evidence)
    before, after = evidence.comparison.results
    allowed = before.mean_tokens
    curve = [
        {"tokens": point.tokens, "accuracy": point.accuracy.mean, "precision": point.precision}
        for point in budget_curve(after)
    ]
    limit = _affordable_limit(after, allowed)
    if limit is None:
        return failed(
            f"The base used {allowed:.0f} tokens a completion, fewer than the shortest one of the "
            "trained model.",
            base_tokens=allowed,
            curve=curve,
        )
    (difference,) = compare([before, _cut_to(after, limit)]).differences
    paired = difference.paired
    return judged(
        paired.verdict == "better",
        f"With at most {limit} tokens a completion, {_tokens_within(after, limit):.0f} on average "
        f"where the base used {allowed:.0f}: {paired.points}, {paired.verdict}.",
        **paired_numbers(paired),
        base_tokens=allowed,
        limit=limit,
        curve=curve,
    )


def _affordable_limit(result: EvaluationResult, allowed: float) -> int | None:
    """Return the largest limit with which completions have no more tokens than this on average.

    Limits are the lengths of completions. None: even the shortest one is too long.
    """
    lengths = sorted({item.tokens for item in result.slim})
    affordable = None
    for length in lengths:
        if _tokens_within(result, length) > allowed + ROUNDING:
            break
        affordable = length
    return affordable


def _tokens_within(result: EvaluationResult, limit: int) -> float:
    """Return the mean tokens of completions that are cut off at a limit."""
    tokens = [min(item.tokens, limit) for item in result.slim]
    return math.fsum(tokens) / len(tokens)


def _cut_to(result: EvaluationResult, limit: int) -> EvaluationResult:
    """Return a result in which no completion that is longer counts as correct."""
    items = []
    for item in result.slim:
        if item.tokens > limit and item.correct:
            items.append(replace(item, verdict=Verdict.INCORRECT))
        else:
            items.append(item)
    return replace(result, name=f"{result.name} within {limit}", items=tuple(items))


def judge_control(evidence: Evidence) -> Finding:
    """Tell whether the gain is gone where the rewards are shuffled."""
    if PHASES[-1] not in evidence.runs[0].recipe.phases:
        return missing("Nothing was trained with rewards, so there is no control.")
    if not evidence.controls:
        return missing(
            "No control run was named. `grouper run RECIPE grpo.shuffle_rewards=true "
            "name=CONTROL` trains one; name it with --control."
        )
    arms: dict[str, list[EvaluationResult]] = {"before": [], "control": [], "trained": []}
    for control in evidence.controls:
        run, before = _run_of_control(control, evidence)
        if before is None or control.last is None or run.last is None:
            return missing(f"{control.path.name} was not measured before and after GRPO.")
        if control.last.phase != PHASES[-1] or control.last.step != run.last.step:
            return missing(
                f"{control.path.name} was measured at step {control.last.step} of "
                f"{label(control.last.phase)}, its run at step {run.last.step} of GRPO."
            )
        difference = other_condition(control.last, run.last)
        if difference is not None:
            return failed(f"{control.path.name}: {difference}")
        arms["before"].append(before)
        arms["control"].append(control.last)
        arms["trained"].append(run.last)
    helped, taught, _ = compare_arms(arms).differences
    return judged(
        helped.verdict != "better" and taught.verdict == "better",
        f"GRPO with shuffled rewards: {helped.paired.points}, {helped.verdict}. With the true "
        f"ones against it: {taught.paired.points}, {taught.verdict}.",
        control=paired_numbers(helped.paired),
        against_control=paired_numbers(taught.paired),
    )


def _run_of_control(
    control: RunEvidence, evidence: Evidence
) -> tuple[RunEvidence, EvaluationResult | None]:
    """Return the run that a control belongs to, and what its GRPO began with can do.

    A control that began with the SFT of a run belongs to that one, which has measured it; else it
    belongs to the run of its seed, or to the first. None: it was not measured.
    """
    start = control.recipe.grpo.start_from
    if start is not None:
        for run in evidence.runs:
            # The folders may have been moved together.
            if Path(start).parts[-3:] == (run.path.resolve().name, "sft", "final"):
                return run, run.before_grpo
        return evidence.runs[0], None
    for run in evidence.runs:
        if run.recipe.seed == control.recipe.seed:
            return run, control.before_grpo
    return evidence.runs[0], control.before_grpo


def judge_attacks(evidence: Evidence) -> Finding:
    """Attack the rewards with completions that deserve nothing."""
    recipe = evidence.runs[0].recipe
    if PHASES[-1] not in recipe.phases:
        return missing("Nothing was trained with rewards.")
    code = code_fingerprints(reward.name for reward in recipe.rewards)
    changed = that_differ(evidence.runs[0].info.code, code)
    if changed:
        return missing(f"The code of the rewards is not what it was: {', '.join(changed)}.")
    fmt = make_format(recipe.prompt)
    try:
        with Grader(fmt.contract, recipe.grading) as grader:
            results = attack(build_rewards(recipe.rewards, fmt), fmt, grader)
    except GrouperError as error:
        return missing(f"The rewards cannot be attacked here: {error.what}.")
    paid = [result.name for result in results if not result.passed]
    names = f" ({', '.join(paid)})" if paid else ""
    return judged(
        not paid,
        f"Of {len(results)} attacks on the rewards, {len(paid)} are paid{names}.",
        attacks=len(results),
        paid=paid,
    )


def judge_payment(evidence: Evidence) -> Finding:
    """Tell whether wrong completions earned as much as right ones to the same problem do."""
    wrong = 0
    overpaid = 0
    for run in evidence.runs:
        for rows in run.rollout_groups():
            right_rewards, wrong_rewards = _rewards_by_verdict(rows)
            if right_rewards:
                usual = math.fsum(right_rewards) / len(right_rewards)
                wrong += len(wrong_rewards)
                overpaid += sum(reward >= usual for reward in wrong_rewards)
    if not wrong:
        return missing("No group of rollouts holds right and wrong completions.")
    share = overpaid / wrong
    return judged(
        share <= MOST_PAID,
        f"Of {wrong:,} wrong completions in training, {100 * share:.1f} % earned as much as "
        "right ones to the same problem do.",
        share=share,
        wrong=wrong,
    )


def _rewards_by_verdict(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Return the rewards of the right rollouts of a group, and those of the others."""
    right_rewards = []
    wrong_rewards = []
    for row in rows:
        if row["reward"] is None:
            continue
        if row["verdict"] == Verdict.CORRECT.value:
            right_rewards.append(row["reward"])
        else:
            wrong_rewards.append(row["reward"])
    return right_rewards, wrong_rewards
