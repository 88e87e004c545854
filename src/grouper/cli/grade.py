"""`grouper grade`: one text with every stage shown, or a file or a run graded again."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from grouper.cli.opening import open_recipe, read_rows, require_new
from grouper.cli.text import short, some, warn, warn_of_losses, write_rows
from grouper.config.schema import GradingConfig, Recipe
from grouper.data.references import check_references
from grouper.errors import ConfigError, DataError, GrouperError, counted, require_known
from grouper.grading import Grader, by_text_alone, extract, extract_lenient
from grouper.prompts.formats import FORMATS, TURN_MARKERS, make_format
from grouper.rewards import Group, build_rewards
from grouper.rewards.attacks import example_prompt
from grouper.rewards.calling import Notes
from grouper.runs.folder import RunFolder
from grouper.runs.samples import printable
from grouper.types import AnswerContract, AnswerKind, Completion, FinishReason, Grade, Problem

Row = dict[str, Any]
Score = Callable[[Sequence[Row], Sequence[Grade]], Iterator[float | None]]

# Columns of a file, the first that is there: the texts become `completion`, references `answer`.
TEXTS = ("completion", "text", "response", "prediction", "output")
ANSWERS = ("answer", "reference", "ground_truth", "gold", "expected_answer")
# Formats that no prompt asks for, but texts have.
OTHERS = {"hashes": AnswerKind.HASHES, "last-number": AnswerKind.LAST_NUMBER}


def grade(
    what: str,
    overrides: tuple[str, ...],
    *,
    answer: str | None,
    format_name: str | None,
    recipe: str | None,
    only: str | None,
    output: Path | None,
    text_column: str | None,
    show: int,
) -> None:
    """Grade a text, a file or a run, whichever `what` is."""
    require_new(output, "--output")
    try:
        place = Path(what).expanduser()
        is_folder, is_file = bool(what) and place.is_dir(), bool(what) and place.exists()
    except (OSError, RuntimeError, ValueError):  # too long, ~nobody, a null character: a text
        is_folder = is_file = False
    if is_folder:
        run = place.absolute()
        warn_of_losses(RunFolder(run))
        listed = _grade_run(run, open_recipe(recipe or str(run), overrides), only, show)
    else:
        grading = GradingConfig()
        if recipe or overrides:
            opened = open_recipe(recipe or "demo", overrides)
            grading, own = opened.grading, opened.prompt.format if recipe else None
            format_name = format_name or own
        if not is_file:
            _grade_text(sys.stdin.read() if what == "-" else what, answer, format_name, grading)
            return
        rows = _rows(place, text_column, answer)
        name = format_name or _looks_like(rows[0]["completion"])
        with Grader(_contract(name), grading) as grader:
            listed = _grade_rows(f"{what}, by format {name}", rows, grader, show)
    if output is not None:
        write_rows(listed, output)
        click.echo(f"They are in {output}.")


# --- one text ------------------------------------------------------------------------------------


def _grade_text(
    text: str, answer: str | None, format_name: str | None, grading: GradingConfig
) -> None:
    if answer is None:
        raise ConfigError(
            f"{short(text, 60)!r} is not a file or a run folder, and a text needs a reference",
            where="grouper grade",
            fix="Give it with --answer.",
        )
    name = format_name or _looks_like(text)
    contract = _contract(name)
    chosen = "" if format_name else "  (by the look of the text; --format names another)"
    problem = check_references([answer])[answer] or "readable, equals itself"
    click.echo(f"format     {name}{chosen}\nreference  {short(answer)}  ({problem})")
    found = {"strict": extract(text, contract), "lenient": extract_lenient(text, contract)}
    for label, one in found.items():
        click.echo(f"{label:<10} {short(one.answer)}  ({one.reason})")
    with Grader(contract, grading) as grader:
        for label, lenient in (("verdict", False), ("leniently", True)):
            graded = grader.submit(text, answer, lenient=lenient).result()
            colour = "green" if graded.correct else "red" if graded.extracted else "yellow"
            verdict = click.style(graded.verdict.value, fg=colour, bold=True)
            took = f"stage {graded.stage}, {1000 * graded.seconds:.2f} ms"
            click.echo(f"{label:<10} {verdict}  {took}: {short(graded.reason)}")


def _looks_like(text: str) -> str:
    if "<answer>" in text:
        return "think" if "</think>" in text else "xml"
    if "<SOLUTION>" in text:
        return "tags"
    return "hashes" if "####" in text and "box" not in text else "boxed"


def _contract(name: str) -> AnswerContract:
    if name in OTHERS:
        return AnswerContract(kind=OTHERS[name], turn_markers=TURN_MARKERS)
    require_known("prompt format", name, [*FORMATS, *OTHERS], where="--format")
    return FORMATS[name].contract


# --- rows of completions -------------------------------------------------------------------------


def _rows(file: Path, text: str | None = None, answer: str | None = None) -> list[Row]:
    """The rows of a file, with texts as `completion` and references as `answer`."""
    rows = read_rows(file)
    present = {name for row in rows for name in row}
    for named, usual in ((text, TEXTS), (answer, ANSWERS)):
        found = next((name for name in ((named,) if named else usual) if name in present), None)
        if found is None:
            raise DataError(
                f"there is no column {named or ' or '.join(usual)}",
                where=str(file),
                fix=f"Name one with --text or --answer. Columns: {', '.join(sorted(present))}.",
            )
        for row in rows:
            row[usual[0]] = "" if row.get(found) is None else str(row[found])
    return rows


def _grade_rows(
    name: str, rows: Sequence[Row], grader: Grader, show: int, score: Score | None = None
) -> list[Row]:
    """Grade rows, and print and return those that come out differently than stored.

    Of rows without a verdict these are the ones that are not correct.

    Args:
        name: of the rows, for people.
        rows: as `_rows` has them.
        grader: of their format.
        show: how many to print.
        score: their total rewards; None for evaluations, where a reference that cannot be read is
            compared as text.
    """
    grades = grader.grade([row["completion"] for row in rows], [row["answer"] for row in rows])
    if score is None:
        grades = [by_text_alone(g, row["answer"]) for g, row in zip(grades, rows, strict=True)]
    totals = [None] * len(rows) if score is None else score(rows, grades)
    listed: list[Row] = []
    kinds: Counter[str] = Counter()
    for number, (row, grade, total) in enumerate(zip(rows, grades, totals, strict=True)):
        after: Row = {"verdict": grade.verdict.value, "extracted": grade.extracted}
        after |= {"reason": grade.reason, **({} if score is None else {"reward": total})}
        before = {key: row.get(key) for key in after}
        stored, was = before["verdict"] is not None, before["verdict"] or "correct"
        if was != after["verdict"]:
            kinds[(f"{was} -> " if stored else "") + after["verdict"]] += 1
        elif stored and not _equal(before.get("reward"), total):
            kinds["only the reward"] += 1
        else:
            continue
        place = {"problem_id": row.get("problem_id", number), "sample": row.get("sample", 0)}
        found = {"where": name, **place, "answer": row["answer"]}
        listed.append({**found, "before": before, "after": after})
    right = sum(grade.correct for grade in grades)
    counts = f"{right:,} correct, {len(listed):,} not"
    if "verdict" in rows[0]:
        before = sum(row["verdict"] == "correct" for row in rows)
        counts = f"{before:,} correct before, {right:,} now; {len(listed):,} differ"
    click.echo(f"{name}: {counted(len(rows), 'row')}, {counts}")
    for kind, count in kinds.most_common():
        click.echo(printable(f"    {count:>6,}  {kind}"))
    some([f"{row['problem_id']} #{row['sample']}, {_told(row)}" for row in listed], show)
    return listed


def _told(row: Row) -> str:
    lines = [f"reference {short(row['answer'], 120)}"]
    for when, facts in (("before", row["before"]), ("now", row["after"])):
        if facts["verdict"]:
            answer = short(facts["extracted"] or "no answer", 120)
            reward = f", reward {facts['reward']}" if "reward" in facts else ""
            reason = short(facts["reason"], 120)
            lines.append(f"    {when:<6} {facts['verdict']}: {answer} ({reason}){reward}")
    return "\n".join(lines)


def _equal(before: float | None, now: float | None) -> bool:
    if before is None or now is None:
        return before is now
    return math.isclose(before, now, rel_tol=1e-9, abs_tol=1e-9)


# --- a run ---------------------------------------------------------------------------------------


def _grade_run(run: Path, chosen: Recipe, only: str | None, show: int) -> list[Row]:
    """Grade every stored file of a run again; the answer stands where its own format says."""
    own = open_recipe(str(run))
    listed: list[Row] = []
    with Grader(make_format(own.prompt).contract, chosen.grading) as grader:
        for kind in ("evaluations", "rollouts") if only is None else (only,):
            score = _scoring(own, chosen) if kind == "rollouts" else None
            for file in sorted((run / kind).glob("*.jsonl.gz")):
                try:
                    rows = _rows(file) if score is None else _rollouts(run, file)
                except GrouperError as error:  # one of many
                    warn(f"left out: {error.paragraph()}")
                    continue
                step = f"{rows[0]['phase']} step {rows[0]['step']}" if score else None
                name = step or file.name.partition(".")[0]
                listed += _grade_rows(name, rows, grader, show, score)
    click.echo(f"Rows that come out differently: {len(listed):,}.")
    return listed


def _rollouts(run: Path, file: Path) -> list[Row]:
    """The rows of a file of rollouts, with all that a reward looks at."""
    rows = [*RunFolder(run).shown_rollouts(file)]
    needed = ("problem_id", "prompt", "answer", "tokens", "phase")
    lacking = [name for name in needed for row in rows if not row[name]]
    if lacking or not rows:
        what = f"a row has no {lacking[0]}" if rows else "there are no rows in it"
        raise DataError(what, where=str(file), fix="Check the file.")
    return rows


def _scoring(own: Recipe, chosen: Recipe) -> Score:
    """A function that scores stored rollouts of the recipe `own` with the rewards of `chosen`."""
    from grouper.training.problem_sets import require_part

    fmt = make_format(own.prompt)
    stack = build_rewards(chosen.rewards, fmt)
    problems: dict[str, Problem] = {}
    try:
        problems = {problem.id: problem for problem in require_part(own, "train").problems}
    except GrouperError as error:
        warn(f"the training problems cannot be read ({error.what}); rewards see no columns.")

    def score(rows: Sequence[Row], grades: Sequence[Grade]) -> Iterator[float | None]:
        graded = zip(rows, grades, strict=True)
        for _, members in itertools.groupby(graded, lambda member: member[0]["group"]):
            group, group_grades = zip(*members, strict=True)
            first = group[0]
            problem = problems.get(first["problem_id"]) or Problem(
                id=first["problem_id"],
                question=first["prompt"],
                answer=first["answer"],
                source="stored",
            )
            completions = [_completion(row) for row in group]
            prompt = example_prompt(problem, fmt)
            # With notes a reward that fails is not scored, as in training.
            rewards = stack.score(Group(problem, prompt, completions, group_grades), Notes())
            yield from (reward.total for reward in rewards)

    return score


def _completion(row: Row) -> Completion:
    """As stored; without stored ids there are as many as were sampled."""
    ids = row.get("token_ids") or [0] * row["tokens"]
    return Completion(
        token_ids=tuple(ids),
        logprobs=tuple(row.get("logprobs") or [0.0] * len(ids)),
        text=row["completion"],
        finish_reason=FinishReason(row["finish_reason"]),
        policy_version=row["policy_version"],
    )
