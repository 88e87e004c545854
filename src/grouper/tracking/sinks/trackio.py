"""Trackio: a local database, looked at with `trackio show`; a Space only when asked for."""

from __future__ import annotations

from typing import Any

from grouper.evaluation.result import EvaluationResult
from grouper.tracking.sinks.base import (
    Step,
    TrackedRun,
    evaluation_numbers,
    placed,
    step_numbers,
)

__all__ = ["TrackioSink"]


class TrackioSink:
    """Metrics as `<phase>/<metric>`, rewards as histograms, the recipe as config.

    Everything stays in Trackio's own folder on this machine (`TRACKIO_DIR`), unless `params` names
    a `space_id` and the tracker's mode is online.

    Args:
        run: becomes the run of that name and project; a resumed run goes on in the same one.
        params: further keywords of `trackio.init`.

    Raises:
        ValueError: a `space_id` while offline.
    """

    def __init__(self, run: TrackedRun, **params: Any) -> None:
        import trackio

        if params.get("space_id") and not run.online:
            raise ValueError("space_id sends to the Hub: add mode: online to the tracker")
        self._trackio = trackio
        self._run = trackio.init(
            **{
                "project": run.project,
                "name": f"{run.name}-{run.mark}",
                "config": dict(run.recipe),
                "resume": "allow",
                "embed": False,
                "auto_log_gpu": False,
                "auto_log_cpu": False,
                **params,
            }
        )

    def step(self, step: Step) -> None:
        report = step.report
        histograms = {
            f"rewards/{name}": self._trackio.Histogram(list(values))
            for name, values in step.rewards.items()
            if values
        }
        values = {**step_numbers(report), **histograms}
        self._run.log(placed(report.phase, report.step, values))

    def evaluation(self, result: EvaluationResult) -> None:
        self._run.log(placed(result.phase, result.step, evaluation_numbers(result)))

    def close(self) -> None:
        self._run.finish()
