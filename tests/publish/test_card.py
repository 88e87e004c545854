"""The model card where little is known."""

from __future__ import annotations

from pathlib import Path

import yaml
from tiny_models import tiny_model

from grouper.publish.card import license_of, model_card


def test_a_model_of_unknown_origin_gets_a_short_card(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "strange")
    card = model_card(str(tmp_path / "strange"), None, place="strange")
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["pipeline_tag"] == "text-generation"
    assert "model-index" not in metadata
    assert "base_model" not in metadata
    assert "# strange" in card
    assert "No licence is named here" in card


def test_the_base_models_licence_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# base\n")
    assert license_of(str(tmp_path)) == "mit"
    assert license_of(str(tmp_path / "nothing")) is None
