"""TRL's files become recipes of the same run; the rest is listed, and nonsense refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grouper.compat.aliases import aliases
from grouper.compat.importing import ImportedRecipe, import_recipe
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.data.reading import source_named
from grouper.errors import ConfigError
from grouper.rewards import REWARDS


def import_file(path: Path, **options: Any) -> ImportedRecipe:
    return import_recipe(path, source_named=source_named, rewards=REWARDS, **options)


# As somebody's own, whose batch is 4 prompts x 16 completions.
GRPO: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "dataset_name": "openai/gsm8k",
    "output_dir": "outputs/Qwen-1.5B-GRPO",
    "reward_funcs": ["accuracy_reward", "think_format_reward"],
    "learning_rate": "LEARNING_RATE",
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "num_generations": 16,
    "max_completion_length": 786,
    "max_grad_norm": 0.1,
    "save_steps": 100,
}


@pytest.fixture
def imported(tmp_path: Path) -> Any:
    def call(settings: dict[str, Any], **options: Any) -> ImportedRecipe:
        path = tmp_path / "trl.yaml"
        path.write_text(yaml.safe_dump(settings).replace("LEARNING_RATE", "5e-6"))
        found = import_file(path, **options)
        copy = tmp_path / "ours.yaml"
        copy.write_text(found.text)
        assert load_recipe(copy) == found.recipe
        return found

    return call


def changed(**settings: Any) -> dict[str, Any]:
    return {**GRPO, **settings}


def test_a_grpo_file_becomes_the_same_run(imported):
    found = imported(GRPO)
    recipe: Recipe = found.recipe
    assert found.left_out == {}
    assert found.text.startswith("# From trl.yaml, read with the names of TRL 1.16's GRPOConfig.")
    assert "# - For 1 process(es): 4 prompts x 16 = 64 completions per step" in found.text
    assert (recipe.name, recipe.output_dir) == ("Qwen-1.5B-GRPO", "outputs")
    assert recipe.description == "From trl.yaml, a file for TRL"
    assert recipe.skip_sft
    assert recipe.data.train.source == "gsm8k"
    g = recipe.grpo
    assert (g.prompts_per_step, g.group_size, g.updates_per_batch) == (4, 16, 1)
    assert (g.optimizer.learning_rate, g.optimizer.max_grad_norm) == (5e-6, 0.1)
    assert [r.name for r in recipe.rewards] == ["accuracy", "think_format"]
    assert recipe.prompt.format == "boxed"  # where TRL reads the answer, whatever it rewards
    assert recipe.sampling.max_new_tokens == 786
    assert g.checkpoint_every == 100


def test_the_recipe_says_what_was_made_of_the_file_and_is_no_longer_than_that(imported):
    """Comments in paragraphs: where it is from, notes, what was left out; then what is set."""
    for settings, left_out in [(GRPO, []), (changed(packing=True), ["packing"])]:
        comments, _, ours = imported(settings).text.partition("\n\n")
        _, notes, *listed = (part.splitlines() for part in comments.split("\n#\n"))
        assert [line[:14] for line in notes] == ["# - For 1 proc", "# - Answers ar"]
        reasons = [f"#   {name}: not a setting of GRPOConfig" for name in left_out]
        assert listed == ([["# Without a counterpart:", *reasons]] if left_out else [])
        assert "grading" not in yaml.safe_load(ours)


def test_what_the_file_does_not_set_has_trls_default(imported):
    recipe = imported(GRPO).recipe
    g = recipe.grpo
    assert (g.clip_low, g.clip_high, g.beta, g.weighting) == (0.2, 0.2, 0.0, "token_mean")
    assert (g.epochs, g.optimizer.schedule, recipe.seed) == (3.0, "linear", 42)
    assert not g.require_correct_in_group
    assert recipe.tracking.log_every == 10
    assert recipe.model.compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"loss_type": "grpo"}, {"grpo.weighting": "sequence_mean"}),
        ({"loss_type": "dr_grpo", "scale_rewards": False}, {"grpo.advantage": "mean"}),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"grpo.surrogate": "cispo", "grpo.clip_high": 4.0, "grpo.clip_low": 1.0},
        ),
        ({"epsilon_high": 0.28, "delta": 3.0}, {"grpo.clip_high": 0.28, "grpo.dual_clip": 3.0}),
        ({"steps_per_generation": 16}, {"grpo.prompts_per_step": 16, "grpo.updates_per_batch": 4}),
        ({"steps_per_generation": 1}, {"grpo.prompts_per_step": 4, "grpo.updates_per_batch": 1}),
        # Completions of all devices.
        ({"generation_batch_size": 128}, {"grpo.prompts_per_step": 8, "grpo.updates_per_batch": 2}),
        (
            {"steps_per_generation": 8, "num_iterations": 2, "max_steps": 40, "save_steps": 8},
            {"grpo.steps": 10, "grpo.checkpoint_every": 2, "grpo.num_iterations": 2},
        ),
        ({"top_p": 0.95}, {"sampling.top_p": 0.95, "sampling.allow_truncated": True}),
        ({"warmup_ratio": 0.1}, {"grpo.optimizer.warmup_ratio": 0.1}),
        ({"warmup_steps": 5}, {"grpo.optimizer.warmup_steps": 5}),
        ({"warmup_steps": 0.1}, {"grpo.optimizer.warmup_ratio": 0.1}),
        (
            {"warmup_steps": 5, "warmup_ratio": 0.1},
            {"grpo.optimizer.warmup_steps": 5, "grpo.optimizer.warmup_ratio": 0.0},
        ),
        ({"eval_strategy": "steps", "logging_steps": 7}, {"grpo.evaluate_every": 7}),
        ({"max_grad_norm": 0}, {"grpo.optimizer.max_grad_norm": None}),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            },
            {"grpo.optimizer.schedule": "cosine", "grpo.optimizer.final_ratio": 0.1},
        ),
        ({"torch_dtype": "bfloat16"}, {"model.dtype": "bfloat16"}),
        ({"use_peft": True, "lora_r": 8}, {"model.lora.rank": 8, "model.lora.alpha": 32}),
        ({"save_strategy": "no"}, {"grpo.checkpoint_every": 0}),
        ({"save_steps": 0}, {"grpo.checkpoint_every": 0}),
        (
            {"eval_strategy": "steps", "eval_steps": 20, "dataset_test_split": "test"},
            {"grpo.evaluate_every": 20, "data.validation.split": "test"},
        ),
        (
            {"eval_strategy": "epoch", "dataset_test_split": "test"},
            {"grpo.evaluate_every": "epoch", "data.validation.split": "test"},
        ),
        ({"eval_strategy": False, "save_strategy": False}, {"grpo.checkpoint_every": 0}),
        (
            {"training": {"beta": 0.04, "seed": 7}, "logs": {"logging-steps": 5}},
            {"grpo.beta": 0.04, "seed": 7, "tracking.log_every": 5},
        ),
        (
            {"eval": {"eval_strategy": "steps", "eval_steps": 7}, "temperature": 0.9},
            {"grpo.evaluate_every": 7, "sampling.temperature": 0.9},
        ),
        (
            {"vllm": {"gpu_memory_utilization": 0.5, "temperature": 0.8}},
            {"sampling.vllm.gpu_memory_utilization": 0.5, "sampling.temperature": 0.8},
        ),
        ({"beta": 0.04}, {"grpo.kl": "k3_weighted"}),
        ({"num-train-epochs": 2}, {"grpo.epochs": 2.0}),
        ({"bf16": False}, {"model.compute_dtype": "float32"}),
        ({"gradient_checkpointing": True}, {"model.gradient_checkpointing": True}),
        ({"gradient_checkpointing": "unsloth"}, {"model.gradient_checkpointing": True}),
        # Ours holds, since it changes nothing that is learned.
        ({}, {"model.gradient_checkpointing": False, "push_to": None, "data.validation": None}),
        ({"push_to_hub": True}, {"push_to": "Qwen-1.5B-GRPO"}),
        ({"push_to_hub": True, "hub_model_id": "us/ours"}, {"push_to": "us/ours"}),
        ({"output_dir": "runs/my run!"}, {"name": "my-run", "output_dir": "runs"}),
        ({"output_dir": "."}, {"name": "imported"}),
        ({"output_dir": 2026, "dataset_name": 5}, {"name": "2026", "data.train.path": "5"}),
        (
            {"dataset_train_split": "test"},
            {"data.train.source": "gsm8k", "data.train.split": "test"},
        ),
        ({"reward_funcs": ["trl.rewards.accuracy_reward"]}, {"rewards.0.name": "accuracy"}),
        ({"reward_weights": [1.0, 0.5]}, {"rewards.0.weight": 1.0, "rewards.1.weight": 0.5}),
        (
            {"scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"},
            {"grpo.advantage": "standardised", "grpo.decouple_rewards": True},
        ),
        ({"beta": 0.04, "use_bias_correction_kl": False}, {"grpo.kl": "k3"}),
        (
            {"report_to": ["wandb", "trackio"], "project": "p", "run_name": "r"},
            {"tracking.trackers.1.name": "trackio", "tracking.trackers.0.project": "p"},
        ),
        ({"report_to": "wandb"}, {"tracking.trackers.0.project": None}),
        ({"reward_funcs": "my.rewards.brevity"}, {"rewards.0.name": "my.rewards:brevity"}),
        (
            {"dataset_name": "./mine.jsonl"},
            {"data.train.source": "file", "data.train.split": "train"},
        ),
        # A source of ours has its own split for training: here `cot`.
        (
            {"dataset_name": "unsloth/OpenMathReasoning-mini"},
            {"data.train.source": "openmath-mini", "data.train.split": None},
        ),
        ({"dataset_name": "a/b", "dataset_config": "c"}, {"data.train.subset": "c"}),
        ({"deepspeed": "zero3.json"}, {"parallel": "fsdp"}),
        ({"mask_truncated_completions": True}, {"grpo.overlong": "mask"}),
        # transformers has no warm-up with `constant`.
        (
            {"lr_scheduler_type": "constant", "warmup_ratio": 0.1},
            {"grpo.optimizer.warmup_ratio": 0.0, "grpo.optimizer.schedule": "constant"},
        ),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 5},
            {"grpo.optimizer.warmup_steps": None},
        ),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5},
            {"grpo.optimizer.warmup_steps": 5, "grpo.optimizer.schedule": "constant"},
        ),
        ({"model_init_kwargs": {"torch_dtype": "bfloat16"}}, {"model.dtype": "bfloat16"}),
        ({"save_total_limit": None}, {"grpo.keep_checkpoints": 2}),
        ({"max_prompt_length": None}, {"prompt.max_prompt_tokens": 512}),
        ({"attn_implementation": None}, {"model.attention": "native"}),
        ({"use_peft": True, "load_in_4bit": False}, {"model.quantization": None}),
        ({"reward_funcs": ["accuracy", "tag_count"]}, {"prompt.format": "think"}),
        ({"reward_funcs": ["format"]}, {"prompt.format": "think"}),
        ({"reward_funcs": ["soft_format"]}, {"prompt.format": "think"}),
    ],
    ids=str,
)
def test_settings_and_what_they_become(imported, settings, expected):
    found = imported(changed(**settings))
    assert found.left_out == {}
    data = found.recipe.model_dump(mode="json")
    for key, value in expected.items():
        node = data
        for part in key.split("."):
            node = node[int(part)] if part.isdecimal() else node[part]
        assert node == value, key


def test_every_tracker_that_there_is_not_is_listed(imported):
    found = imported(changed(report_to=["neptune", "wandb", "comet_ml"]))
    assert list(found.left_out) == ["report_to: neptune", "report_to: comet_ml"]
    assert [tracker.name for tracker in found.recipe.tracking.trackers] == ["wandb"]


def test_products_are_in_the_dtype_that_the_file_says(imported):
    assert imported(changed(fp16=True)).recipe.model.compute_dtype == "float16"
    assert imported(changed(bf16=False)).recipe.model.compute_dtype == "float32"


def test_a_batch_that_counted_prompts_is_explained(imported):
    settings = changed(per_device_train_batch_size=1, gradient_accumulation_steps=1)
    with pytest.raises(ConfigError, match="multiply per_device_train_batch_size"):
        imported(settings)
    assert imported(settings | {"per_device_train_batch_size": 16}).recipe.grpo.group_size == 16


def test_the_seed_of_a_mixture_is_not_that_of_the_run(imported):
    sets = {"datasets": [{"id": "a/b", "weight": 1.0}], "seed": 7}
    found = imported(changed(dataset_mixture=sets, seed=3))
    assert found.recipe.seed == 3
    assert "data.train.mixture" in found.left_out.pop("dataset_mixture")
    assert found.left_out == {}
    assert imported(changed(dataset_mixture=sets)).recipe.seed == 42


def test_what_trainers_on_top_of_trl_call_the_same(imported):
    names = {"base_model": "a/b", "micro_batch_size": 16, "num_epochs": 2, "adapter": "lora"}
    recipe = imported({**names, "num_generations": 4, "lora_r": 8}).recipe
    assert (recipe.model.path, recipe.model.lora.rank) == ("a/b", 8)
    assert (recipe.grpo.prompts_per_step, recipe.grpo.epochs) == (4, 2.0)


def test_an_older_file_without_a_name_of_grpos_own(imported):
    recipe = imported({"max_prompt_length": 256, "per_device_train_batch_size": 8}).recipe
    assert (recipe.skip_sft, recipe.prompt.max_prompt_tokens) == (True, 256)


@pytest.mark.parametrize("folder", ["outputs", "./outputs/", "/data/outputs"])
def test_the_folder_of_all_runs_is_not_one_of_them(imported, folder):
    """Unsloth's notebooks have it: beside other runs, the dry run would refuse the folder."""
    recipe = imported(changed(output_dir=folder)).recipe
    assert Path(recipe.output_dir) == Path(folder)
    assert recipe.name not in ("outputs", "")


