"""What went wrong in a run, read from its logs alone: the failure, its evidence, what to change.

Nothing is loaded and nothing is sampled again. Each check looks at one way to fail; thresholds are
rough on purpose, for a finding is a place to look. A new check is one function and its row in
`CHECKS`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, stdev

from grouper.advice.record import WINDOW, Finding, Record, curve, ends, mean, span
from grouper.training.alarms import replay, slope
from grouper.types import StepReport

__all__ = ["CHECKS", "Check", "diagnose"]

Check = Callable[[Record], Iterator[Finding]]

MOST = 0.5
"""A share of the steps above which something is the rule."""
SOME = 0.05
"""A share of the rollouts, or points of an accuracy, that are worth a word."""
MIN_STEPS = 20
"""Curves are compared in runs at least as long, and a learning rate judged after as many steps."""
FEW_UPDATES = 5
"""A policy that is lost after as few was lost to their size."""
MOVED = 0.05
"""The share by which an entropy, or the points by which a solve rate, has changed noticeably."""
MOSTLY_CLIPPED = 0.5
"""A share of the ratios, or of the completions cut off."""
MAX_GAP = 0.05
"""Nats a token between sampler and trainer; bfloat16 sampling alone stays well below it."""
SAMPLED_STEPS = 20
"""Rollout files that are opened to see which policy drew them."""


_NO_SIGNAL = {
    "all-wrong": "no rollout was ever right",
    "all-right": "every rollout was right: there is nothing left to learn here",
    "truncated": "every completion was cut off before its answer",
    "grader-error": "the grader could decide on nothing",
    "not-scored": "no rollout was scored",
    "equal-rewards": "within no group did the rewards differ",
}

_NO_SIGNAL_FIXES = {
    "all-wrong": "Read some rollouts: is the answer where the format wants it? Then use easier "
    "data.train, more sft.steps, or a larger grpo.group_size.",
    "all-right": "Use harder data.train, grpo.difficulty, or grpo.max_resample_rounds.",
    "truncated": "Raise sampling.max_new_tokens, or teach the stop token first (sft.steps).",
    "grader-error": "Look at `reason` in the rollouts; raise grading.timeout_seconds, or audit "
    "data.train with `grouper data audit`.",
    "not-scored": "The events of these steps in metrics.jsonl say which reward failed and why; try "
    "it with `grouper rewards try`.",
    "equal-rewards": "Use a reward that tells rollouts apart (rewards), or a larger "
    "grpo.group_size.",
}


def no_signal(record: Record) -> Iterator[Finding]:
    """Most steps had nothing to learn from, and why."""
    reports = record.grpo
    flat = [r for r in reports if r.status.startswith("no-signal:")]
    if not reports or len(flat) <= MOST * len(reports):
        return
    counts = Counter(r.status.partition(":")[2] for r in flat)
    kind, count = counts.most_common(1)[0]
    yield Finding(
        name=f"no-signal:{kind}",
        phase="grpo",
        what=f"{len(flat)} of {len(reports)} steps had no signal; in {count} of them "
        + _NO_SIGNAL[kind],
        steps=span(flat),
        evidence={
            "steps": len(reports),
            "steps_without_signal": len(flat),
            "solve_rate": mean(curve(reports, "solve_rate")),
            "truncated": mean(curve(reports, "completion/truncated")),
        },
        fix=_NO_SIGNAL_FIXES[kind],
    )


def grader(record: Record) -> Iterator[Finding]:
    """Rollouts without a verdict: the grader was too slow, or a reward failed."""
    causes = {
        "grader/timeouts": "Raise grading.timeout_seconds or grading.workers.",
        "rollouts/not_scored": "Read the warnings about rewards in training.log; a reward function "
        "fails, or data.train has answers that nobody can read (`grouper data audit`).",
    }
    for metric, fix in causes.items():
        values = curve(record.grpo, metric)
        if values and mean(values) > SOME:
            yield Finding(
                name="grader-errors",
                phase="grpo",
                what=f"{mean(values):.0%} of the rollouts count under {metric} and teach nothing",
                steps=span(record.grpo),
                evidence={metric: mean(values)},
                fix=fix,
            )


def alarms(record: Record) -> Iterator[Finding]:
    """What rang, or would have rung, while the run went on; each kind once."""
    rung = replay(record.grpo, record.recipe.alarms)
    flat = len(list(no_signal(record)))
    seen: set[str] = set()
    for step, alarm in rung:
        # A run without any signal has told the same story already.
        if alarm.name in seen or (flat and alarm.name in ("truncated", "saturated")):
            continue
        seen.add(alarm.name)
        yield Finding(
            name=_ALARM_NAMES.get(alarm.name, alarm.name),
            phase="grpo",
            what=f"at step {step} {alarm.what}",
            steps=(max(1, step - record.recipe.alarms.window + 1), step),
            evidence={"rang_at_step": step},
            fix=alarm.advice,
        )


_ALARM_NAMES = {
    "entropy-low": "entropy-collapse",
    "sameness": "entropy-collapse",
    "length": "length-blow-up",
    "saturated": "reward-saturation",
}


def format_only(record: Record) -> Iterator[Finding]:
    """Strict accuracy rose and lenient accuracy did not: the answers only look different."""
    tests = {r.name: r for r in record.evaluations if r.split == "test"}
    before = tests.get("sft") or tests.get("base")
    after = tests.get("grpo")
    if after is None:
        checks = [r for r in record.evaluations if r.split != "test" and r.phase == "grpo"]
        before, after = (checks[0], checks[-1]) if len(checks) > 1 else (None, None)
    if before is None or after is None or before.lenient is None or after.lenient is None:
        return
    strict = after.accuracy - before.accuracy
    lenient = after.lenient.mean - before.lenient.mean
    if strict <= SOME or lenient > strict / 4:
        return
    yield Finding(
        name="format-only",
        phase="grpo",
        what=f"strict accuracy rose by {100 * strict:.1f} points from {before.name} to "
        f"{after.name}, lenient accuracy by {100 * lenient:.1f}: what was learned is the format",
        steps=(before.step if before.phase == "grpo" else 0, after.step),
        evidence={
            "strict_before": before.accuracy,
            "strict_after": after.accuracy,
            "lenient_before": before.lenient.mean,
            "lenient_after": after.lenient.mean,
        },
        fix="Compare with a model that knows the format: train SFT first (sft.steps), and report "
        "lenient accuracy. Give the format rewards less weight (rewards).",
    )


def reward_without_correctness(record: Record) -> Iterator[Finding]:
    """The reward rose and the solve rate did not."""
    rewards, solved = curve(record.grpo, "reward/total"), curve(record.grpo, "solve_rate")
    if min(len(rewards), len(solved)) < MIN_STEPS:
        return
    (low, high), (before, after) = ends(rewards), ends(solved)
    noise = stdev(rewards[: len(rewards) // 2])
    if high - low <= max(SOME, 2 * noise) or after - before > SOME / 2:
        return
    yield Finding(
        name="format-only",
        phase="grpo",
        what=f"the reward rose from {low:.3f} to {high:.3f} while the solve rate went from "
        f"{before:.1%} to {after:.1%}: something other than right answers pays",
        steps=span(record.grpo),
        evidence={
            "reward_before": low,
            "reward_after": high,
            "solve_rate_before": before,
            "solve_rate_after": after,
        },
        fix="Look at the components reward/* in metrics.jsonl; lower the weight of those that rose "
        "(rewards), and keep grpo.shaping_needs_a_correct: true.",
    )


def stale_sampler(record: Record) -> Iterator[Finding]:
    """Rollouts come from another policy than the one that is updated."""
    late = {step: lag for step, lag in _lags(record) if lag > 0}
    if late:
        yield Finding(
            name="stale-sampler",
            phase="grpo",
            what=f"rollouts were drawn by weights up to {max(late.values())} updates old",
            steps=(min(late), max(late)),
            evidence={"versions_behind": max(late.values()), "steps_seen": len(late)},
            fix="The sampler was not given the new weights; without that, set grpo.importance: "
            "truncate.",
        )
    gaps = curve(record.grpo, "sampler_logprob_diff")
    if gaps and mean(gaps) > MAX_GAP:
        yield Finding(
            name="stale-sampler",
            phase="grpo",
            what=f"sampler and trainer disagree by {mean(gaps):.3g} nats a token",
            steps=span(record.grpo),
            evidence={"gap_mean": mean(gaps), "gap_highest_step": max(gaps)},
            fix="Set sampling.dtype: same, or grpo.importance: truncate; check that "
            "sampling.temperature and model.attention are what you meant.",
        )


def _lags(record: Record) -> Iterator[tuple[int, int]]:
    """(step, updates that the sampler's weights were behind), of some steps."""
    steps = [r.step for r in record.grpo]
    stride = max(1, len(steps) // SAMPLED_STEPS)
    chosen = set(steps[::stride])
    first: int | None = None
    updates = 0
    for report in record.grpo:
        if report.step in chosen:
            drawn = next(record.folder.read_rollouts("grpo", report.step), None)
            if drawn is not None:
                version = int(drawn["policy_version"])
                first = version - updates if first is None else first
                yield report.step, first + updates - version
        tally = report.tallies.get("updates")
        updates += int(tally.sum) if tally is not None else 0


def not_finite(record: Record) -> Iterator[Finding]:
    """Steps that were skipped because something was infinite or not a number."""
    for phase, reports in (("sft", record.sft), ("grpo", record.grpo)):
        bad = [r for r in reports if any(event.startswith("not-finite") for event in r.events)]
        if bad:
            yield Finding(
                name="not-finite",
                phase=phase,
                what=f"in {len(bad)} steps something was infinite or not a number, and skipped; "
                f"first: {next(e for e in bad[0].events if e.startswith('not-finite'))}",
                steps=span(bad),
                evidence={"steps_skipped": len(bad)},
                fix=f"Lower {phase}.optimizer.learning_rate, or use model.compute_dtype: float32; "
                "the folder incident/ has the batch where the run stopped.",
            )


# --- learning rates ------------------------------------------------------------------------------


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


CHECKS: tuple[Check, ...] = (
    not_finite,
    stale_sampler,
    rate_too_high,
    no_signal,
    grader,
    alarms,
    format_only,
    reward_without_correctness,
    sft_rate,
    rate_too_low,
)
"""In the order in which findings are reported: the first ones can be the cause of the later."""


def diagnose(record: Record) -> list[Finding]:
    """Everything that is found wrong, the most telling first."""
    return [finding for check in CHECKS for finding in check(record)]
