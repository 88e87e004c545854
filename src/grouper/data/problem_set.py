"""What loading a data source gives: problems, and the rows that could not become one."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grouper.errors import DataError
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