def test_a_dr_grpo_constant_is_the_completion_length(imported):
    recipe = imported(changed(loss_type="dr_grpo")).recipe
    assert (recipe.grpo.weighting, recipe.grpo.weighting_constant) == ("constant", None)


def test_batches_are_those_of_as_many_processes(imported):
    small = changed(per_device_train_batch_size=4, gradient_accumulation_steps=1)
    with pytest.raises(ConfigError, match="--nproc"):
        imported(small)
    assert imported(small, nproc=8).recipe.grpo.prompts_per_step == 2


def test_an_sft_file(imported):
    found = imported(
        {
            "dataset_name": "open-r1/OpenR1-Math-220k",
            "max_length": 2048,
            "per_device_train_batch_size": 16,
            "gradient_accumulation_steps": 8,
            "optim": "adamw_8bit",
            "packing": True,
        }
    )
    recipe = found.recipe
    assert recipe.skip_grpo
    assert (recipe.sft.batch_size, recipe.sft.max_tokens) == (128, 2048)
    assert (recipe.sft.optimizer.name, recipe.sft.optimizer.learning_rate) == ("adamw_8bit", 2e-5)
    assert list(found.left_out) == ["packing"]
    assert "reward" not in found.text
    assert "Qwen/Qwen2.5-0.5B-Instruct until you change it" in found.text


