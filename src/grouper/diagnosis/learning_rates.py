"""Signs that a learning rate was too high or too low."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

from grouper.diagnosis.record import WINDOW, Finding, Record, curve, ends, mean, span
from grouper.training.alarms import slope
from grouper.types import StepReport

__all__ = ["rate_too_high", "rate_too_low", "sft_rate"]

MIN_STEPS = 20
"""A learning rate is judged after as many steps that learned."""
FEW_UPDATES = 5
"""A policy that is lost after as few was lost to their size."""
MOVED = 0.05
"""The share by which an entropy, or the points by which a solve rate, has changed noticeably."""
MOSTLY_CLIPPED = 0.5
"""A share of the ratios, or of the completions cut off."""


def rate_too_high(record: Record) -> Iterator[Finding]:
    """What was learned is lost again, the gradient explodes, or most of the ratios are clipped."""
    reports = record.grpo
    norms, solved = curve(reports, "grad_norm"), curve(reports, "solve_rate")
    clipped = curve(reports, "policy/clip_fraction")
    signs: dict[str, float] = {}
    if len(solved) >= 2 * WINDOW:
        best = max(fmean(solved[i : i + WINDOW]) for i in range(len(solved) - WINDOW + 1))
        if best > 2 * MOVED and fmean(solved[-WINDOW:]) < best / 2:
            signs |= {"solve_rate_best": best, "solve_rate_at_the_end": fmean(solved[-WINDOW:])}
    if len(norms) >= MIN_STEPS and ends(norms)[1] > 10 * ends(norms)[0]:
        signs |= {"grad_norm_before": ends(norms)[0], "grad_norm_after": ends(norms)[1]}
    if clipped and mean(clipped) > MOSTLY_CLIPPED:
        signs |= {"clip_fraction": mean(clipped)}
    signs |= _sudden_loss(reports)
    if signs:
        yield _rate(record, "grpo", "too-high", signs)


def _sudden_loss(reports: Sequence[StepReport]) -> dict[str, float]:
    """What the model could do before the first update, and never again after a few."""
    learned = [r.step for r in reports if r.status == "learning"]
    if not 0 < len(learned) <= FEW_UPDATES or len(reports) < MIN_STEPS:
        return {}
    signs = {}
    for name, lost in (("solve_rate", -2 * MOVED), ("completion/truncated", MOSTLY_CLIPPED)):
        values = curve(reports, name)
        change = fmean(values[-WINDOW:]) - values[0]
        if change * math.copysign(1, lost) >= abs(lost):
            signs[f"{name}_at_first"] = values[0]
            signs[f"{name}_at_the_end"] = fmean(values[-WINDOW:])
    return signs | ({"steps_that_learned": len(learned)} if signs else {})


def rate_too_low(record: Record) -> Iterator[Finding]:
    """There was a signal, and neither the solve rate nor the policy moved."""
    learned = [r for r in record.grpo if r.status == "learning"]
    solved, entropy = curve(learned, "solve_rate"), curve(learned, "policy/entropy")
    if len(learned) < MIN_STEPS or len(solved) < MIN_STEPS or not entropy:
        return
    rise = slope(solved) * len(solved)
    # The rise of a straight line through n independent values has this standard error.
    noise = stdev(solved) * math.sqrt(12 / len(solved))
    before, after = ends(entropy)
    moved = abs(after - before) / before if before else math.inf
    if abs(rise) > 2 * noise or rise > MOVED or moved > MOVED:
        return
    signs = {"solve_rate_rise": rise, "its_noise": noise, "entropy_change": moved}
    yield _rate(record, "grpo", "too-low", signs)


def sft_rate(record: Record) -> Iterator[Finding]:
    """The loss rose, or stayed where it was."""
    losses = curve(record.sft, "loss")
    if len(losses) < MIN_STEPS:
        return
    before, after = ends(losses)
    signs = {"loss_before": before, "loss_after": after}
    if after > 1.05 * before:
        yield _rate(record, "sft", "too-high", signs)
    elif after > 0.98 * before:
        yield _rate(record, "sft", "too-low", signs)


def _rate(record: Record, phase: str, kind: str, signs: dict[str, float]) -> Finding:
    rate = getattr(record.recipe, phase).optimizer.learning_rate
    told = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in signs.items())
    verb = {"too-high": "Lower", "too-low": "Raise"}[kind]
    return Finding(
        name=f"learning-rate-{kind}",
        phase=phase,
        what=f"a learning rate of {rate:g} looks {kind.replace('-', ' ')}: {told}",
        steps=span(getattr(record, phase)),
        evidence={**signs, "learning_rate": rate},
        fix=f"{verb} {phase}.optimizer.learning_rate by a factor of 3 to 10.",
    )
