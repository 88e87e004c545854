"""What the data sections of a recipe refuse, and what `sampling` and `prompt` say together."""

from __future__ import annotations

import json

import pytest

from grouper.config.checks import validate_json
from grouper.config.loading import load_recipe, resolved_yaml
from grouper.config.schema import DataConfig, PromptConfig, SamplingConfig, SourceConfig
from grouper.errors import ConfigError


def source(**settings: object) -> SourceConfig:
    return validate_json(SourceConfig, json.dumps(settings), where="here")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give either one `source` or the list `mixture`"),
        ({"source": "gsm8k", "mixture": [{"source": "math"}]}, "give either one `source`"),
        ({"mixture": [{"source": "mixture"}]}, "not mixtures"),
        ({"mixture": [{"source": "gsm8k", "weight": 0}]}, "weight"),
        ({"mixture": [{"source": "gsm8k", "wieght": 1}]}, "Did you mean mixture.0.weight=1"),
        ({"mixture": [{"source": "gsm8k"}], "path": "x", "split": "train"}, "path, split: set it"),
        ({"source": "gsm8k", "streaming": True}, "streaming keeps `limit` rows"),
        ({"source": "gsm8k", "unique": 0}, "unique"),
        ({"source": "gsm8k", "unique": "some"}, "unique"),
        ({"source": "gsm8k", "unique_by": "prompt"}, "unique_by"),
        ({"source": "gsm8k", "numeric_onl": True}, "Did you mean numeric_only=true"),
    ],
)
def test_settings_of_a_source_that_cannot_be_right(settings, message):
    with pytest.raises(ConfigError, match=message):
        source(**settings)


def test_one_validation_set():
    train = SourceConfig(source="gsm8k")
    with pytest.raises(ValueError, match=r"only one of data\.validation and"):
        DataConfig(train=train, validation=train, validation_share=0.1)
    assert not DataConfig(train=train).has_validation
    assert DataConfig(train=train, validation_share=0.1).has_validation
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match="validation_share"):
            DataConfig(train=train, validation_share=share)


def test_the_budget_is_given_once():
    with pytest.raises(ValueError, match="follows from max_total_tokens"):
        SamplingConfig(max_total_tokens=2048, max_new_tokens=300)
    with pytest.raises(ValueError, match="min_new_tokens is larger"):
        SamplingConfig(max_total_tokens=600, min_new_tokens=601)
    assert SamplingConfig(max_total_tokens=2048, min_new_tokens=600).max_total_tokens == 2048


@pytest.mark.parametrize("percentile", [0, 101])
def test_percentiles_are_of_a_hundred(percentile):
    with pytest.raises(ValueError, match="max_percentile"):
        PromptConfig(max_percentile=percentile)


def test_a_resolved_recipe_with_all_of_it_reads_back(tmp_path):
    recipe = load_recipe(
        "demo",
        [
            "data.train={mixture: [{source: arithmetic, weight: 2}, {source: gsm8k, unique: 5}]}",
            "data.validation=null",
            "data.validation_share=0.1",
            "sampling={max_total_tokens: 512}",
            "prompt.max_percentile=90",
            "sft.max_tokens=100",
        ],
    )
    path = tmp_path / "copy.yaml"
    path.write_text(resolved_yaml(recipe))
    assert load_recipe(path) == recipe
