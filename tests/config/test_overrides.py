"""A recipe with other settings, in Python: checked like a file, and the old one stays as it is."""

from __future__ import annotations

import time

import numpy as np
import pytest

from grouper.config.loading import load_recipe, recipe_hash
from grouper.config.overrides import as_json, parse_yaml
from grouper.config.schema import GRPOConfig, LoraConfig, stack
from grouper.errors import ConfigError


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "what"),
    [
        (BOMB, "more than 20 aliases"),
        ("a: &a [*a]", "Circular reference"),
        ("a: &a 1\n2026-01-01: *a", "keys must be str"),
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


def test_a_setting_of_a_reward_that_is_listed_by_name(demo):
    """U17: it was a traceback."""
    recipe = demo.override("rewards=[accuracy, format]", "rewards.1.weight=2")
    assert [(reward.name, reward.weight) for reward in recipe.rewards] == [
        ("accuracy", 1.0),
        ("format", 2.0),
    ]


def test_a_setting_inside_a_name_is_one_paragraph():
    with pytest.raises(ConfigError, match=r"name: holds 'x', which has no settings"):
        as_json({"name": "x"}, ["name.first=2"], where="x.yaml")
    with pytest.raises(ConfigError, match=r"rewards: holds 'x', .* Set rewards itself"):
        as_json({"rewards": "x"}, ["rewards.0.weight=2"], where="x.yaml")
