"""One file, two trainers: TRL's settings give the same weights here as they give there.

A file of TRL's is imported and trained; TRL trains with the same settings on what was sampled or
demonstrated here. Adam's `eps` is so large that a step is nearly the gradient itself, and no error
hides in a sign. What differs on purpose is in docs/migrating.md.

It skips where TRL is not installed (`pip install -e ".[trl]"`).
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gates import package

trl = package("trl", extra="trl")
pytestmark = pytest.mark.slow

from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from peft import get_peft_model_state_dict as adapter_of
from safetensors.torch import load_file
from tiny_runs import TINY_RUN, data_from, write_problems
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from grouper import RunFolder, load_recipe, prepare, train
from grouper.compat.importing import import_recipe
from grouper.data.reading import source_named
from grouper.rewards import REWARDS
from grouper.training.prepare import Prepared

GROUP = 4
BOTH = {
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "adam_epsilon": 10.0,
    "max_grad_norm": 1000.0,
    "bf16": False,
    "seed": 3,
    "save_strategy": "no",
}
GRPO = {
    "num_generations": GROUP,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "max_completion_length": 16,
    "temperature": 1.3,
    "max_steps": 2,
}
SFT = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "max_steps": 3,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.01,
}
# What TRL computes for each micro-batch, and Grouper over the whole step.
WHOLE = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
TWICE = {"num_iterations": 2, "max_steps": 4}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
SCRIPT = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_target_modules": "all-linear"}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "lora": {"beta": 0.5, **TWICE},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo", **WHOLE},
    "dr-grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1, **TWICE},
    "sapo": {
        "loss_type": "sapo",
        "sapo_temperature_pos": 0.7,
        "sapo_temperature_neg": 2.0,
        **TWICE,
    },
    "clipped": {"epsilon": 0.01, "epsilon_high": 0.02, **TWICE},
    "delta": {"delta": 1.1, "epsilon": 0.05, **TWICE},
    "sequence": {"importance_sampling_level": "sequence", "epsilon": 0.01, **TWICE},
    "kl": {"beta": 0.5, **TWICE},
    "kl-uncorrected": {"beta": 0.5, "use_bias_correction_kl": False, **TWICE},
    "masked": {"mask_truncated_completions": True, "max_completion_length": 7},
    "entropy-bonus": {"entropy_coef": 0.1, **WHOLE},
    "entropy-quantile": {"top_entropy_quantile": 0.4, **WHOLE},
    "rewards": {"reward_weights": [1.0, 0.3]},
    "decoupled": {
        "reward_weights": [1.0, 0.3],
        "multi_objective_aggregation": "normalize_then_sum",
        "scale_rewards": "none",
    },
    "optimizer": {
        "weight_decay": 0.01,
        "adam_beta1": 0.8,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.05,
        "max_steps": 3,
    },
}
SCORING = """
def different(completion_ids, **kwargs):
    return [len(set(ids)) / 10 for ids in completion_ids]


def even(completion_ids, **kwargs):
    return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]
"""
QUIET = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with problems, and in `model` one that ends most of its completions."""
    folder = tmp_path_factory.mktemp("start")
    write_problems(folder)
    shown = [
        {"question": f"Pick {n}.", "answer": str(n % 2), "solution": "so " * (1 + n % 5)}
        for n in range(32)
    ]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    recipe = load_recipe("demo", [*TINY_RUN, *data_from(str(folder))]).override(
        "skip_grpo=true", name="run", output_dir=str(folder), save_path=str(folder / "model")
    )
    with prepare(recipe) as run:
        train(run)
    parts = parts_of(folder)
    adapted = get_peft_model(parts["model"], LoraConfig(**LORA))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    for part in (adapted, parts["processing_class"]):
        part.save_pretrained(folder / "adapter")
    return folder


def imported(asked: dict[str, Any], start: Path, data: str, *overrides: str) -> Prepared:
    """The run of a TRL file; the format is that of the model."""
    file = {
        "model_name_or_path": str(start / "model"),
        "dataset_name": str(start / data),
        "output_dir": "outputs/ours",
        "dtype": "float32",
        **asked,
    }
    Path("trl.yaml").write_text(yaml.safe_dump(file))
    recipe = import_recipe("trl.yaml", source_named=source_named, rewards=REWARDS).recipe
    ours = ["tracking.token_groups=all", "prompt={format: xml, system: ''}"]
    return prepare(recipe.override(*ours, "grading.symbolic=false", *overrides))


