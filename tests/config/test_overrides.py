"""Settings before they are a recipe: overrides, in Python too, YAML, and stacks of rewards."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from grouper.config.loading import load_recipe, recipe_hash, resolved_yaml
from grouper.config.overrides import STACKS, as_json, expand_stacks, parse_yaml
from grouper.config.schema import (
    GRPOConfig,
    LoraConfig,
    PromptConfig,
    Recipe,
    RewardConfig,
    stack,
)
from grouper.errors import ConfigError, GrouperError, RewardError
from grouper.prompts import make_format
from grouper.rewards import build_rewards


@pytest.fixture
def demo():
    return load_recipe("demo")


def test_both_spellings_are_those_of_the_command_line(demo):
    expected = load_recipe("demo", ["grpo.steps=3", "name=mine", "model.lora={rank: 4}"])
    assert demo.override("grpo.steps=3", "name=mine", "model.lora.rank=4") == expected
    assert demo.override(grpo={"steps": 3}, name="mine", model={"lora": {"rank": 4}}) == expected
    assert demo.override("grpo.steps=3", name="mine", model={"lora": LoraConfig(rank=4)}) == (
        expected
    )
    assert recipe_hash(demo.override(name="mine")) == recipe_hash(
        load_recipe("demo", ["name=mine"])
    )


def test_what_python_has_instead_of_numbers_and_words(demo):
    """A sweep goes over an array; a dtype or a function is refused as a setting that is wrong."""
    (steps,), (rate,) = np.arange(3, 4), np.array([1e-4], dtype=np.float32)
    swept = demo.override(grpo={"steps": steps, "optimizer": {"learning_rate": rate}})
    assert (swept.grpo.steps, swept.grpo.optimizer.learning_rate) == (3, float(rate))
    with pytest.raises(ConfigError, match=r"model.dtype: should be 'float32' or 'bfloat16'"):
        demo.override(model={"dtype": np.float64})


def test_the_recipe_itself_stays_as_it_is_and_sections_are_merged(demo):
    other = demo.override(sft={"steps": 1}).override("sft.batch_size=2")
    assert (other.sft.steps, other.sft.batch_size) == (1, 2)
    assert other.sft.optimizer == demo.sft.optimizer
    assert demo == load_recipe("demo")
    assert demo.override() == demo
    # Of a section's object, what was set on it.
    assert demo.override(grpo=GRPOConfig(steps=3)) == demo.override("grpo.steps=3")
    assert demo.override(data={"test": None}).data.train == demo.data.train


def test_a_recipe_without_a_section_can_be_given_one():
    least = Recipe.model_validate_json(
        '{"name": "x", "model": {"path": "m"}, "data": {"train": {"source": "gsm8k"}}}'
    )
    assert least.override("seed=2").seed == 2
    assert least.override("grpo.steps=3").grpo.steps == 3


def test_a_text_wins_over_a_keyword_and_the_last_text_over_the_others(demo):
    assert demo.override("seed=2", "seed=3", seed=1).seed == 3


def test_every_mistake_is_told_at_once_with_the_nearest_name(demo):
    with pytest.raises(ConfigError) as error:
        demo.override("grpo.stepz=3", sampling={"temperature": -1})
    told = " ".join(e.paragraph() for e in (error.value, *error.value.others))
    assert "recipe demo: grpo.stepz" in told
    assert "Did you mean" in told
    assert "sampling.temperature" in told
    with pytest.raises(ConfigError, match="not an override"):
        demo.override("grpo.steps")


def test_another_algorithm_brings_its_own_parts(demo):
    dapo = demo.override("grpo.algorithm=dapo")
    assert (dapo.grpo.clip_high, dapo.grpo.dynamic_sampling_rounds) == (0.28, 3)
    gspo = dapo.override(grpo={"algorithm": "gspo", "clip_low": 0.1})
    wanted = GRPOConfig(algorithm="gspo", clip_low=0.1)
    for name in ("ratio", "weighting", "clip_low", "clip_high", "dynamic_sampling_rounds"):
        assert getattr(gspo.grpo, name) == getattr(wanted, name)
    # What was set beside the name stays.
    assert gspo.grpo.steps == demo.grpo.steps
    assert dapo.override("grpo.algorithm=gspo", "grpo.clip_high=0.28").grpo.clip_high == 0.28


def test_a_stack_of_rewards_is_written_out(demo):
    by_name = demo.override(rewards=[{"name": "stack:gsm8k-xml"}])
    assert by_name.rewards == stack("gsm8k-xml")
    assert demo.override(rewards=stack("gsm8k-xml")) == by_name
    assert by_name.override("rewards.0.weight=3").rewards[0].weight == 3


BOMB = "a0: &a0 [1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)

# As a vocabulary that is given in place of a recipe, but for its last line.
MANY = "".join(f"token{n}: {n}\n" for n in range(20_000)) + "token7: 7\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "what"),
    [
        (BOMB, "more than 20 aliases"),
        (MANY, "the key 'token7' is written twice"),
        ("a: &a [*a]", "nested too deeply"),
        ("a: &a 1\n2026-01-01: *a", "keys must be str"),
        ("note: text\n2026-01-01: text", "keys must be str"),
        ("a: " + "[" * 3000, "nested too deeply"),
        ("a: " + "{a: " * 3000, "nested too deeply"),
        ("seed: " + "9" * 5000, "Exceeds the limit"),
        ("when: 2026-13-99", "month must be in 1..12"),
        ("a: [1", "not valid YAML"),
    ],
)
def test_yaml_that_no_recipe_is_takes_no_time_and_is_one_paragraph(text, what):
    """R5, R10: one that unfolds, one that holds itself, one that is too deep."""
    started = time.process_time()
    with pytest.raises(ConfigError, match=what) as caught:
        parse_yaml(text, "mine.yaml")
    assert time.process_time() - started < 10
    assert "mine.yaml" in str(caught.value)
    assert "\n" not in caught.value.what


def test_what_an_alias_names_is_a_copy():
    text = "train: &set {source: gsm8k, limit: 9}\ntest: {<<: *set, split: test}\nsft: *set"
    data = parse_yaml(text, "mine.yaml")
    as_json(data, ["sft.limit=2"], where="mine.yaml")
    assert data == {
        "train": {"source": "gsm8k", "limit": 9},
        "test": {"source": "gsm8k", "limit": 9, "split": "test"},
        "sft": {"source": "gsm8k", "limit": 2},
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        # Each of six lists holds the one before three times; the first is long.
        (f"a: &0 [{'x, ' * 2_000}]\n"
         + "".join(f"b{n}: &{n + 1} [*{n}, *{n}, *{n}]\n" for n in range(6)), "too much text"),
        (f"a: &a {'x' * 90_000}\nb: &b [*a, *a, *a, *a]\nc: [*b, *b, *b]\n", "too much text"),
        ("a: &a [*a]\n", "nested too deeply"),
        ("- 1\n" * 300_000, "is it a file of data"),
        ("[" + "*a," * 300_000 + "]", "more than 20 aliases"),
    ],
)  # fmt: skip
def test_a_recipe_that_would_take_minutes_is_refused_at_once(text, why):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=why):
        parse_yaml(text, "mine.yaml")
    assert time.monotonic() - started < 10


def test_twenty_aliases_are_read_and_a_date_beside_them():
    text = "a: &a 1\nwhen: 2026-01-01\nb: [" + "*a, " * 20
    assert parse_yaml(f"{text}]", "mine.yaml") == {"a": 1, "when": "2026-01-01", "b": [1] * 20}
    with pytest.raises(ConfigError, match="more than 20 aliases"):
        parse_yaml(f"{text}*a]", "mine.yaml")


def test_a_setting_of_a_reward_that_is_listed_by_name(demo):
    """U17: it was a traceback."""
    recipe = demo.override("rewards=[accuracy, format]", "rewards.1.weight=2")
    assert [(reward.name, reward.weight) for reward in recipe.rewards] == [
        ("accuracy", 1.0),
        ("format", 2.0),
    ]


def test_a_place_in_a_list_may_stand_in_brackets(demo):
    expected = demo.override("rewards.1.weight=0.5")
    assert demo.override("rewards[1].weight=0.5") == expected
    with pytest.raises(ConfigError, match=r"^rewards.9: '9' is not a position in a list of 3"):
        demo.override("rewards[9].weight=0.5")


def test_the_first_entry_of_a_list_that_is_not_there():
    """`wandb.project=mine` is answered with the second of these."""
    where = "tracking.trackers.0"
    recipe = load_recipe("demo", [f"{where}.name=wandb", f"{where}.project=mine"])
    assert [(row.name, row.project) for row in recipe.tracking.trackers] == [("wandb", "mine")]
    with pytest.raises(ConfigError, match=rf"{where}.name: this is required"):
        load_recipe("demo", [f"{where}.project=mine"])


def test_a_setting_inside_a_name_is_one_paragraph():
    with pytest.raises(ConfigError, match=r"name: holds 'x', which has no settings"):
        as_json({"name": "x"}, ["name.first=2"], where="x.yaml")
    with pytest.raises(ConfigError, match=r"rewards: holds 'x', .* Set rewards itself"):
        as_json({"rewards": "x"}, ["rewards.0.weight=2"], where="x.yaml")


# --- names that stand for several settings -------------------------------------------------------


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


def test_every_system_has_a_stack() -> None:
    systems = {"gsm8k-xml", "math-r1-zero", "gsm8k-lite", "openmath-dapo", "r1-zero-numina"}
    assert set(STACKS) == systems | {"default"}


def recipe_file(folder: Path, rewards: Any) -> Path:
    data = yaml.safe_load(resolved_yaml(load_recipe("demo")))
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({**data, "rewards": rewards}))
    return file


def test_a_recipe_names_a_stack_and_resolves_to_its_entries(tmp_path: Path) -> None:
    named = load_recipe(recipe_file(tmp_path, [{"name": "stack:gsm8k-lite"}]))
    assert named.rewards == stack("gsm8k-lite")
    assert "lite_tags_present" in resolved_yaml(named)
    assert "stack:" not in resolved_yaml(named)
    written = load_recipe(recipe_file(tmp_path, [{"name": r.name} for r in stack("gsm8k-lite")]))
    assert recipe_hash(written) == recipe_hash(named)


def test_a_stack_can_be_scaled_and_stand_beside_others(tmp_path: Path) -> None:
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
        (
            {"name": "stack:default", "params": {"value": 2}},
            "^rewards: stack:default takes a number as its weight and nothing else. `grouper rew",
        ),
        ({"name": "stack:default", "weight": "much"}, "a number as its weight"),
    ],
)
def test_stacks_that_cannot_be(entry: dict[str, Any], message: str) -> None:
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
