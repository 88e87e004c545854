"""Weights & Biases: offline unless asked otherwise; a run that the caller opened is used."""

from __future__ import annotations

import logging
import os
from typing import Any

from grouper.runs.sinks.background import CLOSING_SECONDS
from grouper.runs.sinks.base import LoggedRun, TrackedRun

log = logging.getLogger(__name__)

INIT_SECONDS = 30.0
"""How long a server may take to answer at the start; the run goes on meanwhile."""


class WandbSink(LoggedRun):
    """Metrics as `<phase>/<metric>` over `<phase>/step`, rewards as histograms, recipe as config.

    Offline runs lie in `<run>/trackers/wandb` and are sent later with `wandb sync`. Where the
    recipe does not say `online`, `WANDB_MODE` of the environment is the user's own word.

    Args:
        run: becomes the run of that name, project and entity.
        params: further keywords of `wandb.init`.
    """

    def __init__(self, run: TrackedRun, **params: Any) -> None:
        import wandb

        self._wandb = wandb
        self._is_ours = wandb.run is None
        self._run = wandb.run or self._open(run, params)
        if not self._is_ours:
            self._run.config.update({"grouper": dict(run.recipe)}, allow_val_change=True)
        super().__init__(self._run.log, wandb.Histogram)
        for phase in ("base", "sft", "grpo"):
            self._run.define_metric(f"{phase}/step", hidden=True)
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def _open(self, run: TrackedRun, params: dict[str, Any]) -> Any:
        folder = run.path / "trackers"
        folder.mkdir(parents=True, exist_ok=True)  # else it would write to a temporary one
        mode = "online" if run.online else os.environ.get("WANDB_MODE", "offline")
        # A process that ends waits for W&B's own clean-up, which waits for these.
        limits = {"init_timeout": INIT_SECONDS, "finish_timeout": CLOSING_SECONDS}
        wanted = {"silent": True, "console": "off", **limits}
        known = self._wandb.Settings.model_fields
        settings = {name: value for name, value in wanted.items() if name in known}
        opened = self._wandb.init(
            **{
                "project": run.project,
                "entity": run.entity,
                "name": run.name,
                "tags": run.tags,
                "config": dict(run.recipe),
                "dir": str(folder),
                "mode": mode,
                "id": run.mark,
                "resume": "allow" if mode == "online" else None,
                "settings": self._wandb.Settings(**settings),
                **params,
            }
        )
        if mode == "offline":
            log.info("Weights & Biases writes to %s; send it with `wandb sync`.", folder / "wandb")
        return opened

    def close(self) -> None:
        if self._is_ours:
            self._run.finish()
