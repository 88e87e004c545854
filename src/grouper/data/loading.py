"""Loading of a recipe's data source as a `ProblemSet`."""

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

# Number of first rows whose columns are examined.
LOOKED_AT = 1000
# Number of first references of which one must be readable, or the wrong column is read.
TRIED = 20
# Rows of a stream that shuffling keeps in memory to sample from.
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
        listed in `quarantined`; `notes` count the problems that the filters left out. Neither
        depends on the speed of the machine.

    Raises:
        ConfigError: unknown source or option.
        DataError: nothing to read, missing column or split, no usable row, repeated ids, or a
            filter that leaves nothing.
        GradingError: a reference could not be checked, see `Grader.read_reference`.
    """
    check_source(config, where="data")
    if not config.mixture:
        return _load_one(config, seed, fmt, keep_unreadable)
    members = []
    for member in config.mixture:
        problems = _load_one(member, seed, fmt, keep_unreadable)
        members.append((problems, member.weight))
    mixed = mix(members, seed=seed if config.shuffle is None else config.shuffle)
    chosen = _window(mixed.problems, config)
    if not chosen:
        message = f"the mixture has {len(mixed)} problems, none after offset"
        raise DataError(message, where="data.offset", fix="Lower it.")
    return apply_filters(subset_of(mixed, chosen, note=""), config, fmt)


def _load_one(
    config: RowsConfig, seed: int, fmt: AnswerFormat | None, keep_unreadable: bool
) -> ProblemSet:
    """Load one source that is no mixture."""
    split = _split(config)
    if config.source not in GENERATED:
        problem_set = _read(config, split, keep_unreadable)
        return apply_filters(problem_set, config, fmt)
    source = GENERATED[config.source]
    name = f"{config.source}/{split}"
    options = source.read_options(config.options, where=name)
    problems = source.generate(options, split=split, seed=seed)
    problem_set = _problem_set(name, name, _choose(problems, config), [])
    return apply_filters(problem_set, config, fmt)


def check_source(config: RowsConfig, *, where: str) -> None:
    """Check a source as far as no data are needed.

    Raises:
        ConfigError: every problem, in one message.
    """
    require_known("data source", config.source, SOURCES, where=f"{where}.source")
    source = SOURCES[config.source]
    errors = [
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
            message = f"{config.source} is generated and reads no file"
            fix = "For a file, set source=file."
            errors.append(ConfigError(message, where=f"{where}.path", fix=fix))
    elif config.options:
        message = f"the source {config.source} has no options"
        errors.append(ConfigError(message, where=f"{where}.options"))
    if not config.path and source.hub is None and config.source not in MADE:
        noun = "a Hub name" if config.source == "hub" else "a file or folder"
        errors.append(ConfigError(f"path is missing: give {noun}", where=f"{where}.path"))
    if isinstance(config, SourceConfig):
        for number, member in enumerate(config.mixture):
            try:
                check_source(member, where=f"{where}.mixture.{number}")
            except ConfigError as error:
                errors.append(error)
    raise_all(errors)


def _split(config: RowsConfig) -> str:
    """Return the split to read: the recipe's, that of a single file, or the source's default."""
    if config.split is not None:
        return config.split
    path = Path(config.path or "").expanduser()
    if config.source != "hub" and path.is_file():
        return path.stem if config.source != "file" else ""
    return SOURCES[config.source].splits[0]


def _read(config: RowsConfig, split: str, keep_unreadable: bool) -> ProblemSet:
    """Read the problems of a file or a set on the Hub, before its filters."""
    commits: list[str] = []
    label, rows = _rows(config, split, commits)
    name = f"{label}/{split}" if split else label
    where = f"{name} (source: {config.source})"
    first_rows = list(islice(rows, LOOKED_AT))
    columns = _columns(config, first_rows, name)
    numbered_problems: list[tuple[int, Problem]] = []
    invalid = []
    for number, row in _choose(enumerate(chain(first_rows, rows)), config):
        try:
            fields = _fields(row, columns, SOURCES[config.source])
        except ValueError as error:
            invalid.append(Quarantined(row=number, reason=str(error)))
            continue
        row_id = fields.pop("id")
        problem_id = f"{label}/{row_id}" if row_id else f"{name}/{number}"
        problem = Problem(id=problem_id, source=label, columns=row, **fields)
        numbered_problems.append((number, problem))

    answers = [problem.answer for _, problem in numbered_problems]
    if config.numeric_only:
        # The filter will leave out the others, so they need no check.
        answers = [answer for answer in answers if is_numeric(answer)]
    reasons = _reasons(answers, where)
    problems = []
    unreadable = 0
    for number, problem in numbered_problems:
        reason = reasons.get(problem.answer)
        if reason is not None and not keep_unreadable:
            reason = f"the reference {_shown(problem.answer)} cannot be graded: {reason}"
            invalid.append(Quarantined(row=number, reason=reason))
            continue
        problems.append(problem)
        if reason is not None:
            unreadable += 1

    invalid.sort(key=lambda quarantined: quarantined.row)
    problem_set = _problem_set(where, name, problems, invalid)
    if len(commits) == 1:
        problem_set = replace(problem_set, revision=commits[0])
    if unreadable:
        note = (
            f"{unreadable:,} of {len(problem_set):,} references cannot be read as mathematics; "
            "their problems are kept, graded by text alone and counted apart."
        )
        problem_set = replace(problem_set, notes=(*problem_set.notes, note))
    return problem_set


def _rows(config: RowsConfig, split: str, commits: list[str]) -> tuple[str, Iterator[Row]]:
    """Return the prefix of problem ids, and the rows; `commits` as in `read_hub`."""
    source = SOURCES[config.source]
    streaming = config.streaming
    subset = config.subset or source.subset
    where = config.path or source.hub
    assert where is not None, "check_source refuses a source without a place"
    label = Path(where).stem if config.source in ("file", "hub") else config.source
    if config.source == "hub" or config.path is None:
        rows = read_hub(where, split=split, subset=subset, streaming=streaming, commits=commits)
        return label, rows
    files = find_file(where, split=split, subset=subset)
    for file in files:
        if streaming and file.suffix.lower() == ".json":
            raise DataError(
                f"{file.suffix} files cannot be streamed: they must be read as a whole",
                where=str(file),
                fix="Save it as .jsonl or .parquet, or leave out `streaming`.",
            )
    return label, iterate_files(files)


def _columns(config: RowsConfig, first_rows: Sequence[Row], name: str) -> Columns:
    """Choose the columns of each field by the first rows.

    Raises:
        DataError: no row can be read, or a column is missing.
    """
    if not first_rows:
        raise DataError(
            "there are no rows in it", where=config.path or name, fix="Check the path and split."
        )
    readable = [row for row in first_rows if not isinstance(row, UnreadableRow)]
    if not readable:
        reason = next(row.reason for row in first_rows if isinstance(row, UnreadableRow))
        raise DataError(
            f"none of the first {len(first_rows)} rows can be read: {reason}",
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


def _choose(items: Iterable[Item], config: RowsConfig) -> list[Item]:
    """Choose rows by `shuffle`, `offset` and `limit`."""
    if config.shuffle is not None and config.streaming:
        items = shuffled(items, seed=config.shuffle, buffer=SHUFFLE_BUFFER)
    elif config.shuffle is not None:
        items = list(items)
        order = np.random.default_rng(config.shuffle).permutation(len(items)).tolist()
        items = [items[i] for i in order]
    return _window(items, config)


def _window(items: Iterable[Item], config: RowsConfig) -> list[Item]:
    """Choose rows by `offset` and `limit`."""
    end = None if config.limit is None else config.offset + config.limit
    return list(islice(items, config.offset, end))


def _fields(row: Row, columns: Columns, source: Source) -> dict[str, Any]:
    """Read the fields of a problem, including the turns before its question.

    Raises:
        ValueError: the reason why the row cannot be used.
    """
    if isinstance(row, UnreadableRow):
        raise ValueError(row.reason)  # noqa: TRY004 - `_read` lists the rows that raise it
    row_with_question, earlier = with_question(row)
    for column in columns["question"]:
        # A turn that the recipe names has its own turns before it.
        turns = before_turn(row, column)
        if turns is not None:
            earlier = turns
            break
    fields = source.parse_row(read_fields(row_with_question, columns))
    answer = (fields["answer"] or "").strip()
    if not (fields["question"] or "").strip():
        raise ValueError("the question is empty")
    if not answer:
        raise ValueError("the answer is empty")
    return {**fields, "answer": answer, "earlier": earlier}


def _with_question(row: Row) -> Row:
    """Read the question out of a conversation; one that cannot be read is listed later."""
    try:
        row_with_question, _ = with_question(row)
    except ValueError:
        return row
    return row_with_question


def _reasons(answers: Sequence[str], where: str) -> dict[str, str | None]:
    """Return the reason why each reference cannot be read, or None.

    The first few are checked alone, since they are enough to notice a wrong column.

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
    """Quote an answer, shortened to 80 characters."""
    return repr(answer if len(answer) <= 80 else f"{answer[:80]}...")


def _problem_set(
    where: str, name: str, problems: Sequence[Problem], invalid: Sequence[Quarantined]
) -> ProblemSet:
    """Make a problem set.

    Raises:
        DataError: there are no problems, or two with one id.
    """
    if not problems:
        example = ""
        if invalid:
            example = f" Row {invalid[0].row}: {invalid[0].reason}."
        raise DataError(
            f"no problem is left of {len(invalid)} rows.{example}",
            where=where,
            fix="Check offset, limit and columns.",
        )
    require_distinct_ids(problems, where=name)
    notes = []
    verbatim = sum(problem.prompt is not None for problem in problems)
    if verbatim:
        notes.append(
            f"{verbatim:,} of {len(problems):,} prompts follow no known template: they are used "
            "word for word, whatever prompt.format says."
        )
    return ProblemSet(
        name=name,
        problems=tuple(problems),
        quarantined=tuple(invalid),
        notes=tuple(notes),
    )
