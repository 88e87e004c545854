"""Checks of runs and samples, and the data that they examine.

`findings.yaml` has the text of each finding, with the problem and its fix; the conditions are here.
A check of a metric over its last window is only a row of that table (`watch`). Every other check is
a function of one type of data: the record of a run (`Record`), the lengths of a few completions
(`SampleSummary`) or graded groups (`Samples`). Checks of recipes are in `recipe_checks`.
Thresholds are rough on purpose: a finding is a place to look.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, linear_regression, median, median_low, pvariance, stdev
from typing import TYPE_CHECKING, Any

from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.errors import ConfigError, PromptError, RunFolderError
from grouper.evaluation.compare import compare
from grouper.evaluation.result import EvaluationResult, mean_of
from grouper.files import load_table
from grouper.prompts.rendering import encode_completion
from grouper.runs.folder import RunFolder
from grouper.runs.lock import is_running
from grouper.types import AnswerFormat, Rollout, RolloutGroup, StepReport

if TYPE_CHECKING:
    from grouper.training.prepare import Prepared

FINDINGS: dict[str, dict[str, Any]] = load_table("grouper.advice", "findings.yaml")

# Share of steps, ratios or completions above which they are most of them.
MOST = 0.5
# Share of rollouts, relative change of the entropy, or change of a rate, that matters.
SOME = 0.05
# Steps at the beginning and the end of a run that are compared.
COMPARED = 10
# Validations after the best one that show that there is no more progress.
FEW_VALIDATIONS = 3
# Accuracy above which a plateau is a success: the rest is within the noise of most sets.
CEILING = 0.9
# Completions that are needed to report that none of them is in the format.
FEW_COMPLETIONS = 8
# Steps that are needed to compare curves, or to judge a learning rate.
MIN_STEPS = 20
# A policy that collapses within this number of updates collapsed because of their size.
FEW_UPDATES = 5
# Nats per token between sampler and trainer. In bfloat16 rounding alone makes 0.04 in SmolLM2-135M,
# 0.01 in Qwen2.5-Coder-0.5B.
MAX_GAP = 0.1
# Rollout files that are opened for the version of the policy that sampled them.
SAMPLED_STEPS = 20
# Share of completions that should end after SFT.
MIN_STOPPED = 0.8
# Temperature below which it is the likely cause of equal samples.
LOW_TEMPERATURE = 0.7
# Problems with samples that are needed for a conclusion.
LOOKED_AT_BY_ADVICE = 16
# Steps of each metric that medians are computed over.
REMEMBERED = 500
# Steps over which a metric is averaged before it is compared.
WINDOW = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem that a check has found.

    Example: `Finding(name="temperature", what="all 5 samples are the same text", fix="Raise it.")`.
    """

    name: str
    what: str
    """One sentence, without its full stop."""
    fix: str = ""
    """The settings to change, in whole sentences."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers that the finding is based on."""
    phase: str = "grpo"
    """Phase of a run in which the problem is."""
    steps: tuple[int, int] = (0, 0)
    """First and last step of the evidence in a run."""
    is_fault: bool = True
    """Whether something went wrong; otherwise the finding is a place to look."""

    def __str__(self) -> str:
        return f"{self.what}. {self.fix}".rstrip()


def found(
    key: str,
    evidence: Mapping[str, float] | None = None,
    *,
    phase: str = "grpo",
    steps: tuple[int, int] = (0, 0),
    conditions: Mapping[str, bool] | None = None,
    **words: Any,
) -> Finding:
    """Make the finding of a row of the table.

    Args:
        key: of the row.
        evidence: the numbers that the finding is based on.
        phase: in which the problem is.
        steps: first and last step of the evidence.
        conditions: of the row's remedies: whether each holds.
        **words: values of the row's sentences in addition to the evidence and the phase.
    """
    row = FINDINGS[key]
    numbers = evidence or {}
    values = {**numbers, **words, "phase": phase}
    fix = row.get("fix", "")
    if "remedies" in row:
        holding: set[str | None] = {None}
        for name, holds in (conditions or {}).items():
            if holds:
                holding.add(name)
        fix = _sentence([text for text, condition in row["remedies"] if condition in holding])
    return Finding(
        name=row.get("name", key),
        what=row["what"].format(**values),
        fix=fix.format(**values),
        evidence=numbers,
        phase=phase,
        steps=steps,
        is_fault=row.get("is_fault", True),
    )


