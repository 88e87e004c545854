"""Rows as dicts, one after another: from local JSONL, JSON, CSV and Parquet, and from the Hub."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from grouper.data.sources import SOURCES, Row
from grouper.errors import DataError, did_you_mean, nearest, plural

Item = TypeVar("Item")

# A file of each folder that `save_to_disk` of `datasets` wrote; its data are in `data-*.arrow`.
_SAVED = "state.json"

# Of a CSV file, by which its header and its first row are found: cells may hold line breaks.
_LINES_OF_TWO_ROWS = 1000


def source_named(name: str) -> dict[str, Any]:
    """Return the settings of a source, as a recipe would have them.

    A local file or training split whose first row has a prompt, as one text, and a response or a
    completion is `prompt-response`. One that cannot be read is a `file`: loading it reports the
    reason.

    Args:
        name: a source, a set on the Hub, or a path.

    >>> source_named("openai/gsm8k"), source_named("./mine.jsonl")
    ({'source': 'gsm8k'}, {'source': 'file', 'path': './mine.jsonl'})
    >>> source_named("somebody/problems")
    {'source': 'hub', 'path': 'somebody/problems'}
    """
    sources_by_hub_name = {source.hub: key for key, source in SOURCES.items() if source.hub}
    if name in SOURCES or name in sources_by_hub_name:
        return {"source": sources_by_hub_name.get(name, name)}
    if not (name.startswith((".", "/", "~")) or Path(name).exists()):
        return {"source": "hub", "path": name}
    first_row: Row = {}
    with contextlib.suppress(DataError):
        files = find_file(name, split="train", subset=None)
        first_row = next(iterate_files(files), first_row)
    has_response = "response" in first_row or "completion" in first_row
    if isinstance(first_row.get("prompt"), str) and has_response:
        return {"source": "prompt-response", "path": name}
    return {"source": "file", "path": name}


class UnreadableRow(dict[str, Any]):
    """An empty row in place of a line that holds no row, with the reason for the list of them.

    Example: `UnreadableRow("not JSON: Expecting value")`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


def find_file(path: str | Path, *, split: str, subset: str | None) -> Sequence[Path]:
    """Find the files that hold `split` below `path`.

    The path of a file gives that file, whatever the split, and so does a `Dataset` that was saved
    to disk. In a folder the files are, in the Hub's layouts, `<split>.<ext>`,
    `<split>-00000-of-00002.<ext>` or files inside `<split>/`, searched for in `<subset>/`,
    `<subset>/` under `data/`, the folder itself and `data/`.

    Raises:
        DataError: there is no such file; the message names the splits that there are.
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
    folders = [path, path / "data"]
    if subset:
        folders = [path / subset, path / "data" / subset, *folders]
    for folder in folders:
        files = _split_files(folder, split)
        if files:
            return files
    raise DataError(
        f"there is no split {split!r} in this folder",
        where=str(path),
        fix=_advice_on_missing_split(path, folders, split),
    )


def _advice_on_missing_split(path: Path, folders: Sequence[Path], split: str) -> str:
    """Write the advice for a folder without the split, by the splits that it has."""
    saved_splits = {file.parent.name for file in path.glob(f"*/{_SAVED}")}
    if not saved_splits:
        folders_with_split = [
            folder.name for folder in sorted(path.glob("[!.]*/")) if _split_files(folder, split)
        ]
        if folders_with_split:
            names = " or ".join(folders_with_split)
            return f"Its folders have one: add {names} to the path, or give it as `subset`."
    splits = {file.stem.split("-")[0] for folder in folders for file in _data_files(folder)}
    suggestion = did_you_mean(split, sorted(saved_splits or splits))
    return suggestion or f"Put {split}.jsonl, .json, .csv or .parquet there."


def read_files(files: Sequence[Path]) -> list[Row]:
    """Read all rows of `files`, in order.

    Raises:
        DataError: a file or a line of it cannot be read.
    """
    rows = list(iterate_files(files))
    for row in rows:
        if isinstance(row, UnreadableRow):
            raise DataError(row.reason, where=", ".join(map(str, files)))
    return rows


def iterate_files(files: Sequence[Path]) -> Iterator[Row]:
    """Yield the rows of `files`, in order, a line or a block in memory at a time (.json: all).

    A line that cannot be read is an `UnreadableRow`.

    Raises:
        DataError: a file cannot be read.
    """
    for file in files:
        try:
            read_rows = _reader(file)
            yield from read_rows(file)
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
                row = json.loads(line, object_pairs_hook=_json_object)
            except (ValueError, RecursionError) as error:
                yield UnreadableRow(f"line {number} is not JSON: {_json_reason(error)}")
                continue
            yield _row_or_unreadable(row, f"line {number}")


def _read_json(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=_json_object)
    except (ValueError, RecursionError) as error:
        # One object per line, as `to_json` of `datasets` writes.
        if _json_reason(error) == "Extra data":
            yield from _read_jsonl(path)
            return
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"not JSON: {_json_reason(error)}", where=f"{path}{line}") from error
    if not isinstance(rows, list):
        raise DataError("must be a list of objects, [{...}, {...}]", where=str(path))
    for row in rows:
        yield _row_or_unreadable(row, "it")


def _row_or_unreadable(row: Any, name: str) -> Row:
    """Return a JSON object as it is, and an unreadable row for any other value."""
    if isinstance(row, dict):
        return row
    return UnreadableRow(f"{name} is a {type(row).__name__}, not an object with named columns")


def _json_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON.

    Raises:
        ValueError: a name occurs twice. The last value would silently replace the first.
    """
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"it has two values for {max(names, key=names.count)!r}")
    return dict(pairs)


