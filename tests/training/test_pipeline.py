"""What one phase leaves behind for the next: the weights, and nothing else."""

from __future__ import annotations

import gc
import json
import shutil
import weakref

import pytest
import torch
from tiny_runs import TINY_RUN, data_from, write_problems

from grouper.api import prepare, train
from grouper.config.loading import load_recipe
from grouper.errors import CheckpointError
from grouper.models.policy import Policy
from grouper.training import pipeline
from grouper.training.observe import take_step
from grouper.training.rollouts import RolloutSource


def tiny_recipe(folder, *overrides):
    write_problems(folder)
    return load_recipe(
        "demo",
        [*TINY_RUN, *data_from(str(folder)), f"output_dir={folder}", "name=run", *overrides],
    )


class Seen:
    """What SFT holds, and which of it is still there when GRPO takes its first step."""

    def __init__(self, monkeypatch):
        self.held: dict[str, weakref.ref] = {}
        self.alive: list[str] | None = None
        self.policies = 0
        self.trained: dict[str, torch.Tensor] = {}
        self.started: dict[str, torch.Tensor] = {}

        def step_of_sft(open_run, state):
            report = take_step(open_run, state)
            moments = [
                value
                for value in state.optimizer.state_dict().values()
                if isinstance(value, torch.Tensor) and value.numel() > 1
            ]
            assert moments
            self.held = {
                "optimizer": weakref.ref(state.optimizer),
                "moments": weakref.ref(moments[0]),
                "policy": weakref.ref(state.replica.policy),
            }
            self.trained = state.replica.policy.snapshot()
            return report

        def step_of_grpo(open_run, state):
            if self.alive is None:
                self.alive = [name for name, ref in self.held.items() if ref() is not None]
                self.policies = sum(type(o) is Policy for o in gc.get_objects())
                self.started = state.replica.policy.snapshot()
            return take_step(open_run, state)

        steps = {"sft": step_of_sft, "grpo": step_of_grpo}
        monkeypatch.setattr(
            pipeline, "take_step", lambda run, state: steps[state.phase](run, state)
        )


