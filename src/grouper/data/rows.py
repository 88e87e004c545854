"""Rows of a table as dicts: local JSONL, JSON, CSV and Parquet, and sets on the Hub."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grouper.errors import DataError, did_you_mean

__all__ = ["find_file", "read_files", "read_hub"]

Row = Mapping[str, Any]


def find_file(path: str | Path, *, split: str, subset: str | None) -> tuple[Path, ...]:
    """The files that hold `split` below `path`.

    A file is itself, whatever the split. In a folder they are, in the Hub's layouts,
    `<split>.<ext>`, `<split>-00000-of-00002.<ext>` or files inside `<split>/`, searched for in
    `<subset>/`, `<subset>/` under `data/`, the folder itself and `data/`.

    Raises:
        DataError: nothing there, naming what is.
    """
    path = Path(path).expanduser()
    if path.is_file():
        _reader(path)
        return (path,)
    if not path.is_dir():
        siblings = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            "there is no such file or folder",
            where=str(path),
            fix=did_you_mean(str(path), siblings),
        )
    places = [path, path / "data"]
    if subset:
        places = [path / subset, path / "data" / subset, *places]
    for place in places:
        files = _split_files(place, split)
        if files:
            return files
    found = sorted({_split_name(f) for place in places for f in _data_files(place)})
    raise DataError(
        f"there is no split {split!r} in this folder",
        where=str(path),
        fix=did_you_mean(split, found) or f"Put {split}.jsonl, .json, .csv or .parquet there.",
    )


def read_files(files: tuple[Path, ...]) -> list[Row]:
    """All rows of `files`, in order. Raises `DataError` for a file that cannot be read."""
    rows: list[Row] = []
    for file in files:
        try:
            rows.extend(_reader(file)(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"cannot be read ({error})", where=str(file)) from error
    return rows


def read_hub(name: str, *, split: str, subset: str | None) -> list[Row]:
    """All rows of one split of a set on the Hub, or of a local folder that has its layout.

    Uses the `datasets` cache, so a set that was read once needs no network.

    Raises:
        DataError: no such set, subset or split; gated; or offline and not in the cache.
    """
    import datasets

    try:
        table = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise _explain_hub(name, split, subset, error) from error
    return [dict(row) for row in table]


def _explain_hub(name: str, split: str, subset: str | None, error: Exception) -> DataError:
    where = "/".join(["Hub set " + name, *([subset] if subset else []), split])
    text = " ".join(str(error).split())
    lowered = text.lower()
    if "gated" in lowered or "401" in lowered or "403" in lowered:
        return DataError(
            "this set is gated: its owner asks you to accept terms first",
            where=where,
            fix="Accept them on the set's page, then run `hf auth login`.",
        )
    if "split" in lowered and isinstance(error, ValueError):
        return DataError(f"there is no split {split!r}: {text}", where=where)
    if "builderconfig" in lowered or "config" in lowered:
        return DataError(f"the subset is missing or wrong: {text}", where=where)
    return DataError(
        f"cannot be loaded: {text}",
        where=where,
        fix="Check the name. Without a network, give a local copy as `path`.",
    )


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    # Not splitlines: that also breaks at U+2028, which is legal inside a JSON string.
    for number, line in enumerate(path.read_text("utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"not JSON: {error.msg}", where=f"{path}, line {number}") from error
        rows.append(_as_row(row, f"{path}, line {number}"))
    return rows


def _read_json(path: Path) -> list[Row]:
    try:
        rows = json.loads(path.read_text("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg}", where=f"{path}, line {error.lineno}") from error
    if not isinstance(rows, list):
        raise DataError("must be a list of objects", where=str(path))
    return [_as_row(row, f"{path}, row {i}") for i, row in enumerate(rows)]


def _read_csv(path: Path) -> list[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [
            {name: value for name, value in row.items() if name is not None}
            for row in csv.DictReader(file)
        ]


def _read_parquet(path: Path) -> list[Row]:
    from pyarrow import ArrowInvalid, parquet

    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise DataError(f"not a Parquet file ({error})", where=str(path)) from error
    return rows


def _as_row(row: Any, where: str) -> Row:
    if isinstance(row, dict):
        return row
    raise DataError(f"is a {type(row).__name__}, not an object with named columns", where=where)


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _reader(path: Path) -> Callable[[Path], list[Row]]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"files of type {path.suffix or '(none)'} cannot be read",
            where=str(path),
            fix=f"Give one of {', '.join(READERS)}.",
        )
    return reader


def _data_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(f for f in folder.iterdir() if f.is_file() and f.suffix.lower() in READERS)


def _split_name(file: Path) -> str:
    """`train` of `train.jsonl` and of `train-00000-of-00002.parquet`."""
    return file.stem.split("-")[0]


def _split_files(folder: Path, split: str) -> tuple[Path, ...]:
    files = _data_files(folder)
    exact = [f for f in files if f.stem == split]
    sharded = [f for f in files if f.stem.startswith(f"{split}-")]
    return tuple(exact[:1] or sharded or _data_files(folder / split))
