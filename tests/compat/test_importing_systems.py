"""Whole files as people have them, of each dialect, and files that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from grouper.advice.recipe_checks import check_recipe
from grouper.compat.aliases import dialects
from grouper.compat.importing import ImportedRecipe, import_recipe
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.data.reading import source_named
from grouper.errors import ConfigError
from grouper.rewards import REWARDS

FILES = Path(__file__).parent / "files"


def text_of(name: str) -> str:
    """A script has another ending, so that no tool takes it for one."""
    return (FILES / f"{name}.txt" if name.endswith(".py") else FILES / name).read_text()


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a text from a folder of its own, and checks that what it became can be loaded."""
    monkeypatch.chdir(tmp_path)

    def call(text: str, name: str = "theirs.yaml", **options: Any) -> ImportedRecipe:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
        found = import_recipe(name, source_named=source_named, rewards=REWARDS, **options)
        Path("ours.yaml").write_text(found.text)
        assert load_recipe("ours.yaml") == found.recipe
        return found

    return call


def of(recipe: Recipe, keys: dict[str, Any]) -> dict[str, Any]:
    """What a recipe has for each dotted key."""
    data = recipe.model_dump(mode="json")
    found = {}
    for key in keys:
        node: Any = data
        for part in key.split("."):
            node = node[int(part)] if isinstance(node, list) else node[part]
        found[key] = node
    return found


LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"]

GSM8K = {
    "name": "Qwen-1.5B-GRPO",
    "output_dir": "outputs",
    "skip_sft": True,
    "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "model.dtype": "bfloat16",
    "model.compute_dtype": "bfloat16",
    "model.attention": "flash_attention_2",
    "model.lora": {"rank": 16, "alpha": 64.0, "dropout": 0.05, "target_modules": LAYERS},
    "data.train.source": "gsm8k",
    "data.train.subset": "main",
    "grpo.prompts_per_step": 4,
    "grpo.group_size": 16,
    "grpo.epochs": 1.0,
    "grpo.checkpoint_every": 100,
    "grpo.optimizer.learning_rate": 5e-6,
    "grpo.optimizer.betas": [0.9, 0.99],
    "grpo.optimizer.weight_decay": 0.1,
    "grpo.optimizer.schedule": "cosine",
    "grpo.optimizer.warmup_ratio": 0.1,
    "grpo.optimizer.max_grad_norm": 0.1,
    "prompt.max_prompt_tokens": 256,
    "sampling.max_new_tokens": 786,
    "tracking.trackers.0.name": "wandb",
    "tracking.trackers.0.run_name": "Qwen-1.5B-GRPO-gsm8k",
    "rewards.0.weight": 1.0,
}
DAPO = {
    "seed": 3407,
    "output_dir": "outputs",
    "save_path": "outputs/final",
    "model.path": "unsloth/Qwen3-4B-Base",
    "model.gradient_checkpointing": True,
    "model.lora.rank": 32,
    "model.lora.alpha": 64.0,
    "model.quantization": None,
    "data.sft.source": "openmath-mini",
    "data.sft.split": "cot",
    "data.sft.numeric_only": True,
    "data.train.source": "dapo-math",
    "data.train.subset": "en",
    "data.validation_share": 0.1,
    "data.test.limit": 5,
    "prompt.max_percentile": 90.0,
    "prompt.system": "You are given a problem. Think about it between <start_working_out> and "
    "<end_working_out>.\nThen give your solution between <SOLUTION></SOLUTION>.",
    "sft.batch_size": 1,
    "sft.epochs": 2.0,
    "sft.max_tokens": 1024,
    "sft.checkpoint_every": 50,
    "sft.optimizer.learning_rate": 2e-4,
    "sft.optimizer.warmup_steps": 5,
    "sft.optimizer.name": "adamw_8bit",
    "sft.optimizer.weight_decay": 0.001,
    "grpo.prompts_per_step": 1,
    "grpo.group_size": 2,
    "grpo.steps": 100,
    "grpo.checkpoint_every": 20,
    "grpo.evaluate_every": 20,
    "grpo.optimizer.learning_rate": 5e-6,
    "grpo.optimizer.warmup_ratio": 0.1,
    "sampling.temperature": 1.2,
    "sampling.top_p": 0.95,
    "sampling.top_k": 0,
    "sampling.min_p": 0.05,
    "sampling.max_total_tokens": 2048,
    "evaluation.max_new_tokens": 2048,
    "evaluation.top_k": 50,
    "tracking.print_every_steps": 5,
}

