"""Dynamic sampling: groups that are all right or all wrong are replaced, within a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grouper.training.rollouts import Collected
from grouper.types import RolloutGroup

__all__ = ["Resampled", "is_mixed", "resample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resampled:
    """The groups of a step, and what was spent on finding them."""

    groups: tuple[RolloutGroup, ...]
    """As many as were asked for: mixed ones first come, then flat ones where they did not do."""
    replaced: tuple[RolloutGroup, ...]
    """Groups that were drawn and take no part in the step."""
    rounds: int
    """Times it was drawn anew."""
    sample_seconds: float
    grade_seconds: float


def is_mixed(group: RolloutGroup) -> bool:
    """Some of its rollouts are correct and some are not."""
    return 0 < group.solved < len(group.rollouts)


def resample(draw: Callable[[int], Collected], *, wanted: int, rounds: int) -> Resampled:
    """Draw groups until `wanted` of them are mixed (DAPO, arXiv 2503.14476, section 3.2).

    Only correctness counts: a group that differs in its format alone is replaced, too. The
    groups kept are the whole step: its denominators count them and no others.

    Args:
        draw: collects that many groups of problems not met in this step.
        wanted: groups of the step.
        rounds: at most this many further draws; what is still missing then is filled with the
            flat groups drawn first.
    """
    drawn = draw(wanted)
    everything, seconds = [*drawn.groups], [drawn.sample_seconds, drawn.grade_seconds]
    used = 0
    while used < rounds and (missing := wanted - sum(map(is_mixed, everything))) > 0:
        drawn = draw(missing)
        everything += drawn.groups
        seconds = [seconds[0] + drawn.sample_seconds, seconds[1] + drawn.grade_seconds]
        used += 1
    # Stable: mixed groups first, each kind in the order it was drawn.
    ranked = sorted(range(len(everything)), key=lambda i: not is_mixed(everything[i]))
    kept = sorted(ranked[:wanted])
    return Resampled(
        groups=tuple(everything[i] for i in kept),
        replaced=tuple(everything[i] for i in sorted(ranked[wanted:])),
        rounds=used,
        sample_seconds=seconds[0],
        grade_seconds=seconds[1],
    )
