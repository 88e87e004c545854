"""What can go wrong, one function and one row of `CHECKS` each.

The same table is used while a run goes on (`watch`), afterwards (`grouper diagnose`), before it
(`grouper preview`, the pre-flight, the warnings about a recipe) and by `grouper plan`. A check
looks at one kind of data, which stands above its checks here: the last steps of a metric
(`Window`), everything that a run has written down (`Record`), the lengths of a few completions
(`SampleSummary`), graded groups (`Samples`), what a plan stands on (`Assumed`), or a `Recipe`.
Thresholds are rough on purpose, for a finding is a place to look.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, linear_regression, median, median_low, pvariance, stdev
from typing import TYPE_CHECKING, Any

from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe, RowsConfig, SourceConfig
from grouper.data import SOURCES
from grouper.errors import PromptError, RunFolderError
from grouper.evaluation.result import EvaluationResult
from grouper.prompts.formats import warn_about_system
from grouper.prompts.rendering import encode_completion
from grouper.runs.folder import RunFolder
from grouper.types import AnswerFormat, Rollout, RolloutGroup, StepReport

if TYPE_CHECKING:
    from grouper.training.prepare import Prepared

# A share of the steps, ratios or completions above which something is the rule.
MOST = 0.5
# A share of the rollouts, of an entropy, or points of a rate, that are worth a word.
SOME = 0.05
# Steps at the beginning and the end of a run that are compared.
COMPARED = 10
# Curves are compared in runs at least as long, and a learning rate judged after as many steps.
MIN_STEPS = 20
# A policy that is lost after as few updates was lost to their size.
FEW_UPDATES = 5
# Nats per token between sampler and trainer; bfloat16 sampling alone stays well below it.
MAX_GAP = 0.05
# Rollout files that are opened to see which policy drew them.
SAMPLED_STEPS = 20
# A share of the completions that ends after SFT.
MIN_STOPPED = 0.8
# Below these, a learning rate was most likely chosen for training all weights: an adapter needs
# about ten times as much (Schulman et al., "LoRA without regret", 2025).
ADAPTER_RATES = {"sft": 5e-5, "grpo": 5e-6}
# Below this, equal samples are first of all a matter of the temperature.
LOW_TEMPERATURE = 0.7
# Steps of each metric that medians are taken over.
REMEMBERED = 500
# Steps over which a metric is averaged before it is compared.
WINDOW = 10
# Entropy and median length of completions, relative to the first window or the steps before.
LEAST_ENTROPY = 0.1
MOST_ENTROPY = 3.0
LENGTH_GROWTH = 2.0
# Nats per token within a window.
KL_RISE = 0.1
# Share of the groups that are all right.
SATURATED = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Example: `Finding(name="temperature", what="all 5 samples are the same text", fix="Raise it.")`.
    """

    name: str = ""
    """Left out by a check whose row says it."""
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

    def __str__(self) -> str:
        return f"{self.what}. {self.fix}".rstrip()


# --- the last steps of a metric -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """One metric, step by step: its mean in each step that had it."""

    first: Sequence[float]
    """The first window of the phase."""
    earlier: Sequence[float]
    """What lies before the last window, without the first one."""
    last: Sequence[float]
    """The last window."""

    @property
    def start(self) -> float:
        """The mean over the first window."""
        return fmean(self.first)

    @property
    def now(self) -> float:
        """The mean over the last window."""
        return fmean(self.last)


def slope(values: Sequence[float]) -> float:
    """The least-squares slope per step: sum (t - mean t)(v - mean v) / sum (t - mean t)^2.

    >>> slope([1.0, 3.0, 5.0]), slope([2.0])
    (2.0, 0.0)
    """
    return linear_regression(range(len(values)), values).slope if len(values) > 1 else 0.0


def entropy_low(w: Window) -> Iterator[Finding]:
    """The policy has stopped exploring."""
    if w.now < LEAST_ENTROPY * w.start:
        yield Finding(
            what=f"the policy's entropy fell to {w.now:.3g} nats per token from {w.start:.3g} at "
            "the start",
            fix="Lower grpo.optimizer.learning_rate, raise grpo.clip_high or set "
            "grpo.entropy_bonus; an earlier checkpoint still explores.",
        )


