"""`grouper grade`: one text with every stage shown, or a file or a run graded again."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import short, some, warn, warn_of_losses, write_rows
from grouper.errors import ConfigError, DataError, GrouperError, plural, require_known
from grouper.printable import printable
from grouper.types import AnswerContract, AnswerKind, Completion, FinishReason, Grade, Problem

if TYPE_CHECKING:
    from grouper.config.schema import GradingConfig, Recipe
    from grouper.grading import Grader

Row = dict[str, Any]
Score = Callable[[Sequence[Row], Sequence[Grade]], Iterator[float | None]]

EXAMPLES = r"""
grouper grade 'so \boxed{0.5}' --answer '\frac12'
grouper grade '<answer>18 dollars</answer>' --answer 18 --format xml
grouper grade completions.jsonl --format boxed
grouper grade outputs/demo                              after an update of the grader
grouper grade outputs/demo grading.symbolic=false       what the symbolic stage contributes
grouper grade outputs/demo --recipe ./other.yaml        other rewards for the same rollouts
"""

# Usual columns of a file, in order: the first present one becomes `completion`, or `answer`.
TEXTS = ("completion", "text", "response", "prediction", "output")
ANSWERS = ("answer", "reference", "ground_truth", "gold", "expected_answer")
# Formats that no prompt asks for, but texts have.
OTHERS = {"hashes": AnswerKind.HASHES, "last-number": AnswerKind.LAST_NUMBER}


@click.command("grade", cls=Command, examples=EXAMPLES)
@click.argument("what", metavar="TEXT|FILE|RUN")
@options.overrides
@click.option(
    "--answer", metavar="TEXT", help="Reference answer; for a FILE, the column that holds it."
)
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help="Format of the answer: a prompt format, `hashes` or `last-number`.  [default: guessed "
    "from the text; for a RUN, its own format]",
)
@click.option("--recipe", metavar="RECIPE", help="Grade and reward with another recipe.")
@click.option(
    "--only",
    type=click.Choice(["rollouts", "evaluations"]),
    help="For a RUN, grade only these.",
)
@click.option(
    "--output",
    metavar="FILE",
    type=options.PATH,
    help="Also write every listed row to this file, one JSON object per line.",
)
@click.option(
    "--text", "text_column", metavar="COLUMN", help="For a FILE, the column of completions."
)
@options.rows_to_show(20)
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
    """Grade a text or a file, or grade a run again.

    Grades one completion TEXT (`-` for standard input) against --answer, and prints every stage:
    the answers that strict and lenient extraction find, the stage that decides, the verdict, the
    reason and the time.

    FILE holds one completion per row, or is a stored file of rollouts or evaluation items. RUN is
    a run folder: its evaluations and rollouts are graded again with this version of the grader
    and with the given settings, and rewards of the rollouts are computed again. Every row with a
    different result is listed (for a file without verdicts, every row that is not correct).
    Nothing in FILE or RUN is changed.
    """
    from grouper.cli.recipe_args import open_recipe, require_new
    from grouper.config.schema import GradingConfig
    from grouper.grading import Grader
    from grouper.runs.folder import RunFolder

    require_new(output, "--output")
    path = _existing_path(what)
    if path is not None and path.is_dir():
        run = path.absolute()
        warn_of_losses(RunFolder(run))
        opened = open_recipe(recipe or str(run), overrides, trains=False)
        differing = _grade_run(run, opened, only, show)
    else:
        grading = GradingConfig()
        if recipe or overrides:
            opened = open_recipe(recipe or "demo", overrides, trains=False)
            grading = opened.grading
            if recipe:
                format_name = format_name or opened.prompt.format
        if path is None:
            text = sys.stdin.read() if what == "-" else what
            _grade_text(text, answer, format_name, grading)
            return
        rows = _rows(path, text_column, answer)
        name = format_name or _looks_like(rows[0]["completion"])
        with Grader(_contract(name), grading) as grader:
            differing = _grade_rows(f"{what}, by format {name}", rows, grader, show)
    if output is not None:
        write_rows(differing, output)
        click.echo(f"They are in {output}.")


def _existing_path(text: str) -> Path | None:
    """Return the file or folder that a text names; None if it is no path."""
    if not text:
        return None
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        # It is too long, begins with ~nobody, or has a null character.
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
    from grouper.data.references import check_references
    from grouper.grading import Grader, extract, extract_lenient

    name = format_name or _looks_like(text)
    contract = _contract(name)
    note = "" if format_name else "  (by the look of the text; --format names another)"
    problem = check_references([answer])[answer] or "readable, equals itself"
    click.echo(f"format     {name}{note}\nreference  {short(answer)}  ({problem})")
    with Grader(contract, grading) as grader:
        extractions = {"strict": grader.answer(text), "lenient": extract_lenient(text, contract)}
        if contract.kind is AnswerKind.PROGRAM:
            extractions = {"program": extract(text, contract), "prints": grader.answer(text)}
        for label, extraction in extractions.items():
            click.echo(f"{label:<10} {short(extraction.answer)}  ({extraction.reason})")
        for label, lenient in (("verdict", False), ("leniently", True)):
            graded = grader.submit(text, answer, lenient=lenient).result()
            verdict = click.style(graded.verdict.value, fg=_color(graded), bold=True)
            facts = f"stage {graded.stage}, {1000 * graded.seconds:.2f} ms"
            click.echo(f"{label:<10} {verdict}  {facts}: {short(graded.reason)}")


def _color(graded: Grade) -> str:
    if graded.correct:
        return "green"
    return "red" if graded.extracted else "yellow"


def _looks_like(text: str) -> str:
    """Guess the prompt format of a text."""
    if "<answer>" in text:
        return "think" if "</think>" in text else "xml"
    if "<SOLUTION>" in text:
        return "tags"
    if "####" in text and "box" not in text:
        return "hashes"
    return "boxed"


def _contract(name: str) -> AnswerContract:
    from grouper.prompts.formats import FORMATS, TURN_MARKERS

    if name in OTHERS:
        return AnswerContract(kind=OTHERS[name], turn_markers=TURN_MARKERS)
    require_known("prompt format", name, [*FORMATS, *OTHERS], where="--format")
    return FORMATS[name].contract


# --- rows of completions -------------------------------------------------------------------------


def _rows(file: Path, text: str | None = None, answer: str | None = None) -> list[Row]:
    """Read the rows of a file, with texts as `completion` and references as `answer`."""
    from grouper.cli.recipe_args import read_rows

    rows = read_rows(file)
    columns = {name for row in rows for name in row}
    for chosen, usual in ((text, TEXTS), (answer, ANSWERS)):
        candidates = (chosen,) if chosen else usual
        column = next((name for name in candidates if name in columns), None)
        if column is None:
            raise DataError(
                f"there is no column {' or '.join(candidates)}",
                where=str(file),
                fix=f"Name one with --text or --answer. Columns: {', '.join(sorted(columns))}.",
            )
        new_name = usual[0]
        for row in rows:
            value = row.get(column)
            row[new_name] = "" if value is None else str(value)
    return rows


def _grade_rows(
    name: str, rows: Sequence[Row], grader: Grader, show: int, score: Score | None = None
) -> list[Row]:
    """Grade rows, and print and return those whose grade differs from the stored one.

    Rows without a verdict are returned if they are not correct.

    Args:
        name: the name of the rows in the output.
        rows: as `_rows` has them.
        grader: a grader of their format.
        show: how many to print.
        score: returns their total rewards; None for evaluations, where a reference that cannot be
            read is compared as text.
    """
    from grouper.grading import by_text_alone

    texts = [row["completion"] for row in rows]
    references = [row["answer"] for row in rows]
    grades = grader.grade(texts, references)
    totals: Iterable[float | None]
    if score is None:
        pairs = zip(grades, references, strict=True)
        grades = [by_text_alone(grade, reference) for grade, reference in pairs]
        totals = [None] * len(rows)
    else:
        totals = score(rows, grades)
    differing: list[Row] = []
    changes: Counter[str] = Counter()
    for number, (row, grade, total) in enumerate(zip(rows, grades, totals, strict=True)):
        new: Row = {
            "verdict": grade.verdict.value,
            "extracted": grade.extracted,
            "reason": grade.reason,
        }
        if score is not None:
            new["reward"] = total
        stored = {key: row.get(key) for key in new}
        change = _change(stored, new)
        if change is None:
            continue
        changes[change] += 1
        record = {
            "where": name,
            "problem_id": row.get("problem_id", number),
            "sample": row.get("sample", 0),
            "answer": row["answer"],
            "before": stored,
            "after": new,
        }
        differing.append(record)
    correct = sum(grade.correct for grade in grades)
    counts = f"{correct:,} correct, {len(differing):,} not"
    if "verdict" in rows[0]:
        stored_correct = sum(row["verdict"] == "correct" for row in rows)
        counts = f"{stored_correct:,} correct before, {correct:,} now; {len(differing):,} differ"
    click.echo(f"{name}: {plural(len(rows), 'row')}, {counts}")
    for change, count in changes.most_common():
        click.echo(printable(f"    {count:>6,}  {change}"))
    some([_described(record) for record in differing], show)
    return differing


def _change(stored: Row, new: Row) -> str | None:
    """Name the change of a grade, or return None if there is none."""
    stored_verdict = stored["verdict"]
    new_verdict = str(new["verdict"])
    if stored_verdict is None:
        return None if new_verdict == "correct" else new_verdict
    if (stored_verdict or "correct") != new_verdict:
        return f"{stored_verdict or 'correct'} -> {new_verdict}"
    if not _equal(stored.get("reward"), new.get("reward")):
        return "only the reward"
    return None


def _described(record: Row) -> str:
    """Describe a row whose grade differs: its reference, and both grades."""
    reference = short(record["answer"], 120)
    lines = [f"{record['problem_id']} #{record['sample']}, reference {reference}"]
    for label, facts in (("before", record["before"]), ("now", record["after"])):
        if facts["verdict"]:
            answer = short(facts["extracted"] or "no answer", 120)
            reward = f", reward {facts['reward']}" if "reward" in facts else ""
            reason = short(facts["reason"], 120)
            lines.append(f"    {label:<6} {facts['verdict']}: {answer} ({reason}){reward}")
    return "\n".join(lines)


def _equal(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-9)


# --- a run ---------------------------------------------------------------------------------------


def _grade_run(run: Path, chosen: Recipe, only: str | None, show: int) -> list[Row]:
    """Grade every stored file of a run again; answers are extracted by the run's own format."""
    from grouper.cli.recipe_args import open_recipe
    from grouper.grading import Grader
    from grouper.prompts.formats import make_format

    run_recipe = open_recipe(str(run), trains=False)
    folders = ("evaluations", "rollouts") if only is None else (only,)
    differing: list[Row] = []
    with Grader(make_format(run_recipe.prompt).contract, chosen.grading) as grader:
        for folder in folders:
            score = _scoring(run_recipe, chosen) if folder == "rollouts" else None
            for file in sorted((run / folder).glob("*.jsonl.gz")):
                try:
                    rows = _rows(file) if score is None else _rollouts(run, file)
                except GrouperError as error:
                    # One damaged file does not stop the others.
                    warn(f"left out: {error.paragraph()}")
                    continue
                name = file.name.partition(".")[0]
                if score is not None:
                    name = f"{rows[0]['phase']} step {rows[0]['step']}"
                differing += _grade_rows(name, rows, grader, show, score)
    click.echo(f"Rows that come out differently: {len(differing):,}.")
    return differing