def _sentence(remedies: Sequence[str]) -> str:
    """Join remedies, one of which is to be chosen, to a sentence.

    >>> _sentence(["raise it", "wait", "give up"]), _sentence(["wait"]), _sentence([])
    ('Raise it, wait, or give up.', 'Wait.', '')
    """
    if not remedies:
        return ""
    text = remedies[-1]
    if len(remedies) == 2:
        text = f"{remedies[0]} or {text}"
    elif len(remedies) > 2:
        text = f"{', '.join(remedies[:-1])}, or {text}"
    return f"{text[0].upper()}{text[1:]}."


def refusal(key: str, where: str, **words: Any) -> ConfigError:
    """Make the finding of a row an error at a setting."""
    finding = found(key, **words)
    return ConfigError(finding.what, where=where, fix=finding.fix)


# --- the last steps of a metric -------------------------------------------------------------------


def slope(values: Sequence[float]) -> float:
    """Compute the least-squares slope per step: sum (t - mean t)(v - mean v) / sum (t - mean t)^2.

    >>> slope([1.0, 3.0, 5.0]), slope([2.0])
    (2.0, 0.0)
    """
    if len(values) < 2:
        return 0.0
    return linear_regression(range(len(values)), values).slope


def watch(report: StepReport, memory: dict[str, Any]) -> list[tuple[str, Finding]]:
    """Check every metric over its last window, after each step.

    A finding is reported when its condition begins to hold, and again after that has ended.

    Args:
        report: of the step.
        memory: values of earlier steps and calls, as JSON values; updated in place.

    Returns:
        (key of its row, finding) of each check whose condition begins to hold at this step.
    """
    first: dict[str, list[float]] = memory.setdefault("first", {})
    recent: dict[str, list[float]] = memory.setdefault("recent", {})
    active: list[str] = memory.setdefault("active", [])
    rows = {key: row for key, row in FINDINGS.items() if row.get("metric") in report.tallies}
    for metric in {row["metric"] for row in rows.values()}:
        value = report.tallies[metric].mean
        if not math.isfinite(value):
            continue
        if len(first.setdefault(metric, [])) < WINDOW:
            first[metric].append(value)
        else:
            values = [*recent.get(metric, []), value]
            recent[metric] = values[-(REMEMBERED + WINDOW) :]
    findings = []
    for key, row in rows.items():
        values = recent.get(row["metric"], [])
        numbers: dict[str, Any] = {}
        holds = False
        if len(values) >= WINDOW:  # otherwise there are no two windows to compare
            numbers = _window_numbers(first[row["metric"]], values)
            holds = _holds(row, numbers)
        if holds and key not in active:
            active.append(key)
            findings.append((key, found(key, **numbers)))
        elif not holds and key in active:
            active.remove(key)
    return findings


def _window_numbers(start: Sequence[float], values: Sequence[float]) -> dict[str, Any]:
    """Compute the numbers of a metric that rows of `findings.yaml` may name.

    Args:
        start: values of the first window.
        values: later values; the last window of them is compared.
    """
    last = values[-WINDOW:]
    return {
        "start": fmean(start),
        "now": fmean(last),
        "median_before": median([*start, *values[:-WINDOW]]),
        "now_median": median(last),
        "drift": fmean(last) - fmean(start),
        "rise": slope(last) * len(last),
        "window": len(last),
    }


def _holds(row: Mapping[str, Any], numbers: Mapping[str, Any]) -> bool:
    """Return whether the number of a row is beyond its bound, which may be relative to another."""
    number = numbers[row["number"]]
    unit = numbers.get(row.get("of", ""), 1.0)
    if "above" in row:
        return bool(number > row["above"] * unit)
    return bool(number < row["below"] * unit)


# --- the record of a run --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record of a run, read from its folder."""

    folder: RunFolder
    recipe: Recipe
    sft: Sequence[StepReport]
    grpo: Sequence[StepReport]
    evaluations: Sequence[EvaluationResult]
    damaged: list[RunFolderError] = field(default_factory=list)
    """Rollouts that the checks could not read."""


