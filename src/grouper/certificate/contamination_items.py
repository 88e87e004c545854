"""Items about the test problems: not trained on, not read before, solved with other numbers."""

from __future__ import annotations

from pathlib import Path

from grouper.certificate.comparison_items import prompts_of
from grouper.certificate.evidence import SPLIT, Evidence, RunEvidence
from grouper.certificate.finding import (
    Finding,
    failed,
    judged,
    missing,
    not_measured,
    paired_numbers,
    passed,
)
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.data import find_overlap
from grouper.errors import GrouperError, plural
from grouper.models.folders import RECIPE_FILE, run_of
from grouper.runs.probes import RecordedProbe
from grouper.training.problem_sets import load_problem_sets, trained_problems
from grouper.types import Problem

# Share of the test problems that may have a copy in the training data: public sets share a few
# questions, which move an accuracy by less than its interval.
MOST_LEAKED = 0.01
# Share of the test problems that need not have been measured: those too long for the model.
MOST_UNMEASURED = 0.01
# Questions or twins below which nothing found is no evidence of anything.
FEWEST_PROBED = 50


def judge_test_set(evidence: Evidence) -> Finding:
    """Tell whether the problems that were measured are the test problems, and all of them."""
    if not evidence.measured:
        return not_measured(evidence)
    for run in evidence.with_controls:
        if run.last is None:
            # A control without a result is named by the items `checkpoint` and `control`.
            continue
        sets = evidence.problem_sets(run)
        if isinstance(sets, str):
            return missing(f"The test problems cannot be compared: {sets}.")
        if sets.test is None:
            return missing("The recipe has no test problems (`data.test`).")
        problems = {(problem.id, problem.answer) for problem in sets.test.problems}
        unknown_ids = [name for name, answer in run.last.problems if (name, answer) not in problems]
        if unknown_ids:
            return failed(
                f"{run.path.name}: {plural(len(unknown_ids), 'problem')} with an id or an answer "
                f"that data.test does not have, the first: {unknown_ids[0]}.",
                unknown_ids=len(unknown_ids),
            )
        unmeasured = len(problems) - len(run.last.problems)
        if unmeasured > MOST_UNMEASURED * len(problems):
            return failed(
                f"{run.path.name}: of {len(problems):,} test problems, {unmeasured:,} were not "
                "measured.",
                unmeasured=unmeasured,
            )
    assert evidence.runs[0].last is not None
    count = len(evidence.runs[0].last.problems)
    return passed(f"All {plural(count, 'test problem')} with their answers.", problems=count)


def judge_leaks(evidence: Evidence) -> Finding:
    """Tell whether the test problems are in the training data."""
    if not evidence.measured:
        return not_measured(evidence)
    worst: Finding | None = None
    for run in evidence.runs:
        finding = _overlap(run, evidence)
        if finding.status != "pass":
            return finding
        if worst is None or finding.numbers["overlaps"] > worst.numbers["overlaps"]:
            worst = finding
    assert worst is not None
    return worst


def _overlap(run: RunEvidence, evidence: Evidence) -> Finding:
    """Tell how many test problems of a run are in its training data."""
    assert run.last is not None
    leaked_ids = _trained_prompts_in_test(run)
    if len(leaked_ids) > MOST_LEAKED * len(run.last.problems):
        return failed(
            f"{run.path.name}: the prompts of {plural(len(leaked_ids), 'test problem')} were "
            f"trained on, the first: {leaked_ids[0]}.",
            same_prompt=len(leaked_ids),
        )
    sets = evidence.problem_sets(run)
    if isinstance(sets, str):
        return missing(f"The training data cannot be searched for test problems: {sets}.")
    if sets.test is None:
        return missing("The recipe has no test problems (`data.test`).")
    trained = trained_problems(run.recipe, sets)
    earlier = _trained_before(run.recipe)
    if isinstance(earlier, str):
        return missing(earlier)
    overlaps = find_overlap([*trained, *earlier], sets.test.problems)
    share = len(overlaps) / len(sets.test)
    first = f", the first: {overlaps[0].held_out_id}" if overlaps else ""
    count = plural(len(trained) + len(earlier), "training problem")
    return judged(
        share <= MOST_LEAKED,
        f"Of {plural(len(sets.test), 'test problem')}, {len(overlaps)} share their question, or "
        f"a run of its words, with one of {count}{first}.",
        overlaps=len(overlaps),
        problems=len(sets.test),
    )


