"""A whole run with rollouts of vLLM: of the fake one, and where GROUPER_VLLM=1 of the real one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import TINY_RUN, data_from, write_problems

from grouper import load_recipe, prepare, train
from grouper.advice import live_checks, recipe_checks
from grouper.config.schema import Recipe
from grouper.errors import ConfigError
from grouper.models.folders import RECIPE_FILE
from grouper.models.policy import Policy
from grouper.runs.folder import RunFolder
from grouper.sampling import factory
from grouper.sampling.factory import Samplers
from grouper.training import grpo
from grouper.training.run import Run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sampling"))

from fake_vllm import FakeVllm

REAL = os.environ.get("GROUPER_VLLM") == "1"
KINDS = ["fake", *(["colocate", "server"] if REAL else [])]


@pytest.fixture(params=KINDS)
def recipe(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Recipe:
    write_problems(tmp_path)
    if request.param == "fake":

        def start(samplers: Samplers, policy: Policy, folder: Path) -> Any:
            return FakeVllm(policy.model, samplers.tokenizer)

        monkeypatch.setattr(factory, "_start_vllm", start)
        monkeypatch.setattr(recipe_checks, "require_vllm", lambda: "0.32.0")
    mode = request.param.replace("fake", "colocate")
    changes = ["model.new.hidden_size=128", "grpo.steps=3", f"output_dir={tmp_path}", "name=run"]
    return load_recipe(
        "demo",
        [
            *TINY_RUN,
            *data_from(str(tmp_path)),
            *changes,
            "sampling.engine=vllm",
            f"sampling.vllm.mode={mode}",
            "tracking.token_groups=all",
        ],
    )


@pytest.mark.slow
def test_a_run_records_what_it_was_sampled_by(recipe: Recipe) -> None:
    assert recipe.grpo.importance == "truncate"
    with prepare(recipe) as setup:
        result = train(setup)
    folder = RunFolder(result.path)
    steps = [r for r in folder.read_metrics() if r.phase == "grpo"]
    assert len(steps) == 3
    updates, begun = 0, None
    for report in steps:
        assert report.tallies["sampler_push_gap"].max < 1e-5
        if report.tallies["updates"].sum:
            assert report.tallies["sampler_logprob_diff"].max < 2e-5
            assert report.tallies["sampler_kl"].mean < 1e-6
            assert report.mean("policy/importance") == pytest.approx(1, abs=1e-4)
        drawn = list(folder.read_rollouts("grpo", report.step))
        begun = drawn[0]["policy_version"] if begun is None else begun
        assert {row["policy_version"] for row in drawn} == {begun + updates}
        updates += int(report.tallies["updates"].sum)
    assert updates, "something was learned"
    assert sum(r.mean("time.push") for r in steps) > 0
    assert [r.name for r in result.results] == ["base", "sft", "grpo"]
    longer = load_recipe(result.path / RECIPE_FILE, ["grpo.steps=4"])
    with prepare(longer) as setup:
        train(setup, resume=True, allow_changes=True)
    assert [r.step for r in folder.read_metrics() if r.phase == "grpo"] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fake"], indirect=True)
def test_an_engine_in_this_process_is_woken_once_a_step(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It slept between the rounds of dynamic sampling, too, and took its weights again."""
    begun: list[FakeVllm] = []
    pushes: list[int] = []
    start, assemble = factory._start_vllm, grpo.assemble

    def remember(*given: Any) -> Any:
        begun.append(start(*given))  # type: ignore[arg-type]  # the fake one
        return begun[-1]

    def assembled(*given: Any, **named: Any) -> Any:
        assert begun[0].resting, "the update needs its memory"
        pushes.append(begun[0].pushes)
        return assemble(*given, **named)

    def filled(*given: Any, **named: Any) -> None:
        assert begun[0].resting, "the rehearsal needs its memory"

    monkeypatch.setattr(factory, "_start_vllm", remember)
    monkeypatch.setattr(grpo, "assemble", assembled)
    monkeypatch.setattr(live_checks.Rehearsal, "devices", ("cpu",))
    monkeypatch.setattr(live_checks, "accumulate_gradient", filled)
    with prepare(recipe.override("grpo.dynamic_sampling_rounds=2", "skip_sft=true")) as setup:
        result = train(setup)
    steps = [r for r in RunFolder(result.path).read_metrics() if r.phase == "grpo"]
    assert sum(r.tallies["resample_rounds"].sum for r in steps) > 0
    assert pushes == [pushes[0], pushes[0] + 1, pushes[0] + 2]


@pytest.mark.parametrize(
    ("vllm", "here", "told"),
    [
        ("{mode: colocate}", 2, "one training process, and there are 2"),
        ("{mode: server}", 1, "on several machines"),
        ("{mode: server, servers: ['http://a:1', 'cuda:1']}", 1, "on several machines"),
    ],
)
def test_what_several_processes_cannot_share_is_refused(
    vllm: str, here: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = SimpleNamespace(size=2, rank=0)
    monkeypatch.setattr("grouper.training.run.join_processes", lambda: two)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    with pytest.raises(ConfigError, match=told):
        Run(load_recipe("demo", ["sampling.engine=vllm", f"sampling.vllm={vllm}"]))