def read_record(path: Path) -> Record:
    """Read a run folder.

    Raises:
        RunFolderError: it is no run folder, it is damaged, or no step has been done.
        ConfigError: its recipe cannot be read.
    """
    folder = RunFolder(path)
    folder.read_info()
    reports = folder.read_metrics()
    if not reports:
        fix = "Continue it with --resume; training.log says how it ended."
        if is_running(path):
            fix = "It is still running: try again after its first step."
        raise RunFolderError(
            "there is nothing to diagnose: the run has not finished a step",
            where=str(path),
            fix=fix,
        )
    return Record(
        folder=folder,
        recipe=load_recipe(path / "recipe.yaml"),
        sft=[report for report in reports if report.phase == "sft"],
        grpo=[report for report in reports if report.phase == "grpo"],
        evaluations=folder.read_evaluations(),
    )


def curve(reports: Sequence[StepReport], name: str) -> list[float]:
    """Return the finite means of a metric in the steps that have it."""
    values = []
    for report in reports:
        tally = report.tallies.get(name)
        if tally is not None and tally.count and math.isfinite(tally.mean):
            values.append(tally.mean)
    return values


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and of the last steps, which do not overlap."""
    size = max(1, min(COMPARED, len(values) // 2))
    return fmean(values[:size]), fmean(values[-size:])


def changed(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the means of the first and of the last steps as evidence."""
    first, last = ends(values)
    return {f"{name}_before": first, f"{name}_after": last}


def span(reports: Sequence[StepReport]) -> tuple[int, int]:
    """Return the first and the last step."""
    return reports[0].step, reports[-1].step


def no_signal(record: Record) -> Iterator[Finding]:
    """Report that most steps had nothing to learn from, and why."""
    reports = record.grpo
    flat = [report for report in reports if report.status.startswith("no-signal:")]
    if len(flat) > MOST * len(reports):
        status, count = Counter(report.status for report in flat).most_common(1)[0]
        numbers = {
            "steps": len(reports),
            "steps_without_signal": len(flat),
            "solve_rate": mean_of(curve(reports, "solve_rate")),
            "truncated": mean_of(curve(reports, "completion/truncated")),
        }
        yield found(status, numbers, steps=span(flat), count=count)


def grader(record: Record) -> Iterator[Finding]:
    """Report rollouts without a verdict: the grader was too slow, or a reward failed."""
    for metric in ("grader/timeouts", "rollouts/not_scored"):
        share = mean_of(curve(record.grpo, metric))
        if share > SOME:
            yield found(metric, {metric: share}, steps=span(record.grpo), share=share)


def during_the_run(record: Record) -> Iterator[Finding]:
    """Report the findings of `watch` over all steps, each one once."""
    reported: set[str] = set()
    if any(no_signal(record)):  # which explains these already
        reported = {"truncated", "saturated"}
    memory: dict[str, Any] = {}
    for report in record.grpo:
        step = report.step
        for key, finding in watch(report, memory):
            if key in reported:
                continue
            reported.add(key)
            yield replace(
                finding,
                what=f"at step {step} {finding.what}",
                steps=(max(1, step - WINDOW + 1), step),
                evidence={"found_at_step": step},
            )


def format_only(record: Record) -> Iterator[Finding]:
    """Report that strict accuracy rose without lenient accuracy: answers only look different."""
    tests = {result.name: result for result in record.evaluations if result.split == "test"}
    first = tests.get("sft") or tests.get("base")
    last = tests.get("grpo")
    validations = [
        result for result in record.evaluations if result.split != "test" and result.phase == "grpo"
    ]
    if last is None and len(validations) > 1:
        first = validations[0]
        last = validations[-1]
    if first is None or last is None or first.lenient is None or last.lenient is None:
        return
    strict = last.accuracy - first.accuracy
    lenient = last.lenient.mean - first.lenient.mean
    if strict > SOME and lenient <= strict / 4:
        numbers = {
            "strict_before": first.accuracy,
            "strict_after": last.accuracy,
            "lenient_before": first.lenient.mean,
            "lenient_after": last.lenient.mean,
        }
        first_step = first.step if first.phase == "grpo" else 0
        yield found(
            "format-only",
            numbers,
            steps=(first_step, last.step),
            before=first.name,
            after=last.name,
            strict=100 * strict,
            lenient=100 * lenient,
        )


