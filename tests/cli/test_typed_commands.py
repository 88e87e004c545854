"""What users of the five systems type, with only the program's name replaced, means the same.

The commands are those that their pages show; the numbers are those that each system trains with.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from gates import shared

ONE_OF_A = {
    "skip_sft": True,
    "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "model.lora.rank": 16,
    "model.lora.alpha": 64,
    "grpo.prompts_per_step": 4,
    "grpo.group_size": 16,
    "grpo.updates_per_batch": 1,
    "grpo.epochs": 1.0,
    "grpo.checkpoint_every": 100,
    "grpo.optimizer.learning_rate": 5e-6,
    "grpo.optimizer.schedule": "cosine",
    "grpo.optimizer.warmup_ratio": 0.1,
    "sampling.max_new_tokens": 786,
}
ONE_OF_C = {
    "skip_sft": True,
    "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
    "model.lora": None,
    "grpo.prompts_per_step": 1,
    "grpo.group_size": 16,
    "grpo.updates_per_batch": 4,
    "grpo.optimizer.learning_rate": 5e-6,
    "sampling.max_new_tokens": 200,
}
SFT_OF_D = {
    "sft.steps": None,
    "sft.epochs": 2.0,
    "sft.batch_size": 1,
    "sft.optimizer.learning_rate": 2e-4,
    "sft.optimizer.warmup_steps": 5,
}
ONE_OF_D = {
    **SFT_OF_D,
    "model.lora.rank": 32,
    "model.lora.alpha": 64,
    "grpo.steps": 100,
    "grpo.prompts_per_step": 1,
    "grpo.group_size": 2,
    "grpo.optimizer.learning_rate": 5e-6,
    "sampling.temperature": 1.2,
}
ONE_OF_E = {
    "skip_sft": True,
    "grpo.group_size": 8,
    "grpo.updates_per_batch": 1,
    "grpo.optimizer.learning_rate": 5e-5,
    "sampling.max_new_tokens": 512,
    "tracking.trackers": [],
}
# The folder ./models comes before the Hub.
SMALL_E = {**ONE_OF_E, "model.path": "./models/Qwen2.5-0.5B", "grpo.prompts_per_step": 1}
FIVE = "accuracy format reasoning_steps cosine repetition_penalty"
WANDB = {"name": "wandb", "project": "qwen-math-grpo", "entity": "your-entity"}
COMMAND_OF_C = (
    "run gsm8k-lite --model-name Qwen/Qwen2.5-0.5B-Instruct --use-wandb "
    "--wandb-project qwen-math-grpo --wandb-entity your-entity"
)
PUBLISHING = "--push-to-hub --hub-model-id your-hf-user/model-name"

TYPED: list[tuple[str, dict[str, Any]]] = [
    ("run gsm8k-xml", ONE_OF_A),
    (
        "sft --config unique_256.yaml --unique-train-examples 128",
        {"data.sft.unique": 128, "sft.batch_size": 128, "sft.optimizer.learning_rate": 5e-5},
    ),
    ("sft --config unique_256.yaml --unique-train-examples all", {"data.sft.unique": "all"}),
    ("sft --config unique_256.yaml", {"data.sft.unique": 256, "skip_grpo": True}),
    (COMMAND_OF_C, {**ONE_OF_C, "tracking.trackers.0": WANDB}),
    (f"{COMMAND_OF_C} {PUBLISHING}", {**ONE_OF_C, "push_to": "your-hf-user/model-name"}),
    ("run gsm8k-lite --push-to-hub --run-name mine", {"name": "mine", "push_to": "mine"}),
    ("run gsm8k-lite", {**ONE_OF_C, "tracking.trackers": []}),
    (
        "run gsm8k-lite --system-prompt-path FILE",
        {**ONE_OF_C, "prompt.system": "Write <reasoning> and <answer> tags."},
    ),
    ("run openmath-dapo", {**ONE_OF_D, "skip_sft": False, "skip_grpo": False}),
    ("run --config configs/my_config.yaml", {**ONE_OF_D, "grpo.steps": 77}),
    ("run openmath-dapo --skip-sft", {**ONE_OF_D, "skip_sft": True, "skip_grpo": False}),
    ("run openmath-dapo --skip-grpo", {**ONE_OF_D, "skip_sft": False, "skip_grpo": True}),
    (
        "run openmath-dapo --max-steps 200 --learning-rate 1e-5",
        {**ONE_OF_D, "grpo.steps": 200, "grpo.optimizer.learning_rate": 1e-5},
    ),
    (
        "run r1-zero-numina --no_wandb --reward_funcs accuracy format reasoning_steps",
        {**SMALL_E, "rewards": ["accuracy", "format", "reasoning_steps"]},
    ),
    (
        (
            f'run r1-zero-numina --model_name "./models/Qwen2.5-0.5B" --reward_funcs {FIVE} '
            "--per_device_train_batch_size 4 --logging_steps 10"
        ),
        {
            **SMALL_E,
            "rewards": FIVE.split(),
            "tracking.log_every": 10,
        },
    ),
    # P x G is 1 x 8 at a device batch of 4 and 2 x 8 at 8: two accumulation steps.
    (
        "run r1-zero-numina --per_device_train_batch_size 8",
        {**ONE_OF_E, "grpo.prompts_per_step": 2},
    ),
    ("run r1-zero-numina --gradient-accumulation-steps 2", SMALL_E),
    ("run r1-zero-numina --gradient-accumulation-steps 6", {"grpo.prompts_per_step": 3}),
    (
        "run r1-zero-numina --num-generations 4 --per-device-train-batch-size 4",
        {"grpo.prompts_per_step": 2, "grpo.group_size": 4},
    ),
    (
        "run r1-zero-numina --per-device-train-batch-size 4 --nproc 2",
        {"grpo.prompts_per_step": 2, "grpo.group_size": 8},
    ),
    ("run gsm8k-xml --per_device_train_batch_size 16", ONE_OF_A),
    ("run gsm8k-xml --gradient_accumulation_steps 4 --num-generations 16", ONE_OF_A),
    ("run gsm8k-xml --gradient_accumulation_steps 2", {"grpo.prompts_per_step": 2}),
    ("run gsm8k-lite --gradient-accumulation-steps 4 --num-generations 16", ONE_OF_C),
    ("run openmath-dapo --gradient-accumulation-steps 2", ONE_OF_D),
    ("run openmath-dapo --gradient-accumulation-steps 4", {**ONE_OF_D, "grpo.prompts_per_step": 2}),
    (
        "sft math-r1-zero --per-device-train-batch-size 16 --gradient-accumulation-steps 8",
        {"sft.batch_size": 128, "grpo.prompts_per_step": 32},
    ),
    ("sft math-r1-zero --gradient-accumulation-steps 4", {"sft.batch_size": 64}),
    ("run gsm8k-lite --max-completion-length 300", {"sampling.max_new_tokens": 300}),
    ("run gsm8k-lite --beta 0.04 --temperature 0.9", {"grpo.beta": 0.04}),
    ("run gsm8k-lite --beta 0.04 --temperature 0.9", {"sampling.temperature": 0.9}),
    (
        "run gsm8k-lite --use-wandb --wandb-run-name first --wandb-tags math grpo",
        {"tracking.trackers.0.run_name": "first", "tracking.trackers.0.tags": ["math", "grpo"]},
    ),
]


def in_underscores(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else word


def in_dashes(word: str) -> str:
    return word.replace("_", "-") if word.startswith("--") and "=" not in word else word


@pytest.fixture
def resolved(monkeypatch, grouper, tmp_path):
    """The recipe of a typed command, in a folder with the files that it names."""

    def show(recipe: Any, _intent: Any) -> None:
        from grouper.config.loading import resolved_yaml

        print(resolved_yaml(recipe))

    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("Write <reasoning> and <answer> tags.")
    Path("configs").mkdir()
    for name, recipe, setting in (
        ("unique_256.yaml", "math-r1-zero", "data.sft.unique=256"),
        ("configs/my_config.yaml", "openmath-dapo", "grpo.steps=77"),
    ):
        Path(name).write_text(grouper("recipes", "show", recipe, setting).out)
    for folder in ("models/Qwen2.5-0.5B", "data/math"):
        Path(folder).mkdir(parents=True)
    Path("data/math/sft.jsonl").write_text("{}")
    Path("models/Qwen2.5-0.5B/config.json").write_text("{}")
    monkeypatch.setattr("grouper.cli.train._dry_run", show)
    # The trackers' packages need not be installed.
    monkeypatch.setattr("grouper.runs.trackers.check_trackers", lambda _: None)

    def call(*words: str) -> tuple[dict[str, Any], str]:
        called = grouper(*words, "--dry-run")
        assert called.code == 0, called.err
        return yaml.safe_load(called.out), called.err

    return call


def at(recipe: Any, key: str) -> Any:
    value = recipe
    for part in key.split("."):
        value = value[int(part)] if part.isdigit() else value[part]
    return [row["name"] for row in value] if key == "rewards" else value


@pytest.mark.usefixtures("extras")
@pytest.mark.parametrize("spelling", [str, in_underscores, in_dashes], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("command", "expected"), TYPED, ids=lambda value: str(value)[:80])
def test_what_is_typed_elsewhere_means_the_same(resolved, command, expected, spelling):
    recipe, _ = resolved(*map(spelling, shlex.split(command)))
    found = {key: at(recipe, key) for key in expected}
    tracker = found.get("tracking.trackers.0")
    if tracker is not None:
        found["tracking.trackers.0"] = {key: tracker[key] for key in WANDB}
    assert found == expected


def test_steps_and_rate_of_the_two_phases_say_whose_they_are(resolved):
    _, err = resolved(*shlex.split("run openmath-dapo --max-steps 200 --learning-rate 1e-5"))
    assert "note: --max-steps and --learning-rate mean GRPO. SFT stays as the recipe has" in err


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (
            "run r1-zero-numina --per_device_train_batch_size 8",
            "note: GRPO: 8 per device x 2 accumulated x 1 process(es) = 16 completions",
        ),
        (
            "run gsm8k-lite --gradient-accumulation-steps 4",
            "= 4 completions per optimizer step, 4 step(s) on each batch: 1 prompt(s) x 16.",
        ),
        (
            "sft math-r1-zero --gradient-accumulation-steps 4",
            "note: SFT: 16 per device x 4 accumulated x 1 process(es) = 64 demonstrations",
        ),
    ],
)
def test_a_note_says_what_batch_sizes_came_to(resolved, command, text):
    assert text in resolved(*command.split())[1]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("run gsm8k-xml --per-device-train-batch-size 1", "= 4 completions per optimizer step"),
        ("run gsm8k-xml --per-device-train-batch-size 1", "not whole groups of 16"),
        (
            "run gsm8k-xml --per-device-train-batch-size 0",
            "is a whole number of 1 or more, not '0'",
        ),
        ("run gsm8k-xml --gradient-accumulation-steps two", "of 1 or more, not 'two'"),
        ("run demo --per-device-train-batch-size 4", "4 per device x 1 accumulated"),
    ],
)
def test_a_batch_that_is_no_whole_groups_is_refused(grouper, command, text):
    called = grouper(*command.split(), "--dry-run")
    assert called.code == 2
    assert text in " ".join(called.err.split())


def test_processes_that_torchrun_started_count(resolved, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("os._exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    recipe, _ = resolved(*shlex.split("run r1-zero-numina --per-device-train-batch-size 4"))
    assert recipe["grpo"]["prompts_per_step"] == 2


@pytest.mark.slow  # reads all of MATH
@pytest.mark.parametrize("spelling", [str, in_dashes], ids=lambda f: f.__name__)
def test_the_baseline_evaluation_of_b(grouper, finished_run, tmp_path, monkeypatch, spelling):
    data = shared("math")
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/math").symlink_to(data)
    Path(".models").mkdir()
    model = ".models/Qwen2.5-Math-1.5B-Instruct"
    Path(model).symlink_to(finished_run / "grpo" / "final")
    command = f"eval math-r1-zero --model_path {model} --output_dir evaluation_results"
    called = grouper(*map(spelling, command.split()), "--dry-run")
    assert called.code == 0, called.err
    assert re.search(rf"# {re.escape(model)}: [\d,]+ test problems", called.out)
    assert ", to evaluation_results/" in called.out


@pytest.mark.slow  # reads all of MATH
def test_the_sft_of_b_is_checked_with_its_data(grouper, tmp_path, monkeypatch):
    data = shared("math")
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/math").symlink_to(data)
    called = grouper(*shlex.split("sft math-r1-zero --unique-train-examples 128 --dry-run"))
    assert called.code == 0, called.err
    assert "128 demonstrations per step, 128 in all" in called.out


NAMED = """
--config --model-name --model-path --output-dir --use-wandb --no-wandb --wandb-project
--wandb-entity --wandb-run-name --wandb-tags --system-prompt-path --unique-train-examples
--skip-sft --skip-grpo --max-steps --learning-rate --reward-funcs --per-device-train-batch-size
--gradient-accumulation-steps --logging-steps --num-generations --max-completion-length --beta
--temperature
"""


@pytest.mark.parametrize("name", NAMED.split())
def test_every_name_is_tried_in_this_file(name):
    typed = {in_dashes(word) for command, _ in TYPED for word in shlex.split(command)}
    assert name in typed | {"--model-path", "--output-dir"}  # those two are of `grouper eval`
