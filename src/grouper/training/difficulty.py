"""The difficulty band: problems are sampled while they are neither too easy nor too hard.

A problem that is always or never solved gives no signal; its samples are wasted. Pass rates come
from a file (`grouper data difficulty`), from the rollouts of the run, or from both.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grouper.config.schema import DifficultyConfig, GRPOConfig
from grouper.errors import ConfigError
from grouper.types import RolloutGroup

__all__ = ["DifficultyBand", "difficulty_band", "read_pass_rates"]

log = logging.getLogger(__name__)

MEASURED_BEFORE = -1
"""The epoch of a pass rate that was read from a file."""


class DifficultyBand:
    """Which problems to sample, from how often each was solved when last seen.

    Args:
        config: the band, and where pass rates come from.
        measured: problem id -> (correct, completions), known before the run.
    """

    def __init__(
        self, config: DifficultyConfig, measured: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        self._config = config
        self._seen: dict[str, tuple[int, int, int]] = {
            name: (correct, total, MEASURED_BEFORE)
            for name, (correct, total) in (measured or {}).items()
        }

    def allows(self, problem_id: str, epoch: int) -> bool:
        """Whether to sample a problem in this epoch; one never measured is always sampled."""
        if problem_id not in self._seen:
            return True
        correct, total, when = self._seen[problem_id]
        if self._config.low <= correct / total <= self._config.high:
            return True
        wait = self._config.recheck_epochs
        return wait > 0 and epoch - when > wait

    def update(self, groups: Sequence[RolloutGroup], epoch: int) -> None:
        """Remember how often each problem was solved this time."""
        if not self._config.online:
            return
        for group in groups:
            self._seen[group.problem.id] = (group.solved, len(group.rollouts), epoch)

    def left_out(self, problem_ids: Sequence[str], epoch: int) -> int:
        """How many of these problems are outside the band now."""
        return sum(not self.allows(name, epoch) for name in problem_ids)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {name: list(values) for name, values in self._seen.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen = {name: (v[0], v[1], v[2]) for name, v in state["seen"].items()}


def difficulty_band(config: GRPOConfig) -> DifficultyBand | None:
    """The band at the start of a phase, with the pass rates that were measured before.

    Raises:
        ConfigError: the file of pass rates cannot be read.
    """
    if config.difficulty is None:
        return None
    file = config.difficulty.file
    measured = None if file is None else read_pass_rates(Path(file).expanduser())
    return DifficultyBand(config.difficulty, measured)


def read_pass_rates(path: Path) -> dict[str, tuple[int, int]]:
    """Problem id -> (correct, completions) from what `grouper data difficulty` wrote.

    Raises:
        ConfigError: the file is missing, or a line of it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror})",
            where="grpo.difficulty.file",
            fix="Make it with `grouper data difficulty RECIPE`.",
        ) from error
    return dict(_pass_rate(line, f"line {n} of {path}") for n, line in enumerate(lines, start=1))


def _pass_rate(line: str, where: str) -> tuple[str, tuple[int, int]]:
    try:
        row = json.loads(line)
        correct, total = int(row["correct"]), int(row["completions"])
        if not 0 <= correct <= total or total < 1:
            raise ValueError(f"{correct} of {total}")
        return str(row["problem_id"]), (correct, total)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where} is not a pass rate ({error!r})",
            where="grpo.difficulty.file",
            fix='A line is {"problem_id": "...", "correct": 3, "completions": 8}.',
        ) from error