def test_a_json_file_is_read_as_well(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(learning_rate=1e-6), indent="\t"))
    assert import_file(path).recipe.grpo.optimizer.learning_rate == 1e-6


@pytest.mark.parametrize(
    ("settings", "name", "why"),
    [
        ({"num_generatoins": 8}, "num_generatoins", "Did you mean 'num_generations'"),
        ({"num_generatoins": None}, "num_generatoins", "Did you mean 'num_generations'"),
        ({"packing": True}, "packing", "not a setting of GRPOConfig"),
        ({"vllm_model_impl": "transformers"}, "vllm_model_impl", "its own engine"),
        ({"loss_type": "vespo"}, "loss_type", "this loss is not supported"),
        ({"scale_rewards": "batch"}, "scale_rewards", "keeps its default"),
        ({"gradient_checkpointing": "offload"}, "gradient_checkpointing", "keeps its default"),
        (
            {"lr_scheduler_type": "polynomial"},
            "lr_scheduler_type",
            "'polynomial' has no counterpart, so that grpo.optimizer.schedule keeps its default",
        ),
        ({"report_to": "mlflow"}, "report_to: mlflow", "there are tensorboard, wandb, trackio"),
        ({"reward_funcs": ["code", "accuracy"]}, "reward_funcs: code", "no reward here"),
        ({"save_steps": 0.1}, "save_steps", "give their number"),
        ({"lora_r": 8}, "lora_r", "use_peft is not set"),
        ({"run_name": "a", "report_to": "none"}, "run_name", "names no tracker"),
        ({"run_name": "a", "report_to": ["none"]}, "run_name", "names no tracker"),
        ({"run_name": "a", "report_to": []}, "run_name", "names no tracker"),
        ({"lora_r": 8, "use_peft": None}, "lora_r", "use_peft is not set"),
        ({"eval_steps": 5, "eval_strategy": "no"}, "eval_steps", "nothing is evaluated"),
        # How often is evaluated is as often as something is logged.
        ({"eval_strategy": "steps", "logging_steps": 0.1}, "logging_steps", "give their number"),
        ({"reward_funcs": ["accuracy", "pack/age.fn"]}, "reward_funcs: pack/age.fn", "no reward"),
        (
            {"reward_funcs": None, "reward_weights": [1.0, 0.5]},
            "reward_weights",
            "rewards that the file does not name",
        ),
        ({"eval": {"temperature": 0.1}, "seed": 1}, "eval.temperature", "not a name"),
        ({"vllm": {"dtype": "bfloat16"}}, "vllm.dtype", "the weights of the run"),
        ({"hub_model_revision": "v1"}, "hub_model_revision", "checkpoints are tags"),
        ({"soft_punish_cache": 96}, "soft_punish_cache", "params.buffer_tokens"),
        (
            {"lr_scheduler_kwargs": "{'num_cycles': 2}"},
            "lr_scheduler_kwargs",
            "not read from such a file: set grpo.optimizer.final_ratio in the recipe",
        ),
        (
            {"lr_scheduler_kwargs": {"min_lr": 1e-7}},
            "lr_scheduler_kwargs.min_lr",
            "give min_lr_rate",
        ),
    ],
    ids=str,
)
def test_what_has_no_counterpart_is_listed_with_the_reason(imported, settings, name, why):
    found = imported(changed(**settings))
    assert list(found.left_out) == [name]
    assert why in found.left_out[name]
    assert f"#   {name}: " in found.text


