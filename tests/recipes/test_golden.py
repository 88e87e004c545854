"""Every number of the five systems, side by side with what their recipe resolves to."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from grouper.config.loading import load_recipe, resolved_yaml
from grouper.config.schema import PromptConfig, Recipe
from grouper.data import load_problems, loading
from grouper.prompts import make_format
from grouper.prompts.rendering import completion_text
from grouper.rewards import build_rewards
from grouper.rewards.core import find_reward
from grouper.types import Problem

SYSTEMS: dict[str, dict[str, Any]] = {
    "gsm8k-xml": {
        "data.train.source": "gsm8k",
        "data.train.split": "train",
        "prompt.format": "xml",
        "prompt.max_prompt_tokens": 256,
        "rewards": [
            ("xml_correctness", 1.0),
            ("xml_integer", 1.0),
            ("xml_strict_format", 1.0),
            ("xml_soft_format", 1.0),
            ("xml_tag_count", 1.0),
        ],
        "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "model.dtype": "bfloat16",
        "model.lora.rank": 16,
        "model.lora.alpha": 64.0,
        "model.lora.dropout": 0.05,
        "model.lora.target_modules": [
            *("q_proj", "k_proj", "v_proj", "o_proj"),
            *("gate_proj", "up_proj", "down_proj"),
        ],
        "skip_sft": True,
        "grpo.prompts_per_step": 4,
        "grpo.group_size": 16,
        "grpo.updates_per_batch": 1,
        "grpo.epochs": 1.0,
        "grpo.steps": None,
        "grpo.optimizer.name": "adamw",
        "grpo.optimizer.learning_rate": 5e-6,
        "grpo.optimizer.schedule": "cosine",
        "grpo.optimizer.warmup_ratio": 0.1,
        "grpo.optimizer.betas": [0.9, 0.99],
        "grpo.optimizer.weight_decay": 0.1,
        "grpo.optimizer.max_grad_norm": 0.1,
        "grpo.checkpoint_every": 100,
        "sampling.max_new_tokens": 786,
        "output_dir": "outputs",
    },
    "math-r1-zero": {
        "data.sft.source": "prompt-response",
        "data.sft.unique": "all",
        "data.sft.unique_by": "row",
        "data.sft.only_correct": False,
        "data.train.source": "math",
        "prompt.format": "r1-zero",
        "rewards": [("r1_zero_answer", 1.0), ("r1_zero_format", 0.0)],
        "model.path": "Qwen/Qwen2.5-Math-1.5B",
        "model.lora": None,
        "seed": 42,
        "sft.batch_size": 16 * 8,
        "sft.epochs": 1.0,
        "sft.steps": None,
        "sft.weighting": "token_mean",
        "sft.optimizer.name": "adamw",
        "sft.optimizer.learning_rate": 5e-5,
        "sft.optimizer.betas": [0.9, 0.999],
        "sft.optimizer.weight_decay": 0.0,
        "sft.optimizer.max_grad_norm": 1.0,
        "sft.optimizer.schedule": "cosine",
        "evaluation.temperature": 0.0,
        "evaluation.max_new_tokens": 1024,
        "sampling.include_stop": True,
        "grpo.prompts_per_step": 32,
        "grpo.group_size": 8,
        "grpo.steps": 200,
        "grpo.surrogate": "ppo_clip",
        "grpo.clip_low": 0.2,
        "grpo.clip_high": 0.2,
        "grpo.advantage": "standardised",
        "grpo.advantage_eps": 1e-6,
        "grpo.weighting": "sequence_mean",
        "grpo.optimizer.learning_rate": 1e-5,
        "grpo.optimizer.betas": [0.9, 0.95],
        "grpo.optimizer.max_grad_norm": 1.0,
        "sampling.temperature": 1.0,
        "sampling.min_new_tokens": 4,
        "sampling.max_new_tokens": 1024,
    },
    "gsm8k-lite": {
        "data.train.source": "gsm8k",
        "prompt.format": "xml",
        "prompt.max_prompt_tokens": 256,
        "rewards": [("lite_correctness", 1.0), ("lite_numeric", 1.0), ("lite_tags_present", 1.0)],
        "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "model.lora": None,
        "skip_sft": True,
        "grpo.prompts_per_step": 1,
        "grpo.group_size": 16,
        "grpo.updates_per_batch": 4,
        "grpo.epochs": 1.0,
        "grpo.steps": None,
        "grpo.optimizer.name": "adamw",
        "grpo.optimizer.learning_rate": 5e-6,
        "grpo.optimizer.schedule": "cosine",
        "grpo.optimizer.warmup_ratio": 0.1,
        "grpo.optimizer.betas": [0.9, 0.99],
        "grpo.optimizer.weight_decay": 0.1,
        "grpo.optimizer.max_grad_norm": 0.1,
        "grpo.checkpoint_every": 25,
        "sampling.max_new_tokens": 200,
        "output_dir": "outputs",
    },
    "openmath-dapo": {
        "data.sft.source": "openmath-mini",
        "data.sft.split": "cot",
        "data.sft.numeric_only": True,
        "data.train.source": "dapo-math",
        "data.train.subset": "en",
        "data.validation_share": 0.1,
        "prompt.format": "tags",
        "prompt.tags.reasoning_open": "<start_working_out>",
        "prompt.tags.reasoning_close": "<end_working_out>",
        "prompt.tags.answer_open": "<SOLUTION>",
        "prompt.tags.answer_close": "</SOLUTION>",
        "prompt.template": "install",
        "prompt.max_percentile": 90.0,
        "rewards": [
            ("dapo_exact_format", 1.0),
            ("dapo_approximate_format", 1.0),
            ("dapo_answer", 1.0),
            ("dapo_number", 1.0),
        ],
        "model.path": "Qwen/Qwen3-4B-Base",
        "model.lora.rank": 32,
        "model.lora.alpha": 64.0,
        "seed": 3407,
        "skip_sft": False,
        "skip_grpo": False,
        "sft.epochs": 2.0,
        "sft.steps": None,
        "sft.batch_size": 1,
        "sft.max_tokens": 2048 // 2,
        "sft.optimizer.name": "adamw_8bit",
        "sft.optimizer.learning_rate": 2e-4,
        "sft.optimizer.schedule": "linear",
        "sft.optimizer.warmup_steps": 5,
        "sft.optimizer.weight_decay": 0.001,
        "grpo.prompts_per_step": 1,
        "grpo.group_size": 2,
        "grpo.steps": 100,
        "grpo.evaluate_every": 20,
        "grpo.optimizer.name": "adamw_8bit",
        "grpo.optimizer.learning_rate": 5e-6,
        "grpo.optimizer.schedule": "linear",
        "grpo.optimizer.warmup_ratio": 0.1,
        "grpo.optimizer.weight_decay": 0.001,
        "sampling.max_total_tokens": 2048,
        "sampling.temperature": 1.2,
        "sampling.top_p": 0.95,
        "sampling.top_k": 0,
        "sampling.min_p": 0.05,
        "sampling.include_stop": True,
    },
    "r1-zero-numina": {
        "data.train.source": "numina-tir",
        "prompt.format": "think",
        "rewards": [
            ("accuracy", 1.0),
            ("format", 1.0),
            ("reasoning_steps", 1.0),
            ("cosine", 1.0),
            ("repetition_penalty", 1.0),
        ],
        "rewards.2.params": {"enough": 3},
        "rewards.3.params": {
            "min_correct": 0.8,
            "max_correct": 1.0,
            "min_wrong": -0.5,
            "max_wrong": -0.1,
            "scale": 1000,
            "unit": "characters",
        },
        "rewards.4.params": {"n": 3, "max_penalty": -0.1, "unit": "words"},
        "model.path": "Qwen/Qwen2.5-0.5B",
        "model.lora": None,
        "model.compute_dtype": "bfloat16",
        "model.gradient_checkpointing": False,
        "seed": 42,
        "skip_sft": True,
        "grpo.prompts_per_step": 1,
        "grpo.group_size": 8,
        "grpo.epochs": 1.0,
        "grpo.steps": None,
        "grpo.checkpoint_every": 50,
        "grpo.keep_checkpoints": 2,
        "grpo.optimizer.name": "adamw",
        "grpo.optimizer.learning_rate": 5e-5,
        "grpo.optimizer.schedule": "linear",
        "grpo.optimizer.warmup_ratio": 0.1,
        "grpo.optimizer.weight_decay": 0.01,
        "sampling.max_new_tokens": 512,
        "tracking.log_every": 10,
    },
}
"""What `reference-systems.md` says of each, what it marks as (c) included."""

OURS = ("gsm8k", "math")
SUBJECTS = {
    *("Algebra", "Counting & Probability", "Geometry", "Intermediate Algebra"),
    *("Number Theory", "Prealgebra", "Precalculus"),
}
"""Of MATH, whose files are sorted by them."""


@cache
def resolved(name: str) -> Any:
    return yaml.safe_load(resolved_yaml(load_recipe(name)))


def look_up(data: Any, key: str) -> Any:
    if key == "rewards":
        return [(reward["name"], reward["weight"]) for reward in data["rewards"]]
    for part in key.split("."):
        data = data[int(part) if part.isdecimal() else part]
    return data


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_recipe_is_the_system(name: str) -> None:
    found = {key: look_up(resolved(name), key) for key in SYSTEMS[name]}
    assert found == SYSTEMS[name]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("gsm8k-xml", float("-inf"), 2.0 + 0.5 + 0.5 + 0.5 + 4 * 0.125),
        ("math-r1-zero", 0.0, 1.0),
        ("gsm8k-lite", 0.0, 1.0 + 0.1 + 0.1),
        ("openmath-dapo", -6.5, 12.5),
        ("r1-zero-numina", 0 + 0 + 0 - 0.5 - 0.1, 1 + 1 + 1 + 1.0 + 0),
        ("gsm8k", 0.0, 1.2),
        ("math", 0.0, 1.0),
    ],
)
def test_the_range_of_the_total_reward(name: str, low: float, high: float) -> None:
    recipe = load_recipe(name)
    rewards = build_rewards(recipe.rewards, make_format(recipe.prompt))
    assert rewards.bounds == pytest.approx((low, high))


def test_the_prompts_ask_for_the_layouts_of_the_systems() -> None:
    texts = {name: make_format(load_recipe(name).prompt).system for name in SYSTEMS}
    xml = r"<reasoning>\n.+\n</reasoning>\n<answer>\n.+\n</answer>"
    assert re.search(xml, texts["gsm8k-xml"])
    assert re.search(xml, texts["gsm8k-lite"])
    assert re.search(r"<think>\n.+\n</think>\n\n<answer>\n.+\n</answer>", texts["r1-zero-numina"])
    assert all(
        tag in texts["openmath-dapo"]
        for tag in ("<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>")
    )
    r1_zero = make_format(load_recipe("math-r1-zero").prompt)
    assert r1_zero.plain_prompt("q").endswith("Assistant: <think>")
    assert r1_zero.stop == ("</answer>",)


def test_all_subjects_of_math_are_measured(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thousand rows of the file hold two; validation and test share no row."""
    # Whether the references can be graded is another question, and takes seconds.
    monkeypatch.setattr(loading, "check_references", dict.fromkeys)
    folder = shared_data / "math"
    recipe = load_recipe(
        "math-r1-zero", [f"data.{part}.path={folder}" for part in ("validation", "test")]
    )
    parts = [recipe.data.validation, recipe.data.test]
    loaded = [load_problems(part, seed=recipe.seed).problems for part in parts if part is not None]
    assert [len(problems) for problems in loaded] == [1000, 4000]
    assert [{p.subject for p in problems} for problems in loaded] == [SUBJECTS, SUBJECTS]
    assert not set.intersection(*({p.id for p in problems} for problems in loaded))


