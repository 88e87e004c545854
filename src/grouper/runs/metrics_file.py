"""`metrics.jsonl`: one line a step, appended, cut back, and repaired after a kill."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from grouper.errors import RunFolderError
from grouper.files import dumps, refused, sync, write_atomic
from grouper.runs import records
from grouper.types import StepReport


class MetricsFile:
    """The metrics of a run; a file that is missing has none.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, report: StepReport) -> None:
        """Add one step, flushed to the operating system.

        Raises:
            RunFolderError: the disk is full, or the like; no part of the line is left behind.
        """
        line = (dumps(records.report_to_json(report)) + "\n").encode()
        try:
            # Unbuffered, so that a failed write is not tried again on closing.
            with self.path.open("ab", buffering=0) as file:
                start = file.tell()
                try:
                    left = memoryview(line)
                    while left:
                        left = left[file.write(left) :]
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(start)
                    raise
        except OSError as error:
            refused(error, self.path)

    def flush(self) -> None:
        """Wait until every line is on disk.

        Raises:
            RunFolderError: the disk refuses.
        """
        try:
            if self.path.exists():
                sync(self.path)
                sync(self.path.parent)
        except OSError as error:
            refused(error, self.path)

    def read(self) -> list[StepReport]:
        """All steps in the order they were written.

        Raises:
            RunFolderError: a line is damaged; a last line without its end is left out instead.
        """
        reports = []
        for number, line in enumerate(self._complete_lines(), start=1):
            try:
                reports.append(records.report_from_json(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise RunFolderError(
                    f"line {number} cannot be read ({error!r})",
                    where=str(self.path),
                    fix="It was damaged after it was written; restore the file or delete the line.",
                ) from error
        return reports

    def keep(self, wanted: Callable[[StepReport], bool]) -> None:
        """Forget the steps that are not wanted."""
        if self.path.exists():
            kept = [report for report in self.read() if wanted(report)]
            lines = "".join(dumps(records.report_to_json(report)) + "\n" for report in kept)
            write_atomic(self.path, lines.encode())

    def repair(self) -> None:
        """Cut off a last line that a kill left half-written."""
        if self.path.exists():
            lines = self._complete_lines()
            write_atomic(self.path, "".join(line + "\n" for line in lines).encode())

    def _complete_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8", errors="replace")
        # A kill can leave the last line half-written; only lines with their end count.
        return text.split("\n")[:-1]
