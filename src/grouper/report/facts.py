"""The facts of a run at the top of its page: its state, what it is, and whether it improved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grouper.errors import DataError, duration, plural
from grouper.evaluation.compare import compare, label
from grouper.evaluation.result import OUTCOME_NAMES, EvaluationResult
from grouper.evaluation.result_tables import (
    TONES,
    change_in_points,
    difference_title,
    verdict_sentence,
)
from grouper.report.panels import RunView
from grouper.runs.folder import PHASES
from grouper.runs.lock import is_held_here, is_running
from grouper.tables import Tone


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a run, with a few words on it."""

    name: str
    tone: Tone
    text: str


def state_of(run: RunView) -> State:
    """Return the state of a run: running, finished, stopped, failed, or killed."""
    where = "before its first step"
    if run.reports:
        last_report = run.reports[-1]
        where = f"at {label(last_report.phase)} step {last_report.step}"
    if run.recipe and run.folder.has_finished(run.recipe.phases):
        return State(name="finished", tone="good", text="all phases are finished")
    end = run.folder.read_end()
    if end is not None and end.state != "finished":
        tone: Tone = "bad" if end.state == "failed" else "unsure"
        cause = "" if end.state == "failed" else "by "
        text = f"{where}, {cause}{end.reason}" if end.reason else where
        return State(name=end.state, tone=tone, text=text)
    if is_held_here(run.folder.path) or is_running(run.folder.path):
        return State(name="running", tone="plain", text=where)
    if not run.reports:
        return State(name="not started", tone="plain", text=where)
    return State(name="interrupted", tone="unsure", text=f"{where}; how it ended is not recorded")


def facts_of(run: RunView) -> dict[str, str]:
    """Return the facts of a run by their names, each in a few words."""
    info = run.folder.read_info()
    host = info.host
    facts = {"model": "-", "data": "-", "algorithm": "-"}
    if run.recipe is not None:
        facts["model"] = _model(run)
        facts["data"] = _data(run)
        facts["algorithm"] = _algorithm(run)
    facts["steps"] = _steps(run)
    threads = plural(int(host["threads"]), "thread")
    facts["hardware"] = f"{host.get('hardware') or host['platform']}, {threads}"
    processes = int(host["processes"])
    if processes > 1:
        facts["hardware"] += f", {processes} processes"
    seconds = run.seconds[-1] if run.seconds else 0.0
    started = str(host["started"]).replace("T", " ")[:16]
    facts["time"] = f"{duration(seconds)}, from {started} UTC"
    facts["tokens"] = _tokens(run)
    facts["seed"] = str(run.recipe.seed) if run.recipe is not None else "-"
    facts["commit"] = str(host.get("commit") or "none recorded")
    return facts


def _model(run: RunView) -> str:
    assert run.recipe is not None
    model = run.recipe.model
    name = str(model.path)
    if model.new is not None:
        name = f"new random model, {model.new.layers} layers, width {model.new.hidden_size}"
    if model.lora is not None:
        name = f"{name}, LoRA of rank {model.lora.rank}"
    return name


def _data(run: RunView) -> str:
    """Name the source of the training problems, and the number of held-out ones."""
    assert run.recipe is not None
    train = run.recipe.data.train
    name = train.path or train.source
    if train.mixture:
        name = " + ".join(member.path or member.source for member in train.mixture)
    count = train.options.get("count") or train.limit
    if isinstance(count, int):
        name = f"{name}, {count:,} problems"
    held_out = [f"{len(results[-1].problems)} {split}" for split, results in _by_split(run).items()]
    return f"{name}; {', '.join(held_out)}" if held_out else name


def _by_split(run: RunView) -> dict[str, list[EvaluationResult]]:
    splits: dict[str, list[EvaluationResult]] = {}
    for result in run.evaluations:
        splits.setdefault(result.split, []).append(result)
    return splits


def _algorithm(run: RunView) -> str:
    assert run.recipe is not None
    names = {"sft": "SFT", "grpo": ""}
    grpo = run.recipe.grpo
    parts = grpo.algorithm or f"{grpo.advantage} advantage, {grpo.surrogate}"
    names["grpo"] = f"GRPO ({parts}; groups of {grpo.group_size})"
    return ", then ".join(names[phase] for phase in run.recipe.phases) or "none"


