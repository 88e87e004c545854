"""The training sections: presets fill in, what is written wins, what cannot work is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from grouper.config.loading import load_recipe, resolved_yaml
from grouper.config.phases import DifficultyConfig, GRPOConfig, OptimizerConfig, SFTConfig
from grouper.config.presets import PRESETS
from grouper.errors import ConfigError


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_in_what_the_recipe_does_not_say(name: str) -> None:
    recipe = load_recipe("demo", [f"grpo.algorithm={name}"])
    for key, value in PRESETS[name].items():
        assert getattr(recipe.grpo, key) == value
    assert recipe.grpo.group_size == 8
    assert GRPOConfig.of(name).model_dump(include=set(PRESETS[name])) == PRESETS[name]


def test_what_the_recipe_says_wins_over_the_preset(tmp_path: Any) -> None:
    recipe = load_recipe("demo", ["grpo.algorithm=dapo", "grpo.clip_high=0.4"])
    assert recipe.grpo.clip_high == 0.4
    assert recipe.grpo.max_resample_rounds == 3
    copy = tmp_path / "copy.yaml"
    copy.write_text(resolved_yaml(recipe))
    assert load_recipe(copy) == recipe


def test_an_unknown_algorithm_is_told() -> None:
    with pytest.raises(ConfigError, match=r"grpo\.algorithm.*'dapo'"):
        load_recipe("demo", ["grpo.algorithm=dap"])


def test_a_name_without_its_parts_is_refused() -> None:
    """In Python, a preset that filled in nothing would be silently wrong."""
    with pytest.raises(ValidationError, match=r"GRPOConfig\.of\('dapo'"):
        GRPOConfig(algorithm="dapo")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "group_size 1 leaves advantage: standardised nothing"),
        ({"group_size": 1, "advantage": "leave_one_out"}, "raw or batch_standardised"),
        ({"beta": 0.1, "kl": "k1"}, "use k2 or k3, or kl_in_reward"),
        ({"kl_in_reward": True}, "beta above 0"),
        ({"surrogate": "cispo", "dual_clip": 3.0}, "a bound of surrogate: clipped"),
        ({"dual_clip": 1.2}, "above 1 \\+ clip_high"),
        ({"surrogate": "policy_gradient", "ratio": "sequence"}, "has no ratio"),
        ({"updates_per_batch": 129}, "more than the 128 completions"),
        (
            {"group_size": 1, "advantage": "raw", "max_resample_rounds": 1},
            "a group of one has none",
        ),
        (
            {"beta": 0.1, "kl_in_reward": True, "decouple_rewards": True},
            "use one of them",
        ),
        ({"weighting_constant": 3.0}, "only for weighting: constant"),
        ({"advantage": "centred", "advantage_eps": 1e-6}, "centred divides by none"),
        ({"top_entropy": 0.0}, "greater than 0"),
    ],
)
def test_combinations_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GRPOConfig(**settings)


@pytest.mark.parametrize("advantage", ["raw", "batch_standardised"])
def test_a_group_of_one_needs_no_group_baseline(advantage: Any) -> None:
    assert GRPOConfig(group_size=1, advantage=advantage).group_size == 1


def test_sft_has_no_budget_to_divide_by() -> None:
    with pytest.raises(ValidationError, match="needs a weighting_constant"):
        SFTConfig(weighting="constant")
    assert GRPOConfig(weighting="constant").weighting_constant is None


def test_warm_up_is_told_once() -> None:
    with pytest.raises(ValidationError, match="only one of warmup_steps and warmup_ratio"):
        OptimizerConfig(warmup_steps=5, warmup_ratio=0.1)


def test_a_band_has_two_ends_and_a_source() -> None:
    with pytest.raises(ValidationError, match="must be below"):
        DifficultyConfig(low=0.5, high=0.5)
    with pytest.raises(ValidationError, match="online: true"):
        DifficultyConfig(online=False)
