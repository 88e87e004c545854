"""The run folder that a command names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grouper.cli.text import warn_of_losses

if TYPE_CHECKING:
    from grouper.runs.folder import RunFolder


def open_run(run: str) -> RunFolder:
    """Open a run folder, which must exist; a warning names lost records."""
    from grouper.runs.folder import RunFolder

    folder = RunFolder(Path(run).expanduser())
    folder.read_info()
    warn_of_losses(folder)
    return folder
