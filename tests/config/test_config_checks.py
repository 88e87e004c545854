"""pydantic's complaints become our sentences, and a wrong key is told what to write instead."""

from __future__ import annotations

import functools
import json
import re

import pytest
import yaml
from pydantic import BaseModel

from grouper.config.checks import settings, validate_json
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.errors import ConfigError

SMALL = {"name": "x", "model": {"path": "m"}, "data": {"train": {"source": "gsm8k"}}}


def test_places_types_and_nearest_names():
    text = """{"name": "x", "model": {"new": {"layres": 2}}, "data": {"train": {}},
               "grpo": {"optimizer": {"betas": [0.9]}, "advantage": "best"}}"""
    with pytest.raises(ConfigError) as caught:
        validate_json(Recipe, text, where="r.yaml", place=("outer",))
    told = str(caught.value)
    assert "r.yaml: outer.model.new.layres: there is no setting 'layres' here." in told
    assert "Did you mean model.new.layers=2?" in told
    assert "outer.data.train: give either one `source` or the list `mixture` of several." in told
    assert "outer.grpo.optimizer.betas.1" in told
    assert "outer.grpo.advantage: should be 'standardised'" in told
    assert len(told.splitlines()) == 4
    assert "pydantic" not in told


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("evaluate_every", -1, "should be greater than or equal to 0, or 'epoch' (got -1)"),
        ("evaluate_every", "x", "should be a whole number, or 'epoch' (got 'x')"),
    ],
)
def test_a_value_of_several_kinds_is_one_mistake(key: str, value: object, told: str) -> None:
    text = json.dumps({**SMALL, "sft": {key: value}})
    with pytest.raises(ConfigError) as caught:
        validate_json(Recipe, text, where="r.yaml")
    assert str(caught.value) == f"r.yaml: sft.{key}: {told}."


@pytest.mark.parametrize("key", ["rewards[0]", "int", "grpo.float"])
def test_a_key_that_looks_like_a_kind_of_value_is_named(key: str) -> None:
    """pydantic puts `int` and `list[str]` into the place of an error, among the keys."""
    section, _, name = key.rpartition(".")
    text = json.dumps({**SMALL, **({section: {name: 1}} if section else {name: 1})})
    with pytest.raises(ConfigError) as caught:
        validate_json(Recipe, text, where="r.yaml")
    assert f"r.yaml: {key}: there is no setting {name!r} here." in str(caught.value)