@pytest.mark.parametrize(
    ("settings", "importance"),
    [
        ({}, "truncate"),
        ({"vllm_importance_sampling_correction": False}, "none"),
        ({"vllm_importance_sampling_mode": "token_mask"}, "mask"),
        ({"vllm_importance_sampling_mode": "token_truncate"}, "truncate"),
    ],
)
def test_what_weighs_the_samples_of_vllm_is_said(imported, settings, importance):
    found = imported(changed(use_vllm=True, **settings))
    assert found.recipe.grpo.importance == importance
    assert found.left_out == {}
    assert "sequence_mask" in found.text
    alone = imported(changed(**settings))
    assert alone.recipe.grpo.importance == "none"
    assert "sequence_mask" not in alone.text


@pytest.mark.parametrize(
    ("name", "value", "same"),
    [
        ("fsdp", "full_shard", ""),
        ("deepspeed", "zero3.json", None),
        ("top_p", 0.9, 1.0),
        ("report_to", "wandb", "none"),
        ("reward_funcs", None, ["accuracy_reward"]),
    ],
)
def test_a_note_is_about_what_changes_something(imported, name, value, same):
    notes = len(re.findall("^# - ", imported(GRPO).text, re.MULTILINE))
    for given, more in ((value, 1), (same, 0)):
        text = imported(changed(**{name: given})).text
        assert len(re.findall("^# - ", text, re.MULTILINE)) == notes + more


