"""The sections: presets fill in, what is written wins, what cannot work is refused."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from grouper.config.checks import settings, validate_json
from grouper.config.loading import load_recipe, recipe_hash, resolved_yaml
from grouper.config.overrides import PRESETS
from grouper.config.schema import (
    DataConfig,
    DifficultyConfig,
    GRPOConfig,
    ModelConfig,
    OptimizerConfig,
    PromptConfig,
    Recipe,
    SamplingConfig,
    SFTConfig,
    SourceConfig,
)
from grouper.errors import ConfigError

# What a preset leaves to the recipe.
NEEDED = {"distillation": ("grpo.teacher={path: teacher}",)}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_in_what_the_recipe_does_not_say(name: str) -> None:
    recipe = load_recipe("demo", [f"grpo.algorithm={name}", *NEEDED.get(name, ())])
    for key, value in PRESETS[name].items():
        assert getattr(recipe.grpo, key) == value
    assert recipe.grpo.group_size == 8
    config = recipe.grpo.model_dump(include=set(PRESETS[name]))
    assert config == PRESETS[name]


def test_what_the_recipe_says_wins_over_the_preset(tmp_path: Any) -> None:
    recipe = load_recipe("demo", ["grpo.algorithm=dapo", "grpo.clip_high=0.4"])
    assert recipe.grpo.clip_high == 0.4
    assert recipe.grpo.dynamic_sampling_rounds == 3
    copy = tmp_path / "copy.yaml"
    copy.write_text(resolved_yaml(recipe))
    assert load_recipe(copy) == recipe


def test_an_unknown_algorithm_is_told() -> None:
    with pytest.raises(ConfigError, match=r"grpo\.algorithm.*'dapo'"):
        load_recipe("demo", ["grpo.algorithm=dap"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"group_size": 1},
            "needs advantage: none, batch_standardised, only_best or zero, not standardised",
        ),
        ({"group_size": 1, "advantage": "leave_one_out"}, "not leave_one_out"),
        (
            {"group_size": 1, "prompts_per_step": 1, "advantage": "batch_standardised"},
            "one completion per step leaves batch_standardised nothing",
        ),
        ({"surrogate": "cispo", "dual_clip": 3.0}, "a bound of surrogate: ppo_clip"),
        ({"dual_clip": 1.2}, "above 1 \\+ clip_high"),
        ({"surrogate": "policy_gradient", "ratio": "sequence"}, "has no ratio"),
        ({"updates_per_batch": 129}, "at most 128, the completions of a step"),
        (
            {"group_size": 1, "advantage": "none", "dynamic_sampling_rounds": 1},
            "a group_size of 2 or more",
        ),
        ({"beta": 0.1, "kl": "k1", "decouple_rewards": True}, "components: use k2 or k3"),
        ({"weighting_constant": 3.0}, "only for weighting: constant"),
        ({"advantage": "mean", "advantage_eps": 1e-6}, "advantage: mean divides by no deviation"),
        ({"top_entropy": 0.0}, "greater than 0"),
    ],
)
def test_combinations_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GRPOConfig(**settings)


@pytest.mark.parametrize("advantage", ["none", "batch_standardised"])
def test_a_group_of_one_needs_no_group_baseline(advantage: Any) -> None:
    assert GRPOConfig(group_size=1, advantage=advantage).group_size == 1


def test_what_can_just_work() -> None:
    assert GRPOConfig(group_size=1, prompts_per_step=1, advantage="none").prompts_per_step == 1
    assert GRPOConfig(updates_per_batch=128).updates_per_batch == 128
    assert source(source="hub", path="owner/name", streaming=True, limit=1).limit == 1


def test_products_of_bfloat16_weights_are_not_in_float32() -> None:
    with pytest.raises(ValidationError, match="cannot be multiplied in float32"):
        ModelConfig(path="owner/name", dtype="bfloat16", compute_dtype="float32")
    for compute in ("auto", "bfloat16"):
        model = ModelConfig(path="owner/name", dtype="bfloat16", compute_dtype=compute)
        assert model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("settings", "in_reward", "flat_rows"),
    [
        ({}, False, False),
        ({"kl": "k1"}, False, False),
        ({"beta": 0.1}, False, True),
        ({"beta": 0.1, "kl": "k1"}, True, False),
        ({"beta": 0.1, "kl": "k1", "entropy_bonus": 0.1}, True, True),
        ({"entropy_bonus": 0.1}, False, True),
    ],
)
def test_where_the_kl_goes(settings: dict[str, Any], in_reward: bool, flat_rows: bool) -> None:
    grpo = GRPOConfig(**settings)
    assert (grpo.kl_in_reward, grpo.flat_rows_matter) == (in_reward, flat_rows)


def test_sft_has_no_budget_to_divide_by() -> None:
    with pytest.raises(ValidationError, match="needs a weighting_constant"):
        SFTConfig(weighting="constant")
    assert GRPOConfig(weighting="constant").weighting_constant is None


def test_warm_up_is_told_once() -> None:
    with pytest.raises(ValidationError, match="only one of warmup_steps and warmup_ratio"):
        OptimizerConfig(warmup_steps=5, warmup_ratio=0.1)


def test_a_band_has_two_ends() -> None:
    with pytest.raises(ValidationError, match="must be below"):
        DifficultyConfig(band=(0.5, 0.5))


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
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match="validation_share"):
            DataConfig(train=train, validation_share=share)


def test_the_budget_is_given_once():
    with pytest.raises(ValueError, match="follows from max_total_tokens"):
        SamplingConfig(max_total_tokens=2048, max_new_tokens=300)
    with pytest.raises(ValueError, match="min_new_tokens is larger"):
        SamplingConfig(max_total_tokens=600, min_new_tokens=601)
    assert SamplingConfig(max_total_tokens=2048, min_new_tokens=600).max_total_tokens == 2048


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["sampling.min_new_tokens=49"], "min_new_tokens is larger than max_new_tokens"),
        (["sampling.top_p=0.9"], "allow_truncated: true"),
        (["sampling.stop=['']"], "should have at least 1 character"),
        (["sampling.top_k=5"], "allow_truncated: true"),
        (["sampling.min_p=0.1"], "allow_truncated: true"),
        (["evaluation.samples=2"], "evaluation.samples > 1 needs a temperature above 0"),
        (["grpo.dual_clip=1.5", "grpo.clip_high=0.5"], "must lie above 1 + clip_high"),
        (["tracking.trackers=[{name: wandb}, {name: wandb}]"], "'wandb' is listed twice"),
        (["rewards=[format, format]"], "'format' is listed twice"),
        (["rewards=[]"], "rewards is empty"),
        (["sampling.engine=vllm", "grpo=null"], "should be a section of settings"),
        (["sampling.engine=vllm", "evaluation.temperature=0.009"], "raise evaluation.temp"),
        (
            ["sampling.engine=vllm", "sampling.temperature=2", "evaluation.temperature=0.015"],
            "vLLM samples at no temperature below 0.02: raise evaluation.temperature",
        ),
    ],
)
def test_what_a_recipe_contradicts_is_told(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_recipe("demo", ["sampling.max_new_tokens=48", *settings])


@pytest.mark.parametrize(
    "settings",
    [
        ["model.compute_dtype=float32"],
        ["model={path: x, quantization: 4bit, lora: {}}"],
        ["sft.weighting=constant", "sft.weighting_constant=3"],
        ["grpo.weighting=constant", "grpo.weighting_constant=3"],
        ["grpo.difficulty={}"],
        ["grpo.decouple_rewards=true", "grpo.kl=k2", "grpo.beta=0.1"],
        ["grpo.decouple_rewards=true", "grpo.kl=k1"],
        ["grpo.dual_clip=1.5", "grpo.clip_high=0.28"],
        ["sampling.engine=vllm", "sampling.temperature=0.5", "evaluation.temperature=0.006"],
    ],
    ids=" ".join,
)
def test_what_goes_together(settings: list[str]) -> None:
    load_recipe("demo", settings)


def test_what_a_recipe_may_just_say() -> None:
    recipe = load_recipe("demo", ["sampling.max_new_tokens=48", "sampling.min_new_tokens=48"])
    assert recipe.sampling.min_new_tokens == 48
    recipe = load_recipe("demo", ["evaluation.temperature=0.009"])
    assert recipe.evaluation.temperature == 0.009
    recipe = load_recipe("demo", ["sampling.engine=vllm", "evaluation.temperature=0"])
    assert recipe.grpo.importance == "truncate"


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm": {"servers": ["cuda:1"]}}, "servers are only for mode: server"),
        (
            {"vllm": {"mode": "server", "servers": ["localhost"]}},
            "a GPU .cuda:1., a server .http://127.0.0.1:8765. or auto",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_json(SamplingConfig, json.dumps({"engine": "vllm", **settings}), where="here")


def test_vllm_comes_with_importance_weights() -> None:
    assert load_recipe("demo").grpo.importance == "none"
    assert load_recipe("demo", ["sampling.engine=vllm"]).grpo.importance == "truncate"
    least = {"name": "x", "model": {"path": "m"}, "data": {"train": {"source": "gsm8k"}}}
    text = json.dumps({**least, "sampling": {"engine": "vllm"}})
    assert validate_json(Recipe, text, where="here").grpo.importance == "truncate"
    own = load_recipe("demo", ["sampling.engine=vllm", "grpo.importance=mask"])
    assert own.grpo.importance == "mask"
    lora = ["model.lora={rank: 4}", "model.quantization=4bit", "model.new=null", "model.path=x"]
    for use in ("sampling.engine=vllm", "evaluation.servers=[auto]"):
        with pytest.raises(ConfigError, match="4bit weights need"):
            load_recipe("demo", [use, *lora])
        for temperature, accepted in (("0", True), ("0.005", False), ("0.01", True)):
            with nullcontext() if accepted else pytest.raises(ConfigError, match=r"below 0\.01"):
                load_recipe("demo", [use, f"evaluation.temperature={temperature}"])


def test_a_list_is_no_recipe() -> None:
    with pytest.raises(ConfigError, match=r"^here: should be "):
        validate_json(Recipe, "[]", where="here")


def test_the_folder_of_a_run_has_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = load_recipe("demo", ["output_dir=~/out", "name=mine"])
    assert recipe.run_folder == tmp_path / "out" / "mine"


def test_phases_are_those_that_are_not_skipped() -> None:
    assert load_recipe("demo").phases == ("sft", "grpo")
    assert load_recipe("demo", ["skip_sft=true"]).phases == ("grpo",)
    assert load_recipe("demo", ["skip_grpo=true"]).phases == ("sft",)


def test_a_seed_that_pytorch_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed: should be less than"):
        load_recipe("demo", ["seed=99999999999999999999999"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["sampling.engine=vllm"], "needs sampling.vllm.mode: server, or sampling.engine: native"),
        (
            ["sampling.engine=vllm", "sampling.vllm.mode=server", "grpo.importance=none"],
            "older weights: set importance: truncate",
        ),
        (["grpo.importance=none"], "older weights: set importance: truncate"),
        (["grpo.max_staleness=2"], "max_staleness"),
    ],
)
def test_what_rollouts_ahead_need(settings: list[str], message: str) -> None:
    ahead = "grpo.max_staleness=1"
    with pytest.raises(ConfigError, match=message):
        load_recipe("demo", [ahead, *settings])
    for server in ([], ["sampling.engine=vllm", "sampling.vllm.mode=server"]):
        assert load_recipe("demo", [ahead, *server]).grpo.importance == "truncate"


def test_where_vllm_runs_is_not_the_experiment() -> None:
    one, other = (
        load_recipe("demo", ["sampling.engine=vllm", *more])
        for more in (
            [],
            ["sampling.vllm={mode: server, servers: [cuda:1]}", "evaluation.servers=[auto]"],
        )
    )
    assert recipe_hash(one) == recipe_hash(other) != recipe_hash(load_recipe("demo"))


def is_of(kind: type, annotation: Any) -> bool:
    return annotation is kind or any(is_of(kind, inner) for inner in get_args(annotation))


# The sources of a mixture have the same settings again.
NUMBERS = [
    (key.replace("[]", ".0"), values)
    for kind, values in ((int, (2**63, 10**31)), (float, (10**31,)))
    for key, field in settings(Recipe)
    if is_of(kind, field.annotation) and "mixture" not in key
]


@pytest.mark.parametrize(("key", "values"), NUMBERS)
def test_a_number_beyond_every_use_is_refused_where_it_stands(
    key: str, values: tuple[int, ...]
) -> None:
    """It would overflow in a library, perhaps hours later, and end in a traceback."""
    section = "model.lora={}" if "lora" in key else "grpo.difficulty={}"
    for value in values:
        shown = f"[0.1, {value}]" if key.endswith((".betas", ".band")) else value
        with pytest.raises(ConfigError) as caught:
            load_recipe("demo", [section, f"{key}={shown}"])
        problems = (caught.value, *caught.value.others)
        assert any(key in problem.where and "less than" in problem.what for problem in problems)
