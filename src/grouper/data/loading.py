"""One data source of a recipe -> a `ProblemSet`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from grouper.config.schema import RowsConfig, SourceConfig
from grouper.data.conversations import before_turn, with_question
from grouper.data.generated import GENERATED
from grouper.data.problems import (
    ProblemSet,
    Quarantined,
    apply_filters,
    is_numeric,
    mix,
    require_distinct_ids,
    subset_of,
)
from grouper.data.reading import UnreadableRow, find_file, iterate_files, read_hub, shuffled
from grouper.data.references import check_references
from grouper.data.sources import FIELDS, SOURCES, Columns, Row, Source, choose_columns, read_fields
from grouper.errors import ConfigError, DataError, did_you_mean, raise_all, require_known
from grouper.types import AnswerFormat, Problem

Item = TypeVar("Item")

# Rows whose columns are looked at.
LOOKED_AT = 1000
# References of which at least one must be readable, or the wrong column is read.
TRIED = 20
# Rows of a stream that are held in memory to draw from when shuffling.
SHUFFLE_BUFFER = 10_000
# Sources that are neither in a file nor on the Hub.
MADE = (*GENERATED, "mixture")


def load_problems(
    config: SourceConfig,
    *,
    seed: int,
    fmt: AnswerFormat | None = None,
    keep_unreadable: bool = False,
) -> ProblemSet:
    """Read, generate or download the problems that `config` describes.

    Args:
        config: the source (or mixture), where it is, and which part of it to use.
        seed: the run's seed; only generated sources and mixtures use it.
        fmt: the prompt format of the run, by which `only_correct` judges whole responses.
        keep_unreadable: keep problems whose reference the grader cannot read, with a note: an
            evaluation grades them by text alone, and measures the set as published.

    Returns:
        The problems in the source's order (or shuffled), `offset` and `limit` applied to rows,
        then its filters. Rows that cannot be used, and references the grader cannot read, are
        listed in `quarantined`; `notes` say what the filters left out. Neither depends on the
        speed of the machine.

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
    part = _window(mixed.problems, config)
    if not part:
        what = f"the mixture has {len(mixed)} problems, none after offset"
        raise DataError(what, where="data.offset", fix="Lower it.")
    return apply_filters(subset_of(mixed, part, note=""), config, fmt)


def _load_one(
    config: RowsConfig, seed: int, fmt: AnswerFormat | None, keep_unreadable: bool
) -> ProblemSet:
    split = _split(config)
    if config.source in GENERATED:
        source = GENERATED[config.source]
        name = f"{config.source}/{split}"
        options = source.read_options(config.options, where=name)
        problems = source.generate(options, split=split, seed=seed)
        found = _problem_set(name, name, _part(problems, config), [])
    else:
        found = _read(config, split, keep_unreadable)
    return apply_filters(found, config, fmt)


def check_source(config: RowsConfig, *, where: str) -> None:
    """Check what takes no reading. Raises `ConfigError` with every problem."""
    require_known("data source", config.source, SOURCES, where=f"{where}.source")
    source = SOURCES[config.source]
    problems = [
        ConfigError(
            f"{name!r} is not a field of a problem",
            where=f"{where}.columns",
            fix=did_you_mean(name, FIELDS),
        )
        for name in config.columns
        if name not in (*FIELDS, *source.columns)
    ]
    if config.source in GENERATED:
        GENERATED[config.source].read_options(config.options, where=where)
        if config.path is not None:
            what = f"{config.source} is generated and reads no file"
            fix = "For a file, set source=file."
            problems.append(ConfigError(what, where=f"{where}.path", fix=fix))
    elif config.options:
        what = f"the source {config.source} has no options"
        problems.append(ConfigError(what, where=f"{where}.options"))
    if not config.path and source.hub is None and config.source not in MADE:
        what = "a Hub name" if config.source == "hub" else "a file or folder"
        problems.append(ConfigError(f"path is missing: give {what}", where=f"{where}.path"))
    if isinstance(config, SourceConfig):
        for number, member in enumerate(config.mixture):
            try:
                check_source(member, where=f"{where}.mixture.{number}")
            except ConfigError as error:
                problems.append(error)
    raise_all(problems)