def _steps(run: RunView) -> str:
    """Return the steps of each phase that are done, of those to do."""
    texts = []
    for phase in PHASES[1:]:
        reports = run.of_phase(phase)
        total = getattr(getattr(run.recipe, phase, None), "steps", None)
        is_planned = run.recipe is not None and phase in run.recipe.phases
        if not reports and not is_planned:
            continue
        done = reports[-1].step if reports else 0
        of_total = f" of {total}" if total and total != done else ""
        texts.append(f"{label(phase)} {done}{of_total}")
    return ", ".join(texts) or "none"


def _tokens(run: RunView) -> str:
    """Return the tokens that SFT trained on, and those that GRPO sampled."""
    texts = []
    for phase, verb in (("sft", "trained by SFT"), ("grpo", "sampled by GRPO")):
        tokens = run.clock(phase).tokens[-1]
        if tokens:
            texts.append(f"{_short_count(tokens)} {verb}")
    return ", ".join(texts) or "none"


def _short_count(count: float) -> str:
    """Write a large number in a few characters.

    >>> _short_count(950), _short_count(48_210), _short_count(3_200_000)
    ('950', '48.2k', '3.2M')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


# --- results -------------------------------------------------------------------------------------


def held_out_results(run: RunView) -> dict[str, list[EvaluationResult]]:
    """Group the results of base, SFT and GRPO by the set of problems they were measured on.

    Validation counts where no other set was measured twice: its first result and its last.
    Results that were measured after the run come last.
    """
    splits: dict[str, list[EvaluationResult]] = {}
    for result in run.evaluations:
        splits.setdefault(result.split, []).append(result)
    validations = splits.pop("validation", [])
    tests: dict[str, list[EvaluationResult]] = {}
    has_repeated_test = any(len(results) > 1 for results in splits.values())
    if validations and not has_repeated_test:
        tests["validation"] = [_with_step(result) for result in _first_and_last(validations)]
    tests |= splits
    for name, results in run.later.items():
        tests[name] = list(results)
    return tests


def _with_step(result: EvaluationResult) -> EvaluationResult:
    """Name a result by its phase and step."""
    return replace(result, name=f"{label(result.phase)} step {result.step}")


def _first_and_last(results: Sequence[EvaluationResult]) -> list[EvaluationResult]:
    """Return the first result and, if there are more, the last."""
    if len(results) == 1:
        return [results[0]]
    return [results[0], results[-1]]


def headline(run: RunView) -> tuple[str, list[EvaluationResult]] | None:
    """Return the set of problems that the verdict is about, with its results; None: there is none.

    Sets that were measured twice come before others.
    """
    tests = sorted(held_out_results(run).items(), key=lambda test: len(test[1]) < 2)
    return tests[0] if tests else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A row of the results at the top."""

    name: str
    percent: float
    low: float
    high: float
    color: str
    counts: str
    """Completions by outcome."""


def scores_of(results: Sequence[EvaluationResult], colors: Sequence[str] = ("ink",)) -> list[Score]:
    """Return a row for each result."""
    scores = []
    for number, result in enumerate(results):
        counts = [
            f"{count:,} {OUTCOME_NAMES[outcome]}"
            for outcome, count in result.split_counts.items()
            if count
        ]
        scores.append(
            Score(
                name=label(result.name),
                percent=100 * result.accuracy,
                low=100 * result.interval.low,
                high=100 * result.interval.high,
                color=colors[number % len(colors)],
                counts=", ".join(counts),
            )
        )
    return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The verdict on the difference between two results."""

    verdict: str
    tone: Tone
    text: str


def changes_between(results: Sequence[EvaluationResult]) -> list[Change]:
    """Return the difference of each result from the one before, then of the last from the first."""
    if len(results) < 2:
        return []
    try:
        comparison = compare(results)
    except DataError:
        # They share no problem; the table of results says so.
        return []
    return [
        Change(
            verdict=difference.verdict,
            tone=TONES[difference.verdict],
            text=f"{difference_title(difference)}: {change_in_points(difference)}",
        )
        for difference in comparison.differences
    ]


def verdict_of(split: str, results: Sequence[EvaluationResult]) -> tuple[Tone, str]:
    """Return the tone of a verdict, and its sentences."""
    try:
        # Only the problems that both have: the difference is about them.
        comparison = compare(_first_and_last(results))
    except DataError:
        # No problem was scored in both, and the last model is reported alone.
        comparison = None
    if comparison is not None and comparison.differences:
        tone = TONES[comparison.differences[-1].verdict]
        return tone, verdict_sentence(comparison, split)
    last = results[-1]
    problems = f"{last.overall.problems} {split} problems"
    text = f"{label(last.name)} solves {100 * last.accuracy:.1f} % of {problems}"
    return "unsure", f"{text}; there is nothing to compare it with yet."
