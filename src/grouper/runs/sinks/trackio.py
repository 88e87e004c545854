"""Trackio: a local database, looked at with `trackio show`; a Space only when asked for."""

from __future__ import annotations

import logging
import sys
from typing import Any

from grouper.runs.sinks.base import LoggedRun, TrackedRun

log = logging.getLogger(__name__)

ELSEWHERE = ("space_id", "server_url", "bucket_id", "dataset_id", "webhook_url")
"""Arguments of `trackio.init` that send something to another machine."""


class TrackioSink(LoggedRun):
    """Metrics as `<phase>/<metric>`, rewards as histograms, the recipe as config.

    Everything stays in Trackio's own folder on this machine (`TRACKIO_DIR`), unless `params` names
    another place and the tracker's mode is online, or the environment does (`TRACKIO_SPACE_ID`,
    ...), which is the user's own word.

    Args:
        run: becomes the run of that name and project; a resumed run goes on in the same one.
        params: further keywords of `trackio.init`.

    Raises:
        ValueError: a place elsewhere while offline.
    """

    def __init__(self, run: TrackedRun, **params: Any) -> None:
        import trackio

        for name in ELSEWHERE:
            if params.get(name) and not run.online:
                raise ValueError(f"{name} sends to another machine: add mode: online")
        _keep_from_printing()
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
        super().__init__(self._run.log, trackio.Histogram)
        log.info("Trackio shows this run with `trackio show --project %s`.", run.project)

    def close(self) -> None:
        self._run.finish()


def _keep_from_printing() -> None:
    """Trackio prints what it does; on a run's standard output there is the result and no more."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trackio":
            vars(module).setdefault("print", _ignore)


def _ignore(*_: object, **__: object) -> None:
    """In the place of print."""