@pytest.mark.parametrize("lora", ["{rank: 4}", pytest.param("null", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what torch shows the collector
def test_what_sft_held_is_gone_when_grpo_takes_its_first_step(monkeypatch, tmp_path, lora):
    gc.collect()
    before = sum(type(o) is Policy for o in gc.get_objects())
    seen = Seen(monkeypatch)
    recipe = tiny_recipe(
        tmp_path, f"model.lora={lora}", "sft.steps=2", "grpo.steps=1", "sampling.dtype=bfloat16"
    )
    with prepare(recipe) as setup:
        train(setup)
    # The policy is handed on, and with it the sampler's one copy of its weights; nothing else.
    assert seen.alive == ["policy"]
    assert seen.policies - before == 2
    # The weights (the adapter, where there is one) go on as SFT left them.
    assert seen.started.keys() == seen.trained.keys()
    assert all(torch.equal(seen.started[name], seen.trained[name]) for name in seen.started)
    assert all("lora_" in name for name in seen.started) is (lora != "null")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what torch shows the collector
def test_another_model_to_start_from_finds_the_memory_free(monkeypatch, tmp_path):
    first = tiny_recipe(tmp_path, "sft.steps=1", "skip_grpo=true", "name=first")
    with prepare(first) as setup:
        other = train(setup).path / "sft" / "final"
    gc.collect()
    before = sum(type(o) is Policy for o in gc.get_objects())
    seen = Seen(monkeypatch)
    with prepare(
        tiny_recipe(tmp_path, "sft.steps=2", "grpo.steps=1", f"grpo.start_from={other}")
    ) as setup:
        train(setup)
    assert seen.alive == []
    assert seen.policies - before == 1


def test_validation_is_told_and_written_at_step_0_and_at_the_end(lora_run):
    said = (lora_run / "training.log").read_text()
    for phase, last in (("sft", 4), ("grpo", 2)):
        for step in (0, last):
            name = f"validation-{phase}-{step:06d}"
            model = {"sft": "SFT", "grpo": "GRPO"}[phase]
            assert f"{model} step {step}, validation: " in said
            summary = json.loads((lora_run / "evaluations" / f"{name}.json").read_text())
            assert summary["metrics"].keys() == {
                "format_accuracy",
                "answer_accuracy",
                "with_reasoning",
                "reasoning_length",
                "reward",
                "rewards",
            }
            assert summary["metrics"]["answer_accuracy"] == summary["accuracy"]


@pytest.mark.slow
def test_a_phase_of_all_weights_does_not_go_on_as_an_adapter(tmp_path):
    """Its base would be a checkpoint: once that was removed, nothing could be loaded any more."""
    train(prepare(tiny_recipe(tmp_path, "skip_sft=true", "grpo.steps=1")))
    longer = tiny_recipe(tmp_path, "skip_sft=true", "grpo.steps=2", "model.lora={rank: 4}")
    with pytest.raises(
        CheckpointError, match=r"model\.lora would make an adapter of these weights"
    ):
        train(prepare(longer), resume=True, allow_changes=True)


@pytest.mark.slow
def test_a_run_whose_test_problems_were_replaced_hands_its_model_over(tmp_path, caplog):
    train(prepare(tiny_recipe(tmp_path, "skip_sft=true", "grpo.steps=1")))
    (tmp_path / "test.jsonl").rename(tmp_path / "others.jsonl")
    changes = ["grpo.steps=2", f"save_path={tmp_path}/model"]
    recipe = tiny_recipe(tmp_path, "skip_sft=true", *changes)
    recipe = recipe.override(f"data.test.path={tmp_path}/others.jsonl")
    result = train(prepare(recipe), resume=True, allow_changes=True)
    assert result.comparison is None
    assert "share no problem" in caplog.text
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_what_a_change_leaves_alone_goes_on_as_it_was(monkeypatch, tmp_path, capsys):
    """The schedule of GRPO does not follow `sft.steps`; of other data nothing is drawn ahead."""

    def cut(open_run, state):
        if state.phase == "grpo" and state.step == 1:
            raise OSError("power cut")
        return take_step(open_run, state)

    monkeypatch.setattr(pipeline, "take_step", cut)
    read = []
    monkeypatch.setattr(RolloutSource, "read_next", lambda _, folder: read.append(folder))
    recipe = tiny_recipe(tmp_path, "sft.steps=2", "grpo.steps=3", "grpo.checkpoint_every=1")
    with pytest.raises(OSError, match="power cut"):
        train(prepare(recipe))

    def resumed(*changes):
        """Whether the schedule is said to follow, and how often it was read what is ahead."""
        read.clear()
        capsys.readouterr()
        with pytest.raises(OSError, match="power cut"):
            train(prepare(recipe.override(*changes)), resume=True, allow_changes=True)
        return "schedule: the learning rate follows" in capsys.readouterr().err, len(read)

    assert resumed() == (False, 1)
    with (tmp_path / "train.jsonl").open("a") as rows:
        rows.write('{"question": "Pick 7.", "answer": "1", "solution": "1"}\n')
    assert resumed() == (False, 0)
    assert resumed("sft.steps=3") == (False, 0)
    assert resumed("sft.steps=3", "grpo.steps=4") == (True, 0)


@pytest.mark.slow
def test_a_finished_phase_without_checkpoints_is_not_begun_again(tmp_path):
    """It was, once it was given more steps: record and final model were replaced."""
    recipe = tiny_recipe(tmp_path, "skip_sft=true", "grpo.steps=1")
    run = train(prepare(recipe)).path
    shutil.rmtree(run / "grpo" / "checkpoint-1")
    metrics = (run / "metrics.jsonl").read_text()
    with pytest.raises(CheckpointError, match="only final/ is left"):
        train(prepare(recipe.override("grpo.steps=2")), resume=True)
    assert (run / "metrics.jsonl").read_text() == metrics
    assert train(prepare(recipe), resume=True, allow_changes=True).path == run
