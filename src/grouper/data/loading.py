"""One data source of a recipe -> a `ProblemSet`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from grouper.config import SourceConfig
from grouper.data.arithmetic import arithmetic_options, generate
from grouper.data.problem_set import ProblemSet, Quarantined, fingerprint_of, require_distinct_ids
from grouper.data.rows import Row, find_file, read_files, read_hub
from grouper.data.sources import FIELDS, SOURCES, Fields, Source
from grouper.errors import ConfigError, DataError, did_you_mean, raise_all
from grouper.grading import check_reference
from grouper.types import Problem

__all__ = ["check_source", "load_problems"]

Item = TypeVar("Item")


def load_problems(config: SourceConfig, *, seed: int) -> ProblemSet:
    """Read, generate or download the problems that `config` describes.

    Args:
        config: the source, where it lies, and which part of it to use.
        seed: the run's seed; only generated sources use it.

    Returns:
        The problems in the source's order (or shuffled), `offset` and `limit` applied to rows.
        Rows that cannot be used, and references the grader cannot read, are listed in
        `quarantined`.

    Raises:
        ConfigError: unknown source or option.
        DataError: nothing to read, missing column or split, no usable row, repeated ids.
    """
    check_source(config, where="data")
    source = SOURCES[config.source]
    split = _split(config, source)
    if config.source == "arithmetic":
        options = arithmetic_options(config.options, where=f"arithmetic/{split}")
        name = f"arithmetic/{split}"
        made = _part(generate(options, split=split, seed=seed), config)
        return _finish(name, made, ())
    rows, label = _rows(config, source, split)
    name = f"{label}/{split}" if split else label
    layout = _Layout(
        source=source,
        columns=_columns(config, source, rows, where=name),
        label=label,
        name=name,
    )
    problems, quarantined = [], []
    for number, row in _part(list(enumerate(rows)), config):
        problem = _read_row(row, number, layout)
        if isinstance(problem, Problem):
            problems.append(problem)
        else:
            quarantined.append(problem)
    return _finish(name, problems, quarantined)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    source: Source
    columns: Mapping[str, str]
    label: str
    """What `Problem.source` and ids taken from an id column start with."""
    name: str
    """Label and split: what ids made of row numbers start with."""


def check_source(config: SourceConfig, *, where: str) -> None:
    """What can be said about `config` without reading it. Raises `ConfigError`."""
    source = SOURCES.get(config.source)
    if source is None:
        raise ConfigError(
            f"there is no data source {config.source!r}",
            where=f"{where}.source",
            fix=did_you_mean(config.source, SOURCES),
        )
    problems = [
        ConfigError(
            f"{name!r} is not a field of a problem",
            where=f"{where}.columns",
            fix=did_you_mean(name, FIELDS),
        )
        for name in config.columns
        if name not in (*FIELDS, *source.columns)
    ]
    if config.source == "arithmetic":
        arithmetic_options(config.options, where=where)
    elif config.options:
        problems.append(
            ConfigError(f"the source {config.source} has no options", where=f"{where}.options")
        )
    if config.path is None and source.hub is None and config.source != "arithmetic":
        what = "a Hub name" if config.source == "hub" else "a file or folder"
        problems.append(ConfigError(f"path is missing: give {what}", where=f"{where}.path"))
    raise_all(problems)


def _split(config: SourceConfig, source: Source) -> str:
    """A file that holds one split is that split, unless the recipe says otherwise."""
    if config.split is not None:
        return config.split
    if config.path is not None and config.source != "hub":
        path = Path(config.path).expanduser()
        if path.is_file():
            return path.stem if config.source != "file" else ""
    return source.splits[0]


def _rows(config: SourceConfig, source: Source, split: str) -> tuple[Sequence[Row], str]:
    """The rows, and the name of the set that problem ids start with."""
    if config.source == "hub" or config.path is None:
        hub = config.path if config.path is not None else source.hub
        assert hub is not None, "check_source refuses a source without a place"
        rows = read_hub(hub, split=split, subset=config.subset or source.subset)
        where = hub
    else:
        files = find_file(config.path, split=split, subset=config.subset or source.subset)
        rows = read_files(files)
        where = config.path
    if not rows:
        raise DataError("there are no rows in it", where=where, fix="Check the path and split.")
    label = config.source if config.source not in ("file", "hub") else Path(where).stem
    return rows, label


def _part(items: Sequence[Item], config: SourceConfig) -> Sequence[Item]:
    if config.shuffle is not None:
        order = np.random.default_rng(config.shuffle).permutation(len(items)).tolist()
        items = [items[i] for i in order]
    end = None if config.limit is None else config.offset + config.limit
    return items[config.offset : end]


def _columns(
    config: SourceConfig, source: Source, rows: Sequence[Row], *, where: str
) -> dict[str, str]:
    """Our field -> the set's column. Raises `DataError` for every missing column."""
    present = {name for row in rows[:1000] for name in row}
    problems = []
    chosen: dict[str, str] = {}
    for ours, theirs in config.columns.items():
        if theirs.split(".")[0] not in present and theirs not in present:
            problems.append(
                DataError(
                    f"there is no column {theirs!r} for `{ours}`",
                    where=where,
                    fix=did_you_mean(theirs, present),
                )
            )
        chosen[ours] = theirs
    taken = set(config.columns.values())
    for ours, candidates in source.columns.items():
        found = [name for name in candidates if name in present and name not in taken]
        if ours not in chosen and found:
            chosen[ours] = found[0]
    if "question" not in chosen:
        problems.append(_missing("question", present, where))
    elif "answer" not in chosen and "solution" not in chosen:
        problems.append(_missing("answer", present, where))
    raise_all(problems)
    return chosen