def parts_of(start: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(start / "model", dtype=torch.float32)
    return {
        "model": model,
        "processing_class": AutoTokenizer.from_pretrained(start / "model"),
    }


def assert_same_way(start: Path, ours: Path, there: dict[str, Tensor]) -> None:
    """Both have moved from the same weights to the same ones, to a share of the way."""
    before, here = load_file(start), load_file(ours / start.name)

    def length(ends: dict[str, Tensor], starts: dict[str, Tensor]) -> float:
        return sum(float((ends[name] - starts[name]).double().square().sum()) for name in before)

    way = length(here, before)
    assert way > 0
    assert length(here, there) < (1e-4) ** 2 * way


@pytest.mark.parametrize("case", CASES)
def test_grpo(case: str, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scoring.py").write_text(SCORING)
    asked = BOTH | GRPO | CASES[case]
    functions = ["different", "even"][: len(asked.get("reward_weights", [1.0]))]
    rewards = {"reward_funcs": [f"scoring.{name}" for name in functions]}
    parts, lora, overrides = parts_of(start), {}, []
    if case == "lora":
        parts["model"] = PeftModel.from_pretrained(
            parts["model"], start / "adapter", is_trainable=True
        )
        lora = SCRIPT
        overrides = [f"grpo.start_from={start / 'adapter'}"]
    with imported(asked | rewards | lora, start, "train.jsonl", *overrides) as run:
        folder = train(run).path
    rollouts = list(RunFolder(folder).read_rollouts("grpo"))
    if case == "masked":  # some are, and some are not
        assert {row["finish_reason"] for row in rollouts} > {"length"}
    rows = iter(rollouts)

    def replayed(prompts: list[str], _trainer: Any) -> dict[str, Any]:
        batch = [next(rows) for _ in prompts]
        assert [row["prompt"] for row in batch] == prompts
        return {
            "prompt_ids": [row["prompt_token_ids"] for row in batch],
            "completion_ids": [row["token_ids"] for row in batch],
            "logprobs": [row["logprobs"] for row in batch],
        }

    scoring = runpy.run_path("scoring.py")
    theirs = trl.GRPOTrainer(
        **parts,
        reward_funcs=[scoring[name] for name in functions],
        train_dataset=Dataset.from_list([{"prompt": r["prompt"]} for r in rollouts[::GROUP]]),
        rollout_func=replayed,
        args=trl.GRPOConfig("theirs", shuffle_dataset=False, **QUIET, **asked),
    )
    theirs.train()
    assert next(rows, None) is None
    begun, there = start / "model" / "model.safetensors", theirs.model.state_dict()
    if case == "lora":
        begun, there = start / "adapter" / "adapter_model.safetensors", adapter_of(theirs.model)
    assert_same_way(begun, folder / "grpo" / "final", there)


def test_distillation(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reverse KL over the whole vocabulary from a teacher of other weights, without rewards."""
    monkeypatch.chdir(tmp_path)
    parts = parts_of(start)
    with torch.no_grad():
        for number, parameter in enumerate(parts["model"].parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.mul_(1.0 + 0.3 * torch.randn(parameter.shape, generator=generator))
    for part in parts.values():
        part.save_pretrained("teacher")
    asked = BOTH | GRPO
    ours = [
        "grpo.advantage=zero",
        "grpo.group_size=1",
        "grpo.prompts_per_step=16",
        "grpo.teacher={path: ./teacher}",
    ]
    with imported(asked, start, "train.jsonl", *ours) as run:
        folder = train(run).path
    rollouts = list(RunFolder(folder).read_rollouts("grpo"))
    rows = iter(rollouts)

    class Replayed(trl.DistillationTrainer):  # type: ignore[misc]  # untyped
        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any) -> list[list[int]]:
            batch = [next(rows) for _ in prompt_ids]
            assert [row["prompt_token_ids"] for row in batch] == [list(ids) for ids in prompt_ids]
            return [row["token_ids"] for row in batch]

    known = {name: asked[name] for name in asked if name != "num_generations"}
    theirs = Replayed(
        **parts_of(start),
        teacher_model=AutoModelForCausalLM.from_pretrained("teacher", dtype=torch.float32),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rollouts]),
        args=trl.DistillationConfig("theirs", shuffle_dataset=False, beta=1.0, **QUIET, **known),
    )
    theirs.train()
    assert next(rows, None) is None
    begun = start / "model" / "model.safetensors"
    assert_same_way(begun, folder / "grpo" / "final", theirs.model.state_dict())


def test_sft(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has all demonstrations, so that their order does not matter."""
    monkeypatch.chdir(tmp_path)
    asked = BOTH | SFT
    with imported(asked, start, "shown.jsonl") as run:
        folder = train(run).path
        demonstrations = run.demonstrations
    rows = [
        {
            "input_ids": [*one.prompt.token_ids, *one.token_ids],
            "completion_mask": [0] * len(one.prompt.token_ids) + [1] * len(one.token_ids),
        }
        for one in demonstrations
    ]
    theirs = trl.SFTTrainer(
        **parts_of(start),
        train_dataset=Dataset.from_list(rows),
        args=trl.SFTConfig("theirs", completion_only_loss=True, **QUIET, **asked),
    )
    theirs.train()
    begun = start / "model" / "model.safetensors"
    assert_same_way(begun, folder / "sft" / "final", theirs.model.state_dict())
