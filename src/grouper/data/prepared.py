"""A prepared folder: problems read, filtered and checked once, ready for any machine.

    <folder>/train.jsonl        one problem a line, all its fields and the source row's columns
    <folder>/quarantine.jsonl   the rows that could not be used: set, row, reason
    <folder>/manifest.json      written last: fingerprints, counts, and how each set was made

A recipe names the folder as `path`, with any `source`; the problems are then exactly those that
were prepared, ids and fingerprint included, and nothing else is read or downloaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grouper.config.schema import RowsConfig
from grouper.data.problem_set import ProblemSet
from grouper.data.rows import Row
from grouper.errors import DataError, did_you_mean
from grouper.types import Problem

MANIFEST = "manifest.json"
FORMAT = 1
CHOICES = ("shuffle", "offset", "limit", "numeric_only", "only_correct", "unique", "unique_by")
"""Settings that choose rows. Repeated in a recipe they were meant once, not twice."""
_FIELDS = tuple(f.name for f in dataclasses.fields(Problem) if f.name != "columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSplit:
    """One set of a prepared folder."""

    file: Path
    name: str
    """Of the set it was made from: `gsm8k/train`."""
    applied: bool
    """Whether the choice of rows that a recipe now asks for is the one it was made with."""


def write_prepared(
    folder: Path, sets: Mapping[str, tuple[RowsConfig, ProblemSet]], *, overwrite: bool = False
) -> dict[str, Any]:
    """Write problem sets to `folder`, beside those that are prepared there; returns the manifest.

    Args:
        folder: made if it is missing.
        sets: name of the split -> how it was read, and what.
        overwrite: replace a split of the same name whose problems differ.

    Raises:
        DataError: the folder holds something else, or such a split; it cannot be written.
    """
    known = read_manifest(folder) or {"format": FORMAT, "sets": {}}
    if MANIFEST not in _names(folder) and _names(folder):
        raise DataError(
            "this folder holds something else",
            where=str(folder),
            fix="Give a new one, or one that `grouper data prepare` has written.",
        )
    for split, (_, problems) in sets.items():
        there = known["sets"].get(split)
        if there and there["fingerprint"] != problems.fingerprint and not overwrite:
            raise DataError(
                f"another {split!r} is prepared here (fingerprint {there['fingerprint']}, now "
                f"{problems.fingerprint})",
                where=str(folder),
                fix="Add --overwrite, or choose another folder.",
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, (config, problems) in sets.items():
            data = "".join(_line(_row_of(p)) for p in problems.problems).encode()
            _replace(folder / f"{split}.jsonl", data)
            known["sets"][split] = _entry(split, config, problems, data)
        lines = [
            _line({"set": split, **row})
            for split, entry in known["sets"].items()
            for row in entry["quarantined"]
        ]
        _replace(folder / "quarantine.jsonl", "".join(lines).encode())
        _replace(folder / MANIFEST, (json.dumps(known, indent=2) + "\n").encode())
    except OSError as error:
        raise DataError(f"cannot be written ({error})", where=str(folder)) from error
    return known


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a prepared folder; None where it is no such folder.

    Raises:
        DataError: it is damaged, or of a newer Grouper.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read ({error})", where=str(path)) from error
    if not isinstance(manifest, dict) or "sets" not in manifest:
        return None  # somebody else's manifest
    if manifest.get("format") != FORMAT:
        raise DataError(
            f"this folder is of format {manifest.get('format')}, not {FORMAT}",
            where=str(path),
            fix="Prepare it again with this version of Grouper.",
        )
    return manifest


def find_prepared(config: RowsConfig) -> PreparedSplit | None:
    """The prepared set that `config.path` names; None where that is no prepared folder.

    Raises:
        DataError: it has no such split, it was made from another source, or its file was changed.
    """
    folder = Path(config.path or "").expanduser()
    manifest = read_manifest(folder) if config.path is not None else None
    if manifest is None:
        return None
    sets: dict[str, Any] = manifest["sets"]
    split = config.split or ("train" if "train" in sets else next(iter(sets), "train"))
    if split not in sets:
        raise DataError(
            f"no split {split!r} is prepared here",
            where=str(folder),
            fix=did_you_mean(split, sets),
        )
    entry = sets[split]
    if config.source not in ("file", "hub", entry["source"]["source"]):
        raise DataError(
            f"this was prepared from {entry['source']['source']}, not from {config.source}",
            where=str(folder),
            fix="Write `source: file` to use it anyway.",
        )
    file = folder / entry["file"]
    _refuse_changed(file, entry, whole=not config.streaming)
    asked = config.model_dump(mode="json")
    applied = all(entry["source"].get(name) == asked[name] for name in CHOICES)
    return PreparedSplit(file=file, name=entry["name"], applied=applied)


def problem_of(row: Row, split: PreparedSplit, number: int) -> Problem:
    """The problem of one line. Raises `DataError` for a line that is none."""
    try:
        return Problem(columns=row["columns"], **{name: row.get(name) for name in _FIELDS})  # type: ignore[arg-type]  # checked by Problem
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"line {number + 1} is no prepared problem ({error})",
            where=str(split.file),
            fix="Prepare it again.",
        ) from error


def _row_of(problem: Problem) -> dict[str, Any]:
    fields = {name: getattr(problem, name) for name in _FIELDS}
    return {**fields, "columns": dict(problem.columns)}


def _line(row: Mapping[str, Any]) -> str:
    # As in the fingerprint: what JSON does not know is written as Python shows it.
    return json.dumps(row, default=repr) + "\n"


def _entry(split: str, config: RowsConfig, problems: ProblemSet, data: bytes) -> dict[str, Any]:
    return {
        "file": f"{split}.jsonl",
        "name": problems.name,
        "problems": len(problems),
        "fingerprint": problems.fingerprint,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "with_solutions": sum(p.solution is not None for p in problems.problems),
        "notes": list(problems.notes),
        "quarantined": [{"row": q.row, "reason": q.reason} for q in problems.quarantined],
        "source": config.model_dump(mode="json"),
    }


def _refuse_changed(file: Path, entry: Mapping[str, Any], *, whole: bool) -> None:
    try:
        same = file.stat().st_size == entry["bytes"]
        if same and whole:
            with file.open("rb") as opened:
                same = hashlib.file_digest(opened, "sha256").hexdigest() == entry["sha256"]
    except OSError as error:
        raise DataError(f"cannot be read ({error})", where=str(file)) from error
    if not same:
        raise DataError(
            "this file was changed after it was prepared",
            where=str(file),
            fix="Prepare it again; or name the file itself as `path`, which is then read as it is.",
        )


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def _replace(path: Path, data: bytes) -> None:
    """Write a whole file or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
