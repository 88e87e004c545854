"""Format, reasoning and rewards of an evaluation: by hand, stored, and read back."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from evaluation.plain import plain
from tiny_models import ScriptedSampler

from grouper.config.schema import GradingConfig, RewardConfig
from grouper.evaluation.compare import compare
from grouper.evaluation.evaluate import Measurement, measure, reasoning_of
from grouper.evaluation.result_tables import log_line, metrics_table, part_tables, verdict_sentence
from grouper.grading import Grader
from grouper.prompts import FORMATS
from grouper.rewards import RewardStack, build_rewards
from grouper.rewards.builtin import format_holds
from grouper.runs.folder import RunFolder
from grouper.types import FinishReason, Problem, Prompt, SamplingParams, Verdict

TAGS = FORMATS["tags"]  # the prompt opens <start_working_out>
XML = FORMATS["xml"]
GOOD = "add<end_working_out><SOLUTION>4</SOLUTION>"
WRONG = "think hard<end_working_out>\n<SOLUTION>5</SOLUTION>"
SILENT = "<end_working_out><SOLUTION>4</SOLUTION>"
BROKEN = "I guess 4"


@pytest.mark.parametrize(
    ("text", "form", "reasoning"),
    [
        (GOOD, True, "add"),
        (WRONG, True, "think hard"),
        (SILENT, True, ""),
        (BROKEN, False, ""),
        ("a<end_working_out> so <SOLUTION>4</SOLUTION>", False, "a"),
        ("a<end_working_out><SOLUTION></SOLUTION>", False, "a"),
        ("a<end_working_out><SOLUTION>4", False, "a"),
    ],
)
def test_format_and_reasoning_of_a_completion(text, form, reasoning):
    assert format_holds(text, TAGS) is form
    assert reasoning_of(text, TAGS) == reasoning


def test_without_a_prefix_the_model_must_open_the_tag_itself():
    assert reasoning_of("add</reasoning><answer>4</answer>", XML) == ""
    assert not format_holds("add</reasoning><answer>4</answer>", XML)
    boxed = FORMATS["boxed"]
    assert format_holds(r"so \boxed{4}", boxed)
    assert reasoning_of(r"no box", boxed) == ""


def measured(rewards, texts=(GOOD, WRONG, SILENT, BROKEN), fmt=TAGS):
    items = [
        (
            Problem(id=f"p/{i}", question="q", answer="4", source="p", subject="ab"[i % 2]),
            Prompt(problem_id=f"p/{i}", text="", token_ids=(1,)),
        )
        for i in range(len(texts))
    ]
    with Grader(fmt.contract, GradingConfig(symbolic=False)) as grader:
        return evaluated(items, texts, grader, fmt, rewards)


def evaluated(items, texts, grader, fmt, rewards):
    return measure(
        Measurement(
            name="validation-grpo-000002",
            phase="grpo",
            step=2,
            split="validation",
            items=items,
            params=SamplingParams(temperature=0),
            samples=1,
            seed=0,
            format=fmt,
            rewards=rewards,
        ),
        ScriptedSampler(lambda request, index: texts[index]),
        grader,
    )


@pytest.fixture
def stack():
    configs = [RewardConfig(name="correctness", weight=2), RewardConfig(name="format", weight=0.5)]
    return build_rewards(configs, TAGS)


def test_the_five_numbers_by_hand(stack):
    found = measured(stack).metrics
    assert found is not None
    assert found.format_accuracy == 3 / 4
    assert found.answer_accuracy == 2 / 4
    assert found.with_reasoning == 2 / 4
    assert found.reasoning_length == (3 + 10) / 2
    # Strict format wants reasoning: GOOD 2.5, WRONG 0.5, SILENT 2, BROKEN 0.
    assert found.reward == pytest.approx(5 / 4)
    assert found.rewards == {"correctness": 0.5, "format": 0.5}


def test_format_accuracy_and_reward_have_one_notion_of_the_format():
    """A right answer after `</think>` and a newline is not in the format of r1-zero: it earns
    nothing, and neither the headline nor the format counts it; leniently it is right."""
    fmt = FORMATS["r1-zero"]
    texts = (
        " two </think> <answer> 4 </answer>",
        " two </think>\n<answer> 4 </answer>",
        " two </think><answer> 4 </answer>",
        " two </think> <answer> 5 </answer>",
    )
    stack = build_rewards(
        [RewardConfig(name="r1_zero_answer"), RewardConfig(name="r1_zero_format", weight=0)],
        fmt,
    )
    result = measured(stack, texts, fmt)
    found = result.metrics
    assert found is not None
    assert result.accuracy == found.rewards["r1_zero_answer"] == found.reward == 1 / 4
    assert found.format_accuracy == found.rewards["r1_zero_format"] == 2 / 4
    assert result.lenient is not None
    assert result.lenient.mean == 3 / 4


def test_rewards_apart_and_by_subject(stack):
    result = measured(stack)
    assert result.rewards_by_subject == {
        "a": {"correctness": 1.0, "format": 0.5, "total": 2.25},
        "b": {"correctness": 0.0, "format": 0.5, "total": 0.25},
    }
    parts = dict(part_tables([result, replace(result, name="grpo")]))
    assert list(parts) == ["subject", "length"]
    shown = plain(parts["subject"][1])
    assert [line.split() for line in shown.splitlines()[1:]] == [
        [part, name, *means]
        for part, *means in (["a", "1.000", "0.500", "2.250"], ["b", "0.000", "0.500", "0.250"])
        for name in (result.name, "GRPO")
    ]
    row = plain(metrics_table([result])).splitlines()[1].split()
    assert row == ["validation-grpo-000002", "75.0", "50.0", "6", "1.250", "0.500", "0.500"]
    assert log_line(result) == (
        "GRPO step 2, validation: 50.0 % [15.0, 85.0] correct, format 75.0 %, reward 1.250"
    )


def test_the_line_of_an_evaluation_says_that_most_was_truncated(stack):
    result = measured(stack)
    items = [replace(item, finish_reason=FinishReason.LENGTH) for item in result.items]
    assert "truncated" not in log_line(result)
    assert log_line(replace(result, items=items)).endswith("; 100.0 % truncated")


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ("same", "No evidence of a change from SFT to GRPO. 50.0 % before and 50.0 % after, of 40"),
        ("right", "Yes: GRPO is better than SFT. 50.0 % before and 100.0 % after, of 40"),
        ("wrong", "No: GRPO is worse than SFT. 50.0 % before and 0.0 % after, of 40"),
    ],
)
def test_the_verdict_is_a_sentence(stack, texts, said):
    """The last line of a run and the first of its report."""
    before = replace(measured(stack), name="sft")
    items = [
        replace(item, problem_id=f"{item.problem_id}/{number}")
        for number in range(10)
        for item in before.items
    ]
    before = replace(before, items=items)
    verdicts = {"right": Verdict.CORRECT, "wrong": Verdict.INCORRECT}
    after = before
    if texts in verdicts:
        after = replace(
            before, items=[replace(item, verdict=verdicts[texts]) for item in before.items]
        )
    sentence = verdict_sentence(compare([before, replace(after, name="grpo")]), "test")
    assert sentence.startswith(f"{said} test problems: ")
    assert sentence.endswith("].")


def test_they_are_in_the_summary_and_read_back_from_the_items(stack, tmp_path):
    result = measured(stack)
    RunFolder(tmp_path).write_evaluation(result)
    summary = json.loads((tmp_path / "evaluations" / f"{result.name}.json").read_text())
    assert summary["metrics"]["reward"] == 1.25
    assert summary["metrics"]["reasoning_length"] == 6.5
    assert summary["rewards_by_subject"]["a"]["total"] == 2.25
    again = RunFolder(tmp_path).read_evaluation(result.name)
    assert again == result


def test_an_evaluation_from_before_has_no_such_numbers(stack):
    old = measured(stack)
    old = replace(old, items=tuple(replace(item, rewards=None) for item in old.items))
    assert old.metrics is None
    assert log_line(old).endswith("] correct")
    assert metrics_table([old]) is None
    assert old.rewards_by_subject == {}


def test_a_reward_that_fails_leaves_its_problem_out_and_stops_nothing(caplog):
    def picky(*, prompts, completions, **_):
        if any("guess" in text for text in completions):
            raise RuntimeError("no")
        return [1.0 for _ in completions]

    stack = RewardStack([(RewardConfig(name="picky", max_failure_rate=0), picky)])
    result = measured(stack)
    assert [item.reward for item in result.items] == [1.0, 1.0, 1.0, None]
    assert result.metrics.reward == 1.0
    assert "failed on 1 groups of the evaluation" in caplog.text


def test_nothing_scored_is_not_zero():
    def never(*, prompts, completions, **_):
        return [None for _ in completions]

    found = measured(RewardStack([(RewardConfig(name="never"), never)]), texts=(BROKEN,)).metrics
    assert found is not None
    assert math.isnan(found.reward)
    assert math.isnan(found.reasoning_length)
