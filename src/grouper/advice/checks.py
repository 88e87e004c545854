"""What can go wrong: the checks, and the data they examine.

`findings.yaml` has the text of each finding, what is wrong and what to do; the conditions are here.
A check of a metric over its last window is only a row of that table (`watch`). Every
other one is a function of one kind of data: the record of a run (`Record`), the lengths of a few
completions (`SampleSummary`) or graded groups (`Samples`). Recipes have theirs in `recipe_checks`.
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
from grouper.files import table
from grouper.prompts.rendering import encode_completion
from grouper.runs.folder import RunFolder
from grouper.runs.lock import is_running
from grouper.types import AnswerFormat, Rollout, RolloutGroup, StepReport

if TYPE_CHECKING:
    from grouper.training.prepare import Prepared

FINDINGS: dict[str, dict[str, Any]] = table("grouper.advice", "findings.yaml")

# A share of the steps, ratios or completions: most of them.
MOST = 0.5
# A share of the rollouts, a relative change of the entropy, or a change of a rate, that matters.
SOME = 0.05
# Steps at the beginning and the end of a run that are compared.
COMPARED = 10
# Looks at the validation problems after the best one that show that nothing comes any more.
FEW_VALIDATIONS = 3
# An accuracy from which a plateau is a success: what is left is within the noise of most sets.
CEILING = 0.9
# Completions of which not one is in the format before this is said.
FEW_COMPLETIONS = 8
# Curves are compared in runs at least as long, and a learning rate judged after as many steps.
MIN_STEPS = 20
# A policy that collapses within so few updates collapsed because of their size.
FEW_UPDATES = 5
# Nats per token between sampler and trainer. In bfloat16 rounding alone makes 0.04 in SmolLM2-135M,
# 0.01 in Qwen2.5-Coder-0.5B.
MAX_GAP = 0.1
# Rollout files that are opened to see which policy drew them.
SAMPLED_STEPS = 20
# A share of the completions that ends after SFT.
MIN_STOPPED = 0.8
# Below this, the temperature is the likely cause of equal samples.
LOW_TEMPERATURE = 0.7
# Problems that a look at samples should have, before anything is concluded from them.
LOOKED_AT_BY_ADVICE = 16
# Steps of each metric that medians are taken over.
REMEMBERED = 500
# Steps over which a metric is averaged before it is compared.
WINDOW = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Example: `Finding(name="temperature", what="all 5 samples are the same text", fix="Raise it.")`.
    """

    name: str
    what: str
    """One sentence, without its full stop."""
    fix: str = ""
    """The settings to change, in whole sentences."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers it rests on."""
    phase: str = "grpo"
    """Of a run: where it was found."""
    steps: tuple[int, int] = (0, 0)
    """Of a run: first and last step of the evidence."""
    is_fault: bool = True
    """Whether it says that something went wrong; else it is a place to look."""

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
    """The finding of a row of the table.

    Args:
        key: of the row.
        evidence: the numbers it rests on.
        phase: where it was found.
        steps: first and last step of the evidence.
        conditions: of the row's remedies: whether each holds.
        **words: what the row's sentences name beside the evidence and the phase.
    """
    row, evidence = FINDINGS[key], evidence or {}
    named = {**evidence, **words, "phase": phase}
    fix = row.get("fix", "")
    if "remedies" in row:
        holding = {name for name, holds in (conditions or {}).items() if holds}
        fix = _sentence([text for text, only in row["remedies"] if only in (None, *holding)])
    return Finding(
        name=row.get("name", key),
        what=row["what"].format(**named),
        fix=fix.format(**named),
        evidence=evidence,
        phase=phase,
        steps=steps,
        is_fault=row.get("is_fault", True),
    )