def _rollouts(run: Path, file: Path) -> list[Row]:
    """Read a file of rollouts, and check that it has all columns that rewards need."""
    from grouper.runs.folder import RunFolder

    rows = [*RunFolder(run).shown_rollouts(file)]
    if not rows:
        raise DataError("there are no rows in it", where=str(file), fix="Check the file.")
    for name in ("problem_id", "prompt", "answer", "tokens", "phase"):
        if not all(row[name] for row in rows):
            raise DataError(f"a row has no {name}", where=str(file), fix="Check the file.")
    return rows


def _scoring(run_recipe: Recipe, chosen: Recipe) -> Score:
    """Return a function that scores stored rollouts of a run with the rewards of `chosen`."""
    from grouper.prompts.formats import make_format
    from grouper.rewards import Group, build_rewards
    from grouper.rewards.attacks import example_prompt
    from grouper.rewards.call import RewardLog
    from grouper.training.problem_sets import require_part

    fmt = make_format(run_recipe.prompt)
    stack = build_rewards(chosen.rewards, fmt)
    problems: dict[str, Problem] = {}
    try:
        training_set = require_part(run_recipe, "train")
        problems = {problem.id: problem for problem in training_set.problems}
    except GrouperError as error:
        warn(f"the training problems cannot be read ({error.what}); rewards see no columns.")

    def score(rows: Sequence[Row], grades: Sequence[Grade]) -> Iterator[float | None]:
        graded = zip(rows, grades, strict=True)
        for _, members in itertools.groupby(graded, lambda member: member[0]["group"]):
            group, group_grades = zip(*members, strict=True)
            problem = problems.get(group[0]["problem_id"]) or _stored_problem(group[0])
            completions = [_completion(row) for row in group]
            prompt = example_prompt(problem, fmt)
            # With a log a reward that fails is not scored, as in training.
            rewards = stack.score(Group(problem, prompt, completions, group_grades), RewardLog())
            yield from (reward.total for reward in rewards)

    return score


def _stored_problem(row: Row) -> Problem:
    """Make a problem from a rollout, for lack of the training set."""
    return Problem(
        id=row["problem_id"],
        question=row["prompt"],
        answer=row["answer"],
        source="stored",
    )


def _completion(row: Row) -> Completion:
    """Make a completion as it was stored; ids that were not stored are zeros, as many as tokens."""
    ids = row.get("token_ids") or [0] * row["tokens"]
    logprobs = row.get("logprobs") or [0.0] * len(ids)
    return Completion(
        token_ids=tuple(ids),
        logprobs=tuple(logprobs),
        text=row["completion"],
        finish_reason=FinishReason(row["finish_reason"]),
        policy_version=row["policy_version"],
    )
