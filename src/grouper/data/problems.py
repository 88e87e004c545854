"""Problem sets: what loading gives, and how sets are filtered, split, mixed and written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from grouper.config.schema import RowsConfig
from grouper.data.conversations import EARLIER
from grouper.data.overlap import question_words
from grouper.data.sources import BOXED, FIELDS
from grouper.errors import DataError, RunFolderError
from grouper.files import write_atomic
from grouper.grading import extract, grade
from grouper.prompts import FORMATS
from grouper.rewards.builtin import format_holds, plain_number
from grouper.types import AnswerFormat, Problem

Problems = Sequence[Problem]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A source row that cannot be used, and why.

    Example: `Quarantined(row=17, reason="the answer is empty")`.
    """

    row: int
    """Position in the source before `offset`, counted from 0."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class ProblemSet:
    """The problems of one source, in the source's order.

    Example: `ProblemSet(name="gsm8k/test", problems=(...))`.
    """

    name: str
    problems: tuple[Problem, ...]
    quarantined: tuple[Quarantined, ...] = ()
    notes: tuple[str, ...] = ()
    """What its filters left out, one sentence each."""
    left_out: int = 0
    """Problems that could have been used, and that filters left out."""
    revision: str | None = None
    """The commit on the Hub that was read; None: no set on the Hub, or it is not known."""

    def __len__(self) -> int:
        return len(self.problems)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the SHA-256 over every field of every problem, in order."""
        digest = sha256()
        for p in self.problems:
            fields = [p.id, p.question, p.answer, p.solution, p.subject, p.level, dict(p.columns)]
            fields += [text for text in (p.response, p.prompt) if text is not None]
            if p.earlier:
                fields.append({"earlier": list(p.earlier)})
            digest.update(json.dumps(fields, sort_keys=True, default=repr).encode() + b"\n")
        return digest.hexdigest()[:16]

    @property
    def rows_read(self) -> int:
        """How many rows were read: used, left out by a filter, or not usable."""
        return len(self.problems) + self.left_out + len(self.quarantined)


def subset_of(
    whole: ProblemSet, problems: Sequence[Problem], *, note: str, name: str | None = None
) -> ProblemSet:
    """A set of some problems of `whole`, with one more note unless it is empty."""
    return replace(
        whole,
        name=name or whole.name,
        problems=tuple(problems),
        notes=(*whole.notes, *([note] if note else [])),
        left_out=whole.left_out + len(whole) - len(problems),
    )


def require_distinct_ids(problems: Sequence[Problem], where: str) -> None:
    """Raise a `DataError` naming the ids that several rows share."""
    repeated = [name for name, count in Counter(p.id for p in problems).items() if count > 1]
    if repeated:
        raise DataError(
            f"{len(repeated)} ids are used by more than one row, for example "
            f"{', '.join(map(repr, repeated[:3]))}",
            where=where,
            fix="Remove the repeated rows, or map `columns.id` to a column that is unique.",
        )


def write_problems(
    folder: Path, sets: Mapping[str, ProblemSet], *, overwrite: bool = False
) -> dict[str, dict[str, Any]]:
    """Write problem sets as JSONL, `<split>.jsonl` each, and `<split>.invalid.jsonl` beside it.

    A row is the source's, with our names for what was read from it, so that `source: file` gives
    the same problems; rows of `source: prompt-response` stay as they were.

    Args:
        folder: made if it is missing.
        sets: by split.
        overwrite: replace a file with other content.

    Returns:
        Split -> the settings of `data` that read it back.

    Raises:
        DataError: such a file is there already, or it cannot be written.
    """
    files, sources = {}, {}
    for split, problems in sets.items():
        whole = any(p.source == "prompt-response" for p in problems.problems)
        given = not whole and any(p.response for p in problems.problems)
        own = {"columns": {"response": "response"}} if given else {}
        kind = "prompt-response" if whole else "file"
        sources[split] = {"source": kind, "path": str(folder), "split": split, **own}
        rows = [dict(p.columns) if whole else _row_of(p) for p in problems.problems]
        invalid = [{"row": q.row, "reason": q.reason} for q in problems.quarantined]
        for name, written in ((split, rows), (f"{split}.invalid", invalid)):
            # As in the fingerprint: what JSON does not know is written as Python shows it.
            lines = [json.dumps(row, default=repr) + "\n" for row in written]
            files[folder / f"{name}.jsonl"] = "".join(lines).encode()
    for path, data in files.items():
        if path.exists() and not overwrite and path.read_bytes() != data:
            raise DataError(
                "a file with other content is here already",
                where=str(path),
                fix="Add --overwrite, or choose another folder.",
            )
    try:
        for path, data in files.items():
            write_atomic(path, data)
    except RunFolderError as error:
        raise DataError(error.what, where=str(folder), fix="Choose another folder.") from error
    return sources


