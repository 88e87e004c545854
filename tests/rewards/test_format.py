"""Format rewards: reasoning over lines pays, decoration and repetition do not."""

from __future__ import annotations

import time

import pytest
from reward_calls import BOXED, R1_ZERO

from grouper.rewards import REWARDS
from grouper.types import AnswerContract, AnswerFormat, AnswerKind

CONTRACT = AnswerContract(kind=AnswerKind.TAG, open="<answer>", close="</answer>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
LAYOUT = AnswerFormat(name="t", template="{reasoning}{answer}", contract=CONTRACT, tags=TAGS)
OPENED = AnswerFormat(
    name="t", template="{reasoning}{answer}", contract=CONTRACT, tags=TAGS, prefix="<think>"
)

GOOD = "<think>\none\ntwo\n</think>\n\n<answer>\n4\n</answer>"
CASES: list[tuple[str, float, float, float]] = [
    # completion, format, soft_format, tag_count
    (GOOD, 1, 1, 1),
    (GOOD + "\n", 1, 1, 1),
    ("<think>a</think><answer>4</answer>", 1, 1, 1),
    ("<think>a</think> <answer>4</answer> bye", 0, 1, 1),
    ("hm <think>a</think><answer>4</answer>", 0, 1, 1),
    ("<think>a</think> so <answer>4</answer>", 0, 0, 1),
    ("<think>a</think>", 0, 0, 0.5),
    ("<answer>4</answer><think>a</think>", 0, 0, 1),
    ("<think></think><answer></answer>", 0, 0, 1),  # an empty answer is none
    ("<think></think><answer>4</answer>", 0, 1, 1),
    ("<think>a</think><answer>4</answer></answer>", 0, 1, 0.75),
    ("<think><think>a</think><answer>4</answer>", 0, 1, 0.75),
    ("<think>a</think><answer>3</answer><answer>4</answer>", 0, 1, 0.5),
    ("", 0, 0, 0),
    ("4", 0, 0, 0),
]


def score(name: str, text: str, layout: AnswerFormat = LAYOUT) -> float | None:
    (value,) = REWARDS[name](layout)(prompts=["q"], completions=[text])
    return value


@pytest.mark.parametrize(("text", "strict", "soft", "tags"), CASES)
def test_table(text: str, strict: float, soft: float, tags: float) -> None:
    assert score("format", text) == strict
    assert score("soft_format", text) == soft
    assert score("tag_count", text) == tags


def test_what_the_prompt_opened_counts_as_written() -> None:
    rest = GOOD.removeprefix("<think>")
    assert [score(name, rest, OPENED) for name in ("format", "soft_format", "tag_count")] == [1] * 3
    assert score("format", GOOD, OPENED) == 0  # opened twice
    assert score("tag_count", GOOD, OPENED) == 0.75


def test_messages_and_strings_score_the_same() -> None:
    chat = [[{"role": "assistant", "content": GOOD}]]
    assert REWARDS["format"](LAYOUT)(prompts=["q"], completions=chat) == [1.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"so \boxed{4}", 1),
        (r"\boxed{\frac{1}{2}}", 1),
        (r"\boxed{4} or \boxed{5}", 0),
        (r"\boxed{}", 0),
        (r"\boxed{4", 0),
        ("4", 0),
    ],
)
def test_boxed(text: str, value: float) -> None:
    assert score("boxed_format", text) == value


@pytest.mark.parametrize("name", ["format", "soft_format", "tag_count", "boxed_format"])
@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 40_000,
        "</think> " * 40_000,
        "<think>" + "</think>\n<answer>" * 20_000,
        "\\boxed{" * 40_000,
        "<think>" + " " * 300_000 + "</think>" + " " * 300_000,
        "<think>" + "a" * 300_000 + "</answer></think><answer>",
    ],
    ids=range(6),
)
def test_long_output_is_fast(name: str, text: str) -> None:
    started = time.perf_counter()
    score(name, text)
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think>4", 1),
        ("\n<think>\na\nb\n</think>\n\n\\boxed{4}\n", 1),
        ("<think></think>4", 0),
        ("<think>a</think> \n", 0),
        ("hm <think>a</think>4", 0),
        ("<think>a</think>4</think>", 0),
        ("</think>a<think>4", 0),
        ("", 0),
    ],
)
def test_thoughts_and_then_the_answer(text: str, value: float) -> None:
    assert score("think_format", text, BOXED) == value
    opened = score("think_format", text.removeprefix("<think>"), R1_ZERO)
    assert opened == value * text.startswith("<think>")