def _split(config: RowsConfig) -> str:
    """The split to read: the recipe's, that of a single file, or the source's default."""
    if config.split is not None:
        return config.split
    path = Path(config.path or "").expanduser()
    if config.source != "hub" and path.is_file():
        return path.stem if config.source != "file" else ""
    return SOURCES[config.source].splits[0]


def _read(config: RowsConfig, split: str, keep_unreadable: bool) -> ProblemSet:
    """The problems of a file or a set on the Hub, before its filters."""
    commits: list[str] = []
    label, rows = _rows(config, split, commits)
    name = f"{label}/{split}" if split else label
    where = f"{name} (source: {config.source})"
    first = list(islice(rows, LOOKED_AT))
    columns = _columns(config, first, name)
    read: list[tuple[int, Problem]] = []
    invalid = []
    for number, row in _part(enumerate(chain(first, rows)), config):
        try:
            fields = _fields(row, columns, SOURCES[config.source])
        except ValueError as error:
            invalid.append(Quarantined(row=number, reason=str(error)))
            continue
        own = fields.pop("id")
        made = f"{label}/{own}" if own else f"{name}/{number}"
        problem = Problem(id=made, source=label, columns=row, **fields)
        read.append((number, problem))
    # What `numeric_only` will leave out needs no check.
    answers = [p.answer for _, p in read if not config.numeric_only or is_numeric(p.answer)]
    reasons = _reasons(answers, where)
    problems = []
    for number, problem in read:
        reason = reasons.get(problem.answer)
        if reason is None or keep_unreadable:
            problems.append(problem)
        else:
            why = f"the reference {_shown(problem.answer)} cannot be graded: {reason}"
            invalid.append(Quarantined(row=number, reason=why))
    found = _problem_set(where, name, problems, sorted(invalid, key=lambda q: q.row))
    found = replace(found, revision=commits[0] if len(commits) == 1 else None)
    unread = sum(reasons.get(problem.answer) is not None for problem in problems)
    note = (
        f"{unread:,} of {len(found):,} references cannot be read as mathematics; their problems "
        "are kept, graded by text alone and counted apart."
    )
    return replace(found, notes=(*found.notes, note)) if unread else found


def _rows(config: RowsConfig, split: str, commits: list[str]) -> tuple[str, Iterator[Row]]:
    """What problem ids start with, and the rows; `commits` as in `read_hub`."""
    source, streaming = SOURCES[config.source], config.streaming
    subset, where = config.subset or source.subset, config.path or source.hub
    assert where is not None, "check_source refuses a source without a place"
    label = Path(where).stem if config.source in ("file", "hub") else config.source
    if config.source == "hub" or config.path is None:
        rows = read_hub(where, split=split, subset=subset, streaming=streaming, commits=commits)
        return label, rows
    files = find_file(where, split=split, subset=subset)
    whole = next((file for file in files if file.suffix.lower() == ".json"), None)
    if streaming and whole is not None:
        raise DataError(
            f"{whole.suffix} files cannot be streamed: they must be read as a whole",
            where=str(whole),
            fix="Save it as .jsonl or .parquet, or leave out `streaming`.",
        )
    return label, iterate_files(files)