# File -> the settings that it becomes, and what is left out.
WHOLE: dict[str, tuple[dict[str, Any], set[str]]] = {
    "trl_gsm8k.yaml": (
        {
            **GSM8K,
            "rewards.2.name": "my_rewards.py:brevity",
            "sampling.engine": "vllm",
            "grpo.importance": "truncate",
        },
        set(),
    ),
    "trl_gsm8k.py": (
        {
            **{k: v for k, v in GSM8K.items() if not k.startswith(("model.", "data."))},
            "name": "trl_gsm8k",
            "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
            "model.compute_dtype": "bfloat16",
            "data.train.source": "gsm8k",
            "rewards.0.name": "accuracy",
            # The script has a LoraConfig and gives it to nothing.
            "model.lora": None,
        },
        {
            "output_dir",
            "log_on_each_node",
            "reward_funcs: brevity",
            "reward_funcs: xmlcount_reward_func",
        },
    ),
    "trl_sft.yaml": (
        {
            "skip_grpo": True,
            "model.path": "Qwen/Qwen2.5-0.5B",
            "sft.batch_size": 16,
            "sft.max_tokens": 2048,
            "sft.evaluate_every": 50,
            "sft.optimizer.learning_rate": 2e-4,
            "sft.optimizer.warmup_ratio": 0.03,
            "sft.optimizer.schedule": "cosine",
            "data.train.path": "trl-lib/Capybara",
            "data.train.split": "train",
            "data.validation.split": "test",
        },
        {"packing"},
    ),
    "trl_sft.py": (
        {"name": "capybara", "skip_grpo": True, "sft.max_tokens": 2048},
        {"learning_rate", "**more"},
    ),
    "trl_launched.yaml": (
        {"parallel": "fsdp", "grpo.weighting": "constant", "grpo.prompts_per_step": 1},
        {"num_processes", "mixed_precision", "zero_optimization"},
    ),
    "math_sft_256.yaml": (
        {
            "name": "math_sft_256",
            "seed": 42,
            "skip_grpo": True,
            "model.path": ".models/Qwen2.5-Math-1.5B",
            "data.sft.path": "data/math/sft.jsonl",
            "data.sft.unique": 256,
            "data.sft.unique_by": "row",
            "sft.batch_size": 128,
            "sft.epochs": 1.0,
            "sft.evaluate_every": 5,
            "sft.optimizer.learning_rate": 5e-5,
            "sft.optimizer.betas": [0.9, 0.999],
            "sft.optimizer.max_grad_norm": 1.0,
            "sft.optimizer.schedule": "cosine",
        },
        set(),
    ),
    "math_sft_all.yaml": (
        {
            "name": "unique_all",
            "output_dir": "runs",
            "seed": 7,
            "data.sft.unique": "all",
            "data.sft.only_correct": True,
            "data.validation.path": "data/math/val",
            "data.validation.limit": 500,
            "sft.batch_size": 32,
            "sft.epochs": 2.0,
            "sft.weighting": "constant",
            "sft.weighting_constant": 1024.0,
            "sft.evaluate_every": 10,
            "sft.optimizer.learning_rate": 2e-5,
            "sft.optimizer.betas": [0.9, 0.98],
            "sft.optimizer.weight_decay": 0.01,
            "sft.optimizer.max_grad_norm": 0.5,
            "evaluation.max_new_tokens": 512,
            "tracking.trackers.0.entity": "us",
            "tracking.trackers.0.project": "math-sft",
        },
        set(),
    ),
    "math_sft_devices.yaml": (
        {
            "model.path": ".models/Qwen2.5-Math-1.5B",
            "data.sft.unique": 128,
            "sampling.vllm.gpu_memory_utilization": 0.85,
        },
        {"num_warmup", "train_device", "vllm_device"},
    ),
    "dapo_default.yaml": (
        DAPO,
        {"sft_training.logging_steps", "evaluation.test_problems"},
    ),
    "dapo_longer.yaml": (
        {
            "output_dir": "/data",
            "model.lora.rank": 16,
            "model.quantization": "4bit",
            "model.gradient_checkpointing": False,
            "data.sft.path": "us/ours",
            "data.train.source": "file",
            "data.validation_share": 0.05,
            "prompt.max_percentile": 95.0,
            "prompt.tags.reasoning_open": "<think>",
            "sft.batch_size": 8,
            "sft.max_tokens": 1024,
            "sft.optimizer.warmup_steps": None,
            "sft.optimizer.warmup_ratio": 0.03,
            "grpo.prompts_per_step": 2,
            "grpo.steps": None,
            "grpo.epochs": 1.0,
            "grpo.evaluate_every": 0,
            "grpo.beta": 0.04,
            "grpo.optimizer.warmup_steps": 10,
            "grpo.optimizer.warmup_ratio": 0.0,
            "rewards.1.name": "dapo_answer",
            "sampling.max_total_tokens": 4096,
            "tracking.print_every_steps": None,
            "tracking.trackers.0.run_name": "longer",
        },
        {"sft_training.output_dir", "grpo_training.epsilon"},
    ),
    "dapo_grpo_only.yaml": (
        {
            "skip_sft": True,
            "grpo.steps": 200,
            "grpo.group_size": 4,
            "grpo.optimizer.learning_rate": 1e-5,
            "sft.optimizer.learning_rate": 2e-4,
        },
        {"unknown_section"},
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_file_becomes_the_same_run(imported, name):
    settings, left_out = WHOLE[name]
    Path(".models/Qwen2.5-Math-1.5B").mkdir(parents=True)
    Path(".models/Qwen2.5-Math-1.5B/config.json").write_text("{}")
    Path("my_rewards.py").write_text("def brevity(completions, **kwargs): return [0.0]\n")
    found = imported(text_of(name), name)
    assert of(found.recipe, settings) == settings
    assert found.left_out.keys() == left_out
    assert all(f"#   {name}: " in found.text for name in left_out)
    assert ("What a script computes is not read" in found.text) == name.endswith(".py")
    check_recipe(found.recipe, runs_here=False)


CONSTANTS = """
import torch as SEED
SEED = 3
EPOCHS = 2
class EPOCHS: ...
LR: float = 1e-6
DECLARED: int
FIRST, SECOND = 1, 2
BETA = BASE_BETA = 0.1
NAMES = ["a"]
NAMES.append("b")
EXTRA = {"dtype": "float32"}
KEPT = {1}
KEPT.add(2)
BELOW_ONE = 0.9
match NAMES:
    case {**BELOW_ONE}:
        pass
STEPS = 5
GROUP = 4
HF_TOKEN = "hf_secret"
for STEPS in range(3):
    pass
def train(GROUP):
    return GRPOConfig(learning_rate=LR, beta=BETA, max_steps=STEPS, num_generations=GROUP,
        seed=SEED, reward_funcs=["format"], wandb_tags=NAMES, num_train_epochs=EPOCHS,
        min_p=DECLARED, top_k=FIRST, save_steps=KEPT, top_p=BELOW_ONE, model_init_kwargs=EXTRA,
        logging_steps=each(of, many, words, that, nobody, reads, to, the, end, of, the, line),
        hub_token=HF_TOKEN)
"""


def test_names_of_constants_are_read_where_nothing_else_can_have_set_them(imported):
    found = imported(CONSTANTS, "theirs.py")
    assert (found.recipe.grpo.optimizer.learning_rate, found.recipe.grpo.beta) == (1e-6, 0.1)
    unread = {
        name: f"{word} is not a literal: set it in the recipe"
        for name, word in (
            ("max_steps", "STEPS"),
            ("num_generations", "GROUP"),
            ("seed", "SEED"),
            ("num_train_epochs", "EPOCHS"),
            ("min_p", "DECLARED"),
            ("top_k", "FIRST"),
            ("wandb_tags", "NAMES"),
            ("save_steps", "KEPT"),
            ("model_init_kwargs", "EXTRA"),
            ("top_p", "BELOW_ONE"),
            ("logging_steps", "each(of, many, words, that, nobody, reads, to, the, end, of,"),
        )
    }
    assert {**found.left_out, **unread} == found.left_out
    # What is left out is listed without its value, which may be a secret.
    assert "hub_token" in found.text
    assert "hf_secret" not in found.text


ARITHMETIC = """
prompt_length = 200
max_seq_length = 1000
max_prompt_length = prompt_length
left = max_seq_length - max_prompt_length - 8
loop = loop - 1
GRPOConfig(max_prompt_length=max_prompt_length, max_completion_length=left, seed=left - unknown,
    num_iterations=prompt_length + 1, max_steps=loop, output_dir=max_seq_length - "a",
    learning_rate=-1e-6 - -3e-6)
"""


def test_differences_of_constants_are_read(imported):
    found = imported(ARITHMETIC, "theirs.py")
    assert found.recipe.prompt.max_prompt_tokens == 200
    assert found.recipe.sampling.max_new_tokens == 792
    assert found.recipe.grpo.optimizer.learning_rate == pytest.approx(2e-6)
    assert list(found.left_out) == ["seed", "num_iterations", "max_steps", "output_dir"]


NOTEBOOK = """
%%capture
!pip install trl
if True:
    !uv pip install vllm
print(
    "%d" % 1
    % 2
    != 3)
GRPOConfig(num_generations=8, seed=7)
"""


def test_a_notebook_that_was_saved_as_a_script_is_read(imported):
    assert imported(NOTEBOOK, "theirs.py").recipe.seed == 7


OTHERS = {
    "axolotl": (
        (
            "base_model: a/b\nbf16: auto\nadapter: lora\nlora_r: 4\nlearning_rate: 0.0002\n"
            "micro_batch_size: 2\ndatasets: [{path: a/c}]\nval_set_size: 0.1\n"
            "lora_target_modules: [q_proj]\nlora_target_linear: true\n"
        ),
        {
            "model.compute_dtype": "bfloat16",
            "model.lora.rank": 4,
            "model.lora.target_modules": "all-linear",  # it adds to the list
            "sft.batch_size": 2,
        },
        {"datasets": "data.train.mixture", "val_set_size": "data.validation_share"},
    ),
    "llama-factory": (
        (
            "model_name_or_path: a/b\nfinetuning_type: lora\nlora_rank: 4\nlora_target: all\n"
            "cutoff_len: 64\nmax_samples: 9\nlearning_rate: 1.0e-4\n"
        ),
        {
            "model.lora.rank": 4,
            "model.lora.target_modules": "all-linear",
            "sft.max_tokens": 64,
            "data.train.limit": 9,
        },
        {},
    ),
    "open-r1": (
        (
            "model_name_or_path: a/b\nreward_funcs: [accuracy, soft_overlong_punishment]\n"
            "max_completion_len: 512\n"
        ),
        {"rewards.1.name": "soft_overlong", "rewards.1.params.max_tokens": 16384},
        {"max_completion_len": "rewards[].params.max_tokens"},
    ),
}


@pytest.mark.parametrize("trainer", OTHERS)
def test_names_of_trainers_on_top_of_trl_are_read_or_explained(imported, trainer):
    text, settings, left_out = OTHERS[trainer]
    found = imported(text)
    assert of(found.recipe, settings) == settings
    assert found.left_out.keys() == left_out.keys()
    assert all(word in found.left_out[name] for name, word in left_out.items())


def test_a_script_with_both_phases_is_refused(imported):
    with pytest.raises(ConfigError, match=r"^both\.py: .*here are 2.*that has only one"):
        imported(text_of("trl_both.py"), "both.py")


def test_a_setting_of_the_other_configuration_is_named(imported):
    left_out = imported("sft_data_path: a.jsonl\nbeta: 0.1").left_out
    assert left_out == {"beta": "not a setting of SFTConfig"}


def test_a_section_that_is_a_text_is_listed(imported):
    left_out = imported("grpo_training:\nmodel: a/b").left_out
    assert left_out == {"model": "not a name in openmath-dapo's set-up"}


def test_a_file_without_notes_has_no_empty_lines_for_them(imported):
    comments, _, ours = imported("sft_data_path: a.jsonl").text.partition("\n\n")
    assert "#" not in comments.splitlines()
    assert "grading" not in yaml.safe_load(ours)


def test_a_tab_in_a_text_stays_one(imported):
    text = 'grpo_training:\nprompt: {system_prompt_template: "a\tb"}'
    assert imported(text).recipe.prompt.system == "a\tb"


def test_a_share_of_warm_up_replaces_the_steps_of_the_shipped_recipe(imported):
    optimizer = imported("sft_training: {warmup_steps: 0.03}").recipe.sft.optimizer
    assert (optimizer.warmup_steps, optimizer.warmup_ratio) == (None, 0.03)


def test_lengths_of_both_phases_are_computed(imported):
    text = "model: {max_seq_length: 3000}\ndata: {truncate_ratio: 0.25, max_length_percentile: %s}"
    for percentile, ours in ((1.0, 100), (0.5, 50), (1.5, 1.5), (80, 80)):
        recipe = imported(f"grpo_training:\n{text % percentile}").recipe
        assert recipe.sft.max_tokens == 750
        assert recipe.prompt.max_percentile == ours


def test_the_folder_of_both_phases_is_the_one_above_grpo(imported):
    for folder, ours in (("runs/grpo", "runs"), ("runs/both", "runs/both"), (2026, "2026")):
        text = f"grpo_training: {{output_dir: {folder}}}"
        assert imported(text).recipe.output_dir == ours


def test_a_file_is_of_grpo_if_any_of_its_names_is(imported):
    for text, name, skip_grpo in [
        ("learning_rate: 1.0e-5", "theirs.yaml", True),
        ("learning_rate: 1.0e-5\nbeta: 0.1", "theirs.yaml", False),
        ("GRPOConfig(learning_rate=1e-5)", "theirs.py", False),
        ("trl.SFTConfig(learning_rate=1e-5)", "theirs.py", True),
    ]:
        assert imported(text, name).recipe.skip_grpo == skip_grpo


@pytest.mark.parametrize(
    ("text", "shipped"),
    [("sft_data_path: data/math/sft.jsonl", "math-r1-zero"), ("grpo_training:", "openmath-dapo")],
)
def test_what_a_file_leaves_out_is_as_in_the_shipped_recipe(imported, text, shipped):
    found = imported(text)
    assert found.left_out == {}
    ours = found.recipe.model_dump()
    for key, value in load_recipe(shipped).model_dump().items():
        if key not in ("name", "description", "skip_grpo"):
            assert ours[key] == value, key


@pytest.mark.parametrize("nothing", ["null", "''"])
def test_a_data_set_that_a_file_leaves_empty_is_that_of_the_recipe(imported, nothing):
    text = f"data: {{sft_dataset_name: {nothing}, grpo_dataset_name: {nothing}}}"
    assert imported(text).recipe.data == load_recipe("openmath-dapo").data


def test_a_data_set_on_the_hub_is_read_from_there(imported):
    data = imported("data: {sft_dataset_name: a/b, grpo_dataset_name: openai/gsm8k}").recipe.data
    assert (data.sft.source, data.sft.path, data.train.source) == ("hub", "a/b", "gsm8k")


@pytest.mark.parametrize(
    "name",
    [
        "my_rewards.brevity",
        "my_rewards:brevity",
        "my_rewards.py:brevity",
        # Relative to where the import runs.
        "theirs.my_rewards.brevity",
        "theirs/my_rewards.py:brevity",
    ],
)
def test_a_reward_beside_the_file_is_named_from_here(imported, name):
    Path("theirs").mkdir()
    Path("theirs/my_rewards.py").write_text("def brevity(completions, **kwargs): return [0.0]\n")
    for file in ("theirs/trl.yaml", f"{Path.cwd()}/theirs/trl.yaml"):
        rewards = imported(f"reward_funcs: ['{name}']", file).recipe.rewards
        assert [r.name for r in rewards] == ["theirs/my_rewards.py:brevity"]


def test_a_file_in_the_home_folder_may_have_a_tilde(imported, monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    imported("seed: 7\nbeta: 0.1")
    found = import_recipe("~/theirs.yaml", source_named=source_named, rewards=REWARDS)
    assert found.recipe.seed == 7


def test_one_file_leaves_no_trace_in_the_next(imported):
    for given, beta in (("{adam_beta2: 0.5}", 0.5), ("{}", 0.999)):
        assert imported(f"grpo_training: {given}").recipe.grpo.optimizer.betas == (0.9, beta)


def test_a_module_that_is_not_here_keeps_its_name(imported):
    rewards = imported("reward_funcs: [pack.age.brevity, 'a:b']").recipe.rewards
    assert [r.name for r in rewards] == ["pack.age:brevity", "a:b"]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "a.yaml", "holds no named settings"),
        ("{}", "a.yaml", "a.yaml: this file holds no named settings. What can be read"),
        ("", "a.py", r"here are 0"),
        ("GRPOConfig(", "a.py", "a.py: this is not valid Python"),
        ("-" * 5_000 + "1", "a.py", "not valid Python"),
        ("-" * 100_000 + "1", "a.py", "not valid Python"),
        ("1\0", "a.py", "not valid Python"),
        ("GRPOConfig(beta=1)\nGRPOConfig(beta=0)", "a.py", r"here are 2"),
        ("actor: {rate: 1}\ncritic: {}", "a.yaml", "trainer: actor, critic. What can be read"),
        ("compute_environment: x\nnum_machines: 1", "a.yaml", "belong to no known trainer"),
        ("zero_optimization: {stage: 3", "a.json", "not valid YAML"),
        ("sft_data_path: a\nmodel_name: a\nmodel_path: b", "a.yaml", "model_name is set twice"),
        ("sft_data_path: a\nbatch_size: 1.5", "a.yaml", "batch_size is 1.5, not a whole number"),
        ("sft_data_path: a\nunique_train_examples: few", "a.yaml", "data.sft.unique"),
        (
            "grpo_training: {num_generations: 1}",
            "a.yaml",
            "is 1, not .* 2 or more. A completion is",
        ),
        ("grpo_training: {num_generations: 4}", "a.yaml", "--nproc"),
        (
            "grpo_training: {}\nmodel: {max_seq_length: 0}",
            "a.yaml",
            "max_seq_length is 0, not a whole number of 1 or more",
        ),
        ("grpo_training: {}\nmodel: {max_seq_length: 9.5}", "a.yaml", "is 9.5, not a whole number"),
        ("grpo_training: {}\ndata: {truncate_ratio: half}", "a.yaml", "'half', not a number"),
        (
            "grpo_training: {}\nprompt: {solution_end: null, system_prompt_template: Write.}",
            "a.yaml",
            "prompt.tags.answer_close: should be text",
        ),
        (
            "name: a\nmodel: {path: b}\ndata: {train: {source: c}}\nseed: 1",
            "a.yaml",
            "no known trainer: name, model",
        ),
        # A recipe of ours, a third of whose names are TRL's, too.
        (
            "name: a\nmodel: b\ndata: {train: c}\nseed: 1\ngrpo: {beta: 1, num_iterations: 2}",
            "a.yaml",
            "no known trainer: name, model",
        ),
    ],
    ids=lambda text: text[:30],
)
def test_bad_input_is_one_paragraph(imported, text, name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        imported(text, name)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("name", ["trl_gsm8k.yaml", "math_sft_256.yaml", "dapo_default.yaml"])
def test_running_such_a_file_offers_the_import(name):
    with pytest.raises(ConfigError, match=r"a file for .*grouper recipes from .* -o mine\.yaml"):
        load_recipe(FILES / name)
    with pytest.raises(
        ConfigError, match=r"^train\.py: this is Python.*grouper recipes from train\.py"
    ):
        load_recipe("train.py")


def test_a_misplaced_key_of_a_recipe_does_not(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: a\nmodel: {path: b}\ndata: {train: {source: c}}\nlearning_rate: 1\n")
    with pytest.raises(ConfigError, match="there is no setting 'learning_rate' here"):
        load_recipe(path)


NAMES = {
    "model": "model_name max_seq_length lora_rank lora_alpha load_in_4bit fast_inference "
    "gpu_memory_utilization target_modules use_gradient_checkpointing random_state",
    "data": "sft_dataset_name sft_dataset_split grpo_dataset_name grpo_dataset_split "
    "grpo_dataset_config max_length_percentile truncate_ratio filter_numeric_only",
    "prompt": "reasoning_start reasoning_end solution_start solution_end system_prompt_template",
    "sft_training": "per_device_train_batch_size gradient_accumulation_steps warmup_steps "
    "num_train_epochs learning_rate logging_steps optim weight_decay lr_scheduler_type seed "
    "output_dir save_steps report_to",
    "grpo_training": "per_device_train_batch_size gradient_accumulation_steps warmup_steps "
    "num_train_epochs learning_rate logging_steps optim weight_decay lr_scheduler_type seed "
    "output_dir save_steps report_to num_generations max_steps warmup_ratio eval_strategy "
    "eval_steps train_validation_split",
    "vllm_sampling": "temperature top_p top_k min_p seed include_stop_str_in_output",
    "reward": "use_format_exact use_format_approximate use_answer_check use_number_check "
    "print_every_steps",
    "evaluation": "num_test_problems temperature top_k max_new_tokens test_problems",
}


def test_every_name_that_such_files_have_has_a_row():
    _, dapo, trl = dialects()
    for section, names in NAMES.items():
        for name in names.split():
            shared = section in dapo["sections"] and name in trl["rows"]
            assert f"{section}.{name}" in dapo["rows"] or shared, (section, name)
    assert {"skip_sft", "skip_grpo", "save_path"} <= dapo["rows"].keys()


SCRIPT = '''
import re
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

SYSTEM_PROMPT = """Answer like this:
<reasoning>...</reasoning>
<answer>...</answer>"""
MODEL = "Qwen/Qwen2.5-1.5B-Instruct"

def questions(split="train"):
    data = load_dataset("openai/gsm8k", "main")[split]
    return data.map(lambda row: {"prompt": row["question"]})

def brevity(completions, **kwargs):
    return [0.0 for _ in completions]

args = GRPOConfig(num_generations=8, per_device_train_batch_size=8, learning_rate=5e-6)
lora = LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj"], use_dora=True,
                  modules_to_save=["lm_head"], use_rslora=False)
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[think_format_reward, brevity],
    args=args,
    train_dataset=questions(),
    peft_config=lora,
)
'''


def test_what_other_calls_of_a_script_say_is_read(imported):
    """M16: model, adapter, data, rewards and system prompt of the same file were ignored."""
    found = imported(SCRIPT, "train.py")
    recipe = found.recipe
    assert recipe.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert recipe.model.lora is not None
    assert (recipe.model.lora.rank, recipe.model.lora.alpha) == (8, 64)
    assert recipe.model.lora.dropout == 0, "PEFT's default, not TRL's"
    assert recipe.model.lora.target_modules == ("q_proj",)
    assert (recipe.data.train.source, recipe.data.train.subset) == ("gsm8k", "main")
    assert recipe.prompt.system is not None
    assert recipe.prompt.system.startswith("Answer like this:")
    assert recipe.prompt.format == "xml"
    assert "brevity" in found.left_out["reward_funcs: brevity"]
    for name in ("use_dora", "modules_to_save"):
        assert "no counterpart" in found.left_out[f"LoraConfig.{name}"]
    assert "LoraConfig.use_rslora" not in found.left_out


OTHER_SCRIPTS = [
    # Unsloth's two functions
    (
        (
            "model, tokenizer = FastLanguageModel.from_pretrained(model_name='a/b')\n"
            "model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=4)\n"
        ),
        lambda recipe: (recipe.model.path, recipe.model.lora.rank) == ("a/b", 4),
    ),
    # A tokenizer's name is no model's.
    (
        (
            "tok = AutoTokenizer.from_pretrained('c/d')\n"
            "model = AutoModelForCausalLM.from_pretrained('a/b')\n"
        ),
        lambda recipe: recipe.model.path == "a/b" and recipe.model.lora is None,
    ),
    ("SYSTEM_PROMPT = f'{x}'\n", lambda recipe: recipe.prompt.system is None),
    # What the configuration says itself comes first.
    ("load_dataset('q/r')\n", lambda recipe: recipe.data.train.path == "q/r"),
]


@pytest.mark.parametrize(("lines", "holds"), OTHER_SCRIPTS)
def test_scripts_of_other_shapes(imported, lines, holds):
    config = "args = GRPOConfig(num_generations=8, per_device_train_batch_size=8)\n"
    assert holds(imported(lines + config, "train.py").recipe)


def test_two_data_sets_of_a_script_are_named(imported):
    lines = "a = load_dataset('a/b')\nb = load_dataset('c/d')\n"
    config = "args = GRPOConfig(num_generations=8, per_device_train_batch_size=8)\n"
    assert "a/b, c/d" in imported(lines + config, "train.py").left_out["load_dataset"]
