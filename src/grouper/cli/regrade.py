"""`grouper regrade`: a run's stored completions graded and rewarded again, the run untouched."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli.options import open_recipe, run_folder_of, warn
from grouper.config.schema import Recipe
from grouper.errors import ConfigError, GrouperError
from grouper.models.folders import RECIPE_FILE
from grouper.types import Completion, FinishReason, Grade, Message, Problem, Prompt, Reward, Verdict

if TYPE_CHECKING:
    from grouper.grading import Grader
    from grouper.rewards import RewardStack
    from grouper.types import AnswerFormat

EXAMPLES = """\b
Examples:
  grouper regrade outputs/demo                              after an update of the grader
  grouper regrade outputs/demo grading.symbolic=false       what the symbolic rung is worth
  grouper regrade outputs/demo --recipe ./other.yaml        other rewards for the same rollouts
  grouper regrade outputs/demo --only evaluations --output flips.jsonl
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One stored row that comes out differently now."""

    where: str
    """The evaluation, or the phase and step of a rollout."""
    problem_id: str
    sample: int
    answer: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]


@click.command("regrade", epilog=EXAMPLES)
@click.option("--recipe", "other", metavar="RECIPE", help="Grade and reward by another recipe.")
@click.option(
    "--only",
    type=click.Choice(["rollouts", "evaluations"]),
    help="Leave the other kind out.  [default: both]",
)
@click.option("--show", default=20, show_default=True, help="Flipped rows of each part to print.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write every flipped row as a line of JSON.",
)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[section.key=value]...")
def regrade_command(
    run: Path,
    overrides: tuple[str, ...],
    *,
    other: str | None,
    only: str | None,
    show: int,
    output: Path | None,
) -> None:
    """Grade the stored evaluations and rollouts of RUN again, with this version of the grader and
    the settings given, reward the rollouts again, and list every row that comes out differently.

    Nothing in the run folder is changed. The answer is looked for as the run's own prompt format
    says, since that is what the model was asked for.
    """
    from grouper.files import write_atomic
    from grouper.grading import Grader
    from grouper.prompts import make_format
    from grouper.rewards import build_rewards

    own, chosen = _recipes(run, other, overrides)
    fmt = make_format(own.prompt)
    flips: list[Flip] = []
    with Grader(fmt.contract, chosen.grading) as grader:
        if only != "rollouts":
            flips += _evaluations(run, grader, show)
        if only != "evaluations":
            rewards = build_rewards(chosen.rewards, fmt)
            bench = _Bench(fmt=fmt, grader=grader, rewards=rewards, problems=_problems(own))
            flips += _rollouts(run, bench, show)
    click.echo(f"{len(flips):,} rows come out differently.")
    if output is not None:
        lines = (json.dumps(_as_json(flip)) + "\n" for flip in flips)
        write_atomic(output, "".join(lines).encode())
        click.echo(f"They are in {output}.")


def _recipes(run: Path, other: str | None, overrides: Sequence[str]) -> tuple[Recipe, Recipe]:
    """The run's own recipe, and the one to grade by."""
    folder = run_folder_of(str(run) if "/" in str(run) else f"./{run}")
    if folder is None:
        raise ConfigError(
            "there is no such run folder", where=str(run), fix="Give <output_dir>/<name> of a run."
        )
    own = open_recipe(str(folder / RECIPE_FILE), [])
    return own, open_recipe(other or str(folder / RECIPE_FILE), overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """What rollouts are judged with."""

    fmt: AnswerFormat
    grader: Grader
    rewards: RewardStack
    problems: Mapping[str, Problem]
    """By id, for the columns that reward functions may ask for."""


# --- evaluations ---------------------------------------------------------------------------------


def _evaluations(run: Path, grader: Grader, show: int) -> list[Flip]:
    from grouper.grading import by_text_alone
    from grouper.tracking.run_folder import RunFolder

    flips = []
    for result in RunFolder(run).read_evaluations():
        answers = [item.answer for item in result.items]
        again = grader.grade([item.completion for item in result.items], answers)
        grades = [
            by_text_alone(grade, answer) for grade, answer in zip(again, answers, strict=True)
        ]
        found = [
            Flip(
                where=result.name,
                problem_id=item.problem_id,
                sample=item.sample,
                answer=item.answer,
                before={"verdict": item.verdict, "said": item.extracted, "reason": item.reason},
                after=_facts(grade),
            )
            for item, grade in zip(result.items, grades, strict=True)
            if item.verdict is not grade.verdict
        ]
        before = sum(item.correct for item in result.items)
        after = sum(grade.correct for grade in grades)
        _tell(f"evaluation {result.name}", (len(grades), before, after), found, show)
        flips += found
    return flips


def _facts(grade: Grade) -> dict[str, Any]:
    return {"verdict": grade.verdict, "said": grade.extracted, "reason": grade.reason}


# --- rollouts ------------------------------------------------------------------------------------


def _rollouts(run: Path, bench: _Bench, show: int) -> list[Flip]:
    from grouper.tracking.run_folder import RunFolder

    stored = RunFolder(run).read_rollouts()
    flips = []
    for (phase, step), rows in itertools.groupby(stored, lambda r: (r["phase"], r["step"])):
        name = f"{phase} step {step}"
        found, counted = _step(list(rows), name, bench)
        _tell(name, counted, found, show)
        flips += found
    return flips


def _problems(recipe: Recipe) -> dict[str, Problem]:
    """The training problems by id."""
    from grouper.training.problem_sets import load_part

    try:
        loaded = load_part(recipe, "train")
    except GrouperError as error:
        warn(f"the training problems cannot be read ({error.what}); rewards see no columns.")
        return {}
    return {problem.id: problem for problem in loaded.problems} if loaded is not None else {}


def _step(
    rows: Sequence[dict[str, Any]], where: str, bench: _Bench
) -> tuple[list[Flip], tuple[int, int, int]]:
    """Flips of one step, and (rollouts, correct before, correct now)."""
    grades = bench.grader.grade([row["text"] for row in rows], [row["answer"] for row in rows])
    flips = []
    scored = _scored(rows, grades, bench)
    for row, grade, reward in zip(rows, grades, scored, strict=True):
        if row["verdict"] == grade.verdict.value and _same(row["total"], reward.total):
            continue
        before = {"verdict": Verdict(row["verdict"]), "said": row["extracted"]}
        before |= {"reason": row["reason"], "total": row["total"]}
        flips.append(
            Flip(
                where=where,
                problem_id=row["problem_id"],
                sample=row["sample"],
                answer=row["answer"],
                before=before,
                after={**_facts(grade), "total": reward.total},
            )
        )
    correct = sum(row["verdict"] == Verdict.CORRECT for row in rows)
    return flips, (len(rows), correct, sum(grade.correct for grade in grades))


def _same(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return before is after
    return abs(before - after) <= 1e-9 * max(1.0, abs(before))


def _scored(
    rows: Sequence[dict[str, Any]], grades: Sequence[Grade], bench: _Bench
) -> Iterator[Reward]:
    """Rewards, group by group as in training, in the order of the rows."""
    at = 0
    for _, members in itertools.groupby(rows, lambda row: row["group"]):
        group = list(members)
        problem = bench.problems.get(group[0]["problem_id"]) or _bare_problem(group[0])
        yield from bench.rewards.score(
            problem=problem,
            prompt=_prompt(group[0], problem, bench.fmt),
            completions=[_completion(row) for row in group],
            grades=grades[at : at + len(group)],
        )
        at += len(group)


def _bare_problem(row: Mapping[str, Any]) -> Problem:
    return Problem(
        id=row["problem_id"], question=row["prompt"], answer=row["answer"], source="stored"
    )


def _prompt(row: Mapping[str, Any], problem: Problem, fmt: AnswerFormat) -> Prompt:
    """The prompt as rewards saw it: a conversation where it was not written as plain text."""
    plain = row["prompt"] in (fmt.plain_prompt(problem.question), problem.question)
    asked = [Message(role="user", content=problem.question)]
    if fmt.system:
        asked.insert(0, Message(role="system", content=fmt.system))
    return Prompt(
        problem_id=problem.id,
        text=row["prompt"],
        token_ids=tuple(row.get("prompt_token_ids") or (0,)),
        messages=None if plain else tuple(asked),
        prefix=fmt.prefix,
    )


def _completion(row: Mapping[str, Any]) -> Completion:
    """As stored; without stored ids there are as many as were sampled."""
    ids = row.get("token_ids") or [0] * row["tokens"]
    return Completion(
        token_ids=tuple(ids),
        logprobs=tuple(row.get("logprobs") or [0.0] * len(ids)),
        text=row["text"],
        finish_reason=FinishReason(row["finish_reason"]),
        policy_version=row["policy_version"],
    )


# --- what is told --------------------------------------------------------------------------------


def _tell(name: str, counted: tuple[int, int, int], flips: Sequence[Flip], show: int) -> None:
    rows, before, after = counted
    click.echo(
        f"{name}: {rows:,} rows, {before:,} correct before, {after:,} now; {len(flips):,} differ"
        f"{_kinds(flips)}"
    )
    for flip in flips[:show]:
        click.echo(f"  {flip.problem_id} #{flip.sample}, reference {_short(flip.answer)}")
        for when, facts in (("before", flip.before), ("now", flip.after)):
            total = f", reward {facts['total']}" if "total" in facts else ""
            said = "no answer" if facts["said"] is None else _short(facts["said"])
            click.echo(f"    {when:<6} {facts['verdict'].value}: {said} "
                       f"({_short(facts['reason'])}){total}")  # fmt: skip
    if len(flips) > show:
        click.echo(f"  and {len(flips) - show:,} more")


def _kinds(flips: Iterable[Flip]) -> str:
    kinds = Counter(
        f"{flip.before['verdict'].value} -> {flip.after['verdict'].value}"
        if flip.before["verdict"] is not flip.after["verdict"]
        else "only the reward"
        for flip in flips
    )
    return "".join(f"\n    {count:>6,}  {kind}" for kind, count in kinds.most_common())


def _short(text: str) -> str:
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:120])
    return shown if len(text) <= 120 else f"{shown}..."


def _as_json(flip: Flip) -> dict[str, Any]:
    return {
        "where": flip.where,
        "problem_id": flip.problem_id,
        "sample": flip.sample,
        "answer": flip.answer,
        "before": dict(flip.before),
        "after": dict(flip.after),
    }
