"""`grouper serve-rollouts`: the shape that vLLM's server gets."""

from __future__ import annotations

import json

import pytest

from grouper.config.loading import load_recipe
from grouper.config.schema import LoraConfig, ModelConfig
from grouper.errors import VLLM
from grouper.models.loading import load_policy, load_tokenizer, save_policy
from grouper.sampling.vllm.sampler import write_shape


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_rollouts_are_served_of_the_shape_that_is_trained(
    grouper, finished_run, monkeypatch, tmp_path, target
):
    """LoRA on one of two tied ends parts them, and the run refused the server as another's."""
    monkeypatch.setattr("grouper.errors.version", lambda _: f"{VLLM[0]}.0")
    monkeypatch.setenv("GROUPER_ROLLOUT_SECRET", "s" * 16)
    monkeypatch.setenv("GROUPER_CACHE", str(tmp_path))
    base = finished_run / "base"
    asked = ["serve-rollouts", finished_run / "recipe.yaml", "--model", base, "--dry-run"]
    called = grouper(*asked, f"model.lora.target_modules=[{target}]", "model.lora.rank=2")
    assert called.code == 0, called.err
    recipe = load_recipe(finished_run / "recipe.yaml")
    lora = LoraConfig(rank=2, target_modules=(target,))
    model = recipe.model.model_copy(update={"path": str(base), "new": None, "lora": lora})
    trained = load_policy(model, str(base), seed=0).model.config
    assert f" {write_shape(tmp_path, trained, load_tokenizer(str(base)))} " in called.err
    (config,) = (tmp_path / "rollouts").glob("*/config.json")
    assert json.loads(config.read_text())["tie_word_embeddings"] == (target == "q_proj")


def test_rollouts_are_served_of_the_shape_of_a_saved_adapter(
    grouper, finished_run, monkeypatch, tmp_path
):
    """Its layers and its rank are its own, whatever the recipe says."""
    monkeypatch.setattr("grouper.errors.version", lambda _: f"{VLLM[0]}.0")
    monkeypatch.setenv("GROUPER_ROLLOUT_SECRET", "s" * 16)
    monkeypatch.setenv("GROUPER_CACHE", str(tmp_path))
    base, lora = finished_run / "base", LoraConfig(rank=20, target_modules=("lm_head",))
    model = ModelConfig(path=str(base), lora=lora)
    policy, tokenizer = load_policy(model, str(base), seed=0), load_tokenizer(str(base))
    save_policy(policy, tokenizer, tmp_path / "saved")
    asked = ["serve-rollouts", finished_run / "recipe.yaml", "--model", tmp_path / "saved"]
    settings = ["model.lora={rank: 2, target_modules: [q_proj]}", "sampling.dtype=same"]
    called = grouper(*asked, "--dry-run", *settings)
    assert called.code == 0, called.err
    assert f" {write_shape(tmp_path, policy.model.config, tokenizer)} " in called.err
    assert "--max-lora-rank 32" in called.out
