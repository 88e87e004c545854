"""Items about the record: whole, without contradictions, graded as it says, reproducible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from grouper.certificate.evidence import Evidence, RunEvidence
from grouper.certificate.finding import (
    Finding,
    failed,
    judged,
    missing,
    not_measured,
    passed,
)
from grouper.certificate.replay import Replay
from grouper.errors import plural
from grouper.files import read_json
from grouper.grading import TEXT_ALONE, Grader
from grouper.prompts import make_format
from grouper.runs.folder import PHASES
from grouper.types import Verdict

# Differences between a recorded number and the one that follows from the items.
_ROUNDING = 1e-9


def judge_records(evidence: Evidence) -> Finding:
    """Tell whether every record is there, and agrees with the others."""
    checked = 0
    for run in evidence.runs:
        problems = [*run.damage, *run.folder.losses(run.recipe)]
        if not problems:
            problems = [*_contradictions(run)]
        if problems:
            more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
            return failed(f"{run.path.name}: {problems[0]}{more}", problems=problems)
        checked += len(run.folder.rollout_files()) + len(run.results)
    return passed(
        "Metrics and summaries agree with the rollouts and items that they were made of, in "
        f"{plural(checked, 'file')}.",
        files=checked,
    )


def _contradictions(run: RunEvidence) -> Iterator[str]:
    """Yield where two records of a run say different things."""
    for result in run.results:
        summary = read_json(
            run.path / "evaluations" / f"{result.name}.json", "the summary is damaged"
        )
        for name, value in result.overall.numbers.items():
            if not _equal(summary.get(name), value):
                yield (
                    f"the summary of {result.name} says {name} {summary.get(name)}, and its items "
                    f"{value}"
                )
    by_step: dict[int, list[float]] = {}
    for row in run.folder.read_rollouts():
        if row["phase"] == PHASES[-1] and row["reward"] is not None:
            by_step.setdefault(row["step"], []).append(row["reward"])
    for step in run.folder.read_metrics_rows():
        rewards = by_step.get(step.step, [])
        columns = step.__pydantic_extra__
        mean = columns.get("reward/total")
        if step.phase != PHASES[-1] or mean is None or not rewards:
            continue
        if columns.get("reward/total/count") != len(rewards):
            yield f"metrics of step {step.step} count other rollouts than its file holds"
        elif not math.isclose(mean, math.fsum(rewards) / len(rewards), abs_tol=_ROUNDING):
            yield f"the mean reward of step {step.step} is not that of its rollouts"


def _equal(stored: Any, value: float) -> bool:
    if stored is None or math.isnan(value):
        return stored is None and math.isnan(value)
    return isinstance(stored, int | float) and abs(stored - value) <= _ROUNDING


def judge_grades(evidence: Evidence) -> Finding:
    """Grade every stored completion of the test problems again."""
    if not evidence.measured:
        return not_measured(evidence)
    graded = 0
    changed: list[str] = []
    for run in evidence.runs:
        fmt = make_format(run.recipe.prompt)
        with Grader(fmt.contract, run.recipe.grading) as grader:
            for result in run.results:
                items = [item for item in result.items if item.stage != TEXT_ALONE]
                texts = [item.completion for item in items]
                answers = [item.answer for item in items]
                for item, grade in zip(items, grader.grade(texts, answers), strict=True):
                    graded += 1
                    if _undecided(item.verdict) or _undecided(grade.verdict):
                        continue
                    if item.correct != grade.correct:
                        changed.append(f"{run.path.name}, {result.name}, {item.problem_id}")
    sentence = f"Of {graded:,} completions graded again, {len(changed)} have another verdict"
    if changed:
        sentence += f", the first: {changed[0]}"
    return judged(not changed, f"{sentence}.", graded=graded, changed=len(changed))


def _undecided(verdict: Verdict) -> bool:
    """Tell whether a verdict depends on the speed of the machine."""
    return verdict in (Verdict.TIMEOUT, Verdict.CRASH)


def judge_replay(replays: Sequence[Replay]) -> Finding:
    """Tell whether the last steps, trained again, give the same weights."""
    if not replays:
        return missing(
            "The last steps were not trained again. `grouper certify --replay` does that from the "
            "last checkpoint before the end."
        )
    reasons = [replay.reason for replay in replays if replay.reason is not None]
    if reasons:
        return missing(reasons[0])
    different = [name for replay in replays for name in replay.different]
    steps = ", ".join(f"{replay.first} to {replay.last}" for replay in replays)
    sentence = f"Steps {steps} of the last phase, trained again, give "
    if different:
        sentence += f"other content in {plural(len(different), 'file')}, the first: {different[0]}."
    else:
        sentence += "the same weights, to the bit, rollouts and evaluation."
    return judged(not different, sentence, different=different)
