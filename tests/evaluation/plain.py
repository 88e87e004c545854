"""Tables as plain text."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console

from grouper.tables import Block, Line, Table, for_terminal


def plain(blocks: Block | Sequence[Block] | None, *, width: int = 100) -> str:
    """The text of tables and lines without colors."""
    assert blocks is not None
    if isinstance(blocks, Line | Table):
        blocks = [blocks]
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        for block in blocks:
            console.print(for_terminal(block))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
