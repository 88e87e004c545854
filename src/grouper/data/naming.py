"""From what people call a set of problems to the source that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grouper.data.sources import SOURCES


def source_named(name: str) -> dict[str, Any]:
    """The settings of a source, as a recipe would have them.

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
    is_local = name.startswith((".", "/", "~")) or Path(name).exists()
    return {"source": "file" if is_local else "hub", "path": name}
