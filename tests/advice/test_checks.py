"""Each way to fail is named from the logs alone, and a healthy run is left in peace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_group

from grouper.advice.checks import SampleSummary, find, read_record
from grouper.advice.recipe_checks import warnings
from grouper.cli.main import main
from grouper.config.loading import load_recipe, recipe_hash, resolved_yaml
from grouper.errors import RunFolderError
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.runs.folder import RunFolder
from grouper.runs.records import RunInfo, rollout_rows
from grouper.types import FinishReason, StepReport, Tally, Verdict

STEPS = 40
Curve = Callable[[int], float]

WAVE = (0.03, -0.02, 0.01, -0.03, 0.02)
"""Something like noise, without a random number."""

HEALTHY: dict[str, Curve] = {
    "solve_rate": lambda t: 0.3 + 0.01 * t + WAVE[t % 5],
    "reward/total": lambda t: 0.35 + 0.01 * t + WAVE[t % 5],
    "policy/entropy": lambda t: 0.5 - 0.007 * t,
    "sampler_logprob_diff": lambda _: 0.003,
    "completion/tokens": lambda t: 100 + t,
    "completion/truncated": lambda _: 0.02,
    "completion/repetition": lambda _: 0.1,
    "completion/unique": lambda _: 0.8,
    "groups/all_right": lambda t: 0.01 * t,
    "grad_norm": lambda t: 0.5 + WAVE[t % 5],
    "updates": lambda _: 1.0,
    "grader/timeouts": lambda _: 0.0,
    "rollouts/not_scored": lambda _: 0.0,
}


def run_of(
    path: Path,
    *,
    status: Callable[[int], str] = lambda _: "learning",
    events: Callable[[int], tuple[str, ...]] = lambda _: (),
    sft: Curve = lambda t: 3.0 / (1 + t),
    **curves: Curve,
) -> Path:
    """A run folder of 30 SFT and 40 GRPO steps whose metrics follow these curves."""
    recipe = load_recipe("demo")
    info = RunInfo(recipe_hash=recipe_hash(recipe), versions={}, fingerprints={})
    folder = RunFolder.create(path, info, recipe_yaml=resolved_yaml(recipe))
    for t in range(30):
        tallies = {"loss": Tally.of([sft(t)])}
        folder.append_metrics(
            StepReport(phase="sft", step=t + 1, tallies=tallies, status="learning")
        )
    for t in range(STEPS):
        tallies = {name: Tally.of([curve(t)]) for name, curve in {**HEALTHY, **curves}.items()}
        if status(t) != "learning":
            tallies = {name: v for name, v in tallies.items() if not name.startswith("policy/")}
        folder.append_metrics(
            StepReport(
                phase="grpo", step=t + 1, tallies=tallies, status=status(t), events=events(t)
            )
        )
    return path


def names(path: Path) -> list[str]:
    return [finding.name for finding in find(read_record(path))]


def test_nothing_is_found_in_a_healthy_run(tmp_path: Path) -> None:
    assert names(run_of(tmp_path)) == []


def test_numbers_of_a_row_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    def sometimes(curve: Curve) -> Curve:
        return lambda t: [math.nan, math.inf, curve(t)][t % 3]

    curves = {name: sometimes(curve) for name, curve in HEALTHY.items()}
    assert names(run_of(tmp_path, **curves)) == []


def metric(name: str, curve: Curve, **more: Any) -> dict[str, Any]:
    return {name: curve, **more}


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    (
        "no-signal:all-wrong",
        {
            "solve_rate": lambda _: 0.0,
            "reward/total": lambda _: 0.0,
            "status": lambda t: "no-signal:all-wrong",
        },
        "sft.steps",
    ),
    (
        "no-signal:all-right",
        metric("groups/all_right", lambda _: 1.0, status=lambda t: "no-signal:all-right"),
        "grpo.difficulty",
    ),
    (
        "no-signal:truncated",
        metric("completion/truncated", lambda _: 1.0, status=lambda t: "no-signal:truncated"),
        "sampling.max_new_tokens",
    ),
    (
        "no-signal:grader-error",
        {"status": lambda t: "no-signal:grader-error"},
        "grading.timeout_seconds",
    ),
    ("no-signal:equal-rewards", {"status": lambda t: "no-signal:equal-rewards"}, "rewards"),
    ("grader-errors", metric("grader/timeouts", lambda _: 0.2), "grading.timeout_seconds"),
    ("entropy-collapse", metric("policy/entropy", lambda t: 0.5 if t < 15 else 0.01), "clip_high"),
    ("length-blow-up", metric("completion/tokens", lambda t: 100 if t < 15 else 400), "weighting"),
    ("reward-saturation", metric("groups/all_right", lambda t: float(t > 10)), "grpo.difficulty"),
    ("truncated", metric("completion/truncated", lambda t: 0.7), "sampling.max_new_tokens"),
    ("repetition", metric("completion/repetition", lambda t: 0.8), "learning_rate"),
    ("stale-sampler", metric("sampler_logprob_diff", lambda _: 0.3), "grpo.importance"),
    (
        "sampler-drift",
        metric("sampler_logprob_diff", lambda t: 0.003 if t < 15 else 0.03),
        "grpo.importance",
    ),
    (
        "learning-rate-too-high",
        {name: lambda t: 0.5 if t < 20 else 0.02 for name in ("solve_rate", "reward/total")},
        "Lower grpo.optimizer.learning_rate",
    ),
    (
        "learning-rate-too-high",
        metric("grad_norm", lambda t: 0.5 if t < 25 else 80.0),
        "Lower grpo.optimizer.learning_rate",
    ),
    (
        "learning-rate-too-low",
        {
            "solve_rate": lambda t: 0.3 + WAVE[t % 5],
            "reward/total": lambda t: 0.3 + WAVE[t % 5],
            "policy/entropy": lambda t: 0.5 + WAVE[t % 5] / 10,
        },
        "Raise grpo.optimizer.learning_rate",
    ),
    ("learning-rate-too-low", {"sft": lambda t: 3 - 0.0001 * t}, "Raise sft.optimizer"),
    ("learning-rate-too-high", {"sft": lambda t: 3 + 0.1 * t}, "Lower sft.optimizer"),
    (
        "format-only",
        {
            "solve_rate": lambda t: 0.3 + WAVE[t % 5],
            "reward/total": lambda t: 0.3 + 0.02 * t,
        },
        "lower the weight",
    ),
    (
        "not-finite",
        {
            "events": lambda t: (
                ("not-finite: loss nan, gradient norm nan; update skipped",) * (t > 30)
            )
        },
        "model.compute_dtype",
    ),
]


@pytest.mark.parametrize(("name", "broken", "fix"), BROKEN)
def test_each_failure_is_named_alone(
    tmp_path: Path, name: str, broken: dict[str, Any], fix: str
) -> None:
    findings = find(read_record(run_of(tmp_path, **broken)))
    assert [finding.name for finding in findings] == [name]
    (finding,) = findings
    assert fix in finding.fix
    assert finding.evidence
    assert 1 <= finding.steps[0] <= finding.steps[1] <= STEPS


def test_a_policy_lost_after_a_few_updates_is_told_by_its_cause_first(tmp_path: Path) -> None:
    path = run_of(
        tmp_path,
        status=lambda t: "learning" if t < 2 else "no-signal:all-wrong",
        **dict.fromkeys(("solve_rate", "reward/total"), lambda t: 0.4 if t < 2 else 0.0),
    )
    assert names(path) == ["learning-rate-too-high", "no-signal:all-wrong"]


def evaluation(name: str, phase: str, strict: Sequence[bool], lenient: Sequence[bool]) -> Any:
    return EvaluationResult(
        name=name,
        phase=phase,
        step=0,
        split="test",
        samples=1,
        items=tuple(
            EvaluationItem(
                problem_id=f"p/{i}",
                subject=None,
                level=None,
                sample=0,
                prompt="",
                completion="",
                answer="1",
                extracted=None,
                verdict=Verdict.CORRECT if right else Verdict.NO_ANSWER,
                reason="",
                stage="",
                finish_reason=FinishReason.STOP_TOKEN,
                tokens=3,
                lenient=meant,
            )
            for i, (right, meant) in enumerate(zip(strict, lenient, strict=True))
        ),
    )


@pytest.mark.parametrize(("after", "found"), [(12, ["format-only"]), (19, [])])
def test_a_gain_that_is_only_format_is_told_from_a_real_one(
    tmp_path: Path, after: int, found: list[str]
) -> None:
    run = RunFolder(run_of(tmp_path))

    def first(count: int) -> list[bool]:
        return [i < count for i in range(20)]

    run.write_evaluation(evaluation("base", "base", first(2), first(11)))
    run.write_evaluation(evaluation("grpo", "grpo", first(after), first(after)))
    assert names(tmp_path) == found


@pytest.mark.parametrize(
    ("right", "since"),
    [
        ((10, 20, 31, 32, 30, 33), 4),  # nothing after step 4 is better than what was there
        ((10, 20, 31, 32, 30), None),  # two later validations are too few to say so
        ((10, 18, 26, 34, 39), None),
        ((20, 21, 19, 20), 0),
    ],
)
def test_no_evidence_of_progress_is_said_with_the_step_since_when(
    tmp_path: Path, right: tuple[int, ...], since: int | None
) -> None:
    run = RunFolder(run_of(tmp_path))
    for look, count in enumerate(right):
        held = [i < count for i in range(40)]
        result = evaluation(f"validation-grpo-{2 * look:06d}", "grpo", held, held)
        run.write_evaluation(replace(result, split="validation", step=2 * look))
    findings = [f for f in find(read_record(tmp_path)) if f.name == "no-progress"]
    assert [f.evidence["since"] for f in findings] == ([] if since is None else [since])
    if findings:
        assert (
            f"no evidence of progress since step {since}: 3 later validations" in findings[0].what
        )
        assert findings[0].steps == (since, 2 * (len(right) - 1))


@pytest.mark.parametrize(("right", "names_found"), [(39, []), (20, ["no-progress"])])
def test_a_plateau_near_the_ceiling_is_no_finding(
    tmp_path: Path, right: int, names_found: list[str]
) -> None:
    """A demonstration that reached 98 % was `no-progress`, and `diagnose` failed."""
    run = RunFolder(run_of(tmp_path))
    for look in range(6):
        held = [i < right for i in range(40)]
        result = evaluation(f"validation-grpo-{2 * look:06d}", "grpo", held, held)
        run.write_evaluation(replace(result, split="validation", step=2 * look))
    assert names(tmp_path) == names_found


def short_run(path: Path, **curves: Curve) -> Path:
    """A run of three GRPO steps, which the checks of windows say nothing about."""
    recipe = load_recipe("demo")
    info = RunInfo(recipe_hash=recipe_hash(recipe), versions={}, fingerprints={})
    folder = RunFolder.create(path, info, recipe_yaml=resolved_yaml(recipe))
    for t in range(3):
        tallies = {name: Tally.of([curve(t)] * 8) for name, curve in {**HEALTHY, **curves}.items()}
        report = StepReport(phase="grpo", step=t + 1, tallies=tallies, status="learning")
        folder.append_metrics(report)
    return path


def test_a_short_run_that_was_truncated_and_in_no_format_is_not_fine(tmp_path: Path) -> None:
    """A run with 0 % format and 18 of 24 truncated was `nothing went wrong`."""
    assert names(short_run(tmp_path / "fine", **{"reward/format": lambda _: 0.5})) == []
    broken = {"completion/truncated": lambda _: 0.75, "reward/format": lambda _: 0.0}
    findings = {f.name: f for f in find(read_record(short_run(tmp_path / "broken", **broken)))}
    assert list(findings) == ["truncated", "no-format"]
    assert "75% of the completions were truncated in the last 3" in findings["truncated"].what
    assert "not one of 24 completions was in the format compact" in findings["no-format"].what
    assert all(finding.is_fault for finding in findings.values())


def test_the_last_measurement_counts_where_there_is_one(tmp_path: Path) -> None:
    run = RunFolder(short_run(tmp_path))
    wrong = [False] * 8
    result = evaluation("grpo", "grpo", wrong, wrong)
    items = tuple(
        replace(item, format=False, rewards={}, reward=0.0, finish_reason=FinishReason.LENGTH)
        for item in result.items
    )
    run.write_evaluation(replace(result, items=items))
    findings = find(read_record(tmp_path))
    assert [finding.name for finding in findings] == ["truncated", "no-format"]
    assert "100% of the 8 completions of grpo" in findings[0].what
    held = tuple(
        replace(item, format=True, finish_reason=FinishReason.STOP_TOKEN) for item in items
    )
    run.write_evaluation(replace(result, items=held))
    assert names(tmp_path) == []


def test_warnings_of_the_log_are_told_and_are_no_fault(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    (run / "training.log").write_text(
        "2026-11-27 10:00:00,000 INFO: begins\n"
        "2026-11-27 10:00:01,000 WARNING: Only 10% of the samples end by themselves.\n"
        "2026-11-27 10:00:02,000 WARNING: Only 10% of the samples end by themselves.\n"
        "a line of its own\n"
        # Told by its own finding.
        "2026-11-27 10:00:03,000 WARNING: grpo step 30: check kl: the KL rose\n"
        "2026-11-27 10:00:04,000 WARNING: reward judge failed\n"
    )
    (finding,) = find(read_record(run))
    assert (finding.name, finding.is_fault) == ("warnings", False)
    assert finding.what == (
        "the run has logged 2 warnings; the first: Only 10% of the samples end by themselves"
    )
    assert finding.steps == (1, 40)


def test_validations_of_other_problems_by_the_same_ids_are_left_out(tmp_path: Path) -> None:
    run = RunFolder(run_of(tmp_path))
    for look, answer in enumerate("1112222"):
        right = [True] * 4 + [False] * 5
        result = evaluation(f"validation-grpo-{2 * look:06d}", "grpo", right, right)
        items = tuple(replace(item, answer=answer) for item in result.items)
        run.write_evaluation(replace(result, split="validation", step=2 * look, items=items))
    (finding,) = (f for f in find(read_record(tmp_path)) if f.name == "no-progress")
    assert (finding.evidence["since"], finding.evidence["validations"]) == (6, 3)


@pytest.mark.parametrize(("lag", "found"), [(0, []), (3, ["stale-sampler"])])
def test_rollouts_of_old_weights_are_noticed(tmp_path: Path, lag: int, found: list[str]) -> None:
    """SFT has made 24 updates before; from step 20 on the sampler gets no new weights in time."""
    run = RunFolder(run_of(tmp_path))
    for t in range(STEPS):
        version = 24 + t - (lag if t >= 20 else 0)
        group = make_group(0, [1.0, 0.0], [3, 3])
        rollouts = tuple(
            replace(r, completion=replace(r.completion, policy_version=version))
            for r in group.rollouts
        )
        rows = rollout_rows("grpo", t + 1, [replace(group, rollouts=rollouts)], [1.0, -1.0])
        run.write_rollouts("grpo", t + 1, rows)
    findings = find(read_record(tmp_path))
    assert [finding.name for finding in findings] == found
    if found:
        assert findings[0].evidence["versions_behind"] == lag
        assert findings[0].steps[0] >= 21


def test_the_command_says_it_in_words_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def diagnose(*words: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as end:
            main(["diagnose", *words])
        return end.value.code, capsys.readouterr().out

    healthy, broken = run_of(tmp_path / "a"), tmp_path / "b"
    run_of(broken, **{"completion/truncated": lambda _: 0.7})
    code, out = diagnose(str(healthy))
    assert code == 0
    assert "40 steps of grpo" in out
    assert "No issues detected" in out
    code, out = diagnose(str(broken))
    assert code == 1
    assert "truncated (grpo 11-20)" in out
    assert "Raise sampling.max_new_tokens" in out
    code, out = diagnose(str(broken), "--json")
    assert code == 1
    content = json.loads(out)
    assert content["steps"] == {"sft": 30, "grpo": 40}
    (finding,) = content["findings"]
    assert finding["name"] == "truncated"
    assert finding["evidence"] == {"found_at_step": 20}


def test_what_is_no_run_is_one_paragraph(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a run folder"):
        read_record(tmp_path)
    run = run_of(tmp_path / "run")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(RunFolderError, match="nothing to diagnose"):
        read_record(run)


# --- completions drawn before GRPO and after SFT ---


def test_a_budget_that_fits_is_told_as_such() -> None:
    report = SampleSummary(completions=[(n, True) for n in range(1, 101)], budget=95)
    assert report.p95 == (95, True)
    assert str(report).startswith("completions take 50 tokens (median), 95 (95th percentile)")
    assert report.truncated == pytest.approx(0.05)


def test_what_was_cut_off_is_a_lower_bound() -> None:
    report = SampleSummary(completions=[(40, False)] * 10, budget=10)
    assert report.p95 == (40, False)
    assert report.truncated == 1.0
    assert "at least 40" in str(report)


def test_ending_exactly_at_the_budget_is_not_truncated() -> None:
    """T7: a completion as long as the budget that ends by itself is whole."""
    assert SampleSummary(completions=[(10, True), (10, True)], budget=10).truncated == 0.0
    assert SampleSummary(completions=[(10, True), (10, False)], budget=10).truncated == 0.5


@pytest.mark.parametrize(
    ("drawn", "begun", "fix"),
    [
        ([(40, False)] * 10, False, "Most never stop at all: teach the stop token first (SFT)"),
        ([(40, True)] * 10, False, "Set sampling.max_new_tokens=64. To train anyway: grpo.allow"),
        ([(40, True)] * 10, True, "=64, with --resume --allow-changes to keep what is there"),
        ([(40, True)] * 5 + [(9, True)] * 5, False, ""),
        # Most end well below the limit of the look, and a few never: the budget is too small.
        (
            [(20, True)] * 9 + [(40, False)],
            False,
            "Set sampling.max_new_tokens=32 (10% would not end then either).",
        ),
        # Half of them do not end: that is what SFT or the format must mend.
        ([(20, True)] * 4 + [(40, False)] * 6, False, "Most never stop at all"),
    ],
)
def test_a_budget_that_cuts_off_most_is_found_before_grpo(
    drawn: list[tuple[int, bool]], begun: bool, fix: str
) -> None:
    found = find(SampleSummary(completions=drawn, budget=10, before="grpo", begun=begun))
    assert [fix in one.fix for one in found] == [True] * bool(fix)
    assert [one.name for one in found] == ["truncated"] * bool(fix)


@pytest.mark.parametrize(("late", "names"), [(2, []), (3, ["stopping"])])
def test_a_model_that_does_not_stop_is_found_after_sft(late: int, names: list[str]) -> None:
    drawn = [(10, False)] * late + [(5, True)] * (10 - late)
    found = find(SampleSummary(completions=drawn, budget=10))
    assert [one.name for one in found] == names
    assert all(str(one).startswith("Only 70% of the samples end by themselves") for one in found)


# --- a recipe ---


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], []),
        (["data.test=null"], ["no-test"]),
        (["prompt.system=Just answer."], ["system"]),
        (["model.lora={}", "grpo.optimizer.learning_rate=1e-6"], ["adapter-rate"]),
        (["model.dtype=bfloat16", "grpo.optimizer.learning_rate=1e-6"], ["rounded-away"]),
        (["model.dtype=bfloat16", "skip_grpo=true", "grpo.optimizer.learning_rate=1e-6"], []),
        (["model.dtype=bfloat16", "model.lora={}"], []),
    ],
)
def test_what_is_rarely_meant_in_a_recipe_is_warned_of(
    overrides: list[str], names: list[str]
) -> None:
    recipe = load_recipe("demo", overrides)
    assert [finding.name for finding in warnings(recipe)] == names
    # A command that trains nothing is silent about training.
    said = [finding.name for finding in warnings(recipe, trains=False)]
    assert said == [name for name in names if name == "system"]
