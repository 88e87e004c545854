"""Blocks of code in a text: what a model calls a tool with, answers with, and reads back."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

PYTHON_NAMES = ("python", "python3", "py")
"""Names of blocks that are programs."""
OUTPUT_NAME = "output"
"""The name of a block that a tool writes."""
BLOCK_END = "\n```\n"
"""What closes a block. A block that opens without a name looks the same; it calls nothing."""

_FENCE = re.compile(r"^[ \t]*```([^\n`]*)$", re.MULTILINE)
_NOTHING = "(no output)"

OUTPUT_BLOCK = re.compile(rf"^```{OUTPUT_NAME}\n(?:.*?\n)??```(?:\n|\Z)", re.DOTALL | re.MULTILINE)
"""What `output_block` writes, and data of others, in which it may be empty."""


class Block(NamedTuple):
    """A block of code: the name behind its opening fence, and what stands inside."""

    name: str
    text: str


def blocks_of(text: str) -> tuple[list[Block], str | None]:
    r"""Return the closed blocks of a text in order, and the name of one that is left open.

    >>> blocks_of("```python\n1\n```\n```\n2\n```\n```py\n3")
    ([Block(name='python', text='1'), Block(name='', text='2')], 'py')
    """
    found = []
    name: str | None = None
    start = 0
    for fence in _FENCE.finditer(text):
        label = fence[1].strip().lower()
        if name is None:
            name, start = label, fence.end() + 1
        elif not label:
            found.append(Block(name, text[start : fence.start()].removesuffix("\n")))
            name = None
    return found, name


def last_block(text: str, names: Collection[str]) -> Block | None:
    """Return the last closed block, if it has one of these names and no block is open after it."""
    found, left_open = blocks_of(text)
    if not found or left_open is not None or found[-1].name not in names:
        return None
    return found[-1]


def program_block(program: str) -> str:
    """Write a program as a block."""
    return f"```{PYTHON_NAMES[0]}\n{program}\n```"


def output_block(text: str) -> str:
    r"""Write what a tool said as the block that the model reads.

    A fence inside would close it early, and the rest would look like the model's own words. Halves
    of characters, which Python's texts may hold, cannot be encoded.

    >>> output_block("42\n")
    '```output\n42\n```\n'
    """
    whole = text.encode("utf-8", "replace").decode("utf-8")
    said = whole.strip().replace("```", "'''") or _NOTHING
    return f"```{OUTPUT_NAME}\n{said}\n```\n"