class Sized(BaseModel):
    """As the parameters of somebody's reward."""

    size: int | bool | float | str
    rows: list[int] | list[str] = []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '{"size": []}',
            "size: should be a whole number, or true or false, or a number, or text (got a list)",
        ),
        ("{}", "size: this is required"),
        ('{"size": 1, "rows": 3}', "rows: should be a list (got 3)"),
    ],
)
def test_kinds_of_a_value_are_not_taken_for_keys(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_json(Sized, text, where="r.yaml")
    assert str(caught.value) == f"r.yaml: {told}."


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "name=a/b",
            "name: should be letters, digits, dots, hyphens and underscores, with a letter",
        ),
        ("grpo.beta={a: 1}", "grpo.beta: should be a number (got a section)."),
        ("seed=null", "seed: should be a whole number (got nothing)."),
        ("rewards=[]", "recipe demo: rewards is empty: GRPO needs at least one"),
        (
            "model=some/model",
            "(got 'some/model'). `grouper recipes fields model` lists its settings.",
        ),
        ("model.lora=true", "(got True). `grouper recipes fields model.lora` lists its settings."),
        ("grpo.optimizer.betas=[0.9, 0.9, 0.9]", "betas: should have at most 2 items, not 3 (got"),
    ],
)
def test_what_pydantic_says_is_told_in_the_words_of_a_recipe(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_recipe("demo", [override])


HINTS = [
    # The setting of that name lies elsewhere: below the section it was written in, or anywhere.
    ("lora.rank=8", "Write model.lora.rank=8."),
    ("grpo.learning_rate=1e-5", "Write grpo.optimizer.learning_rate=1e-05."),
    ("batch_size=4", "Write sft.batch_size=4."),
    ("sft.seed=3", "Write seed=3."),
    # In files of other set-ups, with their section and without it.
    ("model.max_seq_length=1024", "Write sampling.max_total_tokens=1024."),
    ("max_samples=9", "Write data.train.limit=9."),
    ("num_test_problems=5", "Write data.test.limit=5."),
    ("sft_data_path=sft.jsonl", "Write data.sft.path=sft.jsonl."),
    ("val_every_steps=4", "Write sft.evaluate_every=4."),
    ("evaluation.eval_steps=4", "Write grpo.evaluate_every=4 or sft.evaluate_every=4."),
    ("evaluation.eval_strategy=epoch", "See grpo.evaluate_every and sft.evaluate_every."),
    ("reward.use_number_check=false", "See rewards."),
    ("data.grpo_dataset_name=a/b", "See data.train.source."),
    (
        "cosine_min_value_wrong=-1.0",
        "It is a parameter: {name: cosine, params: {min_wrong: -1.0}} among the rewards.",
    ),
    ("grpo.stop=['</a>']", 'Write sampling.stop=["</a>"].'),
    (
        "learning_rate=1e-5",
        "Write sft.optimizer.learning_rate=1e-05 or grpo.optimizer.learning_rate=1e-05.",
    ),
    (
        "data.limit=3",
        "Write data.sft.limit=3 or data.train.limit=3 or data.validation.limit=3 or data.test",
    ),
    # What another trainer calls it, with its value where that means the same.
    ("grpo.num_generations=8", "Write grpo.group_size=8."),
    ("grpo.num-generations=8", "Write grpo.group_size=8."),
    ("num_generations=8", "Write grpo.group_size=8."),
    ("sft.save_steps=50", "Write sft.checkpoint_every=50."),
    ("save_steps=50", "Write grpo.checkpoint_every=50 or sft.checkpoint_every=50."),
    ("mask_truncated_completions=true", "Write grpo.overlong=mask."),
    ("grpo.optim=adamw_torch", "Write grpo.optimizer.name=adamw."),
    ("grpo.optim=lion", "See grpo.optimizer.name."),
    ("bf16=true", "Write model.compute_dtype=bfloat16."),
    ("bf16=auto", "See model.compute_dtype."),
    ("load_in_4bit=true", "Write model.quantization=4bit."),
    ("loss_type=dapo", "See grpo.weighting and grpo.surrogate."),
    ("gradient_acumulation_steps=4", "See grpo.prompts_per_step and sft.batch_size."),
    ("gradient_accumulation_steps=4", "See grpo.prompts_per_step and sft.batch_size."),
    ("dataset_name=openai/gsm8k", "See data.train.source."),
    ("use_vllm=true", "Write sampling.engine=vllm."),
    ("grpo.max_steps=-1", "Write grpo.steps=null."),
    ("max_samples=null", "See data.train.limit."),
    ("normalize_constant=null", "See sft.weighting_constant"),
    ("vllm_gpu_mem_utilization=0.5", "Write sampling.vllm.gpu_memory_utilization=0.5."),
    # A section that is not there: each setting in it for itself.
    ("vllm_sampling={temperature: 1.2}", "vllm_sampling.temperature: there is no section"),
    ("vllm_sampling={temperature: 1.2}", "Write sampling.temperature=1.2."),
    ("grpo_training={max_steps: 5}", "Write grpo.steps=5."),
    ("wandb={project: mine}", "Write tracking.trackers.0.project=mine."),
    ("grpo.optimiser={learning_rate: 1}", "Write grpo.optimizer.learning_rate=1."),
    ("actor.optim={lr: 1e-5}", "Write grpo.optimizer.learning_rate=1e-05 or sft.optimizer"),
    ("algorithm={adv_estimator: grpo}", "algorithm.adv_estimator: there is no section"),
    # Not where it has a meaning of its own, or nothing in it.
    ("data.columns={question: 問題}", 'data.test.columns={"question": "問題"}.'),
    ("gradient_checkpointing_kwargs={use_reentrant: false}", "has no counterpart: about speed"),
    ("nonsense={}", "`grouper recipes fields` lists all settings"),
    # Names of trainers on top of TRL; a section of ours is not one of them.
    ("sft.num_epochs=3", "Write sft.epochs=3."),
    ("num_epochs=3", "Write grpo.epochs=3 or sft.epochs=3."),
    ("adapter=lora", "See model.lora."),
    ("optimizer=adamw_torch", "Write grpo.optimizer.name=adamw or sft.optimizer.name=adamw."),
    ("optimizer={learning_rate: 1}", "Write sft.optimizer.learning_rate=1 or grpo.optimizer"),
    # Spelt alike: in that section, then anywhere.
    ("grpo.stesp=3", "Did you mean grpo.steps=3?"),
    ("sead=2", "Did you mean seed=2?"),
    ("rewards.0.weigth=2", "Did you mean rewards.0.weight=2?"),
    (
        "rewards=[{name: format}, {name: accuracy, weigth: 2}]",
        "Did you mean rewards.1.weight=2?",
    ),
    ("reward=[accuracy]", "Did you mean 'rewards'?"),
    ("grpo.max_slot=4", "Did you mean sampling.max_slots=4?"),
    ("sft.num_generatoins=4", "Did you mean grpo.group_size=4?"),
    # Nothing is near, though another trainer's name without a counterpart is near a name of ours.
    ("data_seed=3", "data_seed has no counterpart"),
    ("grpo.loss_scale=2", "`grouper recipes fields` lists all settings"),
    ("nonsense.nothing=3", "`grouper recipes fields` lists all settings"),
    ("prompt.nonsense=3", "Known names: chat_template_kwargs, format, "),
    ("grpo.nonsense=3", "`grouper recipes fields` lists all settings"),
    # A value that is long, or would not be shown as it is.
    (f"lora.rank={'8' * 80}", "Write model.lora.rank=...."),
    ("lora.rank='8\t'", "Write model.lora.rank=...."),
]


@pytest.mark.parametrize(("override", "hint"), HINTS)
def test_a_wrong_key_is_told_what_to_write(override: str, hint: str) -> None:
    """U10: with its value, and the same in a file."""
    with pytest.raises(ConfigError) as on_command_line:
        load_recipe("demo", [override])
    assert hint in str(on_command_line.value)
    assert "\n" not in str(on_command_line.value)
    if override.startswith("rewards.0"):
        return
    key, _, value = override.partition("=")
    data = yaml.safe_load(value.replace("1e-5", "1.0e-5"))
    for part in reversed(key.split(".")):
        data = {part: data}
    with pytest.raises(ConfigError) as in_file:
        validate_json(Recipe, json.dumps({**SMALL, **data}), where="r.yaml")
    assert hint in str(in_file.value)


def test_a_default_is_that_of_the_section_and_not_of_its_class():
    fields = dict(settings(Recipe))
    assert fields["sft.optimizer.learning_rate"].default == 2e-5
    assert fields["grpo.optimizer.learning_rate"].default == 1e-6
    recipe = validate_json(Recipe, json.dumps(SMALL), where="x")
    begins = ("sft.", "grpo.optimizer.", "sampling.", "evaluation.", "tracking.log")
    for key, field in fields.items():
        # A recipe without a teacher has none of its settings.
        if key.startswith(begins) and not key.startswith("sft.teacher."):
            value = functools.reduce(getattr, key.split("."), recipe)
            assert value == field.default, key


def test_an_empty_key_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="there is no setting '' here"):
        validate_json(Recipe, json.dumps({**SMALL, "": 1}), where="x")
