"""Items about the record: whole, without contradictions, graded as it says, reproducible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from grouper.certificate.evidence import Evidence, RunEvidence
from grouper.certificate.finding import (
    ROUNDING,
    Finding,
    failed,
    finite,
    judged,
    missing,
    not_measured,
    passed,
    same_json,
)
from grouper.certificate.replay import Replay
from grouper.errors import plural
from grouper.evaluation.evaluate import Counted, count_grades
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.files import read_json
from grouper.grading import Grader
from grouper.prompts import FORMATS, make_format
from grouper.runs.folder import PHASES
from grouper.runs.records import are_harmless, describe_changes
from grouper.sampling.sample_and_grade import needs_lenient_grade
from grouper.types import AnswerContract, Grade, Verdict

# Share of the completions whose first grading may have run out of time although they are right:
# a machine may be busy, but a record may not hide right answers of the base in that way.
MOST_LATE = 0.01


def judge_records(evidence: Evidence) -> Finding:
    """Tell whether every record is there, and agrees with the others."""
    files = 0
    for run in evidence.with_controls:
        problems = [*run.damage, *_lost_records(run)]
        if not problems:
            problems = [*_contradictions(run), *_changes_on_the_way(run)]
        if problems:
            more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
            return failed(f"{run.path.name}: {problems[0]}{more}", problems=problems)
        files += len(run.folder.rollout_files()) + len(run.results)
    return passed(
        "Metrics and summaries agree with the rollouts and items that they were made of, in "
        f"{plural(files, 'file')}.",
        files=files,
    )


def _lost_records(run: RunEvidence) -> list[str]:
    """List the records that are missing up to the model that was measured."""
    lost = run.folder.losses(run.recipe)
    last = run.last
    if last is not None:
        lost += run.folder.missing_records({last.phase: last.step})
    return list(dict.fromkeys(f"{name}: lost" for name in lost))


def _changes_on_the_way(run: RunEvidence) -> Iterator[str]:
    """Yield the settings, data and code with which the run was continued, but for its length."""
    for change in run.info.changes:
        if not are_harmless(change.changes):
            yield (
                f"continued from {change.phase} step {change.step} with other settings: "
                f"{describe_changes(change.changes)}"
            )


def _contradictions(run: RunEvidence) -> Iterator[str]:
    """Yield where two records of a run say different things."""
    for result in run.results:
        file = run.path / "evaluations" / f"{result.name}.json"
        summary = read_json(file, "the summary is damaged")
        for name, value in finite(result.numbers).items():
            # A summary of an older version has fewer numbers.
            if name in summary and not same_json(summary[name], value):
                yield f"the summary of {result.name} has another {name} than its items"
    yield from _reward_contradictions(run)


def _reward_contradictions(run: RunEvidence) -> Iterator[str]:
    """Yield the steps whose mean reward is not that of their rollouts."""
    rewards = _rewards_by_step(run)
    for step in run.folder.read_metrics_rows():
        columns = step.__pydantic_extra__
        mean = columns.get("reward/total")
        if step.phase != PHASES[-1] or mean is None:
            continue
        recorded = rewards.get(step.step, [])
        if columns.get("reward/total/count") != len(recorded):
            yield f"the metrics of step {step.step} count other rollouts than its file holds"
        elif not math.isclose(mean, math.fsum(recorded) / len(recorded), abs_tol=ROUNDING):
            yield f"the mean reward of step {step.step} is not that of its rollouts"


def _rewards_by_step(run: RunEvidence) -> dict[int, list[float]]:
    """Return step of GRPO -> the rewards of the groups that were trained on.

    Groups that dynamic sampling has replaced are recorded, too; none of their rollouts has an
    advantage.
    """
    rewards: dict[int, list[float]] = {}
    for rows in run.rollout_groups():
        if any(row["advantage"] is not None for row in rows):
            scored = [row["reward"] for row in rows if row["reward"] is not None]
            rewards.setdefault(rows[0]["step"], []).extend(scored)
    return rewards


def judge_grades(evidence: Evidence) -> Finding:
    """Grade every stored completion of the test problems again, in any format as well."""
    if not evidence.measured:
        return not_measured(evidence)
    graded = 0
    late = 0
    changed: list[str] = []
    for run in evidence.with_controls:
        for result in (*run.results, *run.base_otherwise):
            format_name = result.card.get("prompt", run.recipe.prompt.format)
            with Grader(_contract(run, format_name), run.recipe.grading) as grader:
                for item, counted in zip(result.items, _counted_again(result, grader), strict=True):
                    graded += 1
                    if _is_undecided(counted.grade.verdict):
                        continue
                    if _is_undecided(item.verdict):
                        late += counted.grade.correct
                    elif not _is_same(item, counted):
                        changed.append(f"{run.path.name}, {result.name}, {item.problem_id}")
    sentence = f"Of {graded:,} completions graded again, {len(changed)} have another verdict"
    if changed:
        sentence += f", the first: {changed[0]}"
    if late:
        sentence += f"; {late} that ran out of time are right"
    is_late = late > MOST_LATE * graded
    numbers = {"graded": graded, "changed": len(changed), "late": late}
    return judged(not changed and not is_late, f"{sentence}.", **numbers)


def _contract(run: RunEvidence, format_name: str) -> AnswerContract:
    """Return how answers are found in a prompt format: the run's, or a shipped one."""
    fmt = make_format(run.recipe.prompt)
    if fmt.name == format_name or format_name not in FORMATS:
        return fmt.contract
    return FORMATS[format_name].contract


