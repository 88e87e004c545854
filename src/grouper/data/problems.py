"""Problem sets, the result of loading, and functions that filter, split, mix and write them."""

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
from grouper.programs.code_blocks import program_block
from grouper.prompts import FORMATS
from grouper.rewards.builtin import format_holds, plain_number
from grouper.types import AnswerFormat, AnswerKind, Problem

Problems = Sequence[Problem]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A source row that cannot be used, and the reason.

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
    """Sentences about the problems that its filters left out."""
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
            line = json.dumps(fields, sort_keys=True, default=repr)
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()[:16]

    @property
    def rows_read(self) -> int:
        """Number of rows that were read: used, left out by a filter, or not usable."""
        return len(self.problems) + self.left_out + len(self.quarantined)


def subset_of(
    full_set: ProblemSet, problems: Sequence[Problem], *, note: str, name: str | None = None
) -> ProblemSet:
    """Make a set of some problems of `full_set`, with one more note unless it is empty."""
    notes = full_set.notes
    if note:
        notes = (*notes, note)
    return replace(
        full_set,
        name=name or full_set.name,
        problems=tuple(problems),
        notes=notes,
        left_out=full_set.left_out + len(full_set) - len(problems),
    )


def require_distinct_ids(problems: Sequence[Problem], where: str) -> None:
    """Raise a `DataError` naming the ids that several rows share."""
    uses = Counter(problem.id for problem in problems)
    repeated = [problem_id for problem_id, count in uses.items() if count > 1]
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
    """Write problem sets as JSONL: `<split>.jsonl` and `<split>.invalid.jsonl` for each.

    A row is the source's, with our names for the fields read from it, so that `source: file` gives
    the same problems; rows of `source: prompt-response` stay as they were.

    Args:
        folder: the folder, created if it is missing.
        sets: problem sets by split.
        overwrite: replace a file with other content.

    Returns:
        Split -> the settings of `data` that read it back.

    Raises:
        DataError: a file with other content exists already, or a file cannot be written.
    """
    files: dict[Path, bytes] = {}
    sources: dict[str, dict[str, Any]] = {}
    for split, problems in sets.items():
        source: dict[str, Any] = {"source": "file", "path": str(folder), "split": split}
        if any(problem.source == "prompt-response" for problem in problems.problems):
            source["source"] = "prompt-response"
            rows = [dict(problem.columns) for problem in problems.problems]
        else:
            rows = [_row_of(problem) for problem in problems.problems]
            if any(problem.response for problem in problems.problems):
                source["columns"] = {"response": "response"}
        sources[split] = source
        files[folder / f"{split}.jsonl"] = _as_jsonl(rows)
        invalid_rows = [{"row": q.row, "reason": q.reason} for q in problems.quarantined]
        files[folder / f"{split}.invalid.jsonl"] = _as_jsonl(invalid_rows)
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


def _as_jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    # As in the fingerprint: a value that JSON does not know is written as its `repr`.
    lines = [json.dumps(row, default=repr) + "\n" for row in rows]
    return "".join(lines).encode()


def _row_of(problem: Problem) -> dict[str, Any]:
    row = dict(problem.columns)
    for name in FIELDS:
        text = getattr(problem, name)
        if text is not None:
            row[name] = text
    if problem.earlier:
        row[EARLIER] = list(problem.earlier)
    return row