def _trained_prompts_in_test(run: RunEvidence) -> list[str]:
    """Return the test problems whose prompt is one of the rollouts', by id."""
    assert run.last is not None
    trained_prompts = {row["prompt"] for row in run.folder.read_rollouts()}
    prompts = prompts_of(run.last)
    return [problem for problem, prompt in prompts.items() if prompt in trained_prompts]


def _trained_before(recipe: Recipe) -> list[Problem] | str:
    """Return the training problems of the runs that a run began with; or why they are not known."""
    problems: list[Problem] = []
    folders: list[Path] = []
    models = [recipe.model.path, recipe.grpo.start_from]
    while models:
        model = models.pop()
        folder = None if model is None else run_of(model)
        if folder is None or folder in folders:
            continue
        folders.append(folder)
        try:
            earlier = load_recipe(folder / RECIPE_FILE)
            problems += trained_problems(earlier, load_problem_sets(earlier))
        except GrouperError as error:
            return f"It began with {folder.name}, whose data cannot be read here ({error.what})."
        models += [earlier.model.path, earlier.grpo.start_from]
    return problems


def judge_probe(evidence: Evidence) -> Finding:
    """Tell whether the model completes the test questions from their beginning."""
    probes = []
    has_others = False
    for run in evidence.runs:
        for recorded in run.probes:
            if recorded.probe.name != SPLIT:
                continue
            if _is_of_its_model(recorded.model_hash, run) and _is_of_its_test(recorded, run):
                probes.append(recorded)
            else:
                has_others = True
    if not probes:
        why = "another model or set was probed" if has_others else "no probe was made"
        return missing(
            f"Whether the model has read the test questions: {why}. `grouper probe RUN` finds out."
        )
    most = max(probes, key=lambda recorded: recorded.probe.exact)
    count = len(most.probe.completed)
    if count < FEWEST_PROBED:
        return missing(
            f"Only {plural(count, 'test question')} long enough to be completed: at least "
            f"{FEWEST_PROBED} are needed. `grouper probe RUN --limit N` takes more."
        )
    return judged(
        not any(recorded.suspicious for recorded in probes),
        f"It completes {100 * most.probe.exact:.1f} % of {plural(count, 'test question')}"
        f" word for word, and {100 * most.control.exact:.1f} % of new ones.",
        exact=most.probe.exact,
        low=most.probe.interval.low,
        high=most.probe.interval.high,
        control=most.control.exact,
        control_high=most.control.interval.high,
        rouge_l=most.probe.similarity,
        questions=count,
    )


def _is_of_its_model(model_hash: str | None, run: RunEvidence) -> bool:
    return model_hash is not None and model_hash == run.model_hash


def _is_of_its_test(recorded: RecordedProbe, run: RunEvidence) -> bool:
    """Tell whether the questions of a probe are among those that were measured."""
    assert run.last is not None
    measured = set(run.last.scores)
    return all(one.problem_id in measured for one in recorded.probe.completed)


def judge_twins(evidence: Evidence) -> Finding:
    """Tell whether the model solves the test problems as well with other numbers."""
    comparisons = []
    for run in evidence.runs:
        comparisons += [
            recorded.comparison
            for recorded in run.twins
            if recorded.split == SPLIT and _is_of_its_model(recorded.model_hash, run)
        ]
    if not comparisons:
        return missing(
            "Whether the model solves the same problems with other numbers was not measured. "
            "`grouper eval RUN --twins` does, where the worked solutions are marked."
        )
    worst = min(comparisons, key=lambda comparison: comparison.paired.difference)
    if worst.paired.problems < FEWEST_PROBED:
        return missing(
            f"Only {plural(worst.paired.problems, 'twin')}: at least {FEWEST_PROBED} are needed. "
            "`grouper eval RUN --twins --on gsm8k` has more."
        )
    return judged(
        worst.paired.verdict != "worse",
        worst.sentence,
        **paired_numbers(worst.paired),
    )
