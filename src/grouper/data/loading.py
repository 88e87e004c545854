"""One data source of a recipe -> a `ProblemSet`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from grouper.config.schema import RowsConfig, SourceConfig
from grouper.data.arithmetic import arithmetic_options, generate
from grouper.data.columns import choose_columns, read_fields
from grouper.data.filters import apply_filters, is_numeric
from grouper.data.hub import read_hub, stream_hub
from grouper.data.mixing import mix
from grouper.data.prepared import CHOICES, find_prepared, problem_of
from grouper.data.problem_set import (
    ProblemSet,
    Quarantined,
    fingerprint_of,
    require_distinct_ids,
    subset_of,
)
from grouper.data.references import check_references
from grouper.data.rows import Row, UnreadableRow, find_file, iterate_files, read_files
from grouper.data.sources import FIELDS, SOURCES, Source
from grouper.data.streaming import SHUFFLE_BUFFER, window
from grouper.errors import ConfigError, DataError, did_you_mean, raise_all
from grouper.types import AnswerFormat, Problem

Item = TypeVar("Item")

_DEFAULTS = {name: field.default for name, field in RowsConfig.model_fields.items()}
LOOKED_AT = 1000
"""Rows whose columns are looked at."""
TRIED = 20
"""References of which at least one must be readable, or the wrong column is read."""


def load_problems(
    config: SourceConfig,
    *,
    seed: int,
    fmt: AnswerFormat | None = None,
    keep_unreadable: bool = False,
) -> ProblemSet:
    """Read, generate or download the problems that `config` describes.

    Args:
        config: the source (or mixture), where it lies, and which part of it to use.
        seed: the run's seed; only generated sources and mixtures use it.
        fmt: the prompt format of the run, by which `only_correct` judges whole responses.
        keep_unreadable: keep problems whose reference the grader cannot read, and say so in
            `notes`: an evaluation grades them by text alone, and measures the set as published.

    Returns:
        The problems in the source's order (or shuffled), `offset` and `limit` applied to rows,
        then its filters. Rows that cannot be used, and references the grader cannot read, are
        listed in `quarantined`; what the filters left out is reported in `notes`. Neither depends
        on how fast the machine is.

    Raises:
        ConfigError: unknown source or option.
        DataError: nothing to read, missing column or split, no usable row, repeated ids, or a
            filter that leaves nothing.
        GradingError: a reference could not be checked, see `Grader.read_reference`.
    """
    check_source(config, where="data")
    if not config.mixture:
        return _load_one(config, seed, fmt, keep_unreadable)
    members = [
        (_load_one(member, seed, fmt, keep_unreadable), member.weight) for member in config.mixture
    ]
    mixed = mix(members, seed=seed if config.shuffle is None else config.shuffle)
    end = None if config.limit is None else config.offset + config.limit
    part = mixed.problems[config.offset : end]
    if not part:
        raise DataError(
            f"the mixture has {len(mixed)} problems, none behind offset",
            where="data.offset",
            fix="Lower it.",
        )
    return apply_filters(subset_of(mixed, part, note=""), config, fmt)


def _load_one(
    config: RowsConfig, seed: int, fmt: AnswerFormat | None, keep_unreadable: bool
) -> ProblemSet:
    prepared = find_prepared(config)
    if prepared is None:
        return apply_filters(_load_source(config, seed, keep_unreadable), config, fmt)
    if prepared.applied:
        config = config.model_copy(update={name: _DEFAULTS[name] for name in CHOICES})
    # What was read and checked before is taken as it is.
    rows = (iterate_files if config.streaming else read_files)((prepared.file,))
    numbered = enumerate(rows) if prepared.applied else _part(_numbered(rows), config)
    problems = [problem_of(row, prepared, number) for number, row in numbered]
    return apply_filters(_finish(prepared.name, prepared.name, problems, ()), config, fmt)


def _load_source(config: RowsConfig, seed: int, keep_unreadable: bool) -> ProblemSet:
    source = SOURCES[config.source]
    if config.source == "arithmetic":
        split = _split(config, source)
        options = arithmetic_options(config.options, where=f"arithmetic/{split}")
        name = f"arithmetic/{split}"
        made = _part(generate(options, split=split, seed=seed), config)
        return _finish(name, name, made, ())
    split = _split(config, source)
    rows, label = _rows(config, source, split)
    name = f"{label}/{split}" if split else label
    few = rows[:LOOKED_AT] if isinstance(rows, Sequence) else list(islice(rows, LOOKED_AT))
    if not few:
        raise DataError(
            "there are no rows in it", where=config.path or name, fix="Check the path and split."
        )
    readable = [row for row in few if not isinstance(row, UnreadableRow)]
    if not readable:
        reasons = [row.reason for row in few if isinstance(row, UnreadableRow)]
        raise DataError(
            f"none of the first {len(few)} rows can be read: {reasons[0]}",
            where=config.path or name,
            fix="Save one JSON object per line, or name the file by its kind (.csv, .parquet).",
        )
    columns = choose_columns(source, config.columns, readable, where=name)
    if config.only_correct and "response" in columns and "answer" not in columns:
        raise DataError(
            "only_correct needs a reference answer to grade the responses by, and there is none",
            where=name,
            fix="Name its column as `columns: {answer: ...}`.",
        )
    layout = _Layout(source=source, columns=columns, label=label, name=name)
    # An iterator has given its first rows away already.
    whole = rows if isinstance(rows, Sequence) else chain(few, rows)
    return _read(_part(_numbered(whole), config), layout, config, keep_unreadable)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    source: Source
    columns: Mapping[str, tuple[str, ...]]
    label: str
    """What `Problem.source` and ids taken from an id column start with."""
    name: str
    """Label and split: what ids made of row numbers start with."""

    @property
    def where(self) -> str:
        """What is read and how, for errors."""
        kind = next(kind for kind, source in SOURCES.items() if source is self.source)
        return f"{self.name} (source: {kind})"


def check_source(config: RowsConfig, *, where: str) -> None:
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
    if config.path is None and source.hub is None and config.source not in MADE:
        what = "a Hub name" if config.source == "hub" else "a file or folder"
        problems.append(ConfigError(f"path is missing: give {what}", where=f"{where}.path"))
    if isinstance(config, SourceConfig):
        for number, member in enumerate(config.mixture):
            try:
                check_source(member, where=f"{where}.mixture.{number}")
            except ConfigError as error:
                problems.append(error)
    raise_all(problems)


MADE = ("arithmetic", "mixture")
"""Sources that lie nowhere."""


def _split(config: RowsConfig, source: Source) -> str:
    """A file that holds one split is that split, unless the recipe says otherwise."""
    if config.split is not None:
        return config.split
    if config.path is not None and config.source != "hub":
        path = Path(config.path).expanduser()
        if path.is_file():
            return path.stem if config.source != "file" else ""
    return source.splits[0]


def _rows(config: RowsConfig, source: Source, split: str) -> tuple[Iterable[Row], str]:
    """The rows (an iterator where they are streamed), and what problem ids start with."""
    subset = config.subset or source.subset
    rows: Iterable[Row]
    if config.source == "hub" or config.path is None:
        where = config.path if config.path is not None else source.hub
        assert where is not None, "check_source refuses a source without a place"
        rows = (stream_hub if config.streaming else read_hub)(where, split=split, subset=subset)
    else:
        where = config.path
        files = find_file(where, split=split, subset=subset)
        rows = iterate_files(files) if config.streaming else read_files(files, set_aside=True)
    label = config.source if config.source not in ("file", "hub") else Path(where).stem
    return rows, label


def _numbered(rows: Iterable[Row]) -> Iterable[tuple[int, Row]]:
    return list(enumerate(rows)) if isinstance(rows, Sequence) else enumerate(rows)


def _part(items: Iterable[Item], config: RowsConfig) -> Sequence[Item]:
    if not isinstance(items, Sequence):
        assert config.limit is not None, "the recipe refuses a stream without end"
        return window(
            items,
            offset=config.offset,
            limit=config.limit,
            shuffle=config.shuffle,
            buffer=SHUFFLE_BUFFER,
        )
    if config.shuffle is not None:
        order = np.random.default_rng(config.shuffle).permutation(len(items)).tolist()
        items = [items[i] for i in order]
    end = None if config.limit is None else config.offset + config.limit
    return items[config.offset : end]


def _read(
    rows: Sequence[tuple[int, Row]], layout: _Layout, config: RowsConfig, keep_unreadable: bool
) -> ProblemSet:
    """Rows -> problems; references that need a worker are checked together, at the end."""
    read: list[tuple[int, Problem]] = []
    quarantined = []
    for number, row in rows:
        try:
            read.append((number, _problem(row, number, layout)))
        except ValueError as error:
            quarantined.append(Quarantined(row=number, reason=str(error)))
    # What `numeric_only` will leave out needs no check.
    asked = [p.answer for _, p in read if not config.numeric_only or is_numeric(p.answer)]
    reasons = _reasons(asked, layout)
    problems = []
    unread = 0
    for number, problem in read:
        reason = reasons.get(problem.answer)
        unread += reason is not None
        if reason is None or keep_unreadable:
            problems.append(problem)
        else:
            said = f"the reference {problem.answer!r} cannot be graded: {reason}"
            quarantined.append(Quarantined(row=number, reason=said))
    found = _finish(layout.where, layout.name, problems, sorted(quarantined, key=lambda q: q.row))
    note = (
        f"{unread:,} of {len(problems):,} references cannot be read as mathematics; their problems "
        "are kept, graded by text alone and counted apart."
    )
    return replace(found, notes=(*found.notes, note)) if unread and keep_unreadable else found


def _reasons(answers: Sequence[str], layout: _Layout) -> dict[str, str | None]:
    """Why each reference cannot be read, or None; a few first, which says most of a wrong column.

    Raises:
        DataError: the first `TRIED` cannot be read.
    """
    first = answers[:TRIED]
    reasons = check_references(first)
    if len(first) == TRIED and all(reasons.values()):
        shown = first[0] if len(first[0]) <= 80 else f"{first[0][:80]}..."
        raise DataError(
            f"none of the first {TRIED} reference answers can be read as mathematics; the first is "
            f"{shown!r}: {reasons[first[0]]}",
            where=layout.where,
            fix="Name the column that holds the answer alone as `columns: {answer: ...}`, or the "
            "source that the set is of (`grouper data list`).",
        )
    return reasons | check_references(answers[TRIED:])


def _problem(row: Row, number: int, layout: _Layout) -> Problem:
    """Raises `ValueError` with the reason when the row cannot be used."""
    if isinstance(row, UnreadableRow):
        raise ValueError(row.reason)  # noqa: TRY004 - what `_read` sets a row aside for
    fields = read_fields(row, layout.columns)
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
        response=fields["response"],
        prompt=fields.get("prompt"),
        subject=fields["subject"],
        level=fields["level"],
        columns=row,
    )


def _finish(
    where: str, name: str, problems: Sequence[Problem], quarantined: Sequence[Quarantined]
) -> ProblemSet:
    if not problems:
        example = f" Row {quarantined[0].row}: {quarantined[0].reason}." if quarantined else ""
        raise DataError(
            f"no problem is left of {len(quarantined)} rows.{example}",
            where=where,
            fix="Check offset, limit and columns.",
        )
    require_distinct_ids(problems, where=name)
    verbatim = sum(problem.prompt is not None for problem in problems)
    note = (
        f"{verbatim:,} of {len(problems):,} prompts follow no known template: they are used word "
        "for word, whatever prompt.format says."
    )
    return ProblemSet(
        name=name,
        problems=tuple(problems),
        fingerprint=fingerprint_of(problems),
        quarantined=tuple(quarantined),
        notes=(note,) if verbatim else (),
    )
