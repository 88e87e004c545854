"""pydantic's complaints become our sentences."""

from __future__ import annotations

import json

import pytest

from grouper.config.schema import Recipe
from grouper.config.validation import validate_json
from grouper.errors import ConfigError


def test_places_types_and_nearest_names():
    text = """{"name": "x", "model": {"new": {"layres": 2}}, "data": {"train": {}},
               "grpo": {"optimizer": {"betas": [0.9]}, "advantage": "nothing"}}"""
    with pytest.raises(ConfigError) as caught:
        validate_json(Recipe, text, where="r.yaml", place=("outer",))
    told = str(caught.value)
    assert "r.yaml: outer.model.new.layres: there is no setting 'layres' here." in told
    assert "Did you mean 'layers'?" in told
    assert "outer.data.train: give either one `source` or the list `mixture` of several." in told
    assert "outer.grpo.optimizer.betas.1" in told
    assert "outer.grpo.advantage: should be 'standardised'" in told
    assert len(told.splitlines()) == 4
    assert "pydantic" not in told


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("evaluate_every", -1, "should be greater than or equal to 0, or 'epoch' (got -1)"),
        ("evaluate_every", "x", "should be a valid integer, or 'epoch' (got 'x')"),
    ],
)
def test_a_value_of_several_kinds_is_one_mistake(key: str, value: object, told: str) -> None:
    data = {"name": "x", "model": {"path": "m"}, "data": {"train": {"source": "gsm8k"}}}
    text = json.dumps({**data, "sft": {key: value}})
    with pytest.raises(ConfigError) as caught:
        validate_json(Recipe, text, where="r.yaml")
    assert str(caught.value) == f"r.yaml: sft.{key}: {told}."
