"""`evaluations/`: a summary of each evaluation, and its items beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grouper.evaluation.result import EvaluationResult
from grouper.files import delete, dumps, read_json, read_lines, write_atomic, write_lines
from grouper.runs import records

_DAMAGED = "the summary of the evaluation is damaged"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class EvaluationFiles:
    """The evaluations of a run; a folder that is missing has none.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, result: EvaluationResult) -> None:
        """Record an evaluation; one of the same name is replaced."""
        if not _NAME.fullmatch(result.name):
            raise ValueError(f"{result.name!r} cannot be a file name")
        summary, items = self._files(result.name)
        # Never an old summary beside new items.
        delete(summary)
        write_lines(items, records.evaluation_items_to_json(result))
        # The summary last: an evaluation without one does not exist.
        content = json.dumps(json.loads(dumps(records.evaluation_to_json(result))), indent=2)
        write_atomic(summary, (content + "\n").encode())

    def read(self, name: str) -> EvaluationResult | None:
        """The evaluation of that name, or None where it was not finished.

        Raises:
            RunFolderError: a file of it is damaged.
        """
        summary, items = self._files(name)
        if not summary.exists():
            return None
        return records.evaluation_from_json(read_json(summary, _DAMAGED), read_lines(items))

    def read_all(self) -> list[EvaluationResult]:
        """All of them by name; raises as `read` does."""
        found = (self.read(name) for name, _ in self._summaries())
        return [result for result in found if result is not None]

    def forget(self, unwanted: Callable[[str, int], bool]) -> None:
        """Delete those whose phase and step are `unwanted`."""
        for name, summary in list(self._summaries()):
            if unwanted(summary["phase"], summary["step"]):
                for path in self._files(name):
                    delete(path)

    def _files(self, name: str) -> tuple[Path, Path]:
        """Summary and items."""
        return self.path / f"{name}.json", self.path / f"{name}.jsonl.gz"

    def _summaries(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in sorted(self.path.glob("*.json")):
            yield path.stem, read_json(path, _DAMAGED)
