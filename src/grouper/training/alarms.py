"""Alarms: a run that goes wrong says so while it goes on, and names the setting to change.

Every alarm looks at one metric over the last `alarms.window` steps that had it. It rings once when
its condition begins to hold, and can ring again after the condition has ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from grouper.config.schema import AlarmsConfig
from grouper.errors import AlarmError
from grouper.types import StepReport

__all__ = ["ALARMS", "Alarm", "Alarms", "Raised", "reason_to_stop", "replay", "slope"]

REMEMBERED = 500
"""Steps of each metric that medians are taken over."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric, step by step: its mean in each step that had it."""

    first: Sequence[float]
    """The first window of the phase."""
    earlier: Sequence[float]
    """What lies before the last window, without the first one."""
    last: Sequence[float]
    """The last window."""


Check = Callable[[Series, AlarmsConfig], str | None]
"""What is wrong, in a few words; None where nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One thing that goes wrong in GRPO."""

    name: str
    metric: str
    check: Check
    advice: str
    """The settings to change."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An alarm that rings."""

    name: str
    what: str
    advice: str

    def __str__(self) -> str:
        return f"alarm {self.name}: {self.what}. {self.advice}"


def slope(values: Sequence[float]) -> float:
    """The least-squares slope a step: sum (t - mean t)(v - mean v) / sum (t - mean t)^2.

    >>> slope([1.0, 3.0, 5.0]), slope([2.0])
    (2.0, 0.0)
    """
    middle = (len(values) - 1) / 2
    spread = sum((t - middle) ** 2 for t in range(len(values)))
    mean = fmean(values)
    rise = sum((t - middle) * (value - mean) for t, value in enumerate(values))
    return rise / spread if spread else 0.0


def _entropy_low(s: Series, c: AlarmsConfig) -> str | None:
    start, now = fmean(s.first), fmean(s.last)
    if now >= c.entropy_low * start:
        return None
    return f"the policy's entropy fell to {now:.3g} nats a token from {start:.3g} at the start"


def _entropy_high(s: Series, c: AlarmsConfig) -> str | None:
    start, now = fmean(s.first), fmean(s.last)
    if now <= c.entropy_high * start:
        return None
    return f"the policy's entropy rose to {now:.3g} nats a token from {start:.3g} at the start"


def _length(s: Series, c: AlarmsConfig) -> str | None:
    usual, now = median([*s.first, *s.earlier]), median(s.last)
    if now <= c.length_growth * usual:
        return None
    return f"completions grew to {now:.0f} tokens; the median step had {usual:.0f}"


def _repetition(s: Series, c: AlarmsConfig) -> str | None:
    now = fmean(s.last)
    return None if now <= c.repetition else f"{now:.0%} of what completions say repeats itself"


def _sameness(s: Series, c: AlarmsConfig) -> str | None:
    now = fmean(s.last)
    if now >= c.unique:
        return None
    return f"of the completions of a problem not yet solved only {now:.0%} differ from the first"


def _kl(s: Series, c: AlarmsConfig) -> str | None:
    rise = slope(s.last) * len(s.last)
    if rise <= c.kl_rise:
        return None
    return f"the KL to the reference rose by {rise:.3g} nats a token in {len(s.last)} steps"


def _truncated(s: Series, c: AlarmsConfig) -> str | None:
    now = fmean(s.last)
    return None if now <= c.truncated else f"{now:.0%} of the completions are cut off"


def _saturated(s: Series, c: AlarmsConfig) -> str | None:
    now = fmean(s.last)
    return (
        None if now <= c.saturated else f"{now:.0%} of the groups are all right and teach nothing"
    )