def truncation(record: Record) -> Iterator[Finding]:
    """Report that most completions were truncated, at the end of training or when measured."""
    shares = curve(record.grpo, "completion/truncated")[-COMPARED:]
    names = {finding.name for finding in during_the_run(record)}
    statuses = {report.status for report in record.grpo[-COMPARED:]}
    is_reported = "truncated" in names or "no-signal:truncated" in statuses
    if mean_of(shares) > MOST and not is_reported:
        numbers = {"truncated": mean_of(shares), "steps_seen": len(shares)}
        last_reports = record.grpo[-len(shares) :]
        yield found("truncated-training", numbers, steps=span(last_reports))
        return
    result = _last_evaluation(record)
    if result is not None and result.cut_off > MOST and not is_reported:
        yield found(
            "truncated-answers",
            {"truncated": result.cut_off, "completions": len(result.slim)},
            phase=result.phase,
            steps=(result.step, result.step),
            name=result.name,
        )


def no_format(record: Record) -> Iterator[Finding]:
    """Report that no completion of the last evaluation, or of training, was in the format."""
    fmt = record.recipe.prompt.format
    result = _last_evaluation(record)
    if result is not None and result.metrics is not None:
        count = len(result.slim)
        if result.metrics.format_accuracy == 0 and count >= FEW_COMPLETIONS:
            yield found(
                "no-format",
                {"completions": count, "in_format": 0},
                phase=result.phase,
                steps=(result.step, result.step),
                format=fmt,
                where=f"in {result.name}",
            )
        return
    for name in sorted({name for report in record.grpo for name in report.tallies}):
        if not name.startswith("reward/") or not name.endswith("format"):
            continue
        values = curve(record.grpo, name)
        tallies = [report.tallies[name] for report in record.grpo if name in report.tallies]
        count = round(sum(tally.count for tally in tallies))
        if values and not any(values) and count >= FEW_COMPLETIONS:
            yield found(
                "no-format",
                {"completions": count, "in_format": 0},
                steps=span(record.grpo),
                format=fmt,
                where=f"by {name}",
            )
            return


def _last_evaluation(record: Record) -> EvaluationResult | None:
    """Return the last evaluation of the last phase: on test, else on validation problems."""
    trained = [result for result in record.evaluations if result.phase != "base"]
    if not trained:
        return None
    phase = "grpo" if any(result.phase == "grpo" for result in trained) else "sft"
    of_phase = [result for result in trained if result.phase == phase]
    return max(of_phase, key=lambda result: (result.split == "test", result.step))


_WARNING = re.compile(r"^\S+ \S+ WARNING: (.*)")
# A warning of a live check; `during_the_run` finds it again in the metrics.
_OF_A_CHECK = re.compile(r"(?:sft|grpo) step \d+: check ")


def warnings_logged(record: Record) -> Iterator[Finding]:
    """Report the warnings in the log of the run; each text is counted once."""
    log = record.folder.path / "training.log"
    if not log.is_file():
        return
    texts: dict[str, None] = {}  # in their order, each once
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        match = _WARNING.match(line)
        if match is not None and not _OF_A_CHECK.match(match[1]):
            texts[match[1]] = None
    if texts:
        first_text = next(iter(texts))
        yield found(
            "warnings",
            {"warnings": len(texts)},
            phase="sft" if record.sft else "grpo",
            steps=span([*record.sft, *record.grpo]),
            noun="warning" if len(texts) == 1 else "warnings",
            first=first_text.rstrip("."),
        )


def no_progress(record: Record) -> Iterator[Finding]:
    """Report that several validations were not better than an earlier one."""
    for phase in ("sft", "grpo"):
        validations = [
            result
            for result in record.evaluations
            if result.split == "validation" and result.phase == phase
        ]
        # After a change of the data only the results on the same problems are comparable.
        validations = [r for r in validations if r.problems == validations[-1].problems]
        best = 0
        later = 0
        for number in range(1, len(validations)):
            (change,) = compare([validations[best], validations[number]]).differences
            if change.paired.verdict == "better":
                best = number
            later = number - best
        # Near the ceiling there is little room for progress.
        if later >= FEW_VALIDATIONS and validations[best].accuracy < CEILING:
            paired = change.paired
            numbers = {
                "since": validations[best].step,
                "validations": later,
                "difference": 100 * paired.difference,
                "low": 100 * paired.interval.low,
                "high": 100 * paired.interval.high,
            }
            steps = (validations[best].step, validations[-1].step)
            yield found("no-progress", numbers, phase=phase, steps=steps)


