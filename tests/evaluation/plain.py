"""Tables as plain text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def plain(renderable: RenderableType | None, *, width: int = 100) -> str:
    """The text of a table without colours."""
    assert renderable is not None
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
