"""`grouper grade`: one text with every stage shown, or a file or a run graded again."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from grouper.cli.opening import open_recipe, require_new, run_folder_of
from grouper.cli.text import counted, short, some, warn
from grouper.config.schema import GradingConfig, Recipe
from grouper.data.reading import read_files
from grouper.data.references import check_references
from grouper.errors import ConfigError, DataError, GrouperError, did_you_mean
from grouper.files import read_lines, write_atomic
from grouper.grading import Grader, by_text_alone, extract, extract_lenient
from grouper.prompts.formats import FORMATS, TURN_MARKERS, make_format
from grouper.rewards import RewardStack, build_rewards
from grouper.rewards.attacks import example_prompt
from grouper.rewards.calling import Notes
from grouper.types import (
    AnswerContract,
    AnswerFormat,
    AnswerKind,
    Completion,
    FinishReason,
    Grade,
    Problem,
)

Row = dict[str, Any]

TEXT_COLUMNS = ("completion", "text", "response", "prediction", "output")
ANSWER_COLUMNS = ("answer", "reference", "ground_truth", "gold", "expected_answer")
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
    """Find out whether it is a text, a file or a run, and grade it."""
    if output is not None:
        require_new(output, "--output")
    place = _place(what)
    if place is not None and place.is_dir():
        run = run_folder_of(str(place.absolute()))
        assert run is not None
        listed = _grade_run(run, open_recipe(recipe or str(run), overrides), only, show)
    else:
        grading = GradingConfig()
        if recipe or overrides:
            opened = open_recipe(recipe or "demo", overrides)
            grading, own = opened.grading, opened.prompt.format if recipe else None
            format_name = format_name or own
        if place is None:
            _grade_text(sys.stdin.read() if what == "-" else what, answer, format_name, grading)
            return
        rows = _rows(place, text_column, answer)
        name = format_name or _looks_like(rows[0]["completion"])
        with Grader(_contract(name), grading) as grader:
            listed = _tell(f"{what}, by format {name}", rows, grader, None, show)
    if output is not None:
        write_atomic(output, "".join(json.dumps(row) + "\n" for row in listed).encode())
        click.echo(f"They are in {output}.")


def _place(what: str) -> Path | None:
    """The file or folder that it names; a text names none."""
    try:
        path = Path(what).expanduser()
        return path if what and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, ~nobody, a null character
        return None


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
    with Grader(contract, grading) as grader:
        strict = grader.submit(text, answer).result()
        lenient = grader.submit_lenient(text, answer).result()
    found, loosely = extract(text, contract), extract_lenient(text, contract)
    chosen = "" if format_name else "  (by the look of the text; --format names another)"
    unreadable = check_references([answer])[answer]
    lines = {
        "format": f"{name}{chosen}",
        "reference": f"{short(answer)}  ({unreadable or 'readable, equals itself'})",
        "strict": f"{short(found.answer)}  ({found.reason})",
        "lenient": f"{short(loosely.answer)}  ({loosely.reason})",
        "verdict": _verdict(strict),
        "leniently": _verdict(lenient),
    }
    for label, value in lines.items():
        click.echo(f"{label:<10} {value}")


def _verdict(grade: Grade) -> str:
    colour = "green" if grade.correct else "yellow" if grade.extracted is None else "red"
    verdict = click.style(grade.verdict.value, fg=colour, bold=True)
    return f"{verdict}  stage {grade.stage}, {1000 * grade.seconds:.2f} ms: {short(grade.reason)}"


def _looks_like(text: str) -> str:
    if "<answer>" in text:
        return "think" if "</think>" in text else "xml"
    if "<SOLUTION>" in text:
        return "tags"
    return "hashes" if "####" in text and "box" not in text else "boxed"


def _contract(name: str) -> AnswerContract:
    if name in OTHERS:
        return AnswerContract(kind=OTHERS[name], turn_markers=TURN_MARKERS)
    if name not in FORMATS:
        raise ConfigError(
            f"there is no prompt format {name!r}",
            where="--format",
            fix=did_you_mean(name, [*FORMATS, *OTHERS]),
        )
    return FORMATS[name].contract


# --- rows of completions -------------------------------------------------------------------------


def _rows(file: Path, text: str | None = None, answer: str | None = None) -> list[Row]:
    """The rows of a file, with texts as `completion` and references as `answer`."""
    rows = [dict(r) for r in (read_lines(file) if file.suffix == ".gz" else read_files((file,)))]
    if not rows:
        raise DataError("there are no rows in it", where=str(file))
    for asked, usual in ((text, TEXT_COLUMNS), (answer, ANSWER_COLUMNS)):
        present = {name for row in rows for name in row}
        found = [name for name in ((asked,) if asked else usual) if name in present]
        if not found:
            raise DataError(
                f"there is no column {asked or ' or '.join(usual)}",
                where=str(file),
                fix=f"Name one with --text or --answer. Columns: {', '.join(sorted(present))}.",
            )
        for row in rows:
            value = row.get(found[0])
            row[usual[0]] = "" if value is None else str(value)
    return rows


def _grade_run(run: Path, chosen: Recipe, only: str | None, show: int) -> list[Row]:
    """Grade every stored file of a run again; the answer stands where its own format says."""
    own = open_recipe(str(run))
    fmt = make_format(own.prompt)
    listed: list[Row] = []
    with Grader(fmt.contract, chosen.grading) as grader:
        if only != "rollouts":
            for file in sorted((run / "evaluations").glob("*.jsonl.gz")):
                listed += _tell(file.name.partition(".")[0], _rows(file), grader, None, show)
        if only != "evaluations":
            stack, problems = build_rewards(chosen.rewards, fmt), _problems(own)
            score = partial(_totals, stack=stack, fmt=fmt, problems=problems)
            for file in sorted((run / "rollouts").glob("*.jsonl.gz")):
                rows = _rows(file)
                name = f"{rows[0]['phase']} step {rows[0]['step']}"
                listed += _tell(name, rows, grader, score, show)
    click.echo(f"{len(listed):,} rows come out differently.")
    return listed


def _problems(recipe: Recipe) -> dict[str, Problem]:
    """The training problems by id, for the columns that reward functions may ask for."""
    from grouper.training.problem_sets import require_part

    try:
        return {problem.id: problem for problem in require_part(recipe, "train").problems}
    except GrouperError as error:
        warn(f"the training problems cannot be read ({error.what}); rewards see no columns.")
        return {}


def _totals(
    rows: Sequence[Row],
    grades: Sequence[Grade],
    *,
    stack: RewardStack,
    fmt: AnswerFormat,
    problems: Mapping[str, Problem],
) -> Iterator[float | None]:
    """What each rollout is paid now, group by group as in training."""
    graded = zip(rows, grades, strict=True)
    for _, members in itertools.groupby(graded, lambda member: member[0]["group"]):
        group, own = zip(*members, strict=True)
        first = group[0]
        problem = problems.get(first["problem_id"]) or Problem(
            id=first["problem_id"],
            question=first["prompt"],
            answer=first["answer"],
            source="stored",
        )
        rewards = stack.score(
            problem=problem,
            prompt=example_prompt(problem, fmt),
            completions=[_completion(row) for row in group],
            grades=own,
            notes=Notes(),  # a reward that fails here is not scored, as in training
        )
        yield from (reward.total for reward in rewards)


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


def _tell(
    name: str, rows: Sequence[Row], grader: Grader, score: Callable[..., Any] | None, show: int
) -> list[Row]:
    """Grade rows again, and print and return those that come out differently.

    Of rows without a verdict these are the ones that are not correct.
    """
    grades = grader.grade([row["completion"] for row in rows], [row["answer"] for row in rows])
    if score is None:  # nothing is learned from these: a reference may be text alone
        grades = [by_text_alone(g, row["answer"]) for g, row in zip(grades, rows, strict=True)]
    totals = [None] * len(rows) if score is None else score(rows, grades)
    listed: list[Row] = []
    kinds: Counter[str] = Counter()
    for number, (row, grade, total) in enumerate(zip(rows, grades, totals, strict=True)):
        now = {"verdict": grade.verdict.value, "extracted": grade.extracted, "reason": grade.reason}
        now |= {} if score is None else {"reward": total}
        before = {key: row.get(key) for key in now}
        was = before["verdict"] or "correct"
        if was != now["verdict"] or (before["verdict"] and not _same(before, now)):
            place = {"problem_id": row.get("problem_id", number), "sample": row.get("sample", 0)}
            found = {"where": name, **place, "answer": row["answer"]}
            listed.append({**found, "before": before, "after": now})
            changed = f"{before['verdict'] or ''} -> {now['verdict']}".removeprefix(" -> ")
            kinds["only the reward" if was == now["verdict"] else changed] += 1
    right = sum(grade.correct for grade in grades)
    counts = f"{right:,} correct, {len(listed):,} not"
    if "verdict" in rows[0]:
        before = sum(row["verdict"] == "correct" for row in rows)
        counts = f"{before:,} correct before, {right:,} now; {len(listed):,} differ"
    click.echo(f"{name}: {counted(len(rows), 'row')}, {counts}")
    for kind, count in kinds.most_common():
        click.echo(f"    {count:>6,}  {kind}")
    some(["\n".join(_lines(row)) for row in listed], show)
    return listed


def _same(before: Row, now: Row) -> bool:
    """Whether two totals are one, where there are any."""
    was, total = before.get("reward"), now.get("reward")
    if was is None or total is None:
        return was is total
    return bool(abs(was - total) <= 1e-9 * max(1.0, abs(was)))


def _lines(row: Row) -> Iterator[str]:
    yield f"{row['problem_id']} #{row['sample']}, reference {short(row['answer'], 120)}"
    for when, facts in (("before", row["before"]), ("now", row["after"])):
        if facts["verdict"]:
            said = "no answer" if facts["extracted"] is None else short(facts["extracted"], 120)
            total = f", reward {facts['reward']}" if "reward" in facts else ""
            reason = short(facts["reason"], 120)
            yield f"    {when:<6} {facts['verdict']}: {said} ({reason}){total}"
