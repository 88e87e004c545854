"""The model card where little is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from drawn_runs import make_run, result
from tiny_models import tiny_model

from grouper.config.loading import load_recipe
from grouper.models.folders import STATE_FILE
from grouper.publish.card import license_of, model_card
from grouper.publish.export import recipe_record
from grouper.training.saved_state import _KEYS


def test_a_model_of_unknown_origin_gets_a_short_card(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "strange")
    card = model_card(str(tmp_path / "strange"), None, place="strange")
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["pipeline_tag"] == "text-generation"
    assert "model-index" not in metadata
    assert "base_model" not in metadata
    assert "# strange" in card
    assert "No license is named here" in card


def test_the_base_models_license_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# base\n")
    assert license_of(str(tmp_path)) == "mit"
    assert license_of(str(tmp_path / "nothing")) is None


@pytest.mark.parametrize(
    ("skipped", "said"),
    [
        ("", "by\nSFT, then GRPO, with"),
        ("skip_sft", "by\nGRPO with"),
        ("skip_grpo", "by\nSFT with"),
    ],
)
def test_the_card_says_how_it_was_trained(tmp_path: Path, skipped: str, said: str) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "strange")
    recipe = load_recipe("demo", [f"{skipped}=true"] if skipped else [])
    record = {
        **recipe_record(recipe),
        "prompt": {"format": "xml", "in_chat_template": True, "stop": []},
        "sampling": {"temperature": 0.0, "max_new_tokens": 8},
    }
    assert said in model_card(str(tmp_path / "strange"), record, place="strange")


@pytest.mark.parametrize("tools", [False, True])
def test_the_card_says_that_a_model_calls_tools(tmp_path: Path, tools: bool) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "strange")
    record = {
        **recipe_record(load_recipe("demo")),
        "prompt": {"format": "python-tool", "in_chat_template": True, "stop": [], "tools": tools},
        "sampling": {"temperature": 0.0, "max_new_tokens": 8},
    }
    card = model_card(str(tmp_path / "strange"), record, place="strange")
    assert ("blocks of Python" in card) == tools
    assert ("````" in card) == tools


@pytest.mark.parametrize(
    ("phase", "step", "accuracy", "measured"),
    [("sft", 40, 0.4, ["base", "SFT"]), ("grpo", 5, 0.9, ["base", "SFT", "GRPO"])],
)
def test_a_card_has_what_was_measured_up_to_its_model(
    tmp_path: Path, phase: str, step: int, accuracy: float, measured: list[str]
) -> None:
    """Its metadata the model's own result on the test problems, and no validation."""
    run = make_run(tmp_path / "run")
    model = run.path / phase / "final"
    tiny_model("qwen3").save_pretrained(model)
    best = {"step": None, "accuracy": -1.0, "interval": None, "pending": None}
    state: dict[str, object] = dict.fromkeys(_KEYS, 0) | {
        "phase": phase,
        "step": step,
        "best": best,
    }
    state |= {"checks": {}, "asked": {}, "files": {}, "difficulty": None, "epoch_ended": False}
    state |= {"started_from": "", "recipe_hash": ""}
    (model / STATE_FILE).write_text(json.dumps(state))
    record = {
        **recipe_record(load_recipe("demo")),
        "prompt": {"format": "xml", "in_chat_template": True, "stop": []},
        "sampling": {"temperature": 0.0, "max_new_tokens": 8},
    }
    card = model_card(str(model), record, place="me/mine", run=run.path)
    metadata = yaml.safe_load(card.split("---")[1])
    (metric,) = metadata["model-index"][0]["results"][0]["metrics"]
    assert (metric["type"], metric["value"]) == ("accuracy", accuracy)
    assert ("grpo" in metadata["tags"]) == (phase == "grpo")
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    shown = [name for name in ("base", "SFT", "GRPO") if any(f"| {name} |" in row for row in rows)]
    assert shown == measured, card


def test_models_that_share_no_problem_stand_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose test problems were replaced on its way could not be pushed."""
    tiny_model("qwen3").save_pretrained(tmp_path / "strange")
    tested = [
        result("base", "base", 0, "test", 3),
        result("grpo", "grpo", 5, "test", 9, problem="other"),
    ]
    monkeypatch.setattr("grouper.publish.card.results_of", lambda *_: tested)
    card = model_card(str(tmp_path / "strange"), None, place="strange")
    assert "15.0" in card
    assert "45.0" in card
    assert "share no problem" in card