def apply_filters(
    problems: ProblemSet, config: RowsConfig, fmt: AnswerFormat | None = None
) -> ProblemSet:
    """Apply the filters of `config`; the order of the problems stays.

    Args:
        problems: the full set.
        config: the filters.
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
    r"""Tell whether an answer is a plain decimal number, which rewards that compare numbers read.

    It has no unit, no percent sign, no fraction, and no arithmetic left to do.

    >>> [is_numeric(a) for a in ("-3", "1,000", "2.5", r"\frac{1}{2}", "40%", "0,1", "7 cm")]
    [True, True, True, False, False, False, False]
    """
    return plain_number(answer) is not None


def _keep_numeric(problems: Problems, *_: object) -> tuple[list[Problem], str]:
    kept = [problem for problem in problems if is_numeric(problem.answer)]
    return kept, f"numeric_only: {len(kept):,} of {len(problems):,} answers are plain numbers."


def grade_shown(problem: Problem, fmt: AnswerFormat | None = None) -> bool | None:
    r"""Grade the answer of a demonstration; None where it states none of its own.

    The answer is that of a whole response, which must be in its format, the column
    `demonstrated_answer`, or the last `\boxed{}` of the worked solution. A solution without one is
    trained with the reference answer after it.

    >>> problem = Problem(id="a", question="1+1?", answer="2", source="a", solution=r"\boxed{3}")
    >>> grade_shown(problem)
    False
    """
    response = problem.response
    is_program = fmt is not None and fmt.contract.kind is AnswerKind.PROGRAM
    if response is None and problem.program is not None and is_program:
        response = program_block(problem.program)
    if response is not None:
        if fmt is None:
            has_answer_tag = "<answer>" in response
            fmt = FORMATS["r1-zero" if has_answer_tag else "question-only"]
        if not grade(response, problem.answer, fmt.contract).correct:
            return False
        return format_holds(response, fmt)
    if "demonstrated_answer" in problem.columns:
        boxed_answer = rf"\boxed{{{problem.columns['demonstrated_answer']}}}"
        return grade(boxed_answer, problem.answer, BOXED).correct
    if problem.solution is None:
        return False
    if r"\boxed" in problem.solution:
        return grade(problem.solution, problem.answer, BOXED).correct
    return None


# Solutions whose answer differs in its text are graded, at most so many of a set.
MOST_GRADED = 1000


def contradicting(problems: Problems) -> list[Problem]:
    r"""Find the problems whose demonstration states another answer than their reference.

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


def _keep_correct(
    problems: Problems, _: RowsConfig, fmt: AnswerFormat | None
) -> tuple[list[Problem], str]:
    kept = []
    without_answer = 0
    for problem in problems:
        is_correct = grade_shown(problem, fmt)
        if is_correct is None:
            without_answer += 1
        if is_correct is not False:
            kept.append(problem)
    correct = len(kept) - without_answer
    note = f"only_correct: {correct:,} of {len(problems):,} demonstrations are correct"
    if any(problem.response is not None for problem in problems):
        format_name = f"the format {fmt.name}" if fmt else "their format"
        note += f" and in {format_name}"
    if without_answer:
        note += f", {without_answer:,} more state no answer of their own and show the reference"
    return kept, f"{note}."


def _keep_unique(problems: Problems, config: RowsConfig, *_: object) -> tuple[list[Problem], str]:
    limit = int(config.unique)
    by_problem = config.unique_by == "problem"
    keys: list[str | tuple[str | None, ...]] = []
    for problem in problems:
        if by_problem:
            keys.append(question_words(problem.question))
        else:
            keys.append((problem.question, problem.answer, *problem.demonstration))
    different = list(dict.fromkeys(keys))
    chosen = set(different[:limit])
    kept = []
    for problem, key in zip(problems, keys, strict=True):
        if key in chosen:
            kept.append(problem)
            if not by_problem:  # its repetitions are left out
                chosen.discard(key)
    noun = "problems" if by_problem else "rows"
    count = min(limit, len(different))
    note = (
        f"unique: {count:,} different {noun} of the {len(different):,} there are in "
        f"{len(problems):,} rows, {len(kept):,} rows used"
    )
    if count < limit:
        note += f"; {limit:,} were requested"
    return kept, f"{note}."


Filter = Callable[[Problems, RowsConfig, AnswerFormat | None], tuple[list[Problem], str]]
"""Returns the problems that stay, and a sentence about them."""

# Setting -> its filter, in the order in which filters are applied.
FILTERS: dict[str, Filter] = {
    "numeric_only": _keep_numeric,
    "only_correct": _keep_correct,
    "unique": _keep_unique,
}


