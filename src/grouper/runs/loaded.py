"""The record of a run as tables."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from grouper.evaluation.result import EvaluationResult
from grouper.runs.folder import RunFolder
from grouper.runs.records import evaluation_summary, flat

Table = list[dict[str, Any]]


class LoadedRun:
    """The record of a run as lists of flat rows; `pandas.DataFrame(run.metrics)` makes a frame.

    Args:
        path: of the run folder, finished or not.

    Raises:
        RunFolderError: it is not one, or (when a table is first looked at) it is damaged.
    """

    def __init__(self, path: Path | str) -> None:
        self._folder = RunFolder(Path(path).expanduser())
        self.path = self._folder.path
        self.info = self._folder.read_info().model_dump()
        """The content of `run.json`."""

    @cached_property
    def metrics(self) -> Table:
        """One row per step: `phase`, `step`, `time`, `elapsed_s`, `status`, `events`, metrics."""
        return self._folder.metrics_rows()

    @cached_property
    def rollouts(self) -> Table:
        """One row per rollout, with its reward, and each component as `rewards/<name>`."""
        return [flat(row) for row in self._folder.read_rollouts()]

    @cached_property
    def evaluations(self) -> Table:
        """One row per evaluation: its settings and every number derived from its items."""
        return [flat(evaluation_summary(result)) for result in self._results]

    @cached_property
    def completions(self) -> Table:
        """One row per completion of every evaluation, with the same names as `rollouts`."""
        return [
            flat({"evaluation": result.name, **asdict(item), "outcome": item.outcome})
            for result in self._results
            for item in result.items
        ]

    @cached_property
    def _results(self) -> list[EvaluationResult]:
        return self._folder.read_evaluations()


def load_run(path: Path | str) -> LoadedRun:
    """Read the record of a run; see `LoadedRun`.

    Example: `load_run("outputs/demo").metrics[-1]["solve_rate"]`.
    """
    return LoadedRun(path)
