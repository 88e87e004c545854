"""Which column of a set holds which of our fields, and what it says as text."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from grouper.data.rows import Row
from grouper.data.sources import FIELDS, Fields, Source
from grouper.errors import DataError, did_you_mean, raise_all

Columns = Mapping[str, tuple[str, ...]]
"""Our field -> the set's columns; the first that is not empty in a row counts."""


def choose_columns(
    source: Source, named: Mapping[str, str], rows: Collection[Row], *, where: str
) -> dict[str, tuple[str, ...]]:
    """The columns that a recipe names, and for the other fields those the source knows.

    Args:
        source: whose names to look for.
        named: our field -> column, from the recipe.
        rows: some rows of the set.
        where: the set, for errors.

    Raises:
        DataError: every missing column.
    """
    present = {name for row in rows for name in row}
    problems = []
    chosen: dict[str, tuple[str, ...]] = {}
    for ours, theirs in named.items():
        if not _is_there(theirs, present):
            problems.append(
                DataError(
                    f"there is no column {theirs!r} for `{ours}`",
                    where=where,
                    fix=did_you_mean(theirs, present),
                )
            )
        chosen[ours] = (theirs,)
    taken = set(named.values())
    for ours, candidates in source.columns.items():
        found = tuple(n for n in candidates if _is_there(n, present) and n not in taken)
        if ours not in chosen and found:
            chosen[ours] = found
    if "question" not in chosen:
        problems.append(_missing("question", present, where))
    elif not {"answer", "solution", "response"} & chosen.keys():
        problems.append(_missing("answer", present, where))
    raise_all(problems)
    return chosen


def _is_there(column: str, present: Collection[str]) -> bool:
    return column in present or column.partition(".")[0] in present


def _missing(ours: str, present: set[str], where: str) -> DataError:
    return DataError(
        f"no column holds the {ours}",
        where=where,
        fix=f"Name it as `columns: {{{ours}: ...}}`. Columns: {', '.join(sorted(present))}.",
    )


def read_fields(row: Row, columns: Columns) -> Fields:
    """Our fields of one row. Raises `ValueError` for a column that is neither text nor number."""
    fields: Fields = dict.fromkeys(FIELDS)
    for ours, candidates in columns.items():
        values = (_text(_look_up(row, name), name) for name in candidates)
        fields[ours] = next((value for value in values if value is not None), None)
    return fields


def _look_up(row: Row, column: str) -> Any:
    """`reward_model.ground_truth` reaches into a nested column."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _text(value: Any, column: str) -> str | None:
    """Text as it is, numbers in their shortest form (145.0 is `145`), what is missing as None.

    pandas writes NaN for what is missing, and `nan` where it makes text of it.
    """
    if value is None or isinstance(value, str):
        if value and not value.isascii():
            _require_encodable(value, column)
        return None if value is None or value.strip() in _MISSING else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"column {column!r} holds a {type(value).__name__}, not text or a number")


_MISSING = {"", "nan", "NaN", "NAN"}


def _require_encodable(text: str, column: str) -> None:
    """Raise `ValueError` for half of a surrogate pair, which no tokenizer and no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"column {column!r} holds {text[error.start]!a}, half of a character"
        ) from error
