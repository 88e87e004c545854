"""What loading a data source gives: problems, and the rows that could not become one."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grouper.errors import DataError, RunFolderError
from grouper.files import write_atomic
from grouper.types import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A source row that is left out, and why.

    Example: `Quarantined(row=17, reason="the answer is empty")`.
    """

    row: int
    """Position in the source before `offset`, counted from 0."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """The problems of one source, in the source's order.

    Example: `ProblemSet(name="gsm8k/test", problems=(...), fingerprint="3f9a...")`.
    """

    name: str
    problems: tuple[Problem, ...]
    fingerprint: str
    """16 hex digits of a hash of everything in `problems`: equal contents, equal fingerprint."""
    quarantined: tuple[Quarantined, ...] = ()
    notes: tuple[str, ...] = ()
    """What its filters left out, a sentence each."""
    left_out: int = 0
    """Problems that could have been used, and that filters left out."""

    def __len__(self) -> int:
        return len(self.problems)

    @property
    def rows_read(self) -> int:
        """How many rows were read: used, left out by a filter, or not usable."""
        return len(self.problems) + self.left_out + len(self.quarantined)

    @property
    def quarantined_share(self) -> float:
        """Share of the rows read that could not be used."""
        return len(self.quarantined) / self.rows_read if self.rows_read else 0.0


def subset_of(
    whole: ProblemSet, problems: Sequence[Problem], *, note: str, name: str | None = None
) -> ProblemSet:
    """A set of some problems of `whole`, with one more note (if it says anything)."""
    return replace(
        whole,
        name=name or whole.name,
        problems=tuple(problems),
        fingerprint=fingerprint_of(problems),
        notes=(*whole.notes, *([note] if note else [])),
        left_out=whole.left_out + len(whole) - len(problems),
    )


def fingerprint_of(problems: Sequence[Problem]) -> str:
    """16 hex digits of the SHA-256 over every field of every problem, in order."""
    digest = hashlib.sha256()
    for p in problems:
        fields = [p.id, p.question, p.answer, p.solution, p.subject, p.level, dict(p.columns)]
        fields += [text for text in (p.response, p.prompt) if text is not None]
        digest.update(json.dumps(fields, sort_keys=True, default=repr).encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]


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
) -> dict[str, str]:
    """Write problem sets as JSONL, `<split>.jsonl` each, and `<split>.invalid.jsonl` beside it.

    A row is the source's, with our names for what was read from it, so that `source: file` gives
    the same problems; rows of whole responses stay as they were, for `source: prompt-response`.

    Args:
        folder: made if it is missing.
        sets: by split.
        overwrite: replace a file with other content.

    Returns:
        Split -> the source that reads it back.

    Raises:
        DataError: such a file is there already, or it cannot be written.
    """
    files, sources = {}, {}
    for split, problems in sets.items():
        whole = any(p.response is not None or p.prompt is not None for p in problems.problems)
        sources[split] = "prompt-response" if whole else "file"
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
    names = ("id", "question", "answer", "solution", "subject", "level")
    fields = {name: getattr(problem, name) for name in names}
    return {**problem.columns, **{name: text for name, text in fields.items() if text is not None}}
