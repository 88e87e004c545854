"""What went wrong in a run, read from its logs alone: the failure, its evidence, what to change.

Nothing is loaded and nothing is sampled again. Each check looks at one way to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from grouper.diagnosis import checks, learning_rates
from grouper.diagnosis.record import Finding, Record, read_record

__all__ = ["CHECKS", "Check", "Finding", "Record", "diagnose", "read_record"]

Check = Callable[[Record], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    checks.not_finite,
    checks.stale_sampler,
    learning_rates.rate_too_high,
    checks.no_signal,
    checks.grader,
    checks.alarms,
    checks.format_only,
    checks.reward_without_correctness,
    learning_rates.sft_rate,
    learning_rates.rate_too_low,
)
"""In the order in which findings are told: the first ones can be the cause of the later."""


def diagnose(record: Record) -> list[Finding]:
    """Everything that is found wrong, the most telling first."""
    return [finding for check in CHECKS for finding in check(record)]