@pytest.mark.parametrize("name", [*SYSTEMS, *OURS])
def test_a_part_of_a_sorted_file_is_drawn_from_all_of_it(name: str) -> None:
    """`limit` and `offset` cut what `shuffle` has mixed, by one seed for all parts of a file."""
    data = load_recipe(name).data
    parts = [part for part in (data.sft, data.train, data.validation, data.test) if part]
    cut = [part for part in parts if part.limit or part.offset]
    assert all(part.shuffle is not None for part in cut)
    assert len({part.shuffle for part in cut}) <= 1


@pytest.mark.parametrize("name", [*SYSTEMS, *OURS])
def test_a_run_of_hours_is_not_lost_to_a_kill(name: str) -> None:
    """GRPO saves on the way; so does SFT where it has more than a few steps.

    That of `openmath-dapo` has some 118.
    """
    recipe = load_recipe(name)
    assert 0 < recipe.grpo.checkpoint_every <= 100
    assert recipe.skip_sft or recipe.sft.checkpoint_every or recipe.sft.batch_size == 128


def test_one_generation_a_prompt_is_refused() -> None:
    """The original of openmath-dapo allows it; nothing would be learned."""
    with pytest.raises(Exception, match="group_size 1 needs advantage: none, batch_standardised"):
        load_recipe("openmath-dapo", ["grpo.group_size=1"])


