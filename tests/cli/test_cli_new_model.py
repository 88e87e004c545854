"""`grouper new-model`: a folder that any recipe can start from."""

from __future__ import annotations

import json


def test_the_folder_is_a_model_of_the_size_asked_for(grouper, small, tmp_path):
    folder = tmp_path / "tiny"
    called = grouper(
        "new-model", "demo", folder, *small, "--hidden-size", "48", "--heads", "2", "--layers", "1"
    )
    assert called.code == 0, called.err
    config = json.loads((folder / "config.json").read_text())
    shape = ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    assert [config[name] for name in shape] == [48, 1, 2, 24]
    assert config["num_key_value_heads"] == 2
    assert f"{folder}: random qwen3" in called.out
    settings = [text for text in small if not text.startswith("model.")]
    dry = grouper(
        "run", "demo", *settings, "model.new=null", f"model.path={folder}", "--dry-run", "name=x"
    )
    assert dry.code == 0, dry.err


def test_a_recipe_with_a_model_of_its_own_gets_a_stand_in(grouper, small, tmp_path):
    settings = [text for text in small if not text.startswith("model.")]
    arguments = [*settings, "model.new=null", "model.path=Qwen/Qwen3-0.6B", "--context", "256"]
    called = grouper("new-model", "demo", tmp_path / "tiny", *arguments)
    assert called.code == 0, called.err
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert config["max_position_embeddings"] == 256


def test_sizes_that_do_not_go_together_and_folders_that_exist(grouper, small, tmp_path):
    called = grouper("new-model", "demo", tmp_path / "a", *small, "--heads", "4", "--kv-heads", "3")
    called.refused("heads (4) must be a multiple of kv_heads (3)")
    called = grouper("new-model", "demo", tmp_path / "a", *small, "--vocab-size", "10")
    called.refused("vocab_size 10 is too small", "Use 265 or more")
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    grouper("new-model", "demo", tmp_path / "b", *small).refused("something here already")