def _json_reason(error: ValueError | RecursionError) -> str:
    """Return Python's reason for not reading a text as JSON."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return str(error).split(";")[0]


def _delimiter_of(file: Iterable[str]) -> str:
    """Return what stands between the cells of a file.

    Spreadsheets of some countries put semicolons there. It is the first mark by which the header
    has several cells and the row after it as many or, where its last ones are missing, fewer.

    >>> _delimiter_of(["question;answer, final", "1+1?;2"])
    ';'
    """
    lines = list(itertools.islice(file, _LINES_OF_TWO_ROWS))
    marks_of_header = []
    for mark in "\t,;":
        # A cell in quotes may hold line breaks, so these are rows and not lines.
        rows = list(itertools.islice(csv.reader(lines, delimiter=mark), 2))
        if not rows or len(rows[0]) == 1:
            continue
        if len(rows) == 2 and 1 < len(rows[1]) <= len(rows[0]):
            return mark
        marks_of_header.append(mark)
    return marks_of_header[0] if marks_of_header else ","


def _read_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # a cell may hold a long solution
    with path.open(encoding="utf-8-sig", newline="") as file:
        delimiter = _delimiter_of(file)
        file.seek(0)
        # Strict, because a quote that is never closed would silently swallow the following rows.
        rows = csv.DictReader(file, strict=True, delimiter=delimiter)
        try:
            # A row has one value for each name: the last of two columns would silently win.
            names = rows.fieldnames or ()
            repeated_names = [name for name in names if name and names.count(name) > 1]
            if repeated_names:
                message = f"several columns are called {repeated_names[0]!r}"
                raise DataError(message, where=str(path), fix="Rename all but one of them.")
            for row in rows:
                # `DictReader` puts cells beyond the last column under None.
                extra_cells = row.pop(None, ())
                if any(extra_cells):
                    reason = f"line {rows.line_num} has more cells than there are columns"
                    yield UnreadableRow(reason)
                else:
                    yield row
        except csv.Error as error:
            message = f"not CSV after line {rows.line_num}: {error}"
            raise DataError(message, where=str(path), fix="Look for an unclosed quote.") from error


def _read_arrow(path: Path) -> Iterator[Row]:
    """Read Parquet, files that `save_to_disk` of `datasets` writes, and Arrow files (Feather)."""
    from pyarrow import ArrowInvalid, ipc, parquet

    is_parquet = path.suffix.lower() == ".parquet"
    try:
        with path.open("rb") as file:
            batches: Any
            if is_parquet:
                batches = parquet.ParquetFile(file).iter_batches(batch_size=1024)
            else:
                # An Arrow file holds a stream, too, after the name of its format.
                is_arrow_file = file.read(6) == b"ARROW1"
                file.seek(8 if is_arrow_file else 0)
                batches = ipc.open_stream(file)
            for batch in batches:
                yield from _shorten_floats(batch.to_pylist(), batch.schema)
    except ArrowInvalid as error:
        format_name = "a Parquet file" if is_parquet else "an Arrow stream"
        raise DataError(f"not {format_name} ({error})", where=str(path)) from error


def _shorten_floats(rows: Iterable[Row], schema: Iterable[Any]) -> Iterator[Row]:
    """Yield rows of Arrow whose short floats have no more digits than they need.

    A float32 of 0.1 is 0.1 and not 0.10000000149011612, which no answer equals.
    """
    # Arrow calls 64 bits a double.
    short_types = {
        field.name: field.type.to_pandas_dtype()
        for field in schema
        if field.type in ("float", "halffloat")
    }
    for row in rows:
        shortened = {}
        for name, short_type in short_types.items():
            if row[name] is not None:
                shortened[name] = float(str(short_type(row[name])))
        yield {**row, **shortened}


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
    """List the data files that are not hidden; none where there is no such folder."""
    files = [file for file in folder.glob("[!.]*") if file.is_file()]
    return sorted(file for file in files if file.suffix.lower() in READERS)


def _split_files(folder: Path, split: str) -> Sequence[Path]:
    """List the files of a split in one folder.

    Raises:
        DataError: a file of the split is missing, or there is one too many.
    """
    if (folder / _SAVED).is_file():
        split = "data"
    data_files = _data_files(folder)
    files = [file for file in data_files if file.stem == split]
    expected = 1
    if not files:
        files = [file for file in data_files if file.stem.startswith(f"{split}-")]
        expected = len(files)
        count = re.search(r"-of-(\d+)$", files[0].stem) if files else None
        if count is not None:
            expected = int(count[1])
    if not files:
        split_folder = folder / split
        if (split_folder / _SAVED).is_file():
            return _split_files(split_folder, split)
        return _data_files(split_folder)
    if len(files) != expected:
        message = f"the split has {plural(len(files), 'file')} and should have {expected:,}"
        fix = "Fetch those that are missing, remove another copy, or name one file as `path`."
        raise DataError(message, where=f"{folder}/{split}", fix=fix)
    return files


def read_hub(
    name: str,
    *,
    split: str,
    subset: str | None,
    streaming: bool = False,
    commits: list[str] | None = None,
) -> Iterator[Row]:
    """Yield the rows of one split of a set on the Hub, or of a local folder that has its layout.

    Args:
        name: the set.
        split: the split.
        subset: the set's configuration, where it has several.
        streaming: fetch rows as they are read, and keep nothing on this machine. Else the whole set
            is in the cache of `datasets` afterwards, and needs no network any more.
        commits: receives the commit that is read, where it is known.

    Raises:
        DataError: no such set, subset or split; gated; or offline and not in the cache.
    """
    import datasets

    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=streaming)
        if commits is not None:
            # The cache keeps the files of a set on the Hub in COMMIT/.
            files = " ".join(file["filename"] for file in getattr(rows, "cache_files", ()))
            commits.extend(dict.fromkeys(re.findall(r"/([0-9a-f]{40})/", files)))
        # The columns of a stream are not always known.
        schema = getattr(getattr(rows, "features", None), "arrow_schema", ())
        yield from _shorten_floats(map(dict, rows), schema)
    # The library's own errors, those of the Hub's client, of the network, of file formats and of
    # the disk all come out of this one call, or of reading on.
    except Exception as error:  # the library has no common type of its own
        raise _explain(name, split, subset, error) from error


# Words and statuses of the Hub for a set whose terms were not accepted; not a part of a revision.
_GATED = re.compile(r"\bgated|\b40[13]\b")


def _explain(name: str, split: str, subset: str | None, error: Exception) -> DataError:
    """Say in one message why a set on the Hub could not be read."""
    path = f"{name}/{subset}/{split}" if subset else f"{name}/{split}"
    text = " ".join(str(error).split()) or type(error).__name__
    lowered = text.lower()
    suggestion = _nearest(name)
    fix = f"{suggestion}Check the name, or give a local copy as `path`."
    offline = _is_offline()
    # The set's own name may hold such a word ("owner/set-401").
    if _GATED.search(lowered.replace(name.lower(), "")):
        message = "this set is gated: its owner asks you to accept terms first"
        fix = "Accept them on the set's page, then run `hf auth login`."
    elif "split" in lowered and isinstance(error, ValueError):
        message = f"there is no split {split!r}: {text}"
        fix = ""
    elif "config" in lowered:
        message = f"the subset is missing or wrong: {text}"
        fix = ""
    elif offline or isinstance(error, ConnectionError) or "offline" in lowered:
        cause = " (HF_HUB_OFFLINE is set)" if offline else ""
        message = f"this set is not on this machine, and the Hub cannot be reached{cause}"
        fix = (
            f"{suggestion}Read it once with a network (`grouper data prepare`). Without a "
            "network, give a local copy as `path`."
        )
    elif type(error).__name__ in ("DatasetNotFoundError", "RepositoryNotFoundError"):
        message = "there is no such set on the Hub, or it was renamed or is private"
    else:
        message = f"cannot be loaded: {text}"
    return DataError(message, where=f"Hub set {path}", fix=fix)


def _is_offline() -> bool:
    """Tell whether the user has forbidden the libraries of Hugging Face to use the network."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return True
    return False