ALARMS: tuple[Alarm, ...] = (
    Alarm(
        name="entropy-low",
        metric="policy/entropy",
        check=_entropy_low,
        advice="Lower grpo.optimizer.learning_rate, raise grpo.clip_high or set "
        "grpo.entropy_bonus; an earlier checkpoint still explores.",
    ),
    Alarm(
        name="entropy-high",
        metric="policy/entropy",
        check=_entropy_high,
        advice="The policy falls apart: lower grpo.optimizer.learning_rate or "
        "grpo.entropy_bonus, or set grpo.beta.",
    ),
    Alarm(
        name="length",
        metric="completion/tokens",
        check=_length,
        advice="Look at the longest rollouts; a reward that pays length, or grpo.weighting: "
        "sequence_mean, drives it. Use grpo.weighting: constant or a length penalty in rewards.",
    ),
    Alarm(
        name="repetition",
        metric="completion/repetition",
        check=_repetition,
        advice="Read some rollouts; lower grpo.optimizer.learning_rate, set grpo.beta, or lower "
        "sampling.max_new_tokens.",
    ),
    Alarm(
        name="sameness",
        metric="completion/unique",
        check=_sameness,
        advice="There is nothing left to compare: raise sampling.temperature or "
        "grpo.clip_high, or lower grpo.optimizer.learning_rate.",
    ),
    Alarm(
        name="kl",
        metric="policy/kl",
        check=_kl,
        advice="Lower grpo.optimizer.learning_rate or raise grpo.beta.",
    ),
    Alarm(
        name="truncated",
        metric="completion/truncated",
        check=_truncated,
        advice="Raise sampling.max_new_tokens, or teach shorter answers by SFT first.",
    ),
    Alarm(
        name="saturated",
        metric="groups/all_right",
        check=_saturated,
        advice="The problems are too easy by now: set grpo.difficulty or "
        "grpo.max_resample_rounds, use harder data.train, or stop here (grpo.steps).",
    ),
)


class Alarms:
    """Watches the steps of a phase.

    Args:
        config: window and thresholds.
    """

    def __init__(self, config: AlarmsConfig) -> None:
        self._config = config
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._ringing: set[str] = set()

    def observe(self, report: StepReport) -> tuple[Raised, ...]:
        """Take note of a step; the alarms that begin to ring at it."""
        self._remember(report)
        raised = []
        for alarm in ALARMS:
            what = self._problem(alarm) if alarm.metric in report.tallies else None
            if what is not None and alarm.name not in self._ringing:
                raised.append(Raised(alarm.name, what, alarm.advice))
            if what is not None:
                self._ringing.add(alarm.name)
            elif alarm.metric in report.tallies:
                self._ringing.discard(alarm.name)
        return tuple(raised)

    def _remember(self, report: StepReport) -> None:
        window = self._config.window
        for name in {alarm.metric for alarm in ALARMS} & report.tallies.keys():
            value = report.tallies[name].mean
            if not math.isfinite(value):
                continue
            first = self._first.setdefault(name, [])
            if len(first) < window:
                first.append(value)
            else:
                self._recent.setdefault(name, deque(maxlen=REMEMBERED + window)).append(value)

    def _problem(self, alarm: Alarm) -> str | None:
        """What rings, once there are two windows to compare."""
        window = self._config.window
        recent = [*self._recent.get(alarm.metric, ())]
        if len(recent) < window:
            return None
        series = Series(self._first[alarm.metric], recent[:-window], recent[-window:])
        return alarm.check(series, self._config)

    def state_dict(self) -> dict[str, Any]:
        return {
            "first": {name: list(values) for name, values in sorted(self._first.items())},
            "recent": {name: list(values) for name, values in sorted(self._recent.items())},
            "ringing": sorted(self._ringing),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._first = {name: list(values) for name, values in state["first"].items()}
        length = REMEMBERED + self._config.window
        self._recent = {name: deque(v, maxlen=length) for name, v in state["recent"].items()}
        self._ringing = set(state["ringing"])


def replay(reports: Iterable[StepReport], config: AlarmsConfig) -> list[tuple[int, Raised]]:
    """(step, alarm) of everything that would have rung over recorded steps of one phase."""
    alarms = Alarms(config)
    return [(report.step, raised) for report in reports for raised in alarms.observe(report)]


def reason_to_stop(
    raised: Sequence[Raised],
    config: AlarmsConfig,
    phase: Path,
    step: int,
    good: tuple[int, Path] | None,
) -> AlarmError | None:
    """What to end the run with, or None where alarms are only told.

    Args:
        raised: alarms that rang at this step; at least one.
        config: says whether to stop.
        phase: the folder of the phase.
        step: steps finished.
        good: step and folder of the checkpoint to go back to, from before the last window where
            there is one.
    """
    if config.on_alarm == "warn":
        return None
    before = step - config.window
    kept = "there is no checkpoint of this phase yet"
    if good is not None:
        when = "from before these steps" if good[0] <= before else "the oldest that is left"
        kept = f"{good[1]} is {when}"
    return AlarmError(
        "; ".join(str(alarm).rstrip(".") for alarm in raised),
        where=f"{phase.name} step {step}",
        fix=f"alarms.on_alarm is stop: nothing of the last step was saved; {kept}. Go on with "
        "--resume --allow-changes and another setting.",
    )