def _missing(ours: str, present: set[str], where: str) -> DataError:
    return DataError(
        f"no column holds the {ours}",
        where=where,
        fix=f"Name it as `columns: {{{ours}: ...}}`. Columns: {', '.join(sorted(present))}.",
    )


def _read_row(row: Row, number: int, layout: _Layout) -> Problem | Quarantined:
    try:
        problem = _problem(row, number, layout)
    except ValueError as error:
        return Quarantined(row=number, reason=str(error))
    reason = check_reference(problem.answer)
    if reason is not None:
        return Quarantined(
            row=number, reason=f"the reference {problem.answer!r} cannot be graded: {reason}"
        )
    return problem


def _problem(row: Row, number: int, layout: _Layout) -> Problem:
    """Raises `ValueError` with the reason when the row cannot be used."""
    fields: Fields = dict.fromkeys(FIELDS)
    for ours, theirs in layout.columns.items():
        fields[ours] = _text(_look_up(row, theirs), theirs)
    if layout.source.parse_row is not None:
        fields = layout.source.parse_row(fields)
    question, answer = fields["question"] or "", (fields["answer"] or "").strip()
    if not question.strip():
        raise ValueError("the question is empty")
    if not answer:
        raise ValueError("the answer is empty")
    return Problem(
        id=f"{layout.label}/{fields['id']}" if fields["id"] else f"{layout.name}/{number}",
        question=question,
        answer=answer,
        source=layout.label,
        solution=fields["solution"],
        subject=fields["subject"],
        level=fields["level"],
        columns=row,
    )


def _look_up(row: Row, column: str) -> Any:
    """`reward_model.ground_truth` reaches into a nested column."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _text(value: Any, column: str) -> str | None:
    """Text as it is, numbers in their shortest form (145.0 is `145`), empty as None."""
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"column {column!r} holds a {type(value).__name__}, not text or a number")


def _finish(
    name: str, problems: Sequence[Problem], quarantined: Sequence[Quarantined]
) -> ProblemSet:
    if not problems:
        example = f" Row {quarantined[0].row}: {quarantined[0].reason}." if quarantined else ""
        raise DataError(
            f"no problem is left of {len(quarantined)} rows.{example}",
            where=name,
            fix="Check offset, limit and columns.",
        )
    require_distinct_ids(problems, where=name)
    return ProblemSet(
        name=name,
        problems=tuple(problems),
        fingerprint=fingerprint_of(problems),
        quarantined=tuple(quarantined),
    )
