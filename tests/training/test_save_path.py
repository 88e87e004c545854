"""`save_path`: the adapter alone, whole or not at all, and never in the place of something else."""

from __future__ import annotations

import json
import os

import pytest

from grouper.config.loading import load_recipe, recipe_hash
from grouper.errors import RunFolderError
from grouper.training.save_path import check_save_path, export_to_save_path


@pytest.fixture
def recipe(lora_run):
    return load_recipe(lora_run / "recipe.yaml")


def test_the_adapter_alone_is_handed_over(lora_run, recipe):
    handed, final = lora_run.parent / "handed-over", lora_run / "grpo" / "final"
    names = {path.name for path in handed.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "chat_template.jinja" in names
    assert not names & {"trainer_state.json", "optimizer", "model.safetensors"}
    weights = "adapter_model.safetensors"
    assert (handed / weights).read_bytes() == (final / weights).read_bytes()
    assert load_recipe(handed / "recipe.yaml") == recipe
    said = (lora_run / "training.log").read_text()
    assert "Saved the adapter of" in said


def test_the_adapter_went_from_sft_to_grpo(lora_run):
    """One adapter: GRPO's checkpoint names SFT's folder, and both stand on the same base."""
    state = json.loads((lora_run / "grpo" / "final" / "trainer_state.json").read_text())
    assert state["started_from"] == str(lora_run / "sft" / "final")
    bases = [
        json.loads((lora_run / phase / "final" / "adapter_config.json").read_text())
        for phase in ("sft", "grpo")
    ]
    assert bases[0]["base_model_name_or_path"] == bases[1]["base_model_name_or_path"]
    assert bases[0]["base_model_name_or_path"] == str((lora_run / "base").resolve())


def test_it_is_no_part_of_the_experiment(recipe):
    assert recipe_hash(recipe) == recipe_hash(recipe.override(save_path=None))


def test_a_later_run_replaces_it_and_a_skipped_phase_is_not_handed_over(lora_run, recipe, tmp_path):
    target = tmp_path / "adapter"
    to_target = recipe.override(save_path=str(target))
    assert "grpo" in str(export_to_save_path(to_target, lora_run))
    (target / "extra.txt").write_text("from before")
    assert "sft" in str(export_to_save_path(to_target.override(skip_grpo=True), lora_run))
    assert not (target / "extra.txt").exists()
    assert not list(tmp_path.glob(".*"))
    assert export_to_save_path(recipe.override(save_path=None), lora_run) is None
    assert export_to_save_path(to_target, tmp_path) is None  # nothing was trained there


def test_a_full_disk_leaves_what_was_there(lora_run, recipe, tmp_path, monkeypatch):
    target = tmp_path / "adapter"
    export_to_save_path(recipe.override(save_path=str(target)), lora_run)
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def full(*_, **__):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(RunFolderError, match="No space left"):
        export_to_save_path(recipe.override(save_path=str(target)), lora_run)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


@pytest.mark.parametrize("inside", [".", "..", "grpo/final", "base", "evaluations/x"])
def test_a_part_of_the_run_is_refused(lora_run, recipe, inside):
    with pytest.raises(RunFolderError, match="part of the run"):
        check_save_path(recipe.override(save_path=str(lora_run / inside)), lora_run)


def test_somebody_elses_folder_is_refused_and_a_place_in_the_run_is_not(lora_run, recipe, tmp_path):
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    check_save_path(recipe.override(save_path=str(thesis)), lora_run)  # empty
    (thesis / "chapter.tex").write_text("precious")
    for precious in (thesis, thesis / "chapter.tex"):
        with pytest.raises(RunFolderError, match="something other"):
            check_save_path(recipe.override(save_path=str(precious)), lora_run)
    check_save_path(recipe.override(save_path=str(lora_run / "adapter")), lora_run)


@pytest.mark.parametrize(
    "names",
    [
        ("config.json", "model.safetensors"),  # a model from elsewhere, as the base may be
        ("notes.txt", "recipe.yaml"),
        ("recipe.yaml",),
    ],
)
def test_only_a_model_with_its_recipe_is_replaced(tmp_path, names):
    target = tmp_path / "there"
    target.mkdir()
    for name in names:
        (target / name).write_text("precious")
    recipe = load_recipe("demo", [f"save_path={target}"])
    with pytest.raises(RunFolderError, match="something other than a model"):
        check_save_path(recipe, tmp_path / "run")
    for name in ("config.json", "recipe.yaml"):
        (target / name).write_text("as a run leaves them")
    check_save_path(recipe, tmp_path / "run")


def test_a_folder_in_it_is_not_deleted(lora_run, recipe, tmp_path):
    """Nothing that is handed over is a folder: measurements, say, that somebody put there."""
    again = recipe.override(save_path=str(tmp_path / "adapter"))
    export_to_save_path(again, lora_run)
    precious = tmp_path / "adapter" / "eval_runs" / "mine"
    precious.mkdir(parents=True)
    for attempt in (check_save_path, export_to_save_path):
        with pytest.raises(RunFolderError, match="eval_runs in this folder is from elsewhere"):
            attempt(again, lora_run)
    assert precious.is_dir()