def _row_of(problem: Problem) -> dict[str, Any]:
    fields = {name: getattr(problem, name) for name in FIELDS}
    row = {**problem.columns, **{name: text for name, text in fields.items() if text is not None}}
    if problem.earlier:
        row[EARLIER] = list(problem.earlier)
    return row


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
    for name, choose in FILTERS.items():
        value = getattr(config, name)
        if value in (False, "all"):
            continue
        kept, note = choose(problems.problems, config, fmt)
        if not kept:
            raise DataError(
                f"{name}: {str(value).lower()} leaves none of {len(problems):,} problems",
                where=problems.name,
                fix=f"{note} Leave it out, or choose another source.",
            )
        problems = subset_of(problems, kept, note=note)
    return problems


def is_numeric(answer: str) -> bool:
    r"""Whether an answer is a plain decimal number, which rewards that compare numbers can read.

    No unit, no per cent, no fraction, no arithmetic left to do.

    >>> [is_numeric(a) for a in ("-3", "1,000", "2.5", r"\frac{1}{2}", "40%", "0,1", "7 cm")]
    [True, True, True, False, False, False, False]
    """
    return plain_number(answer) is not None


def _numeric(problems: Problems, *_: object) -> tuple[list[Problem], str]:
    kept = [p for p in problems if is_numeric(p.answer)]
    return kept, f"numeric_only: {len(kept):,} of {len(problems):,} answers are plain numbers."


