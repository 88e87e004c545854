"""Attacks deserve nothing. Grouper's own stacks pass all; the others fail those they say."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from reward_calls import stack_of

from grouper.config.loading import load_recipe
from grouper.config.overrides import STACKS
from grouper.config.schema import GradingConfig, PromptConfig, RewardConfig, stack
from grouper.errors import RewardError
from grouper.files import load_table
from grouper.grading import Grader
from grouper.prompts import FORMATS, make_format
from grouper.rewards import Completed, RewardStack, build_rewards, probe, reward
from grouper.rewards.attacks import ProbeResult, attacks
from grouper.types import AnswerContract, AnswerFormat, AnswerKind, Verdict

NAMES = {
    *("empty", "only_format", "repeated_tags", "answer_list", "all_options", "prompt_copy"),
    *("several_boxes", "answer_in_thinking", "giant_output", "look_alikes", "closing_tags"),
    *("next_turn", "step_words"),
}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_attacks_are_neither_honest_nor_right(fmt: AnswerFormat) -> None:
    found = list(attacks(fmt))
    assert {one.name for one in found} == NAMES
    with Grader(fmt.contract, GradingConfig(symbolic=False)) as grader:
        for one in found:
            right = fmt.completion("So it is.", one.problem.answer)
            if fmt.name.startswith("gsm8k-") and not one.problem.answer.isdecimal():
                continue  # that protocol reads numbers alone
            grades = grader.grade([one.honest, right], [one.problem.answer] * 2)
            assert [g.verdict for g in grades] == [Verdict.INCORRECT, Verdict.CORRECT]
            assert one.texts
            assert one.honest not in one.texts
            assert right not in one.texts
            # Every name in braces has been filled in.
            left = [t for t in one.texts if re.search(r"\{[a-z][a-z_]*\}", t[:2000])]
            assert left == []


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_every_text_of_the_table_is_tried(fmt: AnswerFormat) -> None:
    rows = load_table("grouper.rewards", "attacks.yaml")["attacks"]
    for one in attacks(fmt):
        row = rows[one.name]
        parts = (row, row.get("with_tags" if fmt.tags else "without_tags", {}))
        keys = ("texts", "answers", "orders", "orders", "reasonings", "unanswered")
        singles = sum(len(part.get(key, [])) for part in parts for key in keys)
        if fmt.contract.kind is AnswerKind.PROGRAM:
            # Of several lines that a program prints, the last is its one answer.
            orders = [order for part in parts for order in part.get("orders", [])]
            singles -= 2 * sum("\n" in order for order in orders)
        assert len(one.texts) == singles + sum(len(p.get("fillings", [])) ** 2 for p in parts)


@pytest.mark.parametrize("name", ["program", "python-tool"])
def test_no_attack_on_an_answer_of_a_program_is_paid(name: str) -> None:
    fmt = FORMATS[name]
    with Grader(fmt.contract, GradingConfig()) as grader:
        results = probe(build_rewards([RewardConfig(name="correctness")], fmt), fmt, grader)
    assert [result.name for result in results if not result.passed] == []


def test_the_honest_answer_is_of_median_length(shared_data: Path) -> None:
    text = (shared_data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8")
    solutions = [json.loads(line)["answer"].split("####")[0] for line in text.splitlines()]
    lengths = [len(solution.strip()) for solution in solutions]
    (honest, *_) = (one.honest for one in attacks(FORMATS["question-only"]))
    reasoning = honest.strip().partition("\n")[0]
    assert len(reasoning) == pytest.approx(statistics.median(lengths), rel=0.1)


_GRADERS: dict[AnswerContract, Grader] = {}
"""One for every layout: its process takes half a second to start."""


@pytest.fixture(scope="module", autouse=True)
def _graders_end() -> Iterator[None]:
    yield
    for grader in _GRADERS.values():
        grader.close()


def attack(rewards: Sequence[RewardConfig] | RewardStack, fmt: AnswerFormat) -> list[ProbeResult]:
    stack = rewards if isinstance(rewards, RewardStack) else build_rewards(rewards, fmt)
    if fmt.contract not in _GRADERS:
        _GRADERS[fmt.contract] = Grader(fmt.contract, GradingConfig())
    return probe(stack, fmt, _GRADERS[fmt.contract])


def failed(results: list[ProbeResult]) -> list[str]:
    return [result.name for result in results if not result.passed]


@pytest.mark.parametrize("recipe", ["demo", "gsm8k-tiny"])
def test_our_recipes_pass(recipe: str) -> None:
    opened = load_recipe(recipe)
    results = attack(opened.rewards, make_format(opened.prompt))
    assert len(results) == len([*attacks(FORMATS["xml"])])
    assert failed(results) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xml", "compact", "think", "r1-zero", "tags"])
def test_the_default_stack_passes_in_every_tagged_format(name: str) -> None:
    results = attack(stack("default"), make_format(PromptConfig(format=name)))
    assert failed(results) == []
    assert STACKS["default"].fails == ()


@pytest.mark.parametrize("name", [name for name in STACKS if name != "default"])
def test_compatibility_stacks_fail_what_they_say(name: str) -> None:
    results = attack(stack(name), make_format(PromptConfig(format=STACKS[name].format)))
    assert failed(results) == list(STACKS[name].fails)


@pytest.mark.parametrize("name", STACKS)
def test_the_docs_list_what_each_fails(name: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
    shown = row.split("|")[-2].strip()
    assert shown == (", ".join(f"`{probe}`" for probe in STACKS[name].fails) or "none")


def test_an_answer_inside_the_reasoning_is_none() -> None:
    fmt = make_format(PromptConfig(format="think"))
    with Grader(fmt.contract, GradingConfig()) as grader:
        texts = [
            "<think>so <answer>4</answer></think>",
            "<think>a</think><answer>4</answer>",
            "<think>a</think><answer>4</answer><think>b</think>",
            "<think>a</think><answer>4</answer></think>",
            "<answer>4</answer>",
            "a <answer>4</answer></think>",
        ]
        verdicts = [g.verdict for g in grader.grade(texts, ["4"] * len(texts))]
    no, yes = Verdict.NO_ANSWER, Verdict.CORRECT
    assert verdicts == [no, yes, yes, yes, yes, no]


def function_stack(function: Any) -> RewardStack:
    return stack_of(mine=function)


XML = make_format(PromptConfig(format="xml"))


def test_a_substring_test_is_caught() -> None:
    def contains(completions: Any, reference_answer: Any, **columns: Any) -> list[float]:
        texts = [c[0]["content"] for c in completions]
        return [float(a in t) for a, t in zip(reference_answer, texts, strict=True)]

    assert {"answer_list", "answer_in_thinking", "giant_output", "next_turn"} <= set(
        failed(attack(function_stack(contains), XML))
    )


@pytest.mark.slow
def test_paying_for_length_or_tags_is_caught() -> None:
    def long(completions: Any, **columns: Any) -> list[float]:
        return [float(len(c[0]["content"])) for c in completions]

    def tags(completions: Any, **columns: Any) -> list[float]:
        return [float(c[0]["content"].count("<answer>")) for c in completions]

    assert "giant_output" in failed(attack(function_stack(long), XML))
    assert "repeated_tags" in failed(attack(function_stack(tags), XML))


def test_a_punishment_for_answering_is_caught() -> None:
    def silent(completions: Any, **columns: Any) -> list[float]:
        return [-float(bool(c[0]["content"].strip())) for c in completions]

    assert "empty" in failed(attack(function_stack(silent), XML))


def test_a_result_explains_itself() -> None:
    (result, *_) = attack(
        function_stack(lambda completions, **c: [float(not t[0]["content"]) for t in completions]),
        XML,
    )
    assert (result.name, result.earned, result.honest) == ("empty", 1.0, 0.0)
    assert (result.text, result.verdict) == ("", Verdict.NO_ANSWER)


def test_a_function_that_cannot_score_the_made_up_problem_is_told() -> None:
    def needs(level: Any, **columns: Any) -> list[float]:
        return [1.0]

    with pytest.raises(RewardError, match=r"level.*It was given the columns answer"):
        attack(function_stack(needs), XML)
    with pytest.raises(RewardError, match="does not score an honest wrong answer"):
        attack(function_stack(lambda completions, **columns: [None] * len(completions)), XML)


def test_attacks_work_on_a_reward_of_ones_own() -> None:
    @reward(0.0, 1.0)
    def nice(done: Completed) -> float:
        return float("310" in done.text)

    assert "answer_list" in failed(attack(function_stack(nice(XML)), XML))
