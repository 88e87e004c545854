r"""Which problems of a set are used: `numeric_only`, `only_correct`, `unique`.

Each takes a `ProblemSet` and gives a smaller one with a sentence on what it left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grouper.config.schema import RowsConfig
from grouper.data.overlap import question_words
from grouper.data.problem_set import ProblemSet, subset_of
from grouper.errors import DataError
from grouper.grading import grade
from grouper.prompts import FORMATS
from grouper.rewards.builtin import format_holds
from grouper.rewards.published import plain_number
from grouper.types import AnswerContract, AnswerFormat, AnswerKind, Problem

_BOXED = AnswerContract(kind=AnswerKind.BOXED)


def apply_filters(
    problems: ProblemSet, config: RowsConfig, fmt: AnswerFormat | None = None
) -> ProblemSet:
    """The problems that `config` wants, in their order.

    Args:
        problems: all of them.
        config: which filters.
        fmt: the prompt format that whole responses must be in to count as correct; left out: that
            of r1-zero, or a box where a response has no answer tag.

    Raises:
        DataError: a filter leaves nothing.
    """
    for name, keep in FILTERS.items():
        value = getattr(config, name)
        if value in (False, "all"):
            continue
        kept, note = keep(problems, config, fmt)
        if not kept:
            raise DataError(
                f"{name}: {_told(value)} leaves none of {len(problems):,} problems",
                where=problems.name,
                fix=f"{note} Leave it out, or choose another source.",
            )
        problems = subset_of(problems, kept, note=note)
    return problems


def _told(value: Any) -> str:
    return "true" if value is True else str(value)


def is_numeric(answer: str) -> bool:
    r"""Whether an answer is a plain decimal number, which rewards that compare numbers can read.

    No unit, no per cent, no fraction, no arithmetic left to do.

    >>> [is_numeric(a) for a in ("-3", "1,000", "2.5", r"\frac{1}{2}", "40%", "7 cm", "x+1")]
    [True, True, True, False, False, False, False]
    """
    return plain_number(answer) is not None


def _numeric(problems: ProblemSet, *_: object) -> tuple[list[Problem], str]:
    kept = [p for p in problems.problems if is_numeric(p.answer)]
    return kept, f"numeric_only: {len(kept):,} of {len(problems):,} answers are plain numbers."


def grade_shown(problem: Problem, fmt: AnswerFormat | None = None) -> bool | None:
    r"""Whether the answer that a demonstration shows is right; None where it shows none of its own.

    That is the answer of a whole response, which must be in its format, the column
    `demonstrated_answer`, or the last `\boxed{}` of the worked solution. A solution without it is
    trained with the reference after it.

    >>> problem = Problem(id="a", question="1+1?", answer="2", source="a", solution=r"\boxed{3}")
    >>> grade_shown(problem)
    False
    """
    if problem.response is not None:
        fmt = fmt or FORMATS["r1-zero" if "<answer>" in problem.response else "question-only"]
        right = grade(problem.response, problem.answer, fmt.contract).correct
        return right and format_holds(problem.response, fmt)
    if "demonstrated_answer" in problem.columns:
        shown = rf"\boxed{{{problem.columns['demonstrated_answer']}}}"
        return grade(shown, problem.answer, _BOXED).correct
    if problem.solution is not None and r"\boxed" in problem.solution:
        return grade(problem.solution, problem.answer, _BOXED).correct
    return None if problem.solution is not None else False


def _correct(
    problems: ProblemSet, _: RowsConfig, fmt: AnswerFormat | None
) -> tuple[list[Problem], str]:
    verdicts = [grade_shown(problem, fmt) for problem in problems.problems]
    kept = [p for p, right in zip(problems.problems, verdicts, strict=True) if right is not False]
    silent = verdicts.count(None)
    whole = any(problem.response is not None for problem in problems.problems)
    name = f"the format {fmt.name}" if fmt else "their format"
    layout = f" and in {name}" if whole else ""
    note = (
        f"only_correct: {len(kept) - silent:,} of {len(problems):,} demonstrations are "
        f"correct{layout}."
    )
    if silent:
        note = f"{note[:-1]}, {silent:,} more state no answer of their own and show the reference."
    return kept, note


def _unique(problems: ProblemSet, config: RowsConfig, *_: object) -> tuple[list[Problem], str]:
    wanted, by_problem = int(config.unique), config.unique_by == "problem"
    keys = [_question(p) if by_problem else _row(p) for p in problems.problems]
    chosen = set(list(dict.fromkeys(keys))[:wanted])
    seen: set[Any] = set()
    kept = []
    for problem, key in zip(problems.problems, keys, strict=True):
        if key in chosen and (by_problem or key not in seen):
            kept.append(problem)
        seen.add(key)
    noun = "problems" if by_problem else "rows"
    note = (
        f"unique: {len(chosen):,} different {noun} of the {len(seen):,} there are in "
        f"{len(problems):,} rows, {len(kept):,} rows used"
    )
    return kept, f"{note}; {wanted:,} were asked for." if len(chosen) < wanted else f"{note}."


def _question(problem: Problem) -> Any:
    return question_words(problem.question)


def _row(problem: Problem) -> Any:
    return problem.question, problem.answer, problem.solution, problem.response


Filter = Callable[[ProblemSet, RowsConfig, AnswerFormat | None], tuple[list[Problem], str]]

FILTERS: dict[str, Filter] = {
    "numeric_only": _numeric,
    "only_correct": _correct,
    "unique": _unique,
}
"""Setting -> (the problems that stay, a sentence), in the order they are applied."""
