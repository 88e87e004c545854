"""What TRL passes to a reward function beside the columns: how far training is, and ways to log."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grouper.types import Tally

logger = logging.getLogger(__name__)

WHOLE = ("trainer_state", "log_metric", "log_extra")
"""Arguments that are one for the whole batch, where all others have an entry per completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """How far GRPO is; outside a phase, as when functions are tried before a run, the start."""

    global_step: int = 0
    """Finished steps."""
    max_steps: int = 1
    """Steps of the phase; 1 where that is not known."""


class Notes:
    """What reward functions log during one step.

    >>> notes = Notes()
    >>> notes.arguments()["log_metric"]("words", 3)
    >>> notes.arguments()["log_metric"]("words", 4)
    >>> notes.tallies()["rewards/words"].mean
    3.5
    """

    def __init__(self, state: TrainerState | None = None) -> None:
        self._state = state or TrainerState()
        self._metrics: dict[str, list[float]] = {}

    def arguments(self) -> dict[str, Any]:
        """The arguments of `WHOLE`, by name."""
        given = (self._state, self._log_metric, self._log_extra)
        return dict(zip(WHOLE, given, strict=True))

    def tallies(self) -> dict[str, Tally]:
        """What was logged so far, as `rewards/<name>`."""
        return {f"rewards/{name}": Tally.of(values) for name, values in self._metrics.items()}

    def _log_metric(self, name: str, value: float) -> None:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, {number}): not a finite number")
        self._metrics.setdefault(str(name), []).append(number)

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        del values  # rollout records have no columns of the user's
        logger.debug("log_extra(%r) is not recorded.", column)