@pytest.mark.parametrize("name", ["val_split_ratio", "sample_packing", "lora_model_dir"])
def test_a_name_of_another_trainer_is_not_taken_for_a_typing_error(imported, name):
    assert imported(changed(**{name: 1})).left_out == {name: "not a name in TRL 1.16"}


def test_where_answers_are_read_is_said_if_that_is_not_the_format_of_a_reward(imported):
    assert "read from \\boxed{}" in imported(GRPO).text
    assert "boxed" not in imported(changed(reward_funcs=["accuracy", "format"])).text


def test_trls_own_defaults_are_not_worth_a_word(imported):
    assert imported(changed(use_vllm=False, log_completions=False)).left_out == {}


@pytest.mark.parametrize("phase", ["grpo", "sft"])
def test_every_default_of_trls_can_be_written_out(imported, phase):
    defaults = {name: row.get("default", {}) for name, row in aliases().items()}
    written = {name: of[phase] for name, of in defaults.items() if phase in of}
    on = {"use_peft": True, "eval_strategy": "steps", "report_to": "wandb", "output_dir": "a/b"}
    more = {"use_vllm": True, "reward_funcs": "accuracy_reward"} if phase == "grpo" else {}
    found = imported({**written, **on, **more})
    # vLLM's weights are another choice here, and a note says so.
    assert found.left_out.keys() <= {"vllm_importance_sampling_mode"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 1}, "trl.yaml: num_generations is 1, not a whole number of 2 or more"),
        ({"num_generations": 7}, "cannot be cut into groups"),
        ({"num_generations": "many"}, "not a whole number"),
        ({"gradient_accumulation_steps": True}, "is True, not a whole number of 1 or more"),
        ({"gradient_accumulation_steps": 1.5}, "not a whole number"),
        ({"gradient_accumulation_steps": 0}, "is 0, not a whole number of 1 or more"),
        ({"per_device_train_batch_size": 0}, "is 0, not a whole number of 1 or more"),
        ({"max_steps": True}, "is True, not a number of 0 or more"),
        ({"steps_per_generation": 2.5}, "not a whole number"),
        ({"steps_per_generation": 0}, "is 0, not a whole number of 1 or more"),
        ({"generation_batch_size": 0}, "is 0, not a whole number of 1 or more"),
        ({"num_iterations": 0}, "is 0, not a whole number of 1 or more"),
        ({"num_iterations": 1.5}, "not a whole number"),
        ({"steps_per_generation": 3}, "cannot be cut into groups"),
        ({"reward_weights": 0.5}, "not one weight for each of 2"),
        ({"steps_per_generation": 6}, "cannot be cut into groups"),
        ({"generation_batch_size": 96}, "cannot be cut into groups"),
        ({"generation_batch_size": "96"}, "not a whole number"),
        ({"reward_weights": [1.0]}, "not one weight for each of 2"),
        (
            {"loss_type": "cispo", "epsilon_high": 0.5},
            "0.5, not a number of 1 or more. With loss_type cispo it bounds the ratio itself",
        ),
        ({"loss_type": "cispo"}, "epsilon_high is 0.2, not a number of 1 or more"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype is set twice"),
        ({"temperature": 0.0}, r"sampling\.temperature"),
        ({"learning_rate": "fast"}, r"grpo\.optimizer\.learning_rate"),
        ({"max_steps": float("inf")}, "max_steps is inf, not a number"),
    ],
    ids=str,
)
def test_nonsense_is_refused_with_the_reason(imported, settings, message):
    with pytest.raises(ConfigError, match=message):
        imported(changed(**settings))


def test_a_file_of_another_trainer_is_refused(imported):
    with pytest.raises(
        ConfigError,
        match=r"trl.yaml: .* no known trainer: 1, actor, b, c, data\. What can be read: .*migrat",
    ):
        imported({1: 2, "actor": {"rollout": {"n": 8}}, "b": 1, "c": 1, "data": 1, "e": 1})


def test_a_name_in_common_with_trl_does_not_make_a_file_trls(imported):
    settings = {
        "actor": {"clip_ratio": 0.2, "grad_clip": 1.0, "ppo_epochs": 1},
        "data": {"max_prompt_length": 512, "train_files": "a.parquet"},
        "algorithm": {"adv_estimator": "grpo"},
    }
    with pytest.raises(ConfigError, match="belong to no known trainer"):
        imported(settings)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "a: [", "\x00"])
def test_a_file_without_settings_is_one_sentence(tmp_path, text):
    path = tmp_path / "trl.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trl\.yaml"):
        import_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        import_file(tmp_path / "none.yaml")
    (tmp_path / "trl.json").write_text("{")
    with pytest.raises(ConfigError, match=r"not valid YAML.*trl\.json|trl\.json.*not valid YAML"):
        import_file(tmp_path / "trl.json")
