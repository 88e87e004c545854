"""Which model a run has trained, in every state that a run can be left in."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from grouper.config.loading import load_recipe, resolved_yaml
from grouper.errors import ConfigError, ModelError, RunFolderError
from grouper.models.folders import BEST_FILE, STATE_FILE, recipe_for
from grouper.models.trained import model_in, trained_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(resolved_yaml(load_recipe("demo")))
    (tmp_path / "run.json").write_text("{}")
    return tmp_path


def save(run: Path, place: str, step: int, total: int = 60, accuracy: float | None = None) -> str:
    """A model that a phase has saved, as far as its name and its step go."""
    folder = run / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / STATE_FILE).write_text(json.dumps({"step": step, "total": total}))
    if accuracy is not None:
        mark = {"step": step, "validation_accuracy": accuracy}
        (folder / BEST_FILE).write_text(json.dumps(mark))
    return str(folder)


def test_a_run_means_what_it_trained_last(run: Path) -> None:
    """Each state of a run is worse than the one after it, and says what is missing."""
    said: list[str] = []
    (run / "base").mkdir()
    (run / "base" / "config.json").write_text("{}")
    for name in (None, "last", "best", "20"):
        with pytest.raises(ConfigError, match="has trained nothing yet"):
            model_in(str(run), checkpoint=name, say=said.append)
    assert said == [], "the untrained base is never meant"
    for place, step, text in [
        ("sft/checkpoint-5", 5, "the sft of .* is not finished: .* step 5 of 60"),
        ("sft/checkpoint-40", 40, "the sft of .* is not finished: .* step 40 of 60"),
        ("sft/final", 60, "its grpo has saved nothing yet"),
        ("grpo/checkpoint-9", 9, "the grpo of .* is not finished: .* step 9 of 60"),
        ("grpo/checkpoint-10", 10, "the grpo of .* is not finished: .* step 10 of 60"),
        ("grpo/final", 60, None),
    ]:
        model = save(run, place, step)
        said.clear()
        assert model_in(str(run), say=said.append) == model
        assert model_in(str(run), checkpoint="last") == model
        if text is None:
            assert said == []
        else:
            (line,) = said
            assert re.search(text, line), line
            assert model in line, "the folder is named"
    longer = save(run, "grpo/checkpoint-80", 80, total=90)
    assert model_in(str(run), say=said.append) == longer, "a phase that was given more steps"
    assert "step 80 of 90" in said[-1]


def test_a_run_of_sft_alone_is_finished_after_it(run: Path) -> None:
    recipe = load_recipe("demo", ["skip_grpo=true"])
    final, said = save(run, "sft/final", 60), list[str]()
    assert trained_model(recipe, run, say=said.append) == final
    assert said == []


def test_checkpoints_are_named_by_step_or_by_what_they_are(run: Path) -> None:
    for step in (20, 40):
        save(run, f"sft/checkpoint-{step}", step)
    save(run, "sft/final", 60, accuracy=0.99)
    for step, accuracy in ((20, 0.5), (40, 0.7), (50, 0.7)):
        save(run, f"grpo/checkpoint-{step}", step, accuracy=accuracy)
    (run / "grpo" / "checkpoint-55").mkdir()  # of a copy that was interrupted
    for name, place in {
        "best": "grpo/checkpoint-40",
        "last": "grpo/checkpoint-50",
        "20": "grpo/checkpoint-20",
        "60": "sft/final",
    }.items():
        assert model_in(str(run), checkpoint=name) == str(run / place)
    for name in ("55", "0", "-1", "first", "1e1", ""):
        with pytest.raises(ConfigError, match=r"no checkpoint .*last and the steps 50 \(grpo\)"):
            model_in(str(run), checkpoint=name)
    for mark in (run / "grpo").glob(f"*/{BEST_FILE}"):
        mark.unlink()
    with pytest.raises(ConfigError, match="no checkpoint of grpo is marked as the best"):
        model_in(str(run), checkpoint="best")


def test_a_result_that_is_not_whole_is_named(run: Path) -> None:
    save(run, "grpo/final", 60)
    (run / "grpo" / "final" / STATE_FILE).unlink()
    with pytest.raises(ConfigError, match="grpo/final is incomplete"):
        model_in(str(run))
    checkpoint, said = save(run, "grpo/checkpoint-40", 40), list[str]()
    assert model_in(str(run), say=said.append) == checkpoint
    assert "is not finished" in said[0]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (STATE_FILE, "{"),
        (STATE_FILE, "[]"),
        (STATE_FILE, '{"step": null, "total": 4}'),
        (STATE_FILE, '{"step": true, "total": 4}'),
        (BEST_FILE, "[" * 100_000),
        (BEST_FILE, '{"validation_accuracy": "high"}'),
    ],
)
def test_a_damaged_state_is_one_paragraph(run: Path, file: str, content: str) -> None:
    save(run, "grpo/checkpoint-40", 40, accuracy=0.5)
    (run / "grpo" / "checkpoint-40" / file).write_text(content)
    with pytest.raises(RunFolderError, match="checkpoint is damaged"):
        model_in(str(run), checkpoint="best")


def test_a_recipe_that_was_not_run_means_its_own_model(tmp_path: Path) -> None:
    recipe = load_recipe("demo")
    with pytest.raises(ConfigError, match="has not been run yet"):
        trained_model(recipe, tmp_path / "none")
    elsewhere = recipe.override("model.new=null", "model.path=owner/model")
    # Measured before it is trained: only `eval_runs` is there.
    (tmp_path / "demo" / "eval_runs").mkdir(parents=True)
    for run in (tmp_path / "none", tmp_path / "demo"):
        assert trained_model(elsewhere, run) == "owner/model"
    untrained = elsewhere.override("skip_sft=true", "skip_grpo=true")
    (tmp_path / "demo" / "recipe.yaml").touch()
    assert trained_model(untrained, tmp_path / "demo") == "owner/model"


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json"])
def test_a_folder_that_holds_a_model_means_itself(run: Path, file: str) -> None:
    save(run, "sft/final", 60)
    (run / file).write_text("{}")
    assert model_in(str(run)) == trained_model(load_recipe("demo"), run) == str(run)
    assert recipe_for(str(run)).name == "demo"
    assert model_in("owner/model") == "owner/model"
    for model in (str(run), "owner/model"):
        with pytest.raises(ConfigError, match="is a model itself, and has no checkpoints"):
            model_in(model, checkpoint="best")
    with pytest.raises(ModelError, match="there is no folder"):
        model_in(str(run / "nothing"), checkpoint="best")
