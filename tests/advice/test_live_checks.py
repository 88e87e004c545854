"""Each check of the last steps finds the run it is for, spares a healthy one, and advises."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grouper.advice import checks
from grouper.advice.checks import FINDINGS, REMEMBERED, Finding, slope, watch
from grouper.advice.live_checks import LiveChecks
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe, Section
from grouper.models.process_group import ProcessGroup
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
    ("sampler-update-share", "sampler_update_share", lambda t: 1.0 if t < 15 else 0.4),
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


class FirstOfTwo(ProcessGroup):
    size = 2

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def on_rank0(self, work: Callable[[], Any]) -> Any:
        self.sent.append(work())
        return self.sent[-1]


class SecondOfTwo(ProcessGroup):
    rank, size = 1, 2

    def __init__(self, first: FirstOfTwo) -> None:
        self.received = first.sent

    def on_rank0(self, work: Callable[[], Any]) -> Any:
        return self.received.pop(0)


@pytest.mark.parametrize("on_finding", ["warn", "stop"])
def test_what_rank_0_alone_has_logged_is_found_by_all_processes(
    tmp_path: Path, on_finding: str
) -> None:
    """A reward may log under a name that a check watches, and only rank 0 computes rewards.

    The second process went on where the first one stopped, and waited for it.
    """
    first = FirstOfTwo()
    second = SecondOfTwo(first)
    recipe = SimpleNamespace(on_finding=on_finding)
    states = [SimpleNamespace(phase="grpo", step=0, checks={}) for _ in range(2)]
    rising: dict[str, Callable[[int], float]] = {"policy/kl": lambda t: 0.05 * t}
    found = []
    for report in reports(**rising):
        others = {name: tally for name, tally in report.tallies.items() if name != "policy/kl"}
        mine = [report, StepReport(phase="grpo", step=report.step, status="", tallies=others)]
        asked = []
        for state, processes, seen in zip(states, (first, second), mine, strict=True):
            state.step = report.step
            run = SimpleNamespace(path=tmp_path, processes=processes, recipe=recipe)
            asked.append(LiveChecks().after_step(run, state, seen))  # type: ignore[arg-type]  # what it asks of both
        assert asked[0].events == asked[1].events
        assert repr(asked[0].error) == repr(asked[1].error)
        assert not first.sent  # both have called the same
        found += [asked[1]] if asked[1].events else []
    assert found
    assert "check kl" in found[0].events[0]
    assert (found[0].error is not None) == (on_finding == "stop")
