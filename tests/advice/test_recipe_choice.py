"""What a new recipe sets, by what model and problems are: a table."""

from __future__ import annotations

from typing import Any

import pytest

from grouper.advice.recipe_choice import (
    Choices,
    DataKind,
    Kind,
    ModelKind,
    Observation,
    choose,
    kind_of,
    rewards_for,
)
from grouper.config.schema import GradingConfig, PromptConfig, RewardConfig
from grouper.grading import Grader
from grouper.prompts import make_format
from grouper.rewards import build_rewards
from grouper.rewards.attacks import probe

TEMPLATE = "{% for message in messages %}{{ message }}{% endfor %}"
THINKING = TEMPLATE + "{% if enable_thinking %}<think>{% endif %}"


@pytest.mark.parametrize(
    ("name", "template", "ends_turns", "kind"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", TEMPLATE, True, "instruct"),
        ("/models/smollm2", TEMPLATE, True, "instruct"),
        ("google/gemma-3-270m", None, None, "base"),
        ("google/gemma-3-270m-it", TEMPLATE, True, "instruct"),
        # Base models that come with the template of their instruct siblings.
        ("Qwen/Qwen3-4B-Base", THINKING, None, "base"),
        ("Qwen/Qwen2.5-0.5B", TEMPLATE, False, "base"),
        ("Qwen/Qwen2.5-0.5B-Instruct", TEMPLATE, True, "instruct"),
        ("Qwen/Qwen3-0.6B", THINKING, True, "thinking"),
        ("Qwen/Qwen3-4B-Thinking-2507", TEMPLATE, True, "thinking"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", TEMPLATE, True, "thinking"),
        # An instruct model by name, whose template has no thoughts.
        ("mistralai/Mistral-7B-Instruct-v0.3", TEMPLATE, None, "instruct"),
        # Parts of words are none.
        ("./baseline", TEMPLATE, True, "instruct"),
        ("./database/itemize", TEMPLATE, True, "instruct"),
    ],
)
def test_kinds_of_models(
    name: str, template: str | None, ends_turns: bool | None, kind: Kind
) -> None:
    assert kind_of(name, template, ends_turns=ends_turns).kind == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("owner/Model-7B", "instruct"),
        ("owner/Model-7B-Base", "base"),
        ("owner/Model-7B-Chat", "instruct"),
        ("owner/QwQ-32B", "thinking"),
    ],
)
def test_a_model_elsewhere_is_known_by_its_name(name: str, kind: Kind) -> None:
    assert kind_of(name, None, here=False).kind == kind


def observed(name: str, held: int, right: int, ended: int = 8, answers: int = 8) -> Observation:
    return Observation(
        format=name, answers=answers, held=held, right=right, ended=ended, tokens=150
    )


SMALL, LARGE = 135_000_000, 7_000_000_000
SOLVED, ALONE = DataKind(problems=100, solutions=True), DataKind(problems=100)