def _columns(config: RowsConfig, first: Sequence[Row], name: str) -> Columns:
    """The columns of each field, by the first rows. Raises `DataError`: none can be read."""
    if not first:
        raise DataError(
            "there are no rows in it", where=config.path or name, fix="Check the path and split."
        )
    readable = [row for row in first if not isinstance(row, UnreadableRow)]
    if not readable:
        reason = next(row.reason for row in first if isinstance(row, UnreadableRow))
        raise DataError(
            f"none of the first {len(first)} rows can be read: {reason}",
            where=config.path or name,
            fix="Save one JSON object per line, or name the file by its kind (.csv, .parquet).",
        )
    readable = [_with_question(row) for row in readable]
    if config.source == "prompt-response" and isinstance(readable[0].get("prompt"), list):
        raise DataError(
            "its rows are conversations, and prompt-response reads whole prompts as text",
            where=name,
            fix="Set `source: file`: conversations are rendered by the model's chat template.",
        )
    columns = choose_columns(SOURCES[config.source], config.columns, readable, where=name)
    if config.only_correct and "response" in columns and "answer" not in columns:
        raise DataError(
            "only_correct needs a reference answer to grade the responses by, and there is none",
            where=name,
            fix="Name its column as `columns: {answer: ...}`.",
        )
    return columns


def _part(items: Iterable[Item], config: RowsConfig) -> list[Item]:
    """The rows that `shuffle`, `offset` and `limit` choose."""
    if config.shuffle is not None and config.streaming:
        items = shuffled(items, seed=config.shuffle, buffer=SHUFFLE_BUFFER)
    elif config.shuffle is not None:
        items = list(items)
        order = np.random.default_rng(config.shuffle).permutation(len(items)).tolist()
        items = [items[i] for i in order]
    return _window(items, config)


def _window(items: Iterable[Item], config: RowsConfig) -> list[Item]:
    end = None if config.limit is None else config.offset + config.limit
    return list(islice(items, config.offset, end))


def _fields(row: Row, columns: Columns, source: Source) -> dict[str, Any]:
    """Read the fields of a problem, the turns before its question among them.

    Raises:
        ValueError: the reason why the row cannot be used.
    """
    if isinstance(row, UnreadableRow):
        raise ValueError(row.reason)  # noqa: TRY004 - `_read` lists the rows that raise it
    read, earlier = with_question(row)
    for column in columns["question"]:
        # A turn that the recipe names has its own turns before it.
        turns = before_turn(row, column)
        if turns is not None:
            earlier = turns
            break
    fields = source.parse_row(read_fields(read, columns))
    answer = (fields["answer"] or "").strip()
    if not (fields["question"] or "").strip():
        raise ValueError("the question is empty")
    if not answer:
        raise ValueError("the answer is empty")
    return {**fields, "answer": answer, "earlier": earlier}


def _with_question(row: Row) -> Row:
    """As `with_question`; a conversation that cannot be read is as it was, and is listed later."""
    try:
        return with_question(row)[0]
    except ValueError:
        return row


def _reasons(answers: Sequence[str], where: str) -> dict[str, str | None]:
    """Why each reference cannot be read, or None; the first few are enough to see a wrong column.

    Raises:
        DataError: the first `TRIED` cannot be read.
    """
    first = answers[:TRIED]
    reasons = check_references(first)
    if len(first) == TRIED and all(reasons.values()):
        raise DataError(
            f"none of the first {TRIED} reference answers can be read as mathematics; the first is "
            f"{_shown(first[0])}: {reasons[first[0]]}",
            where=where,
            fix="Name the column that holds the answer alone as `columns: {answer: ...}`, or the "
            "source that the set is of (`grouper data list`).",
        )
    return reasons | check_references(answers[TRIED:])


def _shown(answer: str) -> str:
    return repr(answer if len(answer) <= 80 else f"{answer[:80]}...")


def _problem_set(
    where: str, name: str, problems: Sequence[Problem], invalid: Sequence[Quarantined]
) -> ProblemSet:
    if not problems:
        example = f" Row {invalid[0].row}: {invalid[0].reason}." if invalid else ""
        raise DataError(
            f"no problem is left of {len(invalid)} rows.{example}",
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
        quarantined=tuple(invalid),
        notes=(note,) if verbatim else (),
    )
