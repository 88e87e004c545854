"""Recipes are strict, told all at once, and written back whole."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import re
from pathlib import Path

import pytest
import yaml

from grouper.advice.recipe_checks import check_recipe
from grouper.config.loading import (
    ADDED_SINCE,
    NOT_THE_EXPERIMENT,
    list_recipes,
    load_recipe,
    recipe_hash,
    resolved_yaml,
)
from grouper.config.schema import Recipe
from grouper.errors import ConfigError, GrouperError

SMALL = """
name: small
description: a test
model:
  new: {layers: 1}
data:
  train: {source: arithmetic, split: train, options: {count: 10}}
  test: {source: arithmetic, split: test, options: {count: 5}}
grpo:
  optimizer: {learning_rate: 5e-6, betas: [0.9, 0.99]}
rewards:
  - {name: correctness, weight: 1}
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def changed(path, *overrides):
    return load_recipe(path, overrides)


def test_numbers_as_people_write_them(small):
    optimizer = load_recipe(small).grpo.optimizer
    assert (optimizer.learning_rate, optimizer.betas) == (5e-6, (0.9, 0.99))
    for text, value in [("1e6", 1e6), ("3.0e-4", 3e-4), ("1", 1.0), ("-1e-3", None)]:
        override = f"grpo.optimizer.learning_rate={text}"
        if value is None:
            with pytest.raises(ConfigError, match="greater than 0"):
                changed(small, override)
        else:
            assert changed(small, override).grpo.optimizer.learning_rate == value


def test_overrides_reach_every_place_and_the_last_wins(small):
    recipe = changed(
        small,
        "grpo.steps=20",
        "grpo.steps=30",
        "model.lora.rank=8",
        "model.new.layers=3",
        "rewards.0.weight=2",
        "data.train.limit=7",
        "prompt.system='Use tags: <answer>'",
        "data.test=null",
        "sampling.stop=['</answer>']",
        "skip_sft=true",
    )
    assert recipe.grpo.steps == 30
    assert recipe.model.lora is not None
    assert recipe.model.lora.rank == 8
    assert recipe.model.new.layers == 3
    assert recipe.rewards[0].weight == 2
    assert recipe.data.train.limit == 7
    assert recipe.data.train.options == {"count": 10}
    assert recipe.data.test is None
    assert recipe.sampling.stop == ("</answer>",)
    assert recipe.skip_sft


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "grpo.stesp=3",
            r"grpo\.stesp: there is no setting .* Did you mean grpo.steps=3",
        ),
        ("grpo.steps='3'", r"grpo\.steps.*whole number.*got '3'"),
        ("grpo.steps=2.5", r"grpo\.steps"),
        ("skip_sft=1", "skip_sft.*true or false"),
        ("grpo.group_size=1", "group_size 1 needs advantage: none, .* or zero, not standardised"),
        ("sampling.top_p=0.9", "allow_truncated: true accepts that"),
        ("grpo.beta=.inf", r"small\.yaml: a setting is infinite or not a number"),
        ("model.path=x", "exactly one of model.path and model.new"),
        ("grpo.steps", r"'grpo.steps' is not an override\. Write section\.key=value"),
        ("=3", "is not an override"),
        ("grpo..steps=3", "is not an override"),
        (
            "rewards.1.weight=3",
            r"^rewards\.1: '1' is not a position in a list of 1, counted from",
        ),
        ("rewards.name.weight=3", "'name' is not a position in a list of 1"),
        ("rewards.-1.weight=3", "'-1' is not a position in a list of 1"),
        ("model.quantization=4bit", "give model.lora"),
        ("name.first=3", "holds 'small', which has no settings inside"),
        ("grpo.steps=[1", "not valid YAML: expected"),
        ("name=2026-13-45", "^name=2026-13-45: this is not valid YAML: month must be in"),
        ("note=" + "[" * 3000, "nested too deeply"),
        (f"seed={'1' * 5000}", "not valid YAML: Exceeds the limit"),
    ],
    ids=lambda text: text[:30],
)
def test_overrides_that_are_wrong(small, override, message):
    with pytest.raises(ConfigError, match=message):
        changed(small, override)


