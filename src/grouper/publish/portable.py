"""Removal of this machine's folders from published settings: a path becomes its file's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Settings that hold text, which may begin as a path does (`/no_think`).
_TEXTS = {"system", "prefix", "note", "description", "prompt_of_item_0", "stop"}


def without_folders(value: Any) -> Any:
    """Replace every absolute path in nested settings by the name of its file or folder.

    >>> without_folders({"path": "/home/me/data/mine.jsonl", "rewards": ["/home/me/mine.py:f"]})
    {'path': 'mine.jsonl', 'rewards': ['mine.py:f']}
    """
    if isinstance(value, Mapping):
        return {
            without_folders(key): inner if key in _TEXTS else without_folders(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_folders(inner) for inner in value]
    return without_folder(value) if isinstance(value, str) else value


def without_folder(text: str) -> str:
    """Return the name of an absolute path, with the function after it if there is one.

    >>> without_folder("~/models/mine"), without_folder("owner/model"), without_folder("./a.py:f")
    ('mine', 'owner/model', './a.py:f')
    """
    if not text.startswith(("/", "~")) or "\n" in text:
        return text
    file = text
    function = ""
    if ".py:" in text:
        file, _, function = text.rpartition(":")
    path = Path(file)
    if len(path.parts) < 2:  # `/`, or a text that begins so
        return text
    return f"{path.name}:{function}" if function else path.name
