"""Which model a name means: a folder itself, what a run has trained, or one beside the work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from grouper.config.loading import load_recipe, resolved_yaml
from grouper.errors import ModelError, RunFolderError
from grouper.models.folders import (
    base_of,
    identity_of,
    local_model,
    on_this_machine,
    recipe_for,
    require_model_folder,
)


def test_what_no_model_can_be_called_is_not_here() -> None:
    """The Hub's library raises for such names; a model that cannot be loaded says it better."""
    for name in ("a=b", "owner/my model"):
        assert not on_this_machine(name)
        assert identity_of(name) is None


@pytest.fixture
def run(tmp_path):
    (tmp_path / "recipe.yaml").write_text(resolved_yaml(load_recipe("demo")))
    return tmp_path


def _adapter(folder: Path, base: Path) -> str:
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def test_the_adapter_of_a_run_that_was_moved_belongs_to_the_base_of_that_run(run, tmp_path):
    """Also where another run has taken its place: a base drawn by another seed is another model."""
    before, other = tmp_path / "outputs" / "demo" / "base", tmp_path / "other" / "base"
    for base in (run / "base", before, other):
        base.mkdir(parents=True)
        (base / "config.json").write_text("{}")
    assert base_of(_adapter(run / "sft" / "final", before)) == str(run / "base")
    assert base_of(_adapter(run / "grpo" / "final", other)) == str(other)  # by grpo.start_from
    shutil.rmtree(before)
    assert base_of(str(run / "sft" / "final")) == str(run / "base")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_record_of_an_export_is_one_paragraph(tmp_path, content):
    (tmp_path / "grouper.json").write_text(content)
    with pytest.raises(RunFolderError, match="the record of the export cannot be read"):
        recipe_for(str(tmp_path))


FOLDERS = ("models/Qwen2.5-0.5B", ".models/qwen/qwen2.5-math-1.5b", "models/empty")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name in FOLDERS:
        (tmp_path / name).mkdir(parents=True)
        if name != "models/empty":
            (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen2.5-0.5B", "./models/Qwen2.5-0.5B"),
        ("Qwen2.5-0.5B", "./models/Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-Math-1.5B", "./.models/qwen/qwen2.5-math-1.5b"),
        ("Qwen2.5-Math-1.5B", "Qwen2.5-Math-1.5B"),
        ("somebody/empty", "somebody/empty"),
        ("./models/Qwen2.5-0.5B", "./models/Qwen2.5-0.5B"),
    ],
)
def test_a_local_folder_comes_first(
    here: Path, name: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    assert local_model(name) == found


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="is a file"):
        require_model_folder(str(tmp_path / "model.safetensors"))


def test_a_word_that_is_nothing_here_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was wrong was said to be that its prompt format is not known."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    with pytest.raises(ModelError, match=r"no folder 'my-modell'.*Did you mean \./my-model"):
        recipe_for("my-modell")