def entropy_high(w: Window) -> Iterator[Finding]:
    """The policy has become noise."""
    if w.now > MOST_ENTROPY * w.start:
        yield Finding(
            what=f"the policy's entropy rose to {w.now:.3g} nats per token from {w.start:.3g} at "
            "the start",
            fix="The policy falls apart: lower grpo.optimizer.learning_rate or "
            "grpo.entropy_bonus, or set grpo.beta.",
        )


def length(w: Window) -> Iterator[Finding]:
    """Completions have grown."""
    usual, now = median([*w.first, *w.earlier]), median(w.last)
    if now > LENGTH_GROWTH * usual:
        yield Finding(
            what=f"completions grew to {now:.0f} tokens; the median step had {usual:.0f}",
            fix="Look at the longest rollouts; a reward that pays length, or grpo.weighting: "
            "sequence_mean, drives it. Use grpo.weighting: constant or a length penalty in "
            "rewards.",
        )


def repetition(w: Window) -> Iterator[Finding]:
    """Completions repeat themselves."""
    if w.now > MOST:
        yield Finding(
            what=f"{w.now:.0%} of what completions say repeats itself",
            fix="Read some rollouts; lower grpo.optimizer.learning_rate, set grpo.beta, or lower "
            "sampling.max_new_tokens.",
        )


def sameness(w: Window) -> Iterator[Finding]:
    """The completions of a problem are all alike."""
    if w.now < SOME:
        yield Finding(
            what=f"of the completions of a problem not yet solved only {w.now:.0%} differ from the "
            "first",
            fix="There is nothing left to compare: raise sampling.temperature or "
            "grpo.clip_high, or lower grpo.optimizer.learning_rate.",
        )


def kl(w: Window) -> Iterator[Finding]:
    """The policy leaves its reference."""
    rise = slope(w.last) * len(w.last)
    if rise > KL_RISE:
        yield Finding(
            what=f"the KL to the reference rose by {rise:.3g} nats per token in "
            f"{len(w.last)} steps",
            fix="Lower grpo.optimizer.learning_rate or raise grpo.beta.",
        )


def truncated(w: Window) -> Iterator[Finding]:
    """Most completions are cut off."""
    if w.now > MOST:
        yield Finding(
            what=f"{w.now:.0%} of the completions are cut off",
            fix="Raise sampling.max_new_tokens, or teach shorter answers by SFT first.",
        )


def saturated(w: Window) -> Iterator[Finding]:
    """Nearly all groups are solved."""
    if w.now > SATURATED:
        yield Finding(
            what=f"{w.now:.0%} of the groups are all right and teach nothing",
            fix="The problems are too easy by now: set grpo.difficulty or "
            "grpo.dynamic_sampling_rounds, use harder data.train, or stop here (grpo.steps).",
        )


