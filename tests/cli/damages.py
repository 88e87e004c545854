"""Ways in which a file of a run or of a model can be damaged, each a function of its path.

A damage replaces the file and never writes into it, so that folders may share files by links.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Damage = Callable[[Path], None]

NESTED = "[" * 20_000
"""Brackets that no parser of Python's follows."""


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def cut(path: Path) -> None:
    replace(path, path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """One bit in the middle is another one."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    replace(path, bytes(content))


def flip_first(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 0x10
    replace(path, bytes(content))


def zeros(path: Path) -> None:
    """As after a power cut: of the right size, and nothing in it."""
    replace(path, bytes(path.stat().st_size))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to(target: str) -> Damage:
    def link(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return link


def content(text: str | bytes) -> Damage:
    data = text if isinstance(text, bytes) else text.encode()
    return lambda path: replace(path, data)


BYTES: dict[str, Damage] = {
    "missing": Path.unlink,
    "empty": content(""),
    "half": cut,
    "flipped": flip,
    "first byte flipped": flip_first,
    "zeros": zeros,
    "a folder": folder,
    "a link to nothing": link_to("nowhere"),
    "a link to itself": lambda path: link_to(path.name)(path),
}
"""Of any file."""

TEXTS: dict[str, Damage] = {
    "not UTF-8": content(b"\xff\xfe\x80 not text"),
    "nested": content(NESTED),
    "nested objects": content('{"a":' * 20_000),
    "a list": content("[1, 2]\n"),
    "a number": content("7\n"),
    "null": content("null\n"),
    "a text": content('"text"\n'),
    "an empty object": content("{}\n"),
    "a huge number": content('{"step": ' + "9" * 5_000 + "}\n"),
    "another program's": content('{"hello": "world"}\n'),
}
"""Of a file of JSON, YAML or lines of JSON."""


def in_gzip(damage: Damage) -> Damage:
    """The same inside a compressed file."""

    def inside(path: Path) -> None:
        plain = path.with_name("plain")
        plain.write_bytes(gzip.decompress(path.read_bytes()))
        damage(plain)
        replace(path, gzip.compress(plain.read_bytes()))
        plain.unlink()

    return inside


ODD: dict[str, Any] = {
    "null": None,
    "true": True,
    "a text": "text",
    "negative": -1,
    "a list": [],
    "an object": {"a": 1},
    "1e400": float("inf"),
    "beyond 64 bits": 10**30,
}
"""Values that hardly any key can have."""


def key(name: str, value: Any) -> Damage:
    """A key of a JSON object, or of each line, has another value; `a.b` is one inside."""

    def change(path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        *places, last = name.split(".")
        changed = []
        for part in [text] if path.suffix == ".json" else text.splitlines():
            row = json.loads(part)
            inner = row
            for place in places:
                inner = inner[place]
            inner[last] = value
            changed.append(json.dumps(row))
        replace(path, "\n".join([*changed, ""]).encode())

    return change


def keys(*names: str) -> Iterator[tuple[str, Damage]]:
    """Every odd value for each of these keys."""
    for name in names:
        for what, value in ODD.items():
            yield f"{name}: {what}", key(name, value)
