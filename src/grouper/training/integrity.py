"""Whether a saved folder still is what was saved, and what is wrong with it where it is not."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

__all__ = ["BEST_FILE", "STATE_FILE", "contents", "damage", "is_complete"]

BEST_FILE = "best.json"
"""Lies in the folder of the best checkpoint so far, and says by which evaluation it is that."""
STATE_FILE = "trainer_state.json"
"""Written last: its presence says that a folder is complete."""

_TENSORS = (".safetensors", ".pt", ".distcp")
"""Suffixes of the files that hold tensors."""

_CHUNK = 1 << 24

_NUMBERS = ("step", "policy_version")


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint or final folder was written to its end."""
    return (folder / STATE_FILE).is_file()


def contents(folder: Path) -> dict[str, str]:
    """File -> CRC-32 in hex.

    The state file is left out, and the mark of the best one, which comes and goes.
    """
    return {
        path.relative_to(folder).as_posix(): _checksum(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (STATE_FILE, BEST_FILE)
    }


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def damage(folder: Path, *, only_tensors: bool = False) -> str | None:
    """What is wrong with a saved folder, in a few words, or None where it is whole.

    Every file is read and compared with the checksum that was taken when it was written.

    Args:
        folder: to look at.
        only_tensors: of the other files look only at their presence.
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
    for name in names:
        compared = not only_tensors or name.endswith(_TENSORS)
        problem = _missing(folder / name) or (
            _changed(folder / name, recorded[name]) if compared else None
        )
        if problem is not None:
            return problem
    return None


def _missing(path: Path) -> str | None:
    return None if path.is_file() else f"its {path.name} is missing"


def _changed(path: Path, recorded: str | None) -> str | None:
    if recorded is None:  # a small file of a version that took no checksum of those
        return None
    try:
        same = _checksum(path) == recorded
    except OSError as error:
        return f"its {path.name} cannot be read ({error})"
    return (
        None
        if same
        else f"its {path.name} is damaged or was edited (other bytes than were written)"
    )
