"""Items about the test problems: not trained on, not read before, solved with other numbers."""

from __future__ import annotations

from grouper.certificate.comparison_items import prompts_of
from grouper.certificate.evidence import SPLIT, Evidence, RunEvidence
from grouper.certificate.finding import (
    Finding,
    Status,
    failed,
    judged,
    missing,
    paired_numbers,
)
from grouper.data import find_overlap
from grouper.errors import GrouperError, plural
from grouper.training.problem_sets import load_problem_sets, trained_problems

# Share of the test problems that may have a copy in the training data.
MOST_LEAKED = 0.01


def judge_leaks(evidence: Evidence) -> Finding:
    """Tell whether the test problems are in the training data."""
    seen = _trained_prompts_in_test(evidence)
    if seen:
        return failed(
            f"The prompts of {plural(len(seen), 'test problem')} were trained on, the first: "
            f"{seen[0]}.",
            same_prompt=len(seen),
        )
    findings: dict[tuple[tuple[str, str], ...], Finding] = {}
    for run in evidence.runs:
        # Seeds often read the same data.
        data = tuple(run.info.fingerprints.items())
        if data not in findings:
            findings[data] = _overlap(run)
    statuses: tuple[Status, ...] = ("fail", "missing", "pass")
    return min(findings.values(), key=lambda finding: statuses.index(finding.status))


def _overlap(run: RunEvidence) -> Finding:
    """Tell how many test problems of a run are in its training data."""
    try:
        sets = load_problem_sets(run.recipe)
    except GrouperError as error:
        return missing(
            f"The data of the run cannot be read here ({error.what}), and so not be searched for "
            "test problems.",
        )
    for name, fingerprint in run.info.fingerprints.items():
        if name in sets.fingerprints and sets.fingerprints[name] != fingerprint:
            return missing(f"{run.path.name}: data.{name} is no longer what the run has read.")
    if sets.test is None:
        return missing("The recipe has no test problems (`data.test`).")
    trained = trained_problems(run.recipe, sets)
    overlaps = find_overlap(trained, sets.test.problems)
    share = len(overlaps) / len(sets.test)
    first = f", the first: {overlaps[0].held_out_id}" if overlaps else ""
    return judged(
        share <= MOST_LEAKED,
        f"Of {plural(len(sets.test), 'test problem')}, {len(overlaps)} share their question, or "
        f"a run of its words, with one of {plural(len(trained), 'training problem')}{first}.",
        overlaps=len(overlaps),
        problems=len(sets.test),
    )


def _trained_prompts_in_test(evidence: Evidence) -> list[str]:
    """Return the test problems whose prompt is one of the rollouts', by id."""
    seen: dict[str, None] = {}
    for run in evidence.runs:
        if run.last is None:
            continue
        trained = {row["prompt"] for row in run.folder.read_rollouts()}
        for problem, prompt in prompts_of(run.last).items():
            if prompt in trained:
                seen[problem] = None
    return list(seen)


def judge_probe(evidence: Evidence) -> Finding:
    """Tell whether the model completes the test questions from their beginning."""
    probed = [
        (run, recorded)
        for run in evidence.runs
        for recorded in run.probes
        if recorded.probe.name == SPLIT
    ]
    found = [recorded for run, recorded in probed if recorded.model_hash == run.model_hash]
    if not found:
        why = "another model was probed" if probed else "no probe was made"
        return missing(
            f"Whether the model has read the test questions: {why}. "
            f"`grouper probe {evidence.runs[0].path}` finds out."
        )
    most = max(found, key=lambda recorded: recorded.probe.exact)
    suspicious = any(recorded.suspicious for recorded in found)
    probe = most.probe
    return judged(
        not suspicious,
        f"It completes {100 * probe.exact:.1f} % of {plural(len(probe.completed), 'test question')}"
        f" word for word, and {100 * most.control.exact:.1f} % of new ones.",
        exact=probe.exact,
        low=probe.interval.low,
        high=probe.interval.high,
        control=most.control.exact,
        control_high=most.control.interval.high,
        rouge_l=probe.similarity,
        questions=len(probe.completed),
    )


def judge_twins(evidence: Evidence) -> Finding:
    """Tell whether the model solves the test problems as well with other numbers."""
    found = [
        recorded
        for run in evidence.runs
        for recorded in run.twins
        if recorded.split == SPLIT and recorded.model_hash == run.model_hash
    ]
    if not found:
        return missing(
            "Whether the model solves the same problems with other numbers was not measured. "
            f"`grouper eval {evidence.runs[0].path} --twins` does, where the worked solutions are "
            "marked."
        )
    worst = min(found, key=lambda recorded: recorded.comparison.paired.difference)
    comparison = worst.comparison
    return judged(
        comparison.paired.verdict != "worse",
        comparison.sentence,
        **paired_numbers(comparison.paired),
    )
