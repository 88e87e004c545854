"""Each check of the last steps finds the run it is for, spares a healthy one, and advises."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from grouper.advice import checks
from grouper.advice.checks import FINDINGS, REMEMBERED, Finding, slope, watch
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe, Section
from grouper.types import StepReport, Tally

WINDOW = 5
STEPS = 40

HEALTHY: dict[str, Callable[[int], float]] = {
    # Up and down, and slowly the way a run that learns goes.
    "policy/entropy": lambda t: 0.5 - 0.007 * t + 0.05 * (t % 2),
    "completion/tokens": lambda t: 100 + 1.5 * t + 10 * (t % 3),
    "completion/repetition": lambda t: 0.1 + 0.1 * (t % 2),
    "completion/unique": lambda t: 0.9 - 0.01 * t,
    "completion/truncated": lambda t: 0.2 + 0.2 * (t % 2),
    "policy/kl": lambda t: 0.002 * t,
    "sampler_logprob_diff": lambda _: 0.003,
    "groups/all_right": lambda t: 0.02 * t,
}

BROKEN: list[tuple[str, str, Callable[[int], float]]] = [
    ("entropy-low", "policy/entropy", lambda t: 0.5 if t < 15 else 0.01),
    ("entropy-high", "policy/entropy", lambda t: 0.5 if t < 15 else 2.5),
    ("length", "completion/tokens", lambda t: 100 if t < 15 else 300),
    ("repetition", "completion/repetition", lambda t: 0.1 if t < 15 else 0.9),
    ("sameness", "completion/unique", lambda t: 0.9 if t < 15 else 0.01),
    ("kl", "policy/kl", lambda t: 0.01 if t < 15 else 0.05 * (t - 15)),
    ("truncated", "completion/truncated", lambda t: 0.2 if t < 15 else 0.8),
    ("saturated", "groups/all_right", lambda t: 0.2 if t < 15 else 1.0),
    ("sampler-drift", "sampler_logprob_diff", lambda t: 0.003 if t < 15 else 0.03),
]


@pytest.fixture(autouse=True)
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "WINDOW", WINDOW)


def reports(**changes: Callable[[int], float]) -> list[StepReport]:
    curves = {**HEALTHY, **changes}
    return [
        StepReport(
            phase="grpo",
            step=t + 1,
            status="learning",
            tallies={name: Tally.of([curve(t)]) for name, curve in curves.items()},
        )
        for t in range(STEPS)
    ]


def replay(steps: list[StepReport]) -> list[tuple[int, str, Finding]]:
    memory: dict[str, Any] = {}
    return [(step.step, *found) for step in steps for found in watch(step, memory)]


def found_in(steps: list[StepReport]) -> list[tuple[int, str]]:
    return [(step, name) for step, name, _ in replay(steps)]


def test_a_healthy_run_is_silent() -> None:
    assert found_in(reports()) == []


def test_every_check_is_tried() -> None:
    rows = [(key, row["metric"]) for key, row in FINDINGS.items() if "metric" in row]
    assert [(name, metric) for name, metric, _ in BROKEN] == rows


@pytest.mark.parametrize(("name", "metric", "curve"), BROKEN)
def test_each_finds_it_once_and_soon(name: str, metric: str, curve: Callable[[int], float]) -> None:
    ((step, found),) = found_in(reports(**{metric: curve}))
    assert found == name
    # Within two windows of the step at which it went wrong.
    assert 15 < step <= 15 + 2 * WINDOW


def test_it_is_reported_again_after_it_has_ended() -> None:
    found = found_in(reports(**{"completion/truncated": lambda t: float(12 <= t < 20 or t >= 30)}))
    assert [name for _, name in found] == ["truncated", "truncated"]


def test_a_single_bad_step_is_no_finding() -> None:
    spikes = {
        metric: (lambda t, c=HEALTHY[metric]: 5 * c(t) if t == 20 else c(t))
        for metric in ("completion/tokens", "policy/entropy")
    }
    assert found_in(reports(**spikes)) == []


def test_steps_without_the_metric_are_left_out() -> None:
    """Without a signal there is no update and no entropy."""
    steps = reports(**{"policy/entropy": BROKEN[0][2]})
    gaps = [
        StepReport(phase="grpo", step=r.step, status="no-signal:all-wrong", tallies={})
        if r.step % 3 == 0
        else r
        for r in steps
    ]
    assert [name for _, name in found_in(gaps)] == ["entropy-low"]


def test_what_is_no_number_is_left_out() -> None:
    steps = reports(**{"policy/kl": lambda t: float("nan") if t % 4 == 0 else 0.01})
    assert found_in(steps) == []


@pytest.mark.parametrize("cut", [3, 9, 17, 21, 30])
def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened(cut: int) -> None:
    steps = reports(**{metric: curve for _, metric, curve in BROKEN})
    whole: dict[str, Any] = {}
    expected = [watch(report, whole) for report in steps]
    assert any(expected)
    memory: dict[str, Any] = {}
    found = [watch(report, memory) for report in steps[:cut]]
    memory = json.loads(json.dumps(memory))
    found += [watch(report, memory) for report in steps[cut:]]
    assert found == expected
    assert memory == whole


def test_of_each_metric_no_more_is_remembered_than_medians_are_taken_over() -> None:
    memory: dict[str, Any] = {}
    report = StepReport(phase="grpo", step=1, status="", tallies={"policy/kl": Tally.of([0.0])})
    for _ in range(REMEMBERED + 3 * WINDOW):
        watch(report, memory)
    assert len(memory["first"]["policy/kl"]) == WINDOW
    assert len(memory["recent"]["policy/kl"]) == REMEMBERED + WINDOW


def settings() -> set[str]:
    """Every dotted key of a recipe, sections included."""

    def walk(section: Any, prefix: str) -> set[str]:
        found = set()
        for name in type(section).model_fields:
            key = f"{prefix}{name}"
            found.add(key)
            value = getattr(section, name)
            if isinstance(value, Section):
                found |= walk(value, key + ".")
        return found

    recipe: Recipe = load_recipe("demo")
    return walk(recipe, "")


@pytest.mark.parametrize(("name", "metric", "curve"), BROKEN)
def test_the_advice_names_settings_that_there_are(
    name: str, metric: str, curve: Callable[[int], float]
) -> None:
    ((_, _, finding),) = replay(reports(**{metric: curve}))
    named = set(re.findall(r"\b(?:grpo|sampling|data|on_finding)\.[a-z_.]+[a-z_]", finding.fix))
    assert named, f"{name}: {finding.fix}"
    assert named <= settings()


def test_the_slope_by_hand() -> None:
    # Deviations of t: -1.5 -0.5 0.5 1.5, their squares sum to 5; rise: 1.5*3 - 0.5*1 + ...
    assert slope([0.0, 4.0, 1.0, 3.0]) == pytest.approx((0 - 2 + 0.5 + 4.5) / 5)
