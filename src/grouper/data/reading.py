"""Rows as dicts, one after another: from local JSONL, JSON, CSV and Parquet, and from the Hub."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from grouper.data.sources import SOURCES, Row
from grouper.errors import DataError, counted, did_you_mean, nearest

Item = TypeVar("Item")

# In a folder that `save_to_disk` of `datasets` wrote: its data lie in `data-*.arrow`.
_SAVED = "state.json"


def source_named(name: str) -> dict[str, Any]:
    """The settings of a source, as a recipe would have them.

    A local file or training split whose first row has a prompt, as one text, and a response or a
    completion is `prompt-response`; what cannot be read is a `file`, and loading it will say why.

    Args:
        name: of a source, of a set on the Hub, or a path.

    >>> source_named("openai/gsm8k"), source_named("./mine.jsonl")
    ({'source': 'gsm8k'}, {'source': 'file', 'path': './mine.jsonl'})
    >>> source_named("somebody/problems")
    {'source': 'hub', 'path': 'somebody/problems'}
    """
    known = {source.hub: key for key, source in SOURCES.items() if source.hub}
    if name in SOURCES or name in known:
        return {"source": known.get(name, name)}
    if not (name.startswith((".", "/", "~")) or Path(name).exists()):
        return {"source": "hub", "path": name}
    first: Row = {}
    with contextlib.suppress(DataError):
        first = next(iterate_files(find_file(name, split="train", subset=None)), first)
    whole = isinstance(first.get("prompt"), str) and {"response", "completion"} & first.keys()
    return {"source": "prompt-response" if whole else "file", "path": name}


class UnreadableRow(dict[str, Any]):
    """A line that holds no row: an empty row with the reason, so that the line can be listed.

    Example: `UnreadableRow("not JSON: Expecting value")`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


def find_file(path: str | Path, *, split: str, subset: str | None) -> Sequence[Path]:
    """The files that hold `split` below `path`.

    A file is itself, whatever the split, and so is a `Dataset` that was saved to disk. In a folder
    they are, in the Hub's layouts, `<split>.<ext>`, `<split>-00000-of-00002.<ext>` or files inside
    `<split>/`, searched for in `<subset>/`, `<subset>/` under `data/`, the folder itself and
    `data/`.

    Raises:
        DataError: nothing there, naming what is.
    """
    path = Path(path).expanduser()
    if path.is_file():
        _reader(path)
        return [path]
    if not path.is_dir():
        siblings = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            "there is no such file or folder",
            where=str(path),
            fix=did_you_mean(str(path), siblings),
        )
    inner = [path / subset, path / "data" / subset] if subset else []
    places = [*inner, path, path / "data"]
    for place in places:
        if files := _split_files(place, split):
            return files
    found = {f.stem.split("-")[0] for place in places for f in _data_files(place)}
    saved = {file.parent.name for file in path.glob(f"*/{_SAVED}")}
    near = did_you_mean(split, sorted(saved or found))
    fix = near or f"Put {split}.jsonl, .json, .csv or .parquet there."
    below = [] if saved else [f.name for f in sorted(path.glob("[!.]*/")) if _split_files(f, split)]
    if below:
        fix = f"Its folders have one: add {' or '.join(below)} to the path, or give it as `subset`."
    raise DataError(f"there is no split {split!r} in this folder", where=str(path), fix=fix)


def read_files(files: Sequence[Path]) -> list[Row]:
    """All rows of `files`, in order.

    Raises:
        DataError: a file or a line of it cannot be read.
    """
    rows = list(iterate_files(files))
    bad = next((row for row in rows if isinstance(row, UnreadableRow)), None)
    if bad is not None:
        raise DataError(bad.reason, where=", ".join(map(str, files)))
    return rows


def iterate_files(files: Sequence[Path]) -> Iterator[Row]:
    """The rows of `files`, in order, a line or a block in memory at a time (.json: all of it).

    A line that cannot be read is an `UnreadableRow`.

    Raises:
        DataError: a file cannot be read.
    """
    for file in files:
        try:
            yield from _reader(file)(file)
        except (OSError, UnicodeDecodeError) as error:
            fix = "Save it as UTF-8." if isinstance(error, UnicodeDecodeError) else ""
            raise DataError(f"cannot be read ({error})", where=str(file), fix=fix) from error


def _read_jsonl(path: Path) -> Iterator[Row]:
    # Only \n ends a line: U+2028, at which splitlines breaks too, is legal inside a JSON string.
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:
                yield UnreadableRow(f"line {number} is not JSON: {_reason(error)}")
                continue
            what = f"line {number} is a {type(row).__name__}, not an object with named columns"
            yield row if isinstance(row, dict) else UnreadableRow(what)


