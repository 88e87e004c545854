"""Named stacks: their ranges, and what becomes of one in a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grouper.config.loading import load_recipe, recipe_hash, resolved_yaml
from grouper.config.named import STACKS, expand_stacks
from grouper.config.schema import PromptConfig, RewardConfig, stack
from grouper.errors import GrouperError, RewardError
from grouper.prompts import make_format
from grouper.rewards import build_rewards


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("default", 0, 1.2),
        ("gsm8k-xml", float("-inf"), 4.0),
        ("math-r1-zero", 0, 1),
        ("gsm8k-lite", 0, 1.2),
        ("openmath-dapo", -6.5, 12.5),
        ("r1-zero-numina", -0.6, 4.0),
    ],
)
def test_the_range_of_each_total(name: str, low: float, high: float) -> None:
    layout = make_format(PromptConfig(format=STACKS[name].format))
    assert build_rewards(stack(name), layout).bounds == pytest.approx((low, high))


def test_the_range_of_the_original_of_system_d() -> None:
    layout = make_format(PromptConfig(format="tags"))
    original = [
        RewardConfig(name=r.name, params={"variant": "original"})
        if r.name in ("dapo_answer", "dapo_number")
        else r
        for r in stack("openmath-dapo")
    ]
    assert build_rewards(original, layout).bounds == (-7.5, 13.5)


def test_every_system_has_one() -> None:
    systems = {"gsm8k-xml", "math-r1-zero", "gsm8k-lite", "openmath-dapo", "r1-zero-numina"}
    assert set(STACKS) == systems | {"default"}


def recipe_file(folder: Path, rewards: Any) -> Path:
    data = yaml.safe_load(resolved_yaml(load_recipe("demo")))
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({**data, "rewards": rewards}))
    return file


def test_a_recipe_names_one_and_resolves_to_its_entries(tmp_path: Path) -> None:
    named = load_recipe(recipe_file(tmp_path, [{"name": "stack:gsm8k-lite"}]))
    assert named.rewards == stack("gsm8k-lite")
    assert "lite_tags_present" in resolved_yaml(named)
    assert "stack:" not in resolved_yaml(named)
    written = load_recipe(recipe_file(tmp_path, [{"name": r.name} for r in stack("gsm8k-lite")]))
    assert recipe_hash(written) == recipe_hash(named)


def test_it_can_be_scaled_and_stand_beside_others(tmp_path: Path) -> None:
    entries = [
        {"name": "stack:default", "weight": 2},
        {"name": "soft_overlong", "params": {"max_tokens": 48, "buffer_tokens": 8}},
    ]
    recipe = load_recipe(recipe_file(tmp_path, entries))
    assert [r.weight for r in recipe.rewards] == [2.0, 0.2, 0.2, 1.0]
    overridden = load_recipe("demo", ["rewards=[{name: 'stack:gsm8k-xml'}]"])
    assert overridden.rewards == stack("gsm8k-xml")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "stack:gsm8k-xlm"}, "Did you mean 'gsm8k-xml'"),
        ({"name": "stack:default", "params": {"value": 2}}, "a number as its weight and nothing"),
        ({"name": "stack:default", "weight": "much"}, "a number as its weight"),
    ],
)
def test_refusals(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        expand_stacks([entry])


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        (["accuracy", "format"], ["accuracy", "format"]),
        ("accuracy", ["accuracy"]),
        (["format", {"name": "accuracy"}], ["format", "accuracy"]),
        ("stack:math-r1-zero", ["r1_zero_answer", "r1_zero_format"]),
    ],
)
def test_rewards_may_be_names_alone(tmp_path: Path, raw: Any, names: list[str]) -> None:
    """U14: in a file, and on the command line."""
    in_file = load_recipe(recipe_file(tmp_path, raw))
    assert [reward.name for reward in in_file.rewards] == names
    assert in_file.rewards == load_recipe("demo", [f"rewards={json.dumps(raw)}"]).rewards


def test_twice_the_same_reward_is_refused() -> None:
    with pytest.raises(GrouperError, match="listed twice"):
        load_recipe("demo", ["rewards=[{name: format}, {name: 'stack:default'}]"])


@pytest.mark.parametrize("entries", [None, 3, {"name": "stack:default"}, [3, {"name": 4}, {}]])
def test_what_is_no_entry_is_left_to_the_schema(entries: Any) -> None:
    assert expand_stacks(entries) == entries
