"""A run in two calls: what `prepare` shows is what `train` uses, also inside a running loop."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY_RUN, data_from, write_problems

from grouper import (
    Run,
    api,
    evaluate,
    load_generator,
    load_recipe,
    pass_rates,
    prepare,
    solve,
    train,
)
from grouper.errors import ConfigError, ModelError, RewardError, RunFolderError
from grouper.models.policy import Policy
from grouper.prompts.rendering import render
from grouper.runs.folder import RunFolder
from grouper.runs.lock import LOCK_FILE
from grouper.runs.progress import Progress
from grouper.sampling.native import NativeSampler

ASYNC_REWARD = """
import asyncio

async def patient(*, completions, **_):
    await asyncio.sleep(0)
    return [float(len(text[0]["content"] if text and not isinstance(text, str) else text) % 3)
            for text in completions]
"""


@pytest.fixture
def tiny(tmp_path):
    write_problems(tmp_path)
    overrides = [*TINY_RUN, *data_from(str(tmp_path)), f"output_dir={tmp_path}/outputs"]
    return load_recipe("demo", overrides).override("sft.steps=2", "grpo.steps=1")


def test_everything_is_there_to_look_at_and_nothing_is_written(tiny, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    with prepare(tiny) as setup:
        assert [len(part) for part in (setup.train, setup.validation, setup.test)] == [12, 4, 4]
        assert setup.problems[0].question == "Pick 100."
        assert setup.prompt.text == "<|user|>Pick 100.<|assistant|>"
        assert setup.tokenizer.decode(setup.prompt.token_ids) == setup.prompt.text
        assert len(setup.demonstrations) > 10
        assert list(setup.rewards.weights) == ["correctness", "format", "tag_count"]
        assert setup.sampling.max_new_tokens == 16
        assert setup.settings["grpo.group_size"] == 4
        assert setup.settings["data.train.source"] == "file"
        assert "model" not in vars(setup)
        assert isinstance(setup.model, Policy)
        good = setup.reward("<reasoning>it</reasoning><answer>0</answer>")
        assert good.total == pytest.approx(1.2)
        assert setup.reward("<reasoning>it</reasoning><answer>1</answer>").total == (
            pytest.approx(0.2)
        )
        assert setup.reward("").total == 0
        for text in ("demo: sft then grpo", "12 to train on", "'Pick 100.' -> '0'", "format"):
            assert text in repr(setup)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_reward_that_pays_a_right_answer_least_is_warned_of_at_the_start(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def raw(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
    )
    recipe = tiny.override(name="warned", rewards=[{"name": f"{tmp_path}/mine.py:raw"}])
    told = "the reward 'raw' pays 0 for a right completion of"
    with prepare(recipe) as setup:
        assert [told in text for text in setup.warnings] == [True]
    with Run(recipe, Progress(quiet=True)):
        pass
    log = (tmp_path / "outputs" / "warned" / "training.log").read_text()
    assert told in log


@pytest.mark.slow
def test_a_notebook_runs_it_whole_inside_its_loop(tiny, tmp_path):
    """A cell of a notebook is called from a running event loop; async rewards are awaited."""
    file = tmp_path / "patient.py"
    file.write_text(ASYNC_REWARD)
    recipe = tiny.override(name="cell", rewards=[{"name": f"{file}:patient"}])

    async def cell():
        setup = prepare(recipe)
        prepare(recipe).close()  # running a cell twice is no mistake
        first = render(setup.problems[0], setup.format, setup.tokenizer)
        result = train(setup)
        assert len(repr(result)) < 10_000  # a cell may end in it
        setup.close()
        with load_generator(result.path) as generator:
            return setup, first, result, solve("Pick 100.", generator)

    setup, first, result, solution = asyncio.run(cell())
    assert [r.name for r in result.results] == ["base", "sft", "grpo"]
    assert solution.prompt == first.text == setup.prompt.text
    # What the run made is what was prepared.
    folder = result.path / "base"
    assert folder.is_dir()
    with pytest.raises(Exception, match="already holds a run"):
        train(setup)


def test_gradients_that_are_switched_off_outside_are_on_in_training(tiny):
    """As in a notebook that has asked a model before; it ended in the first update."""
    recipe = tiny.override("data.test=null", "data.validation=null", name="off")
    with torch.inference_mode(), prepare(recipe.override(skip_grpo=True)) as setup:
        assert train(setup).results == ()
        assert torch.is_inference_mode_enabled()


def test_a_process_group_of_the_callers_own_is_left_alone(tiny, tmp_path):
    meet = f"file://{tmp_path / 'meet'}"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    try:
        with Run(tiny, Progress(quiet=True)):
            pass
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def test_a_session_is_taken_as_before_and_keeps_its_own_switches(tiny):
    with Run(tiny.override(name="old", skip_grpo=True, skip_sft=True)) as run:
        with pytest.raises(ValueError, match="to the Run"):
            train(run, resume=True)
        result = train(run)
    assert [r.name for r in result.results] == ["base"]
    # What the process does next is not of this run.
    log = (result.path / "training.log").read_text()
    with Run(tiny.override(name="next", skip_grpo=True, skip_sft=True), Progress(quiet=True)):
        logging.getLogger("grouper.training").warning("of the next run")
    logging.getLogger("grouper.training").warning("of no run")
    assert (result.path / "training.log").read_text() == log
    assert "of no run" not in (result.path.parent / "next" / "training.log").read_text()


def test_a_recipe_is_trained_and_prepared_once(tiny, monkeypatch):
    loaded = []
    monkeypatch.setattr(api, "load_problem_sets", loaded.append)  # the run does this itself
    result = train(tiny.override(name="short", skip_grpo=True, skip_sft=True))
    assert loaded == []
    assert [r.name for r in result.results] == ["base"]
    with pytest.raises(ConfigError, match="no recipe 'dmo'"):
        train("dmo")


def test_mistakes_are_told_before_anything_is_made(tiny, tmp_path):
    with pytest.raises(RewardError, match="no reward 'corectness'"):
        prepare(tiny.override(rewards=[{"name": "corectness"}]))
    with pytest.raises(ConfigError, match="no recipe 'dmo'"):
        prepare("dmo")
    assert not (tmp_path / "outputs").exists()


def test_a_model_is_measured_as_its_run_measured_it(lora_run, tmp_path, monkeypatch):
    recipe = load_recipe(lora_run / "recipe.yaml")
    monkeypatch.setenv("HOME", str(lora_run.parent))
    final = Path(f"~/{lora_run.name}/grpo/final")
    trained = RunFolder(lora_run).read_evaluation("grpo")
    assert trained is not None
    measured = evaluate(recipe, final, name="again", folder=tmp_path / "kept")
    assert measured.items == trained.items
    assert (measured.phase, measured.step) == ("grpo", trained.step)
    kept = RunFolder(tmp_path / "kept").read_evaluation("again")
    assert kept is not None
    assert kept.items == measured.items
    with pytest.raises(ConfigError, match="no test problems"):
        evaluate(recipe.override("data.test=null"), final)
    with pytest.raises(ModelError, match="no folder"):
        evaluate(recipe, "./nowhere")


def test_an_evaluation_that_is_interrupted_is_left_to_others(lora_run, tmp_path, monkeypatch):
    """A notebook lives on, and held the lock until its end."""
    recipe = load_recipe(lora_run / "recipe.yaml")
    monkeypatch.setattr(NativeSampler, "sample", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        evaluate(recipe, str(lora_run / "base"), folder=tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.name == LOCK_FILE] == []


def test_pass_rates_are_counted_and_continued(lora_run, tmp_path):
    recipe = load_recipe(lora_run / "recipe.yaml")
    path = tmp_path / "rates.jsonl"
    first = pass_rates(recipe, str(lora_run / "base"), path, samples=2)
    assert len(first) == 12
    assert {total for _, total in first.values()} == {2}
    before = path.read_text()
    assert [path] == list(tmp_path.iterdir())
    assert pass_rates(recipe, lora_run / "base", path, samples=2) == first
    assert path.read_text() == before
    # Other weights in the same folder, another prompt or seed, or more samples are another
    # measurement.
    for change in ("prompt.system=Answer.", "seed=7", "sampling.temperature=0.5", None):
        other, samples = (recipe.override(change), 2) if change else (recipe, 3)
        with pytest.raises(RunFolderError, match="another model"):
            pass_rates(other, str(lora_run / "base"), path, samples=samples)
    assert path.read_text() == before
    shutil.copytree(lora_run / "base", tmp_path / "model")
    path.unlink()
    pass_rates(recipe, str(tmp_path / "model"), path, samples=2)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    with pytest.raises(RunFolderError, match="another model"):
        pass_rates(recipe, str(tmp_path / "model"), path, samples=2)