def _read_json(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        if _reason(error) == "Extra data":  # an object a line, as `to_json` of `datasets` writes
            yield from _read_jsonl(path)
            return
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"not JSON: {_reason(error)}", where=f"{path}{line}") from error
    if not isinstance(rows, list):
        raise DataError("must be a list of objects, [{...}, {...}]", where=str(path))
    for row in rows:
        what = f"it is a {type(row).__name__}, not an object with named columns"
        yield row if isinstance(row, dict) else UnreadableRow(what)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises `ValueError`: the last of two equal names would win in silence."""
    names = [name for name, _ in pairs]
    if len({*names}) < len(names):
        raise ValueError(f"it has two values for {max(names, key=names.count)!r}")
    return dict(pairs)


def _reason(error: ValueError | RecursionError) -> str:
    """Python's reason for not reading a text as JSON."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error).split(";")[0]


def _read_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # a cell may hold a long solution
    with path.open(encoding="utf-8-sig", newline="") as file:
        # Spreadsheets of some countries put semicolons between cells.
        first = file.readline()
        mark = next((mark for mark in "\t,;" if mark in first), ",")
        file.seek(0)
        # Strictly: a quote that is never closed would swallow the rows after it in silence.
        rows = csv.DictReader(file, strict=True, delimiter=mark)
        try:
            # A row has one value for each name: the last of two columns would win in silence.
            names = rows.fieldnames or ()
            if twice := [name for name in names if name and names.count(name) > 1]:
                what = f"several columns are called {twice[0]!r}"
                raise DataError(what, where=str(path), fix="Rename all but one of them.")
            for row in rows:
                what = f"line {rows.line_num} has more cells than there are columns"
                yield UnreadableRow(what) if any(row.pop(None, ())) else row
        except csv.Error as error:
            what = f"not CSV after line {rows.line_num}: {error}"
            raise DataError(what, where=str(path), fix="Look for an unclosed quote.") from error


def _read_arrow(path: Path) -> Iterator[Row]:
    """Parquet, what `save_to_disk` of `datasets` writes, and Arrow's own files (Feather)."""
    from pyarrow import ArrowInvalid, ipc, parquet

    whole = path.suffix.lower() == ".parquet"
    try:
        with path.open("rb") as file:
            # A stream is also what is in a file of Arrow's, after the name of its format.
            file.seek(0 if file.read(6) != b"ARROW1" else 8)
            source: Any = parquet.ParquetFile(file) if whole else ipc.open_stream(file)
            for batch in source.iter_batches(batch_size=1024) if whole else source:
                yield from _as_written(batch.to_pylist(), batch.schema)
    except ArrowInvalid as error:
        what = f"not {'a Parquet file' if whole else 'an Arrow stream'} ({error})"
        raise DataError(what, where=str(path)) from error


def _as_written(rows: Iterable[Row], schema: Iterable[Any]) -> Iterator[Row]:
    """Rows of Arrow whose short floats have no more digits than they need.

    A float32 of 0.1 is 0.1 and not 0.10000000149011612, which no answer equals.
    """
    # Arrow calls 64 bits a double.
    short = {f.name: f.type.to_pandas_dtype() for f in schema if f.type in ("float", "halffloat")}
    for row in rows:
        known = [name for name in short if row[name] is not None]
        yield {**row, **{name: float(str(short[name](row[name]))) for name in known}}


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_arrow,
    ".arrow": _read_arrow,
}


def _reader(path: Path) -> Callable[[Path], Iterator[Row]]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"files of type {path.suffix or '(none)'} cannot be read",
            where=str(path),
            fix=f"Give one of {', '.join(READERS)}.",
        )
    return reader


def _data_files(folder: Path) -> list[Path]:
    """Those that are not hidden; none where there is no such folder."""
    return sorted(f for f in folder.glob("[!.]*") if f.is_file() and f.suffix.lower() in READERS)


def _split_files(folder: Path, split: str) -> Sequence[Path]:
    if (folder / _SAVED).is_file():
        split = "data"
    found = _data_files(folder)
    exact = [f for f in found if f.stem == split]
    files = exact or [f for f in found if f.stem.startswith(f"{split}-")]
    count = re.search(r"-of-(\d+)$", files[0].stem) if files else None
    parts = 1 if exact else int(count[1]) if count else len(files)
    if parts != len(files):
        what = f"the split has {counted(len(files), 'file')} and should have {parts:,}"
        fix = "Fetch those that are missing, remove another copy, or name one file as `path`."
        raise DataError(what, where=f"{folder}/{split}", fix=fix)
    inner = folder / split
    saved = (inner / _SAVED).is_file()
    return files or (_split_files(inner, split) if saved else _data_files(inner))