def test_other_tags_reach_instruction_and_template() -> None:
    recipe = load_recipe(
        "openmath-dapo", ["prompt.tags.reasoning_open=<hm>", "prompt.tags.answer_close=</END>"]
    )
    fmt = make_format(recipe.prompt)
    assert fmt.prefix == "<hm>"
    assert "<hm>" in fmt.system
    assert "</END>" in fmt.system


@pytest.mark.parametrize("name", [*SYSTEMS, *OURS])
def test_recipes_explain_themselves(name: str) -> None:
    recipe: Recipe = load_recipe(name)
    assert recipe.prompt != PromptConfig() or recipe.prompt.format == "xml"
    assert recipe.data.test is not None
    assert recipe.sampling.allow_truncated == (name == "openmath-dapo")
    # Where the system trains whatever is cut off and rewards tags alone, its recipe does so.
    assert recipe.grpo.allow_truncation == (name in SYSTEMS)
    assert recipe.grpo.require_correct_in_group == (name in OURS)


@pytest.mark.parametrize(("name", "rate"), [("gsm8k", 1e-5), ("math", 1e-6)])
def test_our_own_rates_fit_what_is_trained(name: str, rate: float) -> None:
    """An adapter takes ten times the rate of all weights."""
    recipe = load_recipe(name)
    assert recipe.grpo.optimizer.learning_rate == rate
    assert (recipe.model.lora is not None) == (rate > 1e-6)
    assert recipe.rewards[0].name == "correctness"
    assert sum(r.weight for r in recipe.rewards[1:]) <= 0.2
    assert recipe.data.validation_share > 0


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("gsm8k-xml", 4.0, 2.0),
        ("math-r1-zero", 1.0, 0.0),
        ("gsm8k-lite", 1.2, 0.2),
        ("openmath-dapo", 12.5, 3.0 + 1.5 - 2.0 - 1.5),
        ("gsm8k", 1.2, 0.2),
        ("math", 1.0, 0.0),
    ],
)
def test_what_the_format_of_a_recipe_earns(name: str, right: float, wrong: float) -> None:
    """Prompt and rewards of a recipe belong together: its own demonstration earns the most."""
    recipe = load_recipe(name)
    fmt = make_format(recipe.prompt)
    total = {}
    for answer in ("72", "500"):
        shown = Problem(
            id="a/0", question="q", answer=answer, source="a", solution="Well.\nSo it is."
        )
        text = completion_text(shown, fmt)
        values = [
            find_reward(reward, fmt)(prompts=["q"], completions=[text], reference_answer=["72"])[0]
            for reward in recipe.rewards
        ]
        weights = [reward.weight for reward in recipe.rewards]
        total[answer] = sum(w * v for w, v in zip(weights, values, strict=True) if v is not None)
    assert total == pytest.approx({"72": right, "500": wrong})


def test_the_rewards_of_r1_zero_numina_by_hand() -> None:
    """Right, in the format, three steps, at no length: 1 + 1 + 1 + cosine, nothing repeated."""
    recipe = load_recipe("r1-zero-numina")
    fmt = make_format(recipe.prompt)
    text = "<think>\nStep 1: look. Next, add. Finally done.\n</think>\n\n<answer>\n72\n</answer>"
    values = [
        find_reward(reward, fmt)(prompts=["q"], completions=[text], reference_answer=["72"])[0]
        for reward in recipe.rewards
    ]
    progress = len(text) / 1000
    cosine = 0.8 + 0.2 * (1 + math.cos(math.pi * progress)) / 2
    assert values == pytest.approx([1.0, 1.0, 1.0, cosine, 0.0])
