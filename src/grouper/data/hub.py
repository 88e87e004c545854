"""Sets on the Hub, through the `datasets` library; every failure is one clear sentence."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from typing import Any

from grouper.data.rows import Row
from grouper.data.sources import SOURCES
from grouper.errors import DataError


def read_hub(name: str, *, split: str, subset: str | None) -> list[Row]:
    """All rows of one split of a set on the Hub, or of a local folder that has its layout.

    Uses the `datasets` cache, so a set that was read once needs no network.

    Raises:
        DataError: no such set, subset or split; gated; or offline and not in the cache.
    """
    return [dict(row) for row in _open(name, split, subset, streaming=False)]


def stream_hub(name: str, *, split: str, subset: str | None) -> Iterator[Row]:
    """The rows of one split, fetched as they are read; nothing is kept on this machine.

    Raises:
        DataError: as `read_hub`, at once or while reading. A stream needs the network, unless the
            set was once read whole.
    """
    rows = iter(_open(name, split, subset, streaming=True))
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # as in `_open`: there is no common type
            raise _explain(name, split, subset, error) from error
        if row is None:
            return
        yield dict(row)


def _open(name: str, split: str, subset: str | None, *, streaming: bool) -> Any:
    import datasets

    # Only then: what is not there cannot be asked for by an unusual call in a test's stand-in.
    more = {"streaming": True} if streaming else {}
    try:
        return datasets.load_dataset(name, subset, split=split, **more)
    # Its own errors, those of the Hub's client, of the network, of file formats and of the disk
    # all come out of this one call.
    except Exception as error:  # the library has no common type of its own
        raise _explain(name, split, subset, error) from error


def _explain(name: str, split: str, subset: str | None, error: Exception) -> DataError:
    where = "/".join(["Hub set " + name, *([subset] if subset else []), split])
    text = " ".join(str(error).split()) or type(error).__name__
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
    if _is_offline(lowered, error):
        return DataError(
            "this set is not on this machine, and the Hub cannot be reached"
            + (" (HF_HUB_OFFLINE is set)" if _told_offline() else ""),
            where=where,
            fix=f"{_nearest(name)}Read it once with a network (`grouper data prepare`). Without a "
            "network, give a local copy as `path`.",
        )
    if type(error).__name__ in ("DatasetNotFoundError", "RepositoryNotFoundError"):
        return DataError(
            "there is no such set on the Hub, or it was renamed or is private",
            where=where,
            fix=f"{_nearest(name)}Check the name, or give a local copy as `path`.",
        )
    return DataError(
        f"cannot be loaded: {text}",
        where=where,
        fix=f"{_nearest(name)}Check the name. Without a network, give a local copy as `path`.",
    )


def _told_offline() -> bool:
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def _is_offline(text: str, error: Exception) -> bool:
    return isinstance(error, ConnectionError) or _told_offline() or "offline" in text


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
        near = difflib.get_close_matches(wanted.lower(), keys, n=1, cutoff=0.7)
        if near:
            return f"Did you mean {keys[near[0]]!r}? "
    return ""