def hold_out(
    full_set: ProblemSet, share: float, *, seed: int, part: str = "validation"
) -> tuple[ProblemSet, ProblemSet]:
    """Split a set into (train, held out), with about `share` of the problems held out.

    Problems with the same question stay together, on one side. The held-out problems are the first
    of all questions by a hash of the seed and their words: the same for equal seeds, whatever the
    order of the set, and nearly the same ones of a larger set.

    Args:
        full_set: all problems.
        share: the share of them to hold out.
        seed: the seed of the hash.
        part: the part of the data that they are held out for, `validation` or `test`; another part
            holds out other problems.

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
    questions = [question_words(problem.question) for problem in full_set.problems]
    row_counts = Counter(questions)

    def rank(question: str) -> bytes:
        return sha256(f"grouper/{part}/{seed}/{question}".encode()).digest()

    target = round(share * len(full_set))
    count = 0
    held_out_questions = set()
    for question in sorted(row_counts, key=rank):
        if count >= target:
            break
        held_out_questions.add(question)
        count += row_counts[question]
    train = []
    held_out = []
    for problem, question in zip(full_set.problems, questions, strict=True):
        if question in held_out_questions:
            held_out.append(problem)
        else:
            train.append(problem)
    if not train or not held_out:
        raise DataError(
            f"{share:g} of {len(full_set)} problems leaves one side empty",
            where=f"data.{part}_share",
            fix="Use more problems or another share.",
        )
    train_set = subset_of(
        full_set, train, note=f"{part}_share: {len(held_out):,} problems are held out."
    )
    # Notes and unusable rows belong to the other side.
    held_out_set = subset_of(
        replace(full_set, notes=(), quarantined=()),
        held_out,
        note=f"held out of {full_set.name}: {len(held_out):,} of {len(full_set):,} problems.",
        name=f"{full_set.name} (held out)",
    )
    return train_set, held_out_set


def without(trained: ProblemSet, held_out: ProblemSet, *, part: str = "validation") -> ProblemSet:
    """Leave out the problems of `trained` whose question is held out.

    Args:
        trained: the problems for training.
        held_out: the held-out problems.
        part: the part of the data that they are held out for.

    Raises:
        DataError: none is left.
    """
    held_out_questions = {question_words(problem.question) for problem in held_out.problems}
    kept = [p for p in trained.problems if question_words(p.question) not in held_out_questions]
    if len(kept) == len(trained):
        return trained
    if not kept:
        raise DataError(
            f"every problem of it is held out for {part}",
            where=trained.name,
            fix=f"Lower data.{part}_share.",
        )
    count = len(trained) - len(kept)
    return subset_of(trained, kept, note=f"{part}_share: {count:,} held-out rows left out.")


def mix(members: Sequence[tuple[ProblemSet, float]], *, seed: int) -> ProblemSet:
    """Mix sets by weight, using no problem twice, in a seeded order.

    The member that runs out first, for its weight, sets the size; of the others a random part is
    taken. Ids that two members share get the member's position in front (`2/...`).

    Args:
        members: pairs of set and weight.
        seed: the seed of the choice and the order.

    Raises:
        DataError: a member is too small for its weight.
    """
    rng = np.random.default_rng([seed, len(members)])
    size = min(len(problems) / weight for problems, weight in members)
    id_uses = Counter(problem.id for problems, _ in members for problem in problems.problems)
    chosen: list[Problem] = []
    quarantined = []
    notes = []
    shares = []
    left_out = 0
    for position, (problems, weight) in enumerate(members, start=1):
        count = round(size * weight)
        if count == 0:
            raise DataError(
                f"{problems.name} would give no problem at this weight",
                where="data.mixture",
                fix="Raise its weight, or give the others more problems.",
            )
        rows = rng.permutation(len(problems))[:count].tolist()
        for row in sorted(rows):
            problem = problems.problems[row]
            if id_uses[problem.id] > 1:
                problem = replace(problem, id=f"{position}/{problem.id}")
            chosen.append(problem)
        for invalid in problems.quarantined:
            reason = f"{problems.name}: {invalid.reason}"
            quarantined.append(Quarantined(row=invalid.row, reason=reason))
        notes += [f"{problems.name}: {note}" for note in problems.notes]
        shares.append(f"{count:,} of the {len(problems):,} in {problems.name}")
        left_out += problems.left_out + len(problems) - count
    mixed = [chosen[position] for position in rng.permutation(len(chosen)).tolist()]
    require_distinct_ids(mixed, where="data.mixture")
    notes.append(f"mixture: {', '.join(shares)}.")
    return ProblemSet(
        name="+".join(problems.name for problems, _ in members),
        problems=tuple(mixed),
        quarantined=tuple(quarantined),
        notes=tuple(notes),
        left_out=left_out,
    )