def read_hub(
    name: str,
    *,
    split: str,
    subset: str | None,
    streaming: bool = False,
    commits: list[str] | None = None,
) -> Iterator[Row]:
    """The rows of one split of a set on the Hub, or of a local folder that has its layout.

    Args:
        name: of the set.
        split: of its parts.
        subset: its configuration, where it has several.
        streaming: fetch rows as they are read, and keep nothing on this machine. Else the whole set
            is in the cache of `datasets` afterwards, and needs no network any more.
        commits: gets the commit that is read, where it is known.

    Raises:
        DataError: no such set, subset or split; gated; or offline and not in the cache.
    """
    import datasets

    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=streaming)
        if commits is not None:  # what the cache has of a set on the Hub lies in COMMIT/
            files = " ".join(file["filename"] for file in getattr(rows, "cache_files", ()))
            commits.extend(dict.fromkeys(re.findall(r"/([0-9a-f]{40})/", files)))
        # The columns of a stream are not always known.
        schema = getattr(getattr(rows, "features", None), "arrow_schema", ())
        yield from _as_written(map(dict, rows), schema)
    # Its own errors, those of the Hub's client, of the network, of file formats and of the disk
    # all come out of this one call, or of reading on.
    except Exception as error:  # the library has no common type of its own
        raise _explain(name, split, subset, error) from error


def _explain(name: str, split: str, subset: str | None, error: Exception) -> DataError:
    where = "/".join(["Hub set " + name, *([subset] if subset else []), split])
    text = " ".join(str(error).split()) or type(error).__name__
    lowered = text.lower()
    flags = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    fix = f"{_nearest(name)}Check the name, or give a local copy as `path`."
    offline = any(flag.upper() in ("1", "ON", "YES", "TRUE") for flag in flags)
    if "gated" in lowered or "401" in lowered or "403" in lowered:
        what = "this set is gated: its owner asks you to accept terms first"
        fix = "Accept them on the set's page, then run `hf auth login`."
    elif "split" in lowered and isinstance(error, ValueError):
        what, fix = f"there is no split {split!r}: {text}", ""
    elif "config" in lowered:
        what, fix = f"the subset is missing or wrong: {text}", ""
    elif offline or isinstance(error, ConnectionError) or "offline" in lowered:
        told = " (HF_HUB_OFFLINE is set)" if offline else ""
        what = f"this set is not on this machine, and the Hub cannot be reached{told}"
        fix = (
            f"{_nearest(name)}Read it once with a network (`grouper data prepare`). Without a "
            "network, give a local copy as `path`."
        )
    elif type(error).__name__ in ("DatasetNotFoundError", "RepositoryNotFoundError"):
        what = "there is no such set on the Hub, or it was renamed or is private"
    else:
        what = f"cannot be loaded: {text}"
    return DataError(what, where=where, fix=fix)


def _nearest(name: str) -> str:
    """A sentence naming the known set that was most likely meant, or nothing.

    >>> _nearest("gsm8k"), _nearest("open-r1/DAPO-Math-17k")
    ("Did you mean 'openai/gsm8k'? ", "Did you mean 'open-r1/DAPO-Math-17k-Processed'? ")
    >>> _nearest("openai/gsm8k"), _nearest("somebody/poems")
    ('', '')
    """
    known = [source.hub for source in SOURCES.values() if source.hub is not None]
    if name in known:
        return ""
    # Most names go wrong in one half: the owner is left out, or the set was renamed.
    keys = {key.lower(): hub for hub in known for key in (hub.partition("/")[2], hub)}
    for wanted in (name.rpartition("/")[2], name):
        if near := nearest(wanted.lower(), keys, cutoff=0.7):
            return f"Did you mean {keys[near]!r}? "
    return ""


def shuffled(items: Iterable[Item], *, seed: int, buffer: int) -> Iterator[Item]:
    """Every item once, each drawn at random from the `buffer` that were read before it left.

    >>> sorted(shuffled(range(20), seed=0, buffer=4)) == list(range(20))
    True
    """
    draw = np.random.default_rng(seed)
    held: list[Item] = []
    for item in items:
        if len(held) < buffer:
            held.append(item)
            continue
        place = int(draw.integers(buffer))
        yield held[place]
        held[place] = item
    yield from (held[place] for place in draw.permutation(len(held)).tolist())
