"""TRL both ways: our rewards in its GRPOTrainer, its rewards in our stack, neither changed.

An optional group: it skips where TRL is not installed (`pip install -e ".[trl]"`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from gates import package

trl = package("trl", extra="trl")
pytestmark = pytest.mark.slow

import torch
from datasets import Dataset
from prompts.tokenizer_fixtures import qwen25

from grouper.api import train
from grouper.config.loading import load_recipe
from grouper.config.overrides import STACKS
from grouper.config.schema import NewModelConfig, PromptConfig, RewardConfig, stack
from grouper.data import load_problems
from grouper.grading import Grader
from grouper.models.new_model import make_new_model
from grouper.prompts import make_format
from grouper.prompts.rendering import install_template, render, right_completion
from grouper.rewards import REWARDS, Group, build_rewards
from grouper.training.run import Run
from grouper.types import AnswerFormat, Completion, FinishReason, Problem, Prompt

TEXTS = (
    "<think>\nFirst 2+2.\n</think>\n\n<answer>\n4\n</answer>",
    "<think>\nno\n</think>\n\n<answer>\n5\n</answer>",
    "<think>\nso\n</think> <answer>4.0</answer> and more",
    r"\boxed{4}",
    "",
)
PARAMS: dict[str, dict[str, Any]] = {"soft_overlong": {"max_tokens": 20, "buffer_tokens": 10}}
SOLUTION = "2 + 2 = 4\n#### 4"


@pytest.fixture(scope="module")
def fmt() -> AnswerFormat:
    return make_format(PromptConfig(format="think"))


def ours(fmt: AnswerFormat) -> list[Any]:
    return [builder(fmt, **PARAMS.get(name, {})) for name, builder in REWARDS.items()]


def trainer_of(rewards: list[Any], fmt: AnswerFormat, folder: Path, *, chat: bool) -> Any:
    source = load_recipe("demo", ["data.train.options.count=40"]).data.train
    model, tokenizer = make_new_model(
        NewModelConfig(hidden_size=32, intermediate_size=64, layers=1),
        load_problems(source, seed=0).problems,
        fmt,
        seed=0,
    )
    question = [{"role": "user", "content": "2+2?"}] if chat else "2+2?"
    rows = [{"prompt": question, "answer": SOLUTION, "level": 1}] * 4
    return trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=rewards,
        train_dataset=Dataset.from_list(rows),
        args=trl.GRPOConfig(
            output_dir=str(folder),
            max_steps=1,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=8,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
    )


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
def test_every_reward_of_ours_trains_in_trl(chat: bool, fmt: AnswerFormat, tmp_path: Path) -> None:
    trainer = trainer_of(ours(fmt), fmt, tmp_path, chat=chat)
    trainer.train()
    logged = trainer.state.log_history[0]
    for name, function in zip(REWARDS, ours(fmt), strict=True):
        low, high = function.bounds
        assert low <= logged[f"rewards/{name}/mean"] <= high


def test_trl_gets_the_values_we_get(fmt: AnswerFormat, tmp_path: Path) -> None:
    functions = ours(fmt)
    trainer = trainer_of(functions, fmt, tmp_path, chat=True)
    question = [{"role": "user", "content": "2+2?"}]
    ids = [list(range(1, 8 * (i + 1))) for i in range(len(TEXTS))]
    theirs = trainer._calculate_rewards(
        [{"prompt": question, "answer": SOLUTION}] * len(TEXTS),
        [question] * len(TEXTS),
        [[{"role": "assistant", "content": text}] for text in TEXTS],
        ids,
    )
    stack = build_rewards(
        [RewardConfig(name=name, params=PARAMS.get(name, {})) for name in REWARDS], fmt
    )
    problem = Problem(id="a/0", question="2+2?", answer="4", source="a", solution=SOLUTION)
    prompt = Prompt(problem_id="a/0", text="2+2?", token_ids=(1,), messages=tuple(question))
    completions = [
        Completion(
            token_ids=tuple(row),
            logprobs=(0.0,) * len(row),
            text=text,
            finish_reason=FinishReason.STOP_TOKEN,
            policy_version=0,
        )
        for row, text in zip(ids, TEXTS, strict=True)
    ]
    with Grader(fmt.contract, load_recipe("demo").grading) as grader:
        grades = grader.grade(TEXTS, ["4"] * len(TEXTS))
    rewards = stack.score(
        Group(problem=problem, prompt=prompt, completions=completions, grades=grades)
    )
    for column, name in enumerate(REWARDS):
        mine = [reward.components[name] for reward in rewards]
        assert theirs[:, column].tolist() == pytest.approx(mine, abs=1e-6), name
    correct = theirs[:, list(REWARDS).index("correctness")].tolist()
    assert correct == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert not torch.isnan(theirs).any()


def test_not_scored_is_not_scored_there_too(fmt: AnswerFormat, tmp_path: Path) -> None:
    trainer = trainer_of([REWARDS["correctness"](fmt)], fmt, tmp_path, chat=False)
    values = trainer._calculate_rewards(
        [{"prompt": "q", "answer": r"\frac{1}{"}], ["q"], ["<answer>4</answer>"], [[1]]
    )
    assert math.isnan(values[0, 0])


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_goes_in_as_functions_and_weights(name: str, tmp_path: Path) -> None:
    fmt = make_format(PromptConfig(format=STACKS[name].format))
    functions = [REWARDS[r.name](fmt, **r.params) for r in stack(name)]
    trainer = trainer_of(functions, fmt, tmp_path, chat=False)
    assert trainer.reward_func_names == [r.name for r in stack(name)]


def test_rewards_of_trl_run_in_our_stack(fmt: AnswerFormat) -> None:
    stack = build_rewards(
        [
            RewardConfig(name="trl.rewards:accuracy_reward"),
            RewardConfig(name="trl.rewards:think_format_reward", weight=0.5),
        ],
        fmt,
    )
    problem = Problem(
        id="a/0", question="2+2?", answer="4", source="a", solution=r"so it is $\boxed{4}$"
    )
    prompt = Prompt(
        problem_id="a/0",
        text="2+2?",
        token_ids=(1,),
        messages=({"role": "user", "content": "2+2?"},),
    )
    right = right_completion(problem, fmt)
    stack.check(problem=problem, prompt=prompt, right=right)
    texts = (r"<think>a</think> $\boxed{4}$", r"$\boxed{5}$", "")
    completions = [
        Completion(
            token_ids=(1,),
            logprobs=(0.0,),
            text=text,
            finish_reason=FinishReason.STOP_TOKEN,
            policy_version=0,
        )
        for text in texts
    ]
    with Grader(fmt.contract, load_recipe("demo").grading) as grader:
        grades = grader.grade(texts, ["4"] * 3)
    rewards = stack.score(
        Group(problem=problem, prompt=prompt, completions=completions, grades=grades)
    )
    assert [r.total for r in rewards] == [1.5, 0.0, 0.0]


def test_a_run_of_ours_learns_from_a_reward_of_trl(tmp_path: Path) -> None:
    recipe = load_recipe(
        "demo",
        [
            "sft.steps=2",
            "grpo.steps=1",
            "grpo.prompts_per_step=4",
            "grpo.allow_truncation=true",
            "grpo.require_correct_in_group=false",
            "data.sft.options.count=60",
            "data.train.options.count=60",
            "data.validation.options.count=4",
            "data.test.options.count=4",
            "rewards=[{name: correctness}, {name: 'trl.rewards:think_format_reward'}]",
            f"output_dir={tmp_path}",
        ],
    )
    with Run(recipe) as run:
        train(run)
    lines = (tmp_path / "demo" / "metrics.jsonl").read_text(encoding="utf-8")
    assert "reward/think_format_reward" in lines


HYBRIDS = [("qwen3", False), ("qwen3", True), ("qwen3_5_think", False), ("qwen3_5_think", True)]
HYBRIDS += [("qwen3_5_nothink", False), ("qwen3_5_nothink", True), ("qwen3_6", False)]


@pytest.mark.parametrize(("name", "thinking"), HYBRIDS)
def test_hybrid_models_are_asked_as_their_published_templates_write_it(
    name: str, thinking: bool
) -> None:
    """M12: TRL ships the templates of Qwen3, 3.5 and 3.6 as they were published."""
    tokenizer = qwen25().tokenizer
    file = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    published = file.read_text(encoding="utf-8")
    tokenizer.chat_template = published
    messages = [
        {"role": "system", "content": "Answer in a box."},
        {"role": "user", "content": "2+2?"},
    ]
    expected = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    kwargs = {"enable_thinking": thinking}
    fmt = make_format(
        PromptConfig(format="boxed", system="Answer in a box.", chat_template_kwargs=kwargs)
    )
    install_template(fmt, tokenizer)
    problem = Problem(id="a", question="2+2?", answer="4", source="test")
    assert render(problem, fmt, tokenizer).text == expected
    # Without the setting: as the template writes it, but for a block that it leaves open.
    tokenizer.chat_template = published
    usual = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    plain = make_format(PromptConfig(format="boxed", system="Answer in a box."))
    install_template(plain, tokenizer)
    assert render(problem, plain, tokenizer).text == usual.removesuffix("<think>\n")