def _nearest(name: str) -> str:
    """Write a sentence naming the known set that was most likely meant, or nothing.

    >>> _nearest("gsm8k"), _nearest("open-r1/DAPO-Math-17k")
    ("Did you mean 'openai/gsm8k'? ", "Did you mean 'open-r1/DAPO-Math-17k-Processed'? ")
    >>> _nearest("openai/gsm8k"), _nearest("somebody/poems")
    ('', '')
    """
    hub_names = [source.hub for source in SOURCES.values() if source.hub is not None]
    if name in hub_names:
        return ""
    # Most names are wrong in one half: the owner is left out, or the set was renamed.
    hub_names_by_key = {}
    for hub_name in hub_names:
        _, _, set_name = hub_name.partition("/")
        hub_names_by_key[set_name.lower()] = hub_name
        hub_names_by_key[hub_name.lower()] = hub_name
    _, _, set_name = name.rpartition("/")
    for text in (set_name, name):
        near = nearest(text.lower(), hub_names_by_key, cutoff=0.7)
        if near:
            return f"Did you mean {hub_names_by_key[near]!r}? "
    return ""


def shuffled(items: Iterable[Item], *, seed: int, buffer: int) -> Iterator[Item]:
    """Yield every item once, each sampled at random from a buffer of `buffer` items.

    >>> sorted(shuffled(range(20), seed=0, buffer=4)) == list(range(20))
    True
    """
    rng = np.random.default_rng(seed)
    waiting: list[Item] = []
    for item in items:
        if len(waiting) < buffer:
            waiting.append(item)
            continue
        position = int(rng.integers(buffer))
        yield waiting[position]
        waiting[position] = item
    for position in rng.permutation(len(waiting)).tolist():
        yield waiting[position]
