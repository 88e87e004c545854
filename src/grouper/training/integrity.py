"""Whether a saved folder still is what was saved, and what is wrong with it where it is not."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["BEST_FILE", "STATE_FILE", "contents", "damage", "is_complete"]

BEST_FILE = "best.json"
"""Lies in the folder of the best checkpoint so far, and says by which evaluation it is that."""
STATE_FILE = "trainer_state.json"
"""Written last: its presence says that a folder is complete."""

_TENSORS = (".safetensors", ".pt", ".distcp")
"""Suffixes of the files whose content is checked; people may edit the small ones."""

_CHUNK = 1 << 24

_NUMBERS = ("step", "policy_version")


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint or final folder was written to its end."""
    return (folder / STATE_FILE).is_file()


def contents(folder: Path) -> dict[str, str | None]:
    """File -> CRC-32 in hex of what holds tensors, None for the rest.

    The state file is left out, and the mark of the best one, which comes and goes.
    """
    return {
        path.relative_to(folder).as_posix(): _checksum(path) if path.suffix in _TENSORS else None
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (STATE_FILE, BEST_FILE)
    }


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def damage(folder: Path) -> str | None:
    """What is wrong with a saved folder, in a few words, or None where it is whole.

    Tensors are read and compared with the checksums that were taken when they were written; of
    the other files only their presence is looked at.
    """
    if not is_complete(folder):
        return f"it is incomplete (no {STATE_FILE})"
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        numbers = [int(state[name]) for name in _NUMBERS]
        recorded: Mapping[str, str | None] = state["files"]
        assert all(number >= 0 for number in numbers)
        names = list(recorded)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        return f"its {STATE_FILE} cannot be read ({error})"
    checks: list[Callable[[Path, Any], str | None]] = [_missing, _changed]
    for name in names:
        for check in checks:
            problem = check(folder / name, recorded[name])
            if problem is not None:
                return problem
    return None


def _missing(path: Path, _: Any) -> str | None:
    return None if path.is_file() else f"its {path.name} is missing"


def _changed(path: Path, recorded: Any) -> str | None:
    if recorded is None:
        return None
    try:
        same = _checksum(path) == recorded
    except OSError as error:
        return f"its {path.name} cannot be read ({error})"
    return None if same else f"its {path.name} is damaged (other bytes than were written)"