def _sentence(remedies: Sequence[str]) -> str:
    """Remedies of which one is to be chosen, as a sentence.

    >>> _sentence(["raise it", "wait", "give up"]), _sentence(["wait"]), _sentence([])
    ('Raise it, wait, or give up.', 'Wait.', '')
    """
    if not remedies:
        return ""
    *others, last = remedies
    comma = "," if len(others) > 1 else ""
    text = f"{', '.join(others)}{comma} or {last}" if others else last
    return f"{text[0].upper()}{text[1:]}."


def refusal(key: str, where: str, **words: Any) -> ConfigError:
    """The finding of a row as an error at a setting."""
    finding = found(key, **words)
    return ConfigError(finding.what, where=where, fix=finding.fix)


# --- the last steps of a metric -------------------------------------------------------------------


def slope(values: Sequence[float]) -> float:
    """The least-squares slope per step: sum (t - mean t)(v - mean v) / sum (t - mean t)^2.

    >>> slope([1.0, 3.0, 5.0]), slope([2.0])
    (2.0, 0.0)
    """
    return linear_regression(range(len(values)), values).slope if len(values) > 1 else 0.0


def watch(report: StepReport, memory: dict[str, Any]) -> list[tuple[str, Finding]]:
    """Check every metric over its last window, after each step.

    A finding is reported when its condition begins to hold, and again after that has ended.

    Args:
        report: of the step.
        memory: what earlier calls have left here, as JSON values; kept up to date in place.

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
            recent[metric] = [*recent.get(metric, []), value][-(REMEMBERED + WINDOW) :]
    new = []
    for key, row in rows.items():
        values = recent.get(row["metric"], [])
        holds = False
        if len(values) >= WINDOW:  # there are two windows to compare
            start, last = first[row["metric"]], values[-WINDOW:]
            numbers: dict[str, Any] = {
                "start": fmean(start),
                "now": fmean(last),
                "median_before": median([*start, *values[:-WINDOW]]),
                "now_median": median(last),
                "drift": fmean(last) - fmean(start),
                "rise": slope(last) * len(last),
                "window": len(last),
            }
            value, unit = numbers[row["number"]], numbers.get(row.get("of", ""), 1.0)
            holds = value > row["above"] * unit if "above" in row else value < row["below"] * unit
        if holds and key not in active:
            active.append(key)
            new.append((key, found(key, **numbers)))
        elif not holds and key in active:
            active.remove(key)
    return new


# --- the record of a run --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a run has written down."""

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
        RunFolderError: it is none, it is damaged, or no step has been done.
        ConfigError: its recipe cannot be read.
    """
    folder = RunFolder(path)
    folder.read_info()
    reports = folder.read_metrics()
    if not reports:
        raise RunFolderError(
            "there is nothing to diagnose: the run has not finished a step",
            where=str(path),
            fix="It goes on: try again after its first step."
            if is_running(path)
            else "Continue it with --resume; training.log says how it ended.",
        )
    return Record(
        folder=folder,
        recipe=load_recipe(path / "recipe.yaml"),
        sft=[r for r in reports if r.phase == "sft"],
        grpo=[r for r in reports if r.phase == "grpo"],
        evaluations=folder.read_evaluations(),
    )


def curve(reports: Sequence[StepReport], name: str) -> list[float]:
    """The means of a metric in the steps that had it."""
    tallies = (r.tallies[name] for r in reports if name in r.tallies)
    return [t.mean for t in tallies if t.count and math.isfinite(t.mean)]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last steps, which do not overlap."""
    size = max(1, min(COMPARED, len(values) // 2))
    return fmean(values[:size]), fmean(values[-size:])


def changed(name: str, values: Sequence[float]) -> dict[str, float]:
    """Both ends as evidence."""
    return dict(zip((f"{name}_before", f"{name}_after"), ends(values), strict=True))


def span(reports: Sequence[StepReport]) -> tuple[int, int]:
    """First and last step."""
    return reports[0].step, reports[-1].step


def no_signal(record: Record) -> Iterator[Finding]:
    """Most steps had nothing to learn from, and why."""
    reports = record.grpo
    flat = [r for r in reports if r.status.startswith("no-signal:")]
    if len(flat) > MOST * len(reports):
        status, count = Counter(r.status for r in flat).most_common(1)[0]
        numbers = {
            "steps": len(reports),
            "steps_without_signal": len(flat),
            "solve_rate": mean_of(curve(reports, "solve_rate")),
            "truncated": mean_of(curve(reports, "completion/truncated")),
        }
        yield found(status, numbers, steps=span(flat), count=count)


def grader(record: Record) -> Iterator[Finding]:
    """Rollouts without a verdict: the grader was too slow, or a reward failed."""
    for metric in ("grader/timeouts", "rollouts/not_scored"):
        share = mean_of(curve(record.grpo, metric))
        if share > SOME:
            yield found(metric, {metric: share}, steps=span(record.grpo), share=share)


def during_the_run(record: Record) -> Iterator[Finding]:
    """What was reported, or would have been, while the run went on; each kind once."""
    # A run without any signal is explained by that already.
    seen = {"truncated", "saturated"} if any(no_signal(record)) else set()
    memory: dict[str, Any] = {}
    for step, (key, finding) in ((r.step, f) for r in record.grpo for f in watch(r, memory)):
        if key not in seen:
            seen.add(key)
            yield replace(
                finding,
                what=f"at step {step} {finding.what}",
                steps=(max(1, step - WINDOW + 1), step),
                evidence={"found_at_step": step},
            )


def format_only(record: Record) -> Iterator[Finding]:
    """Strict accuracy rose and lenient accuracy did not: the answers only look different."""
    tests = {r.name: r for r in record.evaluations if r.split == "test"}
    validations = [r for r in record.evaluations if r.split != "test" and r.phase == "grpo"]
    before, after = tests.get("sft") or tests.get("base"), tests.get("grpo")
    if after is None and len(validations) > 1:
        before, after = validations[0], validations[-1]
    if before is None or after is None or before.lenient is None or after.lenient is None:
        return
    strict = after.accuracy - before.accuracy
    lenient = after.lenient.mean - before.lenient.mean
    if strict > SOME and lenient <= strict / 4:
        yield found(
            "format-only",
            {
                "strict_before": before.accuracy,
                "strict_after": after.accuracy,
                "lenient_before": before.lenient.mean,
                "lenient_after": after.lenient.mean,
            },
            steps=(before.step if before.phase == "grpo" else 0, after.step),
            before=before.name,
            after=after.name,
            strict=100 * strict,
            lenient=100 * lenient,
        )


def truncation(record: Record) -> Iterator[Finding]:
    """Most completions were cut off, at the end of training or in the last measurement."""
    shares = curve(record.grpo, "completion/truncated")[-COMPARED:]
    during = {finding.name for finding in during_the_run(record)}
    statuses = {report.status for report in record.grpo[-COMPARED:]}
    told = "truncated" in during or "no-signal:truncated" in statuses
    if mean_of(shares) > MOST and not told:
        last = record.grpo[-len(shares) :]
        numbers = {"truncated": mean_of(shares), "steps_seen": len(shares)}
        yield found("truncated-training", numbers, steps=span(last))
        return
    measured = _last_measured(record)
    if measured is not None and measured.cut_off > MOST and not told:
        numbers = {"truncated": measured.cut_off, "completions": len(measured.light)}
        steps = (measured.step, measured.step)
        yield found(
            "truncated-answers", numbers, phase=measured.phase, steps=steps, name=measured.name
        )


def no_format(record: Record) -> Iterator[Finding]:
    """Not one completion of the last measurement, or of training, was in the format."""
    fmt, measured = record.recipe.prompt.format, _last_measured(record)
    if measured is not None and measured.metrics is not None:
        count = len(measured.light)
        if measured.metrics.format_accuracy == 0 and count >= FEW_COMPLETIONS:
            where, steps = f"in {measured.name}", (measured.step, measured.step)
            numbers = {"completions": count, "in_format": 0}
            yield found(
                "no-format", numbers, phase=measured.phase, steps=steps, format=fmt, where=where
            )
        return
    for name in sorted({name for report in record.grpo for name in report.tallies}):
        is_format = name.startswith("reward/") and name.endswith("format")
        values = curve(record.grpo, name) if is_format else []
        count = round(sum(r.tallies[name].count for r in record.grpo if name in r.tallies))
        if values and not any(values) and count >= FEW_COMPLETIONS:
            numbers = {"completions": count, "in_format": 0}
            where = f"by {name}"
            yield found("no-format", numbers, steps=span(record.grpo), format=fmt, where=where)
            return


def _last_measured(record: Record) -> EvaluationResult | None:
    """The evaluation of what was trained last: on the test, else on validation problems."""
    trained = [result for result in record.evaluations if result.phase != "base"]
    if not trained:
        return None
    phase = "grpo" if any(result.phase == "grpo" for result in trained) else "sft"
    last = [result for result in trained if result.phase == phase]
    return max(last, key=lambda result: (result.split == "test", result.step))


_WARNING = re.compile(r"^\S+ \S+ WARNING: (.*)")
# What a check has said of a step is found again in the metrics.
_OF_A_CHECK = re.compile(r"(?:sft|grpo) step \d+: check ")


def warnings_logged(record: Record) -> Iterator[Finding]:
    """What the run has warned of, each text once."""
    log = record.folder.path / "training.log"
    if not log.is_file():
        return
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    texts = (match[1] for line in lines if (match := _WARNING.match(line)))
    warned = list(dict.fromkeys(text for text in texts if not _OF_A_CHECK.match(text)))
    if warned:
        phase = "sft" if record.sft else "grpo"
        steps = span([*record.sft, *record.grpo])
        noun = "warning" if len(warned) == 1 else "warnings"
        yield found(
            "warnings",
            {"warnings": len(warned)},
            phase=phase,
            steps=steps,
            noun=noun,
            first=warned[0].rstrip("."),
        )


def no_progress(record: Record) -> Iterator[Finding]:
    """Several validations, none of them better than an earlier one."""
    for phase in ("sft", "grpo"):
        validations = [r for r in record.evaluations if (r.split, r.phase) == ("validation", phase)]
        # After a change of the data only those of the same problems.
        validations = [r for r in validations if r.problems == validations[-1].problems]
        since, later = 0, 0
        for number in range(1, len(validations)):
            (change,) = compare([validations[since], validations[number]]).differences
            since = number if change.paired.verdict == "better" else since
            later = number - since
        # Near the ceiling there is no room for better ones.
        if later >= FEW_VALIDATIONS and validations[since].accuracy < CEILING:
            paired = change.paired
            numbers = {
                "since": validations[since].step,
                "validations": later,
                "difference": 100 * paired.difference,
                "low": 100 * paired.interval.low,
                "high": 100 * paired.interval.high,
            }
            steps = (validations[since].step, validations[-1].step)
            yield found("no-progress", numbers, phase=phase, steps=steps)


def reward_without_correctness(record: Record) -> Iterator[Finding]:
    """The reward rose and the solve rate did not."""
    rewards, solved = curve(record.grpo, "reward/total"), curve(record.grpo, "solve_rate")
    if min(len(rewards), len(solved)) < MIN_STEPS:
        return
    numbers = {**changed("reward", rewards), **changed("solve_rate", solved)}
    reward, rate = (after - before for before, after in (ends(rewards), ends(solved)))
    noise = stdev(rewards[: len(rewards) // 2])
    if reward > max(SOME, 2 * noise) and rate <= SOME / 2:
        yield found("reward-without-correctness", numbers, steps=span(record.grpo))


def stale_sampler(record: Record) -> Iterator[Finding]:
    """Rollouts come from another policy than the one that is updated."""
    grpo = record.recipe.grpo
    allowed = grpo.max_staleness * grpo.updates_per_batch * grpo.num_iterations
    late = {step: lag for step, lag in _lags(record) if lag > allowed}
    if late:
        numbers = {"versions_behind": max(late.values()), "steps_seen": len(late)}
        yield found("stale-sampler", numbers, steps=(min(late), max(late)))
    gaps = curve(record.grpo, "sampler_logprob_diff")
    if mean_of(gaps) > MAX_GAP:
        apart = {"gap_mean": mean_of(gaps), "gap_highest_step": max(gaps)}
        yield found("disagreeing-sampler", apart, steps=span(record.grpo))


def _lags(record: Record) -> Iterator[tuple[int, int]]:
    """(step, updates that the sampler's weights were behind), of some steps."""
    stride = max(1, len(record.grpo) // SAMPLED_STEPS)
    first: int | None = None
    updates = 0
    for number, report in enumerate(record.grpo):
        opened = () if number % stride else record.folder.read_rollouts("grpo", report.step)
        try:
            drawn = next(iter(opened), None)
        except RunFolderError as error:
            record.damaged.append(error)
            drawn = None
        if drawn is not None:
            version = int(drawn["policy_version"])
            first = version - updates if first is None else first
            yield report.step, first + updates - version
        updates += int(sum(curve([report], "updates")))


def not_finite(record: Record) -> Iterator[Finding]:
    """Steps that were skipped because something was infinite or not a number."""
    for phase, reports in (("sft", record.sft), ("grpo", record.grpo)):
        bad = {r.step: e for r in reports for e in r.events[::-1] if e.startswith("not-finite")}
        if bad:
            first = min(bad)
            numbers = {"steps_skipped": len(bad)}
            steps = (first, max(bad))
            yield found("not-finite", numbers, phase=phase, steps=steps, first=bad[first])


# --- learning rates ------------------------------------------------------------------------------


def rate_too_high(record: Record) -> Iterator[Finding]:
    """What was learned is lost again, the gradient explodes, or most of the ratios are clipped."""
    reports = record.grpo
    norms, solved = curve(reports, "grad_norm"), curve(reports, "solve_rate")
    clipped = mean_of(curve(reports, "policy/clip_fraction"))
    signs: dict[str, float] = {}
    if len(solved) >= 2 * COMPARED:
        best = max(fmean(solved[i : i + COMPARED]) for i in range(len(solved) - COMPARED + 1))
        if best > 2 * SOME and fmean(solved[-COMPARED:]) < best / 2:
            signs |= {"solve_rate_best": best, "solve_rate_at_the_end": fmean(solved[-COMPARED:])}
    if len(norms) >= MIN_STEPS and ends(norms)[1] > 10 * ends(norms)[0]:
        signs |= changed("grad_norm", norms)
    if clipped > MOST:
        signs["clip_fraction"] = clipped
    # What the model could do before the first update, and never again after a few.
    learned = [r.step for r in reports if r.status == "learning"]
    if 0 < len(learned) <= FEW_UPDATES and len(reports) >= MIN_STEPS:
        for name, lost in (("solve_rate", -2 * SOME), ("completion/truncated", MOST)):
            values = curve(reports, name)
            first, last = values[0], fmean(values[-COMPARED:])
            if (last - first) / lost >= 1:
                signs |= {f"{name}_at_first": first, f"{name}_at_the_end": last}
                signs["steps_that_learned"] = len(learned)
    if signs:
        yield _rate(record, "grpo", "too-high", signs)


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
    if abs(rise) > 2 * noise or rise > SOME or moved > SOME:
        return
    signs = {"solve_rate_rise": rise, "its_noise": noise, "entropy_change": moved}
    yield _rate(record, "grpo", "too-low", signs)


def sft_rate(record: Record) -> Iterator[Finding]:
    """The loss rose, or stayed where it was."""
    losses = curve(record.sft, "loss")
    if len(losses) < MIN_STEPS:
        return
    (before, after), signs = ends(losses), changed("loss", losses)
    if after > 1.05 * before:
        yield _rate(record, "sft", "too-high", signs)
    elif after > 0.98 * before:
        yield _rate(record, "sft", "too-low", signs)


def _rate(record: Record, phase: str, kind: str, signs: dict[str, float]) -> Finding:
    return found(
        f"learning-rate-{kind}",
        {**signs, "learning_rate": getattr(record.recipe, phase).optimizer.learning_rate},
        phase=phase,
        steps=span(getattr(record, phase)),
        signs=", ".join(f"{name.replace('_', ' ')} {sign:.3g}" for name, sign in signs.items()),
    )


# --- completions that were drawn ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSummary:
    """How long completions want to be, against a budget of `budget` tokens.

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
        """The 95th percentile in tokens; where it was cut off itself (False), a lower bound."""
        return sorted(self.completions)[math.ceil(0.95 * len(self.completions)) - 1]

    @property
    def truncated(self) -> float:
        """The share that does not end within the budget."""
        return mean_of([length > self.budget or not ended for length, ended in self.completions])

    @property
    def endless(self) -> float:
        """The share that did not end at all, however long it was sampled."""
        return mean_of([not ended for _, ended in self.completions])

    @property
    def enough(self) -> int:
        """Tokens within which nearly all end that end at all; 0 where none does."""
        lengths = sorted(length for length, ended in self.completions if ended)
        return lengths[math.ceil(0.95 * len(lengths)) - 1] if lengths else 0

    def __str__(self) -> str:
        (p95, ended), median = self.p95, median_low(self.completions)[0]
        return (
            f"completions take {median} tokens (median), {'' if ended else 'at least '}{p95} (95th "
            f"percentile); {self.truncated:.0%} do not end within {self.budget}"
        )


def budget(drawn: SampleSummary) -> Iterator[Finding]:
    """Most completions would be cut off in GRPO, or too few end by themselves after SFT."""
    if not drawn.before and 1 - drawn.truncated < MIN_STOPPED:
        yield found("stopping", share=1 - drawn.truncated)
    if drawn.before == "grpo" and drawn.truncated > MOST:
        # What has been measured or trained before is kept, and the run can continue from it.
        how = ", with --resume --allow-changes to keep what is there, or --overwrite"
        yield found(
            "endless" if drawn.endless > MOST else "cut off",
            share=drawn.truncated,
            count=len(drawn.completions),
            budget=drawn.budget,
            enough=math.ceil(drawn.enough / 32) * 32,  # easier to read and to remember
            others=f" ({drawn.endless:.0%} would not end then either)" if drawn.endless else "",
            how=how if drawn.begun else "",
            resume="--resume " if drawn.begun else "",
        )


# --- graded samples -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A few samples, graded and rewarded as in training, and what wrote them."""

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
    def cut_off(self) -> bool:
        """Whether not one sample comes to an end."""
        return all(rollout.completion.truncated for rollout in self.rollouts)

    @property
    def diversity(self) -> float:
        """How different the samples of a problem are, on average."""
        return fmean(group.diversity for group in self.groups)

    @property
    def reward_variance(self) -> float:
        """Mean over the problems of the variance of the total reward (dividing by n).

        NaN where no sample was scored.
        """
        totals = [[r.reward.total or 0.0 for r in group.scored] for group in self.groups]
        return mean_of(pvariance(values) for values in totals if values)

    @property
    def certainty(self) -> float:
        """Geometric mean of the probabilities with which the tokens were drawn."""
        logprobs = [value for r in self.rollouts for value in r.completion.logprobs]
        return math.exp(fmean(logprobs))


def tokenisation(samples: Samples) -> Iterator[Finding]:
    """The tokenizer cannot write or read back the tags, the stop token, or the prefix."""
    prepared, ids = samples.prepared, list[int]()
    fmt, prompt, stops = prepared.format, prepared.prompt, prepared.stop_tokens
    try:
        for text in (*(fmt.tags or ()), fmt.completion("1", "1")):
            ids = encode_completion(prepared.tokenizer, text, "the format")
    except PromptError:
        yield found("tokenisation-of-text", text=text)
    if any(stop in ids for stop in stops):
        yield found("tokenisation-of-layout")
    if not 0 <= stops[0] < prepared.vocabulary:
        yield found("tokenisation-of-stop", stop=stops[0], vocabulary=prepared.vocabulary)
    ending = prepared.text(prompt.token_ids)
    if prompt.prefix and not ending.endswith(prompt.prefix):
        yield found("tokenisation-of-prefix", prefix=prompt.prefix, ending=ending[-40:])


def cut_off(samples: Samples) -> Iterator[Finding]:
    """No sample comes to an end, or of samples that teach nothing some do not.

    Where none does, rewards may differ anyway, by accident.
    """
    truncated = sum(rollout.completion.truncated for rollout in samples.rollouts)
    if samples.cut_off or (truncated and not any(samples.signal)):
        yield found(
            "all-cut-off" if samples.cut_off else "some-cut-off",
            count=truncated,
            samples=len(samples.rollouts),
            budget=samples.groups[0].params.max_new_tokens,
            conditions=conditions_of(samples),
        )


def equal_rewards(samples: Samples) -> Iterator[Finding]:
    """There is nothing to learn from: every cause, up to one that explains all samples."""
    if any(samples.signal):
        return
    conditions = conditions_of(samples)
    params = samples.groups[0].params
    alike = sum(group.diversity == 0 for group in samples.groups)
    if alike:
        key = "certain" if params.temperature >= LOW_TEMPERATURE else "temperature"
        key = "no-choice" if key == "certain" and params.truncated else key
        yield found(
            key,
            problems=_problems(alike, samples),
            temperature=params.temperature,
            certainty=samples.certainty,
            conditions=conditions,
        )
    if alike == len(samples.groups) or samples.cut_off:
        return
    fmt = samples.prepared.format
    # A truncated sample has had no room for its answer.
    whole = [r.completion.text for r in samples.rollouts if not r.completion.truncated]
    lacking = Counter(
        tag for text in whole for tag, there in tags_in(text, fmt).items() if not there
    )
    never = [tag for tag in tags_in("", fmt) if lacking[tag] == len(whole)]
    if never:
        yield found("tags", missing=", ".join(never), format=fmt.name, conditions=conditions)
    elif lacking:
        missing = ", ".join(f"{tag} in {count}" for tag, count in lacking.items())
        yield found(
            "some-tags",
            missing=missing,
            samples=len(whole),
            format=fmt.name,
            conditions=conditions,
        )
    if never and len(whole) == len(samples.rollouts):
        return
    yield from _by_rewards(samples, conditions)


def _by_rewards(samples: Samples, conditions: Mapping[str, bool]) -> Iterator[Finding]:
    """What the rewards of samples that differ have in common."""
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
    """`1 problem`, or `2 of 5 problems` where they are not all."""
    several = len(samples.groups)
    number = str(count) if count == several else f"{count} of {several}"
    return f"{number} problem{'s' if several > 1 else ''}"


def conditions_of(samples: Samples) -> dict[str, bool]:
    """Condition of a remedy -> whether it holds: what is done already is not proposed."""
    recipe, prepared = samples.prepared.recipe, samples.prepared
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
    r"""Tag -> whether it occurs, what the prompt has opened included; `\boxed` without tags."""
    wanted = fmt.tags or ("\\boxed",)
    return {tag: tag in fmt.prefix + text for tag in wanted}


# --- the checks of each kind of data --------------------------------------------------------------

CHECKS: dict[type, tuple[Callable[[Any], Iterator[Finding]], ...]] = {
    # The first ones can be the cause of the later.
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
    Samples: (tokenisation, cut_off, equal_rewards),
}


def find(data: Record | SampleSummary | Samples) -> list[Finding]:
    """What the checks over this kind of data find."""
    return [finding for check in CHECKS[type(data)] for finding in check(data)]