# --- the record of a run --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a run has written down."""

    folder: RunFolder
    recipe: Recipe
    sft: Sequence[StepReport]
    grpo: Sequence[StepReport]
    evaluations: Sequence[EvaluationResult]


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
            fix="Continue it with --resume; training.log says how it ended.",
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
    found = (r.tallies[name] for r in reports if name in r.tallies)
    return [t.mean for t in found if t.count and math.isfinite(t.mean)]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last steps, which do not overlap."""
    size = max(1, min(COMPARED, len(values) // 2))
    return fmean(values[:size]), fmean(values[-size:])


def span(reports: Sequence[StepReport]) -> tuple[int, int]:
    """First and last step."""
    return reports[0].step, reports[-1].step


def mean(values: Sequence[float]) -> float:
    """The mean, or NaN of nothing."""
    return fmean(values) if values else math.nan


NO_SIGNAL = {
    "all-wrong": "no rollout was ever right",
    "all-right": "every rollout was right: there is nothing left to learn here",
    "truncated": "every completion was cut off before its answer",
    "grader-error": "the grader could decide on nothing",
    "not-scored": "no rollout was scored",
    "equal-rewards": "within no group did the rewards differ",
}
NO_SIGNAL_FIXES = {
    "all-wrong": "Read some rollouts: is the answer where the format wants it? Then use easier "
    "data.train, more sft.steps, or a larger grpo.group_size.",
    "all-right": "Use harder data.train, grpo.difficulty, or grpo.dynamic_sampling_rounds.",
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
        what=f"{len(flat)} of {len(reports)} steps had no signal; in {count} of them "
        + NO_SIGNAL[kind],
        steps=span(flat),
        evidence={
            "steps": len(reports),
            "steps_without_signal": len(flat),
            "solve_rate": mean(curve(reports, "solve_rate")),
            "truncated": mean(curve(reports, "completion/truncated")),
        },
        fix=NO_SIGNAL_FIXES[kind],
    )


def grader(record: Record) -> Iterator[Finding]:
    """Rollouts without a verdict: the grader was too slow, or a reward failed."""
    causes = {
        "grader/timeouts": "Raise grading.timeout_seconds.",
        "rollouts/not_scored": "Read the warnings about rewards in training.log; a reward function "
        "fails, or data.train has answers that nobody can read (`grouper data audit`).",
    }
    for metric, fix in causes.items():
        share = mean(curve(record.grpo, metric))
        if share > SOME:
            yield Finding(
                what=f"{share:.0%} of the rollouts count under {metric} and teach nothing",
                steps=span(record.grpo),
                evidence={metric: share},
                fix=fix,
            )


def alarms(record: Record) -> Iterator[Finding]:
    """What rang, or would have new, while the run went on; each kind once."""
    flat = any(no_signal(record))
    seen: set[str] = set()
    for step, name, finding in replay(record.grpo):
        # A run without any signal is explained by that already.
        if name in seen or (flat and name in ("truncated", "saturated")):
            continue
        seen.add(name)
        yield replace(
            finding,
            what=f"at step {step} {finding.what}",
            steps=(max(1, step - WINDOW + 1), step),
            evidence={"rang_at_step": step},
        )


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
        "(rewards), and keep grpo.require_correct_in_group: true.",
    )


def stale_sampler(record: Record) -> Iterator[Finding]:
    """Rollouts come from another policy than the one that is updated."""
    late = {step: lag for step, lag in _lags(record) if lag > 0}
    if late:
        yield Finding(
            what=f"rollouts were drawn by weights up to {max(late.values())} updates old",
            steps=(min(late), max(late)),
            evidence={"versions_behind": max(late.values()), "steps_seen": len(late)},
            fix="The sampler was not given the new weights; without that, set grpo.importance: "
            "truncate.",
        )
    gaps = curve(record.grpo, "sampler_logprob_diff")
    if mean(gaps) > MAX_GAP:
        yield Finding(
            what=f"sampler and trainer disagree by {mean(gaps):.3g} nats per token",
            steps=span(record.grpo),
            evidence={"gap_mean": mean(gaps), "gap_highest_step": max(gaps)},
            fix="Set sampling.dtype: same, or grpo.importance: truncate; check that "
            "sampling.temperature and model.attention are what you meant.",
        )


def _lags(record: Record) -> Iterator[tuple[int, int]]:
    """(step, updates that the sampler's weights were behind), of some steps."""
    stride = max(1, len(record.grpo) // SAMPLED_STEPS)
    first: int | None = None
    updates = 0
    for number, report in enumerate(record.grpo):
        opened = () if number % stride else record.folder.read_rollouts("grpo", report.step)
        drawn = next(iter(opened), None)
        if drawn is not None:
            version = int(drawn["policy_version"])
            first = version - updates if first is None else first
            yield report.step, first + updates - version
        tally = report.tallies.get("updates")
        updates += int(tally.sum) if tally is not None else 0


def not_finite(record: Record) -> Iterator[Finding]:
    """Steps that were skipped because something was infinite or not a number."""
    for phase, reports in (("sft", record.sft), ("grpo", record.grpo)):
        bad = {r.step: e for r in reports for e in r.events[::-1] if e.startswith("not-finite")}
        if bad:
            yield Finding(
                phase=phase,
                what=f"in {len(bad)} steps something was infinite or not a number, and skipped; "
                f"first: {bad[min(bad)]}",
                steps=(min(bad), max(bad)),
                evidence={"steps_skipped": len(bad)},
                fix=f"Lower {phase}.optimizer.learning_rate, or use model.compute_dtype: float32; "
                "the folder incident/ has the batch where the run stopped.",
            )


# --- learning rates ------------------------------------------------------------------------------


def rate_too_high(record: Record) -> Iterator[Finding]:
    """What was learned is lost again, the gradient explodes, or most of the ratios are clipped."""
    reports = record.grpo
    norms, solved = curve(reports, "grad_norm"), curve(reports, "solve_rate")
    clipped = mean(curve(reports, "policy/clip_fraction"))
    signs: dict[str, float] = {}
    if len(solved) >= 2 * COMPARED:
        best = max(fmean(solved[i : i + COMPARED]) for i in range(len(solved) - COMPARED + 1))
        if best > 2 * SOME and fmean(solved[-COMPARED:]) < best / 2:
            signs |= {"solve_rate_best": best, "solve_rate_at_the_end": fmean(solved[-COMPARED:])}
    if len(norms) >= MIN_STEPS and ends(norms)[1] > 10 * ends(norms)[0]:
        signs |= {"grad_norm_before": ends(norms)[0], "grad_norm_after": ends(norms)[1]}
    if clipped > MOST:
        signs["clip_fraction"] = clipped
    signs |= _sudden_loss(reports)
    if signs:
        yield _rate(record, "grpo", "too-high", signs)


def _sudden_loss(reports: Sequence[StepReport]) -> dict[str, float]:
    """What the model could do before the first update, and never again after a few."""
    learned = [r.step for r in reports if r.status == "learning"]
    if not 0 < len(learned) <= FEW_UPDATES or len(reports) < MIN_STEPS:
        return {}
    signs = {}
    for name, lost in (("solve_rate", -2 * SOME), ("completion/truncated", MOST)):
        values = curve(reports, name)
        change = fmean(values[-COMPARED:]) - values[0]
        if change * math.copysign(1, lost) >= abs(lost):
            signs[f"{name}_at_first"] = values[0]
            signs[f"{name}_at_the_end"] = fmean(values[-COMPARED:])
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
    if abs(rise) > 2 * noise or rise > SOME or moved > SOME:
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
    numbers = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in signs.items())
    verb = {"too-high": "Lower", "too-low": "Raise"}[kind]
    return Finding(
        name=f"learning-rate-{kind}",
        phase=phase,
        what=f"a learning rate of {rate:g} looks {kind.replace('-', ' ')}: {numbers}",
        steps=span(getattr(record, phase)),
        evidence={**signs, "learning_rate": rate},
        fix=f"{verb} {phase}.optimizer.learning_rate by a factor of 3 to 10.",
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
        return mean([length > self.budget or not ended for length, ended in self.completions])

    def __str__(self) -> str:
        (p95, ended), median = self.p95, median_low(self.completions)[0]
        return (
            f"completions take {median} tokens (median), {'' if ended else 'at least '}{p95} (95th "
            f"percentile); {self.truncated:.0%} do not end within {self.budget}"
        )


def budget(drawn: SampleSummary) -> Iterator[Finding]:
    """Most completions would be cut off in GRPO."""
    if drawn.before != "grpo" or drawn.truncated <= MOST:
        return
    resume, (p95, ended) = "--resume " if drawn.begun else "", drawn.p95
    if not ended:
        fix = "Most never stop at all: teach the stop token first (SFT), or check the format."
    else:
        # What has been measured or trained before is kept, and the run can continue from it.
        how = ", with --resume --allow-changes to keep what is there, or --overwrite"
        rounded = math.ceil(p95 / 32) * 32  # easier to read and to remember
        fix = f"Set sampling.max_new_tokens={rounded}{how if drawn.begun else ''}."
    yield Finding(
        what=f"{drawn.truncated:.0%} of {len(drawn.completions)} sampled completions are cut off "
        f"at sampling.max_new_tokens={drawn.budget}; a cut-off answer earns nothing, so nothing "
        "would be learned",
        fix=f"{fix} To train anyway: {resume}grpo.allow_truncation=true.",
    )


def stopping(drawn: SampleSummary) -> Iterator[Finding]:
    """SFT has not taught the model to stop."""
    share = 1 - drawn.truncated
    if not drawn.before and share < MIN_STOPPED:
        yield Finding(
            what=f"Only {share:.0%} of the samples end by themselves after SFT",
            fix="Train longer, raise sampling.max_new_tokens, or look at the demonstrations' last "
            "token.",
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
    vocabulary: int
    """Rows of the model's embedding."""

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
        """How different the samples of a problem are: 0 where all are the same, 1 where no two."""
        texts = [[r.completion.token_ids for r in group.rollouts] for group in self.groups]
        shares = [(len({*t}) - 1) / (len(t) - 1) if len(t) > 1 else 1.0 for t in texts]
        return fmean(shares)

    @property
    def reward_variance(self) -> float:
        """Mean over the problems of the variance of the total reward (dividing by n)."""
        variances = []
        for group in self.groups:
            totals = [r.reward.total for r in group.rollouts if r.reward.total is not None]
            variances.append(pvariance(totals) if totals else math.nan)
        return fmean(variances)

    @property
    def certainty(self) -> float:
        """Geometric mean of the probabilities with which the tokens were drawn."""
        logprobs = [value for r in self.rollouts for value in r.completion.logprobs]
        return math.exp(fmean(logprobs))


def tokenisation(samples: Samples) -> Iterator[Finding]:
    """The tokenizer cannot write or read back the tags, the stop token, or the prefix."""
    prepared, found = samples.prepared, []
    ids: list[int] = []
    fmt, prompt, stops = prepared.format, prepared.prompt, prepared.stop_tokens.all
    layout = fmt.completion("1", "1")
    try:
        for text in (*(fmt.tags or ()), layout):
            ids = encode_completion(prepared.tokenizer, text, "the format")
    except PromptError:
        found.append(f"{text!r} does not survive encoding and decoding")
    if any(stop in ids for stop in stops):
        found.append("the format's own layout holds a stop token, so no completion gets past it")
    if not 0 <= stops[0] < samples.vocabulary:
        found.append(
            f"the stop token {stops[0]} lies outside the model's {samples.vocabulary} tokens, so "
            "it can never be drawn"
        )
    ending = prepared.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
    if prompt.prefix and not ending.endswith(prompt.prefix):
        found.append(f"the prompt should end in {prompt.prefix!r} and ends in {ending[-40:]!r}")
    for what in found:
        yield Finding(
            what=what,
            fix="Use other tags (prompt.tags) or another prompt.format; check the model's "
            "tokenizer files.",
        )


def cut_off(samples: Samples) -> Iterator[Finding]:
    """No sample comes to an end; rewards may differ anyway, by accident."""
    if samples.cut_off:
        yield Finding(
            what=f"all {len(samples.rollouts)} samples are cut off at "
            f"{samples.groups[0].params.max_new_tokens} tokens",
            fix="Raise sampling.max_new_tokens, or let SFT teach the stop token first.",
        )


def same(samples: Samples) -> Iterator[Finding]:
    """The samples of each problem are one text."""
    if any(samples.signal) or samples.diversity > 0:
        return
    params = samples.groups[0].params
    what = (
        f"the samples of a problem are all the same text, drawn at temperature "
        f"{params.temperature:g} with a mean probability of {samples.certainty:.3f} per token"
    )
    name, why = "temperature", "the temperature is too low"
    fix = "Set sampling.temperature to 1.0 or more."
    if params.temperature >= LOW_TEMPERATURE and params.truncated:
        why = "top_p, top_k or min_p leave no choice"
        fix = "Take them off, or raise sampling.temperature."
    elif params.temperature >= LOW_TEMPERATURE:
        name, why = "certain", "the model is too certain"
        fix = "Raise sampling.temperature, or shorten SFT (fewer steps, a lower learning rate)."
    yield Finding(name=name, what=f"{why}: {what}", fix=fix)


def tags(samples: Samples) -> Iterator[Finding]:
    """No sample has some tag of the format, and nothing else explains equal rewards."""
    if _explained(samples):
        return
    fmt = samples.prepared.format
    present = [tags_in(rollout.completion.text, fmt) for rollout in samples.rollouts]
    missing = [tag for tag in tags_in("", fmt) if not any(found[tag] for found in present)]
    if missing:
        yield Finding(
            what=f"no sample has {', '.join(missing)}, so no answer is found and none is paid",
            fix=f"Teach the format {fmt.name} first: run SFT (longer, if this is after it), with "
            "the same `prompt` settings as here; or let prompt.system ask for the tags.",
        )


def equal_rewards(samples: Samples) -> Iterator[Finding]:
    """The samples differ, have all tags, and are paid alike."""
    if _explained(samples) or any(tags(samples)):
        return
    rollouts, more = samples.rollouts, "Look at more problems (--problems 16); choose"
    if all(r.reward.total is None for r in rollouts):
        why, fix = "no reward could be computed", "Try the rewards with `grouper rewards try`."
    elif any(group.has_signal for group in samples.groups):
        why = "none is right, and grpo.require_correct_in_group lets no other reward teach"
        fix = f"{more} easier ones, train SFT longer, or set grpo.require_correct_in_group: false."
    elif all(r.grade.correct for r in rollouts):
        why = "every sample is right: too easy to learn from"
        fix = f"{more} harder ones, or set grpo.difficulty."
    elif not any(r.grade.correct for r in rollouts):
        why = "every sample is wrong, and the other rewards pay them alike"
        fix = f"{more} easier ones, or train SFT longer."
    else:
        why = "right and wrong samples are paid alike"
        fix = "Check `rewards`: a correctness reward with a weight above 0 is needed."
    count = len(samples.groups)
    what = f"on {count} problem{'s' if count > 1 else ''} the samples differ, but {why}"
    yield Finding(what=what, fix=fix)


def _explained(samples: Samples) -> bool:
    """Whether there is a signal, or it is plain why there is none."""
    return any(samples.signal) or samples.cut_off or samples.diversity == 0


def tags_in(text: str, fmt: AnswerFormat) -> dict[str, bool]:
    r"""Tag -> whether it occurs, what the prompt has opened included; `\boxed` without tags."""
    wanted = fmt.tags or ("\\boxed",)
    return {tag: tag in fmt.prefix + text for tag in wanted}


# --- a plan ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What a plan had to take for granted."""

    measured: bool
    """Whether data and tokenizer are on this machine, so that rows were measured."""
    native: bool
    """Whether the model runs with native attention."""


def assumed(plan: Assumed) -> Iterator[Finding]:
    """What a plan could not measure."""
    if not plan.measured:
        yield Finding(
            what="The data or the tokenizer are not on this machine: rows are taken to be as long "
            "as the recipe allows, which they rarely are",
        )
    if not plan.native:
        yield Finding(what="Without native attention the cache is counted as if it did not grow")


# --- a recipe -------------------------------------------------------------------------------------


def silent_system(recipe: Recipe) -> Iterator[Finding]:
    """The user's instruction never names what the rewards look for."""
    # Without any instruction, SFT is what tells the model how to answer.
    if recipe.prompt.system != "" or recipe.skip_sft:
        for warning in warn_about_system(recipe.prompt):
            yield Finding(what=warning.removesuffix("."))


def same_rows(recipe: Recipe) -> Iterator[Finding]:
    """What is measured on is trained on, too."""
    parts = dict(sources(recipe))
    for held_out in ("data.validation", "data.test"):
        for trained in ("data.sft", "data.train"):
            if held_out in parts and trained in parts and _meet(parts[held_out], parts[trained]):
                yield Finding(
                    what=f"{held_out} and {trained} read the same rows: its accuracy will say "
                    "nothing about new problems",
                )


def no_test(recipe: Recipe) -> Iterator[Finding]:
    """There is nothing to measure the trained model on."""
    if recipe.data.test is None:
        yield Finding(what="data.test is not set: there will be no final comparison")


def adapter_rate(recipe: Recipe) -> Iterator[Finding]:
    """A learning rate for all weights, and an adapter."""
    for name, lowest in ADAPTER_RATES.items():
        rate = getattr(recipe, name).optimizer.learning_rate
        skipped = recipe.model.lora is None or getattr(recipe, f"skip_{name}")
        if rate < lowest and not skipped:
            yield Finding(
                what=f"{name}.optimizer.learning_rate={rate:g} suits training all weights; an "
                f"adapter (model.lora) needs about ten times as much: try {10 * rate:g}",
            )


def sources(recipe: Recipe) -> Iterator[tuple[str, SourceConfig]]:
    """The sources of a recipe by the settings that name them."""
    for name in ("sft", "train", "validation", "test"):
        source = getattr(recipe.data, name)
        if source is not None:
            yield f"data.{name}", source


def members(source: SourceConfig) -> Sequence[RowsConfig]:
    """What a mixture is mixed of; any other source is alone."""
    return source.mixture or (source,)


def _meet(a: SourceConfig, b: SourceConfig) -> bool:
    return any(_overlap(one, other) for one in members(a) for other in members(b))


def _overlap(*rows: RowsConfig) -> bool:
    places = {(r.source, r.path, r.subset, r.split or SOURCES[r.source].splits[0]) for r in rows}
    first, second = sorted(rows, key=lambda row: row.offset)
    apart = first.limit is not None and second.offset >= first.offset + first.limit
    return len(places) == 1 and not apart


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that can be wrong."""

    name: str
    """Of what it finds, unless the finding has a name of its own."""
    over: type
    """What it looks at: `Window`, `Record`, `SampleSummary`, `Samples`, `Assumed` or `Recipe`."""
    look: Callable[[Any], Iterator[Finding]]
    metric: str = ""
    """The one that a window shows."""
    alarm: str = ""
    """What it is called while a run goes on, where that is not the name of what it finds."""

    def findings(self, data: object) -> list[Finding]:
        return [replace(found, name=found.name or self.name) for found in self.look(data)]


CHECKS: tuple[Check, ...] = (
    Check("entropy-collapse", Window, entropy_low, "policy/entropy", alarm="entropy-low"),
    Check("entropy-high", Window, entropy_high, "policy/entropy"),
    Check("length-blow-up", Window, length, "completion/tokens", alarm="length"),
    Check("repetition", Window, repetition, "completion/repetition"),
    Check("entropy-collapse", Window, sameness, "completion/unique", alarm="sameness"),
    Check("kl", Window, kl, "policy/kl"),
    Check("truncated", Window, truncated, "completion/truncated"),
    Check("reward-saturation", Window, saturated, "groups/all_right", alarm="saturated"),
    # The first ones can be the cause of the later.
    Check("not-finite", Record, not_finite),
    Check("stale-sampler", Record, stale_sampler),
    Check("learning-rate-too-high", Record, rate_too_high),
    Check("no-signal", Record, no_signal),
    Check("grader-errors", Record, grader),
    Check("alarms", Record, alarms),
    Check("format-only", Record, format_only),
    Check("format-only", Record, reward_without_correctness),
    Check("sft-rate", Record, sft_rate),
    Check("learning-rate-too-low", Record, rate_too_low),
    Check("cut off", SampleSummary, budget),
    Check("stopping", SampleSummary, stopping),
    # From what explains the others to what is left.
    Check("tokenisation", Samples, tokenisation),
    Check("cut off", Samples, cut_off),
    Check("same", Samples, same),
    Check("tags", Samples, tags),
    Check("equal rewards", Samples, equal_rewards),
    Check("assumed", Assumed, assumed),
    Check("system", Recipe, silent_system),
    Check("same-rows", Recipe, same_rows),
    Check("no-test", Recipe, no_test),
    Check("adapter-rate", Recipe, adapter_rate),
)


def find(data: object) -> list[Finding]:
    """What the checks over this kind of data find, in the order of the table."""
    return [found for check in CHECKS if check.over is type(data) for found in check.findings(data)]


def watch(report: StepReport, memory: dict[str, Any]) -> list[tuple[str, Finding]]:
    """Look at a step as it is done, at every metric over its last window.

    A check rings once when its condition begins to hold, and can ring again after that has ended.

    Args:
        report: of the step.
        memory: what earlier calls have left here, as JSON values; kept up to date in place.

    Returns:
        (name, finding) of each check that begins to ring at this step.
    """
    first: dict[str, list[float]] = memory.setdefault("first", {})
    recent: dict[str, list[float]] = memory.setdefault("recent", {})
    ringing: list[str] = memory.setdefault("ringing", [])
    rows = [c for c in CHECKS if c.over is Window and c.metric in report.tallies]
    for metric in {check.metric for check in rows}:
        value = report.tallies[metric].mean
        if not math.isfinite(value):
            continue
        if len(first.setdefault(metric, [])) < WINDOW:
            first[metric].append(value)
        else:
            recent[metric] = [*recent.get(metric, []), value][-(REMEMBERED + WINDOW) :]
    new = []
    for check in rows:
        values, name = recent.get(check.metric, []), check.alarm or check.name
        found: list[Finding] = []
        if len(values) >= WINDOW:  # there are two windows to compare
            seen = Window(first[check.metric], values[:-WINDOW], values[-WINDOW:])
            found = check.findings(seen)
        if found and name not in ringing:
            ringing.append(name)
            new += [(name, finding) for finding in found]
        elif not found and name in ringing:
            ringing.remove(name)
    return new


def replay(reports: Iterable[StepReport]) -> Iterator[tuple[int, str, Finding]]:
    """(step, name, finding) of all that would have new over recorded steps of one phase."""
    memory: dict[str, Any] = {}
    for report in reports:
        for name, finding in watch(report, memory):
            yield report.step, name, finding