def test_an_entry_that_holds_nothing_has_no_settings(small):
    with pytest.raises(ConfigError, match=r"rewards\.0: holds None, which has no settings inside"):
        changed(small, "rewards=[null]", "rewards.0.weight=2")


def test_blanks_around_a_key_are_nothing(small):
    assert changed(small, " grpo.steps = 7").grpo.steps == 7


def test_a_date_is_a_text(small):
    assert changed(small, "name=2026-01-31").name == "2026-01-31"


def test_every_problem_is_told_at_once(small):
    with pytest.raises(ConfigError) as caught:
        changed(small, "grpo.stesp=3", "sft.batch_size=-1", "data.train.nope=1", "sead=2")
    told = str(caught.value).splitlines()
    assert len(told) == 4
    assert all(str(small) in line for line in told)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", r"a\.yaml: the recipe is a list, not settings with names\. Write it as `name"),
        ("# nothing yet\n", "is empty, not settings with names"),
        ("name: [x\n", "line 2: this is not valid YAML"),
        ("name: x\nname: y\n", "line 2: .*'name' is written twice"),
        ("seed: 1\n", "name: this is required"),
        ("name: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_files_that_are_not_recipes(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


def test_a_file_in_another_encoding_is_one_paragraph(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes("name: café".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"a\.yaml: cannot be read \(.*utf-8"):
        load_recipe(path)


def test_an_unknown_recipe_names_the_nearest(small):
    near = r"smal\.yaml: there is no recipe file of this name\. Did you mean '.*small\.yaml'"
    with pytest.raises(ConfigError, match=near):
        load_recipe(small.with_name("smal.yaml"))
    with pytest.raises(
        ConfigError, match=r"no recipe 'demp'\. Did you mean 'demo'\? .* path \(\./demp\.yaml"
    ):
        load_recipe("demp")


def test_the_resolved_recipe_is_complete_and_reads_back_unchanged(small, tmp_path):
    recipe = changed(small, "model.lora={rank: 8}", "grpo.optimizer.eps=1e-9", "note=數學")
    text = resolved_yaml(recipe)
    assert list(yaml.safe_load(text)) == list(Recipe.model_fields)
    assert "note: 數學\n" in text
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load_recipe(again) == recipe
    assert resolved_yaml(load_recipe(again)) == text


def test_the_hash_names_the_experiment_and_not_how_it_is_run(small):
    name = recipe_hash(load_recipe(small))
    same = (
        "output_dir=/else/where",
        "description=other",
        "note=other",
        "threads=3",
        "skip_sft=true",
    )
    assert recipe_hash(changed(small, *same)) == name
    for override in ("seed=1", "grpo.beta=0.1", "data.train.options.count=11"):
        assert recipe_hash(changed(small, override)) != name
    assert re.fullmatch("[0-9a-f]{16}", name)
    orders = ("{seed: 1, count: 10}", "{count: 10, seed: 1}")
    first, second = (changed(small, f"data.train.options={order}") for order in orders)
    assert recipe_hash(first) == recipe_hash(second) != name


def test_what_is_a_path_and_not_the_name_of_a_shipped_recipe(small, monkeypatch):
    monkeypatch.chdir(small.parent)
    monkeypatch.setenv("HOME", str(small.parent))
    for name in ("mine.yaml", "mine.yml", "mine.json", "./demo", "~/demo", Path("demo")):
        Path(name).expanduser().write_text(SMALL)
        assert load_recipe(name).name == "small"
    assert load_recipe("demo").name == "demo"


def test_the_small_recipe_is_sound(small):
    assert check_recipe(load_recipe(small)) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train.source=arithmetics"], r"data\.train\.source.*Did you mean 'arithmetic'"),
        (["data.train.options.cuont=3"], r"data\.train: options\.cuont.*count=3"),
        (["data.test.options={kinds: [nope]}"], r"data\.test: options.*no kind 'nope'"),
        (["prompt.format=xlm"], r"prompt\.format.*Did you mean 'xml'"),
        (["data.test={source: gsm8k, path: ./no/such}"], r"data\.test\.path.*no file or folder"),
        (["model={path: ./no/such}"], r"model\.path: there is no folder"),
        (["grpo.start_from=/no/such"], r"grpo\.start_from: there is no folder"),
        (["save_path=/dev/null/x"], r"/dev/null: cannot write here\. Set save_path"),
        (["grpo.difficulty={path: no.jsonl}"], r"grpo\.difficulty\.path: no\.jsonl cannot be read"),
        (["data.train={source: svamp}"], r"data\.sft.*svamp has none"),
        (["rewards=[{name: corectness}]"], "Did you mean 'correctness'"),
    ],
)
def test_what_the_tables_know(small, overrides, message):
    with pytest.raises(GrouperError, match=message):
        check_recipe(changed(small, *overrides))


def test_checks_are_told_together(small):
    with pytest.raises(GrouperError) as caught:
        check_recipe(
            changed(
                small,
                "prompt.format=xlm",
                "data.train.source=nope",
                "data.test.options={cuont: 3, hihg: 4}",
            )
        )
    assert len(str(caught.value).splitlines()) == 4


def test_wrong_rewards_are_told_beside_wrong_data(small):
    with pytest.raises(GrouperError) as caught:
        check_recipe(changed(small, "rewards=[{name: corectness}]", "data.train.source=nope"))
    assert "correctness" in str(caught.value)
    assert "'nope'" in str(caught.value)


def test_sources_without_solutions_are_fine_without_sft(small):
    assert check_recipe(changed(small, "data.train={source: svamp}", "skip_sft=true")) == []
    assert check_recipe(changed(small, "model={path: someone/model, new: null}")) == []


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["data.test=null"], "no final comparison"),
        (["prompt.system=Just answer."], "never mentions <reasoning>"),
    ],
)
def test_warnings(small, overrides, warning):
    (told,) = check_recipe(changed(small, *overrides))
    assert warning in told


def test_every_shipped_recipe_loads_and_is_listed():
    folder = importlib.resources.files("grouper.config") / "recipes"
    names = sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))
    assert [name for name, _ in list_recipes()] == names
    for name, description in list_recipes():
        assert description, name
        assert load_recipe(name).name == name


def test_a_stop_string_that_closes_the_answer_must_be_kept() -> None:
    recipe = load_recipe("demo", ["prompt.format=r1-zero", "sampling.include_stop=false"])
    with pytest.raises(ConfigError, match="closes the answer"):
        check_recipe(recipe)


def test_a_rate_for_all_weights_is_too_low_for_an_adapter() -> None:
    small = ["sft.optimizer.learning_rate=1e-5", "grpo.optimizer.learning_rate=1e-6"]
    full = check_recipe(load_recipe("demo", small))
    lora = check_recipe(load_recipe("demo", [*small, "model.lora={rank: 8}"]))
    assert not any("adapter" in text for text in full)
    told = [text for text in lora if "adapter" in text]
    assert [text.split(".")[0] for text in told] == ["sft", "grpo"]
    assert "try 1e-05" in told[1]
    fine = ["sft.optimizer.learning_rate=1e-4", "grpo.optimizer.learning_rate=1e-5"]
    assert not any(
        "adapter" in text for text in check_recipe(load_recipe("demo", [*fine, "model.lora={}"]))
    )


def test_evaluation_is_by_steps_or_by_epoch() -> None:
    assert load_recipe("demo", ["grpo.evaluate_every=epoch"]).grpo.evaluate_every == "epoch"
    with pytest.raises(ConfigError, match="evaluate_every"):
        load_recipe("demo", ["grpo.evaluate_every=epochs"])


def test_a_setting_that_came_later_leaves_hashes_as_they_were() -> None:
    """A run that was begun before there was `data.test_share` is continued after."""
    recipe = load_recipe("math")
    recipe = recipe.override(data={"test": None})
    same = recipe.override("data.test_share=0")
    other = recipe.override("data.test_share=0.1")
    assert "data.test_share" in ADDED_SINCE
    assert recipe_hash(same) == recipe_hash(recipe)
    assert recipe_hash(other) != recipe_hash(recipe)
    data = recipe.model_dump(mode="json")
    for key in (*NOT_THE_EXPERIMENT, *ADDED_SINCE):
        *sections, name = key.split(".")
        del functools.reduce(dict.__getitem__, sections, data)[name]
    text = json.dumps(data, sort_keys=True).encode()
    assert recipe_hash(recipe) == hashlib.sha256(text).hexdigest()[:16]
