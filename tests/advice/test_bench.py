"""A few steps of a recipe, measured; nothing is left of them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from tiny_runs import TINY_RUN, data_from, write_problems

from grouper.advice.bench import Bench, bench
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.errors import GrouperError, Interrupted
from grouper.kernels.switch import kernels_are_off
from grouper.training.observe import take_step
from grouper.training.run import Run
from grouper.training.state import TrainState
from grouper.training.stop_signal import StopSignal
from grouper.types import StepReport

LENGTH = 6


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("data")
    write_problems(folder)
    return load_recipe("demo", [*TINY_RUN, *data_from(str(folder)), "grpo.steps=7"])


@pytest.fixture(scope="module")
def measured(recipe: Recipe) -> Bench:
    return bench(recipe, warmup=1, steps=3, completion_tokens=LENGTH)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_every_completion_is_as_long_as_it_is_made(measured: Bench) -> None:
    assert len(measured.reports) == 3
    for report in measured.reports:
        tally = report.tallies["completion/tokens"]
        assert tally.min == tally.max == LENGTH


def test_every_group_teaches_and_every_row_is_trained_on(measured: Bench, recipe: Recipe) -> None:
    """Random models answer nothing right; their update would have no rows."""
    rows = recipe.grpo.prompts_per_step * recipe.grpo.group_size
    for report in measured.reports:
        assert report.status == "learning"
        assert report.tallies["solve_rate"].mean < 1
        assert report.tallies["frac_groups_with_signal"].mean == 1
        trained = report.tallies["time.trained_tokens_per_second"].mean
        assert trained * report.tallies["time.update"].mean == pytest.approx(rows * LENGTH)


@pytest.mark.parametrize("advantage", ["none", "batch_standardised"])
def test_rows_are_trained_on_whatever_the_baseline(recipe: Recipe, advantage: str) -> None:
    alone = recipe.override(f"grpo.advantage={advantage}", "grpo.group_size=1")
    (report,) = bench(alone, warmup=0, steps=1, completion_tokens=LENGTH).reports
    assert report.tallies["frac_groups_with_signal"].mean == 1


def test_the_recipes_own_rewards_are_computed(measured: Bench, recipe: Recipe) -> None:
    names = {f"reward/{reward.name}" for reward in recipe.rewards}
    assert names <= set(measured.reports[0].tallies)


def test_what_follows_from_the_steps(measured: Bench) -> None:
    step = measured.spread("time.step")
    assert 0 < step["min"] <= step["median"] <= step["max"]
    assert measured.hours == pytest.approx(7 * step["median"] / 3600)
    parts = ("prefill", "decode", "grade", "update", "other")
    assert sum(measured.share(part) for part in parts) == pytest.approx(1)
    assert all(r.tallies[f"time.{part}"].mean > 0 for r in measured.reports for part in parts)
    assert measured.peak_bytes > 2**26
    told = measured.as_dict()
    assert told["recipe_steps"] == 7
    assert told["metrics"]["time.step"]["median"] == step["median"]


@pytest.mark.slow
def test_as_many_steps_are_taken_without_kernels(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    off: list[bool] = []

    def step(run: Run, state: TrainState) -> StepReport:
        off.append(kernels_are_off())
        return take_step(run, state)

    monkeypatch.setattr("grouper.advice.bench.take_step", step)
    seen = bench(recipe, warmup=1, steps=2, completion_tokens=LENGTH, plain=True)
    assert off[-3:] == [True] * 3  # one of them warms up
    assert len(off) == 6
    assert len(seen.plain_reports) == len(seen.reports) == 2
    assert seen.spread("time.step", plain=True)["median"] > 0
    assert seen.spread("time.step", plain=True) != seen.spread("time.step")


def test_the_weights_stay_what_they_are_and_the_folder_goes(
    recipe: Recipe, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = []

    def watched(run: Run, state: TrainState) -> StepReport:
        assert list(scratch.iterdir())
        before = state.replica.policy.snapshot()
        report = take_step(run, state)
        after = state.replica.policy.snapshot()
        # Weights that are exactly 0 move by what no sum would ever notice.
        moved.append(max(float((before[n] - after[n]).abs().max()) for n in before))
        return report

    monkeypatch.setattr("grouper.advice.bench.take_step", watched)
    bench(recipe, warmup=0, steps=2, completion_tokens=LENGTH)
    assert len(moved) == 2
    assert max(moved) <= 1e-29
    assert list(scratch.iterdir()) == []


def test_a_stop_leaves_nothing_either(
    recipe: Recipe, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(run: Run, what: str = "", **_: bool) -> None:
        raise Interrupted("stopped on request", fix="continue with --resume")

    monkeypatch.setattr(StopSignal, "raise_if_requested", stopped)
    with pytest.raises(Interrupted, match="Nothing was written") as error:
        bench(recipe, warmup=0, steps=1)
    assert "--resume" not in str(error.value)
    assert list(scratch.iterdir()) == []


def test_completions_that_do_not_fit_are_refused(recipe: Recipe, scratch: Path) -> None:
    with pytest.raises(GrouperError, match="50000"):
        bench(recipe, completion_tokens=50_000)
    assert list(scratch.iterdir()) == []
