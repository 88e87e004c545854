"""Recorded texts beside this file: read, written, and compared whatever the machine is."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

PATTERNS = (
    (r"\x1b\[[0-9;]*m", ""),  # colors
    (r"\b0x[0-9a-f]{6,}\b", "<address>"),
    (r"\b\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:?\d\d)?)?", "<date>"),
    (r"We couldn't connect to [^.]*\.[^.]*\.", "<no network>."),  # as transformers says it
    (r"\b\d\d:\d\d:\d\d\b", "<time>"),
)
"""What differs between runs on one machine, and what stands for it."""


def load(name: str) -> Any:
    """What `save` has recorded as `name`."""
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def save(name: str, content: Any) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def choose(names: Sequence[str], rows: Collection[str]) -> Sequence[str]:
    """The rows that are named on the command line, or else all."""
    unknown = [name for name in names if name not in rows]
    if unknown:
        raise SystemExit(f"no row is called {unknown[0]}")
    return names or list(rows)


def normalize(text: str, folder: Path) -> str:
    """The text without what differs between machines; `folder` is the temporary one."""
    places = {str(folder.resolve()): "<tmp>", str(folder): "<tmp>", str(ROOT): "<repo>"}
    places[str(Path.home())] = "<home>"
    for place, sign in places.items():
        text = text.replace(place, sign)
    for package, label in _versions().items():
        text = text.replace(package, label)
    for pattern, sign in PATTERNS:
        text = re.sub(pattern, sign, text)
    return text


@cache
def _versions() -> dict[str, str]:
    """Names and versions as messages tell them -> the name and a sign for the version."""
    names = {"PyTorch": "torch", "torch": "torch", "transformers": "transformers"}
    names["grouper"] = "grouper-rl"
    return {f"{name} {version(package)}": f"{name} <version>" for name, package in names.items()}