def reward_without_correctness(record: Record) -> Iterator[Finding]:
    """Report that the reward rose and the solve rate did not."""
    rewards = curve(record.grpo, "reward/total")
    solve_rates = curve(record.grpo, "solve_rate")
    if min(len(rewards), len(solve_rates)) < MIN_STEPS:
        return
    first_reward, last_reward = ends(rewards)
    first_rate, last_rate = ends(solve_rates)
    noise = stdev(rewards[: len(rewards) // 2])
    reward_rose = last_reward - first_reward > max(SOME, 2 * noise)
    if reward_rose and last_rate - first_rate <= SOME / 2:
        numbers = {**changed("reward", rewards), **changed("solve_rate", solve_rates)}
        yield found("reward-without-correctness", numbers, steps=span(record.grpo))


def stale_sampler(record: Record) -> Iterator[Finding]:
    """Report rollouts of another policy than the one that is updated."""
    grpo = record.recipe.grpo
    allowed = grpo.max_staleness * grpo.updates_per_batch * grpo.num_iterations
    stale = {step: lag for step, lag in _lags(record) if lag > allowed}
    if stale:
        numbers = {"versions_behind": max(stale.values()), "steps_seen": len(stale)}
        yield found("stale-sampler", numbers, steps=(min(stale), max(stale)))
    gaps = curve(record.grpo, "sampler_logprob_diff")
    if mean_of(gaps) > MAX_GAP:
        evidence = {"gap_mean": mean_of(gaps), "gap_highest_step": max(gaps)}
        yield found("disagreeing-sampler", evidence, steps=span(record.grpo))


def _lags(record: Record) -> Iterator[tuple[int, int]]:
    """Yield (step, updates that the sampler's weights were behind) of some steps."""
    stride = max(1, len(record.grpo) // SAMPLED_STEPS)
    first_version: int | None = None
    updates = 0
    for number, report in enumerate(record.grpo):
        rollout = None
        if number % stride == 0:
            try:
                rollout = next(record.folder.read_rollouts("grpo", report.step), None)
            except RunFolderError as error:
                record.damaged.append(error)
        if rollout is not None:
            version = int(rollout["policy_version"])
            if first_version is None:
                first_version = version - updates
            yield report.step, first_version + updates - version
        updates += int(sum(curve([report], "updates")))


def not_finite(record: Record) -> Iterator[Finding]:
    """Report steps that were skipped because a value was infinite or not a number."""
    for phase, reports in (("sft", record.sft), ("grpo", record.grpo)):
        first_events: dict[int, str] = {}  # the first such event of each skipped step
        for report in reports:
            for event in report.events:
                if event.startswith("not-finite"):
                    first_events.setdefault(report.step, event)
        if first_events:
            first = min(first_events)
            yield found(
                "not-finite",
                {"steps_skipped": len(first_events)},
                phase=phase,
                steps=(first, max(first_events)),
                first=first_events[first],
            )


# --- learning rates ------------------------------------------------------------------------------


def rate_too_high(record: Record) -> Iterator[Finding]:
    """Report lost progress, an exploding gradient, a collapse, or mostly clipped ratios."""
    reports = record.grpo
    solve_rates = curve(reports, "solve_rate")
    norms = curve(reports, "grad_norm")
    clip_fraction = mean_of(curve(reports, "policy/clip_fraction"))
    signs: dict[str, float] = {}
    if len(solve_rates) >= 2 * COMPARED:
        windows = len(solve_rates) - COMPARED + 1
        best = max(fmean(solve_rates[start : start + COMPARED]) for start in range(windows))
        last = fmean(solve_rates[-COMPARED:])
        if best > 2 * SOME and last < best / 2:
            signs["solve_rate_best"] = best
            signs["solve_rate_at_the_end"] = last
    if len(norms) >= MIN_STEPS:
        first_norm, last_norm = ends(norms)
        if last_norm > 10 * first_norm:
            signs |= changed("grad_norm", norms)
    if clip_fraction > MOST:
        signs["clip_fraction"] = clip_fraction
    signs |= _collapse(reports)
    if signs:
        yield _rate(record, "grpo", "too-high", signs)


def _collapse(reports: Sequence[StepReport]) -> dict[str, float]:
    """Return the evidence that the model lost its abilities in a few updates; empty without any."""
    signs: dict[str, float] = {}
    updates = sum(report.status == "learning" for report in reports)
    if not 0 < updates <= FEW_UPDATES or len(reports) < MIN_STEPS:
        return signs
    # Metric -> change that is a collapse.
    for name, collapse in (("solve_rate", -2 * SOME), ("completion/truncated", MOST)):
        values = curve(reports, name)
        first = values[0]
        last = fmean(values[-COMPARED:])
        if (last - first) / collapse >= 1:
            signs[f"{name}_at_first"] = first
            signs[f"{name}_at_the_end"] = last
            signs["steps_that_learned"] = updates
    return signs


def rate_too_low(record: Record) -> Iterator[Finding]:
    """Report that there was a signal, and neither the solve rate nor the policy changed."""
    learned = [report for report in record.grpo if report.status == "learning"]
    solve_rates = curve(learned, "solve_rate")
    entropies = curve(learned, "policy/entropy")
    if len(learned) < MIN_STEPS or len(solve_rates) < MIN_STEPS or not entropies:
        return
    rise = slope(solve_rates) * len(solve_rates)
    # The rise of a straight line through n independent values has this standard error.
    noise = stdev(solve_rates) * math.sqrt(12 / len(solve_rates))
    first_entropy, last_entropy = ends(entropies)
    entropy_change = math.inf
    if first_entropy:
        entropy_change = abs(last_entropy - first_entropy) / first_entropy
    if abs(rise) > 2 * noise or rise > SOME or entropy_change > SOME:
        return
    signs = {"solve_rate_rise": rise, "its_noise": noise, "entropy_change": entropy_change}
    yield _rate(record, "grpo", "too-low", signs)


def sft_rate(record: Record) -> Iterator[Finding]:
    """Report that the loss of SFT rose, or did not change."""
    losses = curve(record.sft, "loss")
    if len(losses) < MIN_STEPS:
        return
    first, last = ends(losses)
    signs = changed("loss", losses)
    if last > 1.05 * first:
        yield _rate(record, "sft", "too-high", signs)
    elif last > 0.98 * first:
        yield _rate(record, "sft", "too-low", signs)


def _rate(record: Record, phase: str, problem: str, signs: dict[str, float]) -> Finding:
    """Make a finding about a learning rate.

    Args:
        record: of the run.
        phase: whose learning rate it is.
        problem: `too-high` or `too-low`.
        signs: the evidence.
    """
    rate = getattr(record.recipe, phase).optimizer.learning_rate
    texts = [f"{name.replace('_', ' ')} {value:.3g}" for name, value in signs.items()]
    return found(
        f"learning-rate-{problem}",
        {**signs, "learning_rate": rate},
        phase=phase,
        steps=span(getattr(record, phase)),
        signs=", ".join(texts),
    )


# --- lengths of sampled completions ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSummary:
    """Lengths of completions, which are compared with a budget of `budget` tokens.

    >>> completions = ((10, True), (20, True), (30, True), (40, False))
    >>> print(SampleSummary(completions=completions, budget=25, before="grpo"))
    completions take 20 tokens (median), at least 40 (95th percentile); 50% do not end within 25
    """

    completions: Sequence[tuple[int, bool]]
    """Tokens of each completion, and whether it ended by itself."""
    budget: int
    before: str = ""
    """The phase that is about to begin; empty after SFT."""
    begun: bool = False
    """Whether anything of the run has been measured or trained."""

    @property
    def p95(self) -> tuple[int, bool]:
        """The 95th percentile in tokens, and whether it is exact; if False, a lower bound."""
        return sorted(self.completions)[math.ceil(0.95 * len(self.completions)) - 1]

    @property
    def truncated(self) -> float:
        """The share of completions that do not end within the budget."""
        return mean_of([length > self.budget or not ended for length, ended in self.completions])

    @property
    def endless(self) -> float:
        """The share of completions that did not end, whatever their length."""
        return mean_of([not ended for _, ended in self.completions])

    @property
    def enough(self) -> int:
        """The 95th percentile of the completions that ended, in tokens; 0 if none did."""
        lengths = sorted(length for length, ended in self.completions if ended)
        if not lengths:
            return 0
        return lengths[math.ceil(0.95 * len(lengths)) - 1]

    def __str__(self) -> str:
        p95, is_exact = self.p95
        bound = "" if is_exact else "at least "
        median_length, _ = median_low(self.completions)
        return (
            f"completions take {median_length} tokens (median), {bound}{p95} (95th percentile); "
            f"{self.truncated:.0%} do not end within {self.budget}"
        )


def budget(summary: SampleSummary) -> Iterator[Finding]:
    """Report that GRPO would truncate most completions, or that too few end after SFT."""
    if not summary.before and 1 - summary.truncated < MIN_STOPPED:
        yield found("stopping", share=1 - summary.truncated)
    if summary.before == "grpo" and summary.truncated > MOST:
        endless = ""
        if summary.endless:
            endless = f" ({summary.endless:.0%} would not end then either)"
        how = ""
        resume = ""
        if summary.begun:
            # The run can continue from what has been measured or trained.
            how = ", with --resume --allow-changes to keep what is there, or --overwrite"
            resume = "--resume "
        yield found(
            "endless" if summary.endless > MOST else "budget-too-small",
            share=summary.truncated,
            count=len(summary.completions),
            budget=summary.budget,
            enough=math.ceil(summary.enough / 32) * 32,  # a round number is easier to remember
            others=endless,
            how=how,
            resume=resume,
        )


# --- graded samples -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A few samples, graded and rewarded as in training, and the prepared data they come from."""

    groups: tuple[RolloutGroup, ...]
    """One per problem."""
    signal: tuple[bool, ...]
    """Whether GRPO would learn from each group: some advantage is not 0."""
    prepared: Prepared

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All samples, problem by problem."""
        return tuple(rollout for group in self.groups for rollout in group.rollouts)

    @property
    def all_truncated(self) -> bool:
        """Whether all samples are truncated."""
        return all(rollout.completion.truncated for rollout in self.rollouts)

    @property
    def diversity(self) -> float:
        """The mean diversity of the samples of a problem."""
        return fmean(group.diversity for group in self.groups)

    @property
    def reward_variance(self) -> float:
        """The mean over the problems of the variance of the total reward (dividing by n).

        NaN if no sample was scored.
        """
        variances = []
        for group in self.groups:
            totals = [rollout.reward.total or 0.0 for rollout in group.scored]
            if totals:
                variances.append(pvariance(totals))
        return mean_of(variances)

    @property
    def certainty(self) -> float:
        """The geometric mean of the probabilities of the sampled tokens."""
        logprobs = [value for rollout in self.rollouts for value in rollout.completion.logprobs]
        return math.exp(fmean(logprobs))


def tokenization(samples: Samples) -> Iterator[Finding]:
    """Report tags, stop tokens and prefixes that the tokenizer cannot write or read back."""
    prepared = samples.prepared
    fmt = prepared.format
    prompt = prepared.prompt
    stops = prepared.stop_tokens
    ids: list[int] = []
    try:
        for text in (*(fmt.tags or ()), fmt.completion("1", "1")):
            ids = encode_completion(prepared.tokenizer, text, "the format")
    except PromptError:
        yield found("tokenization-of-text", text=text)
    if any(stop in ids for stop in stops):
        yield found("tokenization-of-layout")
    if not 0 <= stops[0] < prepared.vocabulary:
        yield found("tokenization-of-stop", stop=stops[0], vocabulary=prepared.vocabulary)
    prompt_text = prepared.text(prompt.token_ids)
    if prompt.prefix and not prompt_text.endswith(prompt.prefix):
        yield found("tokenization-of-prefix", prefix=prompt.prefix, ending=prompt_text[-40:])


def truncated_samples(samples: Samples) -> Iterator[Finding]:
    """Report that all samples are truncated, or some of samples without a signal.

    If all are truncated, rewards may still differ by accident.
    """
    truncated = sum(rollout.completion.truncated for rollout in samples.rollouts)
    if samples.all_truncated or (truncated and not any(samples.signal)):
        yield found(
            "all-truncated" if samples.all_truncated else "some-truncated",
            count=truncated,
            samples=len(samples.rollouts),
            budget=samples.groups[0].params.max_new_tokens,
            conditions=conditions_of(samples),
        )


def equal_rewards(samples: Samples) -> Iterator[Finding]:
    """Report every cause of equal rewards, up to one that explains all samples."""
    if any(samples.signal):
        return
    conditions = conditions_of(samples)
    equal_groups = sum(group.diversity == 0 for group in samples.groups)
    if equal_groups:
        yield _equal_samples(samples, equal_groups, conditions)
    if equal_groups == len(samples.groups) or samples.all_truncated:
        return
    fmt = samples.prepared.format
    # A truncated sample has had no room for its answer.
    texts = [
        rollout.completion.text for rollout in samples.rollouts if not rollout.completion.truncated
    ]
    missing = Counter[str]()  # tag -> number of texts without it
    for text in texts:
        missing.update(tag for tag, occurs in tags_in(text, fmt).items() if not occurs)
    missing_everywhere = [tag for tag in tags_in("", fmt) if missing[tag] == len(texts)]
    if missing_everywhere:
        yield found(
            "tags",
            missing=", ".join(missing_everywhere),
            format=fmt.name,
            conditions=conditions,
        )
    elif missing:
        yield found(
            "some-tags",
            missing=", ".join(f"{tag} in {count}" for tag, count in missing.items()),
            samples=len(texts),
            format=fmt.name,
            conditions=conditions,
        )
    if missing_everywhere and len(texts) == len(samples.rollouts):
        return
    yield from _by_rewards(samples, conditions)


def _equal_samples(samples: Samples, count: int, conditions: Mapping[str, bool]) -> Finding:
    """Make the finding of `count` problems whose samples are the same text."""
    params = samples.groups[0].params
    key = "certain"
    if params.temperature < LOW_TEMPERATURE:
        key = "temperature"
    elif params.truncated:
        key = "no-choice"
    return found(
        key,
        problems=_problems(count, samples),
        temperature=params.temperature,
        certainty=samples.certainty,
        conditions=conditions,
    )


def _by_rewards(samples: Samples, conditions: Mapping[str, bool]) -> Iterator[Finding]:
    """Report the cause of equal rewards of samples that differ."""
    rollouts = samples.rollouts
    right = sum(rollout.grade.correct for rollout in rollouts)
    if all(rollout.reward.total is None for rollout in rollouts):
        key = "equal-not-scored"
    elif samples.reward_variance > 0:
        key = "equal-none-right"
    elif right == len(rollouts):
        key = "equal-all-right"
    elif right:
        key = "equal-mixed"
    else:
        key = "equal-all-wrong"
    problems = _problems(len(samples.groups), samples)
    yield found(key, problems=problems, right=right, samples=len(rollouts), conditions=conditions)
    unscored = sum(rollout.reward.total is None for rollout in rollouts)
    if 0 < unscored < len(rollouts):
        yield found("some-not-scored", count=unscored, samples=len(rollouts))


def _problems(count: int, samples: Samples) -> str:
    """Write a number of problems: `1 problem`, or `2 of 5 problems` if they are not all."""
    total = len(samples.groups)
    number = str(count) if count == total else f"{count} of {total}"
    noun = "problems" if total > 1 else "problem"
    return f"{number} {noun}"


def conditions_of(samples: Samples) -> dict[str, bool]:
    """Return whether each condition of a remedy holds, by its name.

    A remedy that is already applied is not proposed.
    """
    prepared = samples.prepared
    recipe = prepared.recipe
    budget = samples.groups[0].params.max_new_tokens
    context = prepared.context
    longest = max(len(group.prompt.token_ids) for group in samples.groups)
    marks = tags_in("", replace(prepared.format, prefix=""))
    return {
        "few problems": len(samples.groups) < LOOKED_AT_BY_ADVICE,
        "SFT": not recipe.skip_sft,
        "no SFT": recipe.skip_sft,
        "correct needed": recipe.grpo.require_correct_in_group,
        "no difficulty": recipe.grpo.difficulty is None,
        "not told": not all(mark in prepared.format.system for mark in marks),
        "room": context is None or longest + budget < context,
    }


def tags_in(text: str, fmt: AnswerFormat) -> dict[str, bool]:
    r"""Return whether each tag of a format occurs in a completion; `\boxed` if it has no tags.

    Tags that the prompt has opened count as well.
    """
    tags = fmt.tags or ("\\boxed",)
    return {tag: tag in fmt.prefix + text for tag in tags}


# --- the checks of each type of data --------------------------------------------------------------

CHECKS: dict[type, tuple[Callable[[Any], Iterator[Finding]], ...]] = {
    # Earlier ones can be the cause of later ones.
    Record: (
        not_finite,
        stale_sampler,
        rate_too_high,
        no_signal,
        grader,
        during_the_run,
        truncation,
        no_format,
        format_only,
        no_progress,
        reward_without_correctness,
        sft_rate,
        rate_too_low,
        warnings_logged,
    ),
    SampleSummary: (budget,),
    Samples: (tokenization, truncated_samples, equal_rewards),
}


def find(data: Record | SampleSummary | Samples) -> list[Finding]:
    """Run the checks of this type of data."""
    return [finding for check in CHECKS[type(data)] for finding in check(data)]