@pytest.mark.parametrize(
    ("kind", "parameters", "data", "observations", "expected"),
    [
        # An instruct model that knows boxes (Qwen2.5-Coder-0.5B: 3 of the 3 that ended).
        ("instruct", 494_000_000, SOLVED, [observed("boxed", 3, 1, ended=3)], ("boxed", False)),
        # It knows the format and is never right: small, so SFT helps; large, so it does not.
        ("instruct", SMALL, SOLVED, [observed("boxed", 8, 0)], ("boxed", True)),
        ("instruct", LARGE, SOLVED, [observed("boxed", 8, 0)], ("boxed", False)),
        # It follows neither (SmolLM2).
        (
            "instruct",
            SMALL,
            SOLVED,
            [observed("boxed", 1, 0), observed("xml", 0, 0)],
            ("boxed", True),
        ),
        # It follows the tags and no box.
        (
            "instruct",
            LARGE,
            SOLVED,
            [observed("boxed", 1, 0), observed("xml", 7, 3)],
            ("xml", False),
        ),
        # A base model that was never cut off by itself, and one that has met boxes.
        ("base", 268_000_000, SOLVED, [observed("boxed", 0, 0, ended=0)], ("boxed", True)),
        ("base", LARGE, SOLVED, [observed("boxed", 6, 2)], ("boxed", False)),
        # One answer in a box among eight that were cut off shows little.
        ("instruct", SMALL, SOLVED, [observed("boxed", 1, 1, ended=1)], ("boxed", True)),
        # Not asked: by kind and size.
        ("instruct", LARGE, SOLVED, [], ("boxed", False)),
        ("instruct", SMALL, SOLVED, [], ("boxed", True)),
        ("base", LARGE, SOLVED, [], ("boxed", True)),
        ("thinking", LARGE, SOLVED, [], ("boxed", False)),
        # All were cut off in their thoughts, which says nothing; of a base model it does.
        ("thinking", SMALL, SOLVED, [observed("boxed", 0, 0, ended=0)], ("boxed", False)),
        ("instruct", LARGE, SOLVED, [observed("boxed", 0, 0, ended=0)], ("boxed", False)),
        ("base", LARGE, SOLVED, [observed("boxed", 0, 0, ended=0)], ("boxed", True)),
        # Without worked solutions there is no SFT, whatever the model does.
        ("base", SMALL, ALONE, [observed("boxed", 0, 0, ended=0)], ("boxed", False)),
        ("instruct", SMALL, ALONE, [], ("boxed", False)),
        # Whole prompts of R1-Zero are used as they are.
        (
            "base",
            LARGE,
            DataKind(problems=9, solutions=True, r1_prompts=True),
            [observed("r1-zero", 0, 0)],
            ("r1-zero", True),
        ),
    ],
)
def test_choices(
    kind: Kind,
    parameters: int,
    data: DataKind,
    observations: list[Observation],
    expected: tuple[str, bool],
) -> None:
    model = ModelKind(kind=kind, why="of this test", parameters=parameters)
    choices = choose(model, data, observations)
    assert (choices.format, choices.sft) == expected
    assert {"prompt.format", "skip_sft"} <= choices.reasons.keys()


def choices_of(kind: Kind = "instruct", data: DataKind = ALONE, **settings: Any) -> Choices:
    model = ModelKind(kind=kind, why="of this test", parameters=LARGE, **settings)
    return choose(model, data, [])


def test_what_has_to_learn_the_format_from_its_reward_may() -> None:
    """Without SFT, a group without a right answer teaches the format, or nothing ever does."""
    assert choices_of("instruct").needs_correct
    assert choices_of("base", SOLVED).needs_correct
    assert not choices_of("base", ALONE).needs_correct
    knows_none = [observed("boxed", 0, 0), observed("xml", 0, 0)]
    model = ModelKind(kind="instruct", why="of this test", parameters=LARGE)
    assert not choose(model, ALONE, knows_none).needs_correct


def test_completions_fit_the_kind_and_the_context() -> None:
    assert choices_of("instruct").max_new_tokens == 512
    assert choices_of("thinking").max_new_tokens == 2048
    assert choices_of("thinking", context=2048).max_new_tokens == 1024
    assert choices_of("instruct", context=512).max_new_tokens == 256


@pytest.mark.parametrize("name", ["boxed", "xml", "r1-zero"])
def test_rewards_pay_for_a_part_of_the_format_and_for_no_attack(name: str) -> None:
    fmt = make_format(PromptConfig(format=name))
    rows = [RewardConfig(**row) for row in rewards_for(name)]
    stack = build_rewards(rows, fmt)
    with Grader(fmt.contract, GradingConfig()) as grader:
        results = probe(stack, fmt, grader)
    assert [result.name for result in results if not result.passed] == []
    formats = {row.name: row for row in rows if row.name != "correctness"}
    assert "tag_count" in formats or formats["boxed_format"].params["partial"] > 0
