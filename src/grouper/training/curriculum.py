"""The order in which problems are used, the difficulty band, and measured pass rates.

The order is a function of (run seed, phase, epoch), without state. A problem that is always or
never solved gives no signal, and its samples are wasted: the band passes it over. Pass rates come
from a file (`grouper data difficulty`), from the rollouts of the run, or from both.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grouper.config.schema import DifficultyConfig, PhaseConfig
from grouper.errors import ConfigError
from grouper.sampling.base import draw_seed
from grouper.types import RolloutGroup

# --- the order of problems, and the lengths of phases --------------------------------------------


# A step takes problems from one epoch or two neighboring ones, unless an epoch is shorter than it.
@functools.lru_cache(maxsize=4)
def _order(stream: ProblemStream, epoch: int) -> list[int]:
    """Return the indices of all problems, in the order of this epoch."""
    key = draw_seed(stream.seed, "order", stream.phase, epoch)
    order: list[int] = np.random.default_rng(key).permutation(stream.size).tolist()
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemStream:
    """Endless passes over the problems of a phase, each in its own order."""

    size: int
    """Problems in one epoch."""
    seed: int
    """The seed of the run."""
    phase: str
    """`sft` or `grpo`; the two have different orders."""

    def take(
        self, position: int, count: int, is_allowed: Callable[[int, int], bool] | None = None
    ) -> tuple[list[int], int]:
        """Take the next `count` problems from a position on, at the end of an epoch from the next.

        Args:
            position: number of problems taken or passed over so far.
            count: number of problems to take.
            is_allowed: (index, epoch) -> whether to take a problem. After a whole epoch without an
                allowed problem every problem is taken: a stream never ends.

        Returns:
            The indices of the problems, and the position after the last of them.

        >>> stream = ProblemStream(size=4, seed=0, phase="grpo")
        >>> taken, position = stream.take(0, 3, lambda index, epoch: index != 2)
        >>> sorted(taken)
        [0, 1, 3]
        """
        taken: list[int] = []
        for index, after in itertools.islice(self.each(position, is_allowed), count):
            taken.append(index)
            position = after
        return taken, position

    def each(
        self, position: int, is_allowed: Callable[[int, int], bool] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield without an end what `take` takes: the index, and the position after it."""
        passed_over = 0
        while True:
            epoch, offset = divmod(position, self.size)
            index = _order(self, epoch)[offset]
            position += 1
            if is_allowed is None or is_allowed(index, epoch):
                passed_over = 0
            elif passed_over < self.size:
                passed_over += 1
                continue
            yield index, position


def first_met(size: int, count: int, *, seed: int) -> list[int]:
    """Return the indices of the problems that GRPO uses first, each once.

    They are a fair sample of all problems. The first problems of a file are not: many sets are
    sorted by subject or by level.

    >>> sorted(first_met(3, 5, seed=0))
    [0, 1, 2]
    """
    stream = ProblemStream(size=size, seed=seed, phase="grpo")
    indices, _ = stream.take(0, min(count, size))
    return indices


def total_steps(config: PhaseConfig, *, size: int, per_step: int) -> int:
    """Return the number of optimizer steps of a phase: as set, or as many as the epochs need.

    >>> from grouper.config.schema import SFTConfig
    >>> total_steps(SFTConfig(epochs=2.0), size=100, per_step=32)
    7
    """
    if config.steps is not None:
        return config.steps
    # Rounded: 0.29 of 100 is less than 29 in binary.
    items = int(round(config.epochs * size, 6))
    return max(1, -(-items // per_step))


def evaluation_is_due(config: PhaseConfig, step: int, *, total: int, epoch_ended: bool) -> bool:
    """Return whether the policy is validated after `step` steps; it always is at 0 and `total`.

    With `evaluate_every="epoch"` it is validated after each step that finishes an epoch.

    >>> from grouper.config.schema import SFTConfig
    >>> config = SFTConfig(evaluate_every=3)
    >>> [s for s in range(9) if evaluation_is_due(config, s, total=8, epoch_ended=False)]
    [0, 3, 6, 8]
    >>> config = SFTConfig(evaluate_every="epoch")
    >>> [s for s in range(9) if evaluation_is_due(config, s, total=8, epoch_ended=s == 5)]
    [0, 5, 8]
    """
    every = config.evaluate_every
    if every == "epoch":
        return epoch_ended or step in (0, total)
    return every > 0 and (step % every == 0 or step == total)


# --- the difficulty band -------------------------------------------------------------------------


# The epoch of a pass rate that was read from a file.
MEASURED_BEFORE = -1
# A problem outside the band is tried again after this number of epochs.
RECHECKED = 3


class DifficultyBand:
    """Decides which problems to sample, by how often each was solved the last time.

    Args:
        config: the band, and where pass rates come from.

    Raises:
        ConfigError: the file of pass rates cannot be read.
    """

    def __init__(self, config: DifficultyConfig) -> None:
        self._config = config
        self.seen: dict[str, Sequence[int]] = {}
        """Problem id -> correct, completions, epoch; saved in checkpoints."""
        if config.path is not None:
            pass_rates = read_pass_rates(Path(config.path).expanduser())
            for problem_id, (correct, completions) in pass_rates.items():
                self.seen[problem_id] = (correct, completions, MEASURED_BEFORE)

    def allows(self, problem_id: str, epoch: int) -> bool:
        """Return whether to sample a problem in this epoch; one never measured is sampled."""
        if problem_id not in self.seen:
            return True
        correct, completions, measured_epoch = self.seen[problem_id]
        low, high = self._config.band
        is_in_band = low <= correct / completions <= high
        return is_in_band or epoch - measured_epoch > RECHECKED

    def update(self, groups: Sequence[RolloutGroup], epoch: int) -> None:
        """Record how often each problem was solved this time."""
        for group in groups:
            self.seen[group.problem.id] = (group.solved, len(group.rollouts), epoch)


def read_pass_rates(path: Path) -> dict[str, tuple[int, int]]:
    """Read the pass rates that `grouper data difficulty` wrote.

    Returns:
        Problem id -> (correct, completions).

    Raises:
        ConfigError: the file is missing, or a line of it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path} cannot be read ({reason})",
            where="grpo.difficulty.path",
            fix="Make it with `grouper data difficulty RECIPE`.",
        ) from error
    pass_rates = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            correct = int(row["correct"])
            completions = int(row["completions"])
            if not 0 <= correct <= completions or completions < 1:
                raise ValueError(f"{correct} of {completions}")
            pass_rates[str(row["problem_id"])] = (correct, completions)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"line {number} of {path} is not a pass rate ({error!r})",
                where="grpo.difficulty.path",
                fix='A line is {"problem_id": "...", "correct": 3, "completions": 8}.',
            ) from error
    return pass_rates