def grade_shown(problem: Problem, fmt: AnswerFormat | None = None) -> bool | None:
    r"""Whether the answer of a demonstration is right; None where it states none of its own.

    That is the answer of a whole response, which must be in its format, the column
    `demonstrated_answer`, or the last `\boxed{}` of the worked solution. A solution without one is
    trained with the reference answer after it.

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
        return grade(shown, problem.answer, BOXED).correct
    if problem.solution is not None and r"\boxed" in problem.solution:
        return grade(problem.solution, problem.answer, BOXED).correct
    return None if problem.solution is not None else False


# Solutions whose answer differs in its text are graded, at most so many of a set.
MOST_GRADED = 1000


def contradicting(problems: Problems) -> list[Problem]:
    r"""The problems whose demonstration states another answer than their reference.

    One that states none shows the reference, and one that states the same text needs no grading.

    >>> shown = Problem(id="a", question="1+1?", answer="2", source="a", solution=r"\boxed{3}")
    >>> [problem.id for problem in contradicting([shown])]
    ['a']
    """
    wrong = []
    graded = 0
    for problem in problems:
        text = problem.response or problem.solution or ""
        stated = extract(text, BOXED).answer
        if stated is None or stated.strip() == problem.answer.strip():
            continue
        graded += 1
        if graded > MOST_GRADED:
            break
        if not grade(text, problem.answer, BOXED).correct:
            wrong.append(problem)
    return wrong


def _correct(
    problems: Problems, _: RowsConfig, fmt: AnswerFormat | None
) -> tuple[list[Problem], str]:
    verdicts = [grade_shown(problem, fmt) for problem in problems]
    kept = [p for p, right in zip(problems, verdicts, strict=True) if right is not False]
    silent = verdicts.count(None)
    name = f"the format {fmt.name}" if fmt else "their format"
    layout = f" and in {name}" if any(p.response is not None for p in problems) else ""
    more = f", {silent:,} more state no answer of their own and show the reference"
    note = (
        f"only_correct: {len(kept) - silent:,} of {len(problems):,} demonstrations are "
        f"correct{layout}{more if silent else ''}."
    )
    return kept, note


def _unique(problems: Problems, config: RowsConfig, *_: object) -> tuple[list[Problem], str]:
    wanted, by_problem = int(config.unique), config.unique_by == "problem"
    keys: list[str | tuple[str | None, ...]] = [
        question_words(p.question) if by_problem else (p.question, p.answer, p.solution, p.response)
        for p in problems
    ]
    different = dict.fromkeys(keys)
    chosen = set(list(different)[:wanted])
    kept = []
    for problem, key in zip(problems, keys, strict=True):
        if key in chosen:
            kept.append(problem)
            if not by_problem:  # its repetitions are left out
                chosen.discard(key)
    noun, count = "problems" if by_problem else "rows", min(wanted, len(different))
    note = (
        f"unique: {count:,} different {noun} of the {len(different):,} there are in "
        f"{len(problems):,} rows, {len(kept):,} rows used"
    )
    return kept, f"{note}; {wanted:,} were asked for." if count < wanted else f"{note}."


Filter = Callable[[Problems, RowsConfig, AnswerFormat | None], tuple[list[Problem], str]]

# Setting -> (the problems that stay, a sentence), in the order they are applied.
FILTERS: dict[str, Filter] = {
    "numeric_only": _numeric,
    "only_correct": _correct,
    "unique": _unique,
}


def hold_out(
    whole: ProblemSet, share: float, *, seed: int, part: str = "validation"
) -> tuple[ProblemSet, ProblemSet]:
    """(train, held out): about `share` of the problems held out, the same for equal seeds.

    Problems with the same question stay together, on one side. Held out are the first of all
    questions by a hash of the seed and their words, so the order of the set plays no part; of a
    larger set, nearly the same ones.

    Args:
        whole: all problems.
        share: of them that is held out.
        seed: of the hash.
        part: of the data that they are held out for, `validation` or `test`; another part holds out
            other problems.

    Raises:
        DataError: one side would be empty.

    >>> from grouper.types import Problem
    >>> many = tuple(
    ...     Problem(id=str(i), question=f"{i}+{i}?", answer=str(2 * i), source="a")
    ...     for i in range(50)
    ... )
    >>> train, held = hold_out(
    ...     ProblemSet(name="a", problems=many), 0.1, seed=0
    ... )
    >>> len(train), len(held)
    (45, 5)
    """
    questions = [question_words(problem.question) for problem in whole.problems]
    rows = Counter(questions)
    wanted, chosen, count = round(share * len(whole)), set(), 0
    ranked = sorted(rows, key=lambda q: sha256(f"grouper/{part}/{seed}/{q}".encode()).digest())
    for question in ranked:
        if count >= wanted:
            break
        chosen.add(question)
        count += rows[question]
    sides: tuple[list[Problem], list[Problem]] = ([], [])
    for problem, question in zip(whole.problems, questions, strict=True):
        sides[question in chosen].append(problem)
    if not all(sides):
        raise DataError(
            f"{share:g} of {len(whole)} problems leaves one side empty",
            where=f"data.{part}_share",
            fix="Use more problems or another share.",
        )
    train, held = sides
    return (
        subset_of(whole, train, note=f"{part}_share: {len(held):,} problems are held out."),
        subset_of(
            replace(whole, notes=(), quarantined=()),  # they are those of the other side
            held,
            note=f"held out of {whole.name}: {len(held):,} of {len(whole):,} problems.",
            name=f"{whole.name} (held out)",
        ),
    )


def without(trained: ProblemSet, held_out: ProblemSet, *, part: str = "validation") -> ProblemSet:
    """The problems of `trained` whose question is not held out.

    Args:
        trained: some problems.
        held_out: those that nothing is learned from.
        part: of the data that they are held out for.

    Raises:
        DataError: none is left.
    """
    known = {question_words(problem.question) for problem in held_out.problems}
    kept = [p for p in trained.problems if question_words(p.question) not in known]
    if len(kept) == len(trained):
        return trained
    if not kept:
        raise DataError(
            f"every problem of it is held out for {part}",
            where=trained.name,
            fix=f"Lower data.{part}_share.",
        )
    gone = len(trained) - len(kept)
    return subset_of(trained, kept, note=f"{part}_share: {gone:,} held-out rows left out.")


def mix(members: Sequence[tuple[ProblemSet, float]], *, seed: int) -> ProblemSet:
    """As many problems as the weights allow without using one twice, in a seeded order.

    The member that runs out first, for its weight, sets the size; of the others a random part is
    taken. Ids that two members share get the member's position in front (`2/...`).

    Args:
        members: (set, weight) each.
        seed: of the choice and the order.

    Raises:
        DataError: a member is too small for its weight.
    """
    size = min(len(problems) / weight for problems, weight in members)
    counts = [round(size * weight) for _, weight in members]
    draw = np.random.default_rng([seed, len(members)])
    chosen: list[Problem] = []
    uses = Counter(problem.id for problems, _ in members for problem in problems.problems)
    for position, ((problems, _), count) in enumerate(zip(members, counts, strict=True), start=1):
        if count == 0:
            raise DataError(
                f"{problems.name} would give no problem at this weight",
                where="data.mixture",
                fix="Raise its weight, or give the others more problems.",
            )
        for place in sorted(draw.permutation(len(problems))[:count].tolist()):
            problem = problems.problems[place]
            if uses[problem.id] > 1:
                problem = replace(problem, id=f"{position}/{problem.id}")
            chosen.append(problem)
    mixed = [chosen[place] for place in draw.permutation(len(chosen)).tolist()]
    require_distinct_ids(mixed, where="data.mixture")
    parts = [
        f"{count:,} of the {len(problems):,} in {problems.name}"
        for (problems, _), count in zip(members, counts, strict=True)
    ]
    return ProblemSet(
        name="+".join(problems.name for problems, _ in members),
        problems=tuple(mixed),
        quarantined=tuple(
            Quarantined(row=row.row, reason=f"{problems.name}: {row.reason}")
            for problems, _ in members
            for row in problems.quarantined
        ),
        notes=(
            *(f"{p.name}: {note}" for p, _ in members for note in p.notes),
            f"mixture: {', '.join(parts)}.",
        ),
        left_out=sum(p.left_out + len(p) for p, _ in members) - len(mixed),
    )
