"""pydantic's complaints become our sentences."""

from __future__ import annotations

import pytest

from grouper.config import Recipe
from grouper.errors import ConfigError
from grouper.validation import validate_json


def test_places_types_and_nearest_names():
    text = """{"name": "x", "model": {"new": {"layres": 2}}, "data": {"train": {}},
               "grpo": {"optimizer": {"betas": [0.9]}, "advantage": "none"}}"""
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