def _counted_again(result: EvaluationResult, grader: Grader) -> Iterator[Counted]:
    """Yield how each item counts by a new grading, in order."""
    items = list(result.items)
    strict_grades = grader.grade(
        [item.completion for item in items], [item.answer for item in items]
    )
    lenient_grades: dict[int, Future[Grade]] = {}
    for number, (item, grade) in enumerate(zip(items, strict_grades, strict=True)):
        if needs_lenient_grade(grade):
            lenient_grades[number] = grader.submit(item.completion, item.answer, lenient=True)
    for number, (item, grade) in enumerate(zip(items, strict_grades, strict=True)):
        lenient = lenient_grades[number].result() if number in lenient_grades else grade
        yield count_grades(grade, lenient.verdict, item.answer)


def _is_same(item: EvaluationItem, counted: Counted) -> bool:
    """Tell whether an item counts as it should: right, wrong or left out, in any format as well."""
    was_scored = item.verdict is not Verdict.NOT_SCORED
    is_scored = counted.grade.verdict is not Verdict.NOT_SCORED
    if (item.correct, was_scored) != (counted.grade.correct, is_scored):
        return False
    # An evaluation of an older version has not measured the other formats.
    is_lenient_known = item.lenient is not None and not _is_undecided(counted.lenient_verdict)
    return not is_lenient_known or item.lenient == counted.lenient


def _is_undecided(verdict: Verdict) -> bool:
    """Tell whether a verdict depends on the speed of the machine."""
    return verdict in (Verdict.TIMEOUT, Verdict.CRASH)


def judge_replay(replays: Sequence[Replay]) -> Finding:
    """Tell whether the last steps, trained again, give the same weights."""
    if not replays:
        return missing(
            "The last steps were not trained again. `grouper certify RUN --replay` does that from "
            "the last checkpoint before the end."
        )
    trained = [replay for replay in replays if replay.reason is None]
    different = [name for replay in trained for name in replay.different]
    reasons = [replay.reason for replay in replays if replay.reason is not None]
    # One run that differs is enough, whatever could not be trained again of the others.
    if reasons and not different:
        return missing(reasons[0])
    # Seeds of one recipe usually have the same steps.
    steps = ", ".join(dict.fromkeys(_steps_of(replay) for replay in trained))
    runs = f" in {len(trained)} runs" if len(trained) > 1 else ""
    sentence = f"Trained again, {steps} of the last phase{runs}: "
    if different:
        sentence += f"other content in {plural(len(different), 'file')}, the first: {different[0]}."
    else:
        sentence += "the same weights, to the bit, rollouts and evaluation."
    return judged(not different, sentence, different=different)


def _steps_of(replay: Replay) -> str:
    if replay.first == replay.last:
        return f"step {replay.last}"
    return f"steps {replay.first} to {replay.last}"
