"""Users' functions in the shape of each system, per item, and async, named as in a recipe."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from reward_calls import RIGHT, WRONG, XML

from grouper.config.schema import RewardConfig, SourceConfig
from grouper.data import load_problems
from grouper.errors import RewardError
from grouper.prompts.formats import FORMATS
from grouper.rewards import RewardStack, build_rewards
from grouper.rewards.attacks import example_prompt
from grouper.rewards.calling import arguments_of, call, one_by_one
from grouper.rewards.core import find_reward
from grouper.types import Completion, FinishReason, Problem, Prompt

FILE = Path(__file__).with_name("users_functions.py")
TEXTS = ("<answer>4</answer>", "<answer>5</answer>")
CHAT = Prompt(
    problem_id="a/0", text="2+2?", token_ids=(1,), messages=({"role": "user", "content": "2+2?"},)
)
PLAIN = Prompt(problem_id="a/0", text="2+2?", token_ids=(1,))


def stack_of(name: str, **params: Any) -> RewardStack:
    config = RewardConfig(name=f"{FILE}:{name}", params=params, max_failure_rate=0.0)
    return build_rewards([config], XML)


def totals(name: str, prompt: Prompt = CHAT, columns: Any = None, **params: Any) -> list[Any]:
    completions = [
        Completion(
            token_ids=(1,),
            logprobs=(0.0,),
            text=text,
            finish_reason=FinishReason.STOP_TOKEN,
            policy_version=0,
        )
        for text in TEXTS
    ]
    problem = Problem(
        id="a/0",
        question="2+2?",
        answer="4",
        source="a",
        solution=r"2 + 2 = 4, \boxed{4} #### 4",
        columns=columns or {},
    )
    stack = stack_of(name, **params)
    stack.check(problem=problem, prompt=prompt)
    rewards = stack.score(
        problem=problem, prompt=prompt, completions=completions, grades=[RIGHT, WRONG]
    )
    return [reward.total for reward in rewards]


def test_shape_a() -> None:
    assert totals("a_correctness") == [2.0, 0.0]
    assert totals("a_correctness", columns={"answer": "2+2=5\n#### 5"}) == [2.0, 0.0]


def test_shape_c_in_chat_and_plain_text() -> None:
    assert totals("c_correctness") == totals("c_correctness", PLAIN) == [1.0, 0.0]


def test_shape_d() -> None:
    assert totals("d_numbers") == [3.5, -1.5]
    assert totals("d_numbers", scale=2.0) == [7.0, -3.0]


def test_shape_e() -> None:
    assert totals("e_accuracy") == [1.0, 0.0]
    assert totals("e_accuracy", columns={"solution": "no box"}) == [1.0, 0.0]


def test_async() -> None:
    assert totals("later") == [18.0, 18.0]


def test_one_at_a_time() -> None:
    assert totals("brevity") == [0.0, -0.18]
    assert totals("brevity", most=10) == [0.0, -1.8]


def test_async_one_at_a_time_runs_together() -> None:
    assert totals("asks") == [1.0, 1.0]
    running: list[int] = []
    most: list[int] = []

    async def waits(completion: Any, **columns: Any) -> float:
        running.append(1)
        await asyncio.sleep(0.01)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.pop()
        return 0.0

    RewardStack([("waits", 1.0, one_by_one(waits))]).check()
    assert max(most) == 4


REFERENCE = Path(__file__).with_name("reference_functions.py")
"""As users of three published set-ups bring them."""

SYSTEMS: dict[str, tuple[str, dict[str, float], str]] = {
    "gsm8k-xml": (
        "xml",
        {
            "xml_correctness": 2.0,
            "xml_integer": 0.5,
            "xml_strict_format": 0.5,
            "xml_tag_count": 0.5,
        },
        "<reasoning>\n{working}\n</reasoning>\n<answer>\n{answer}\n</answer>\n",
    ),
    # Its two patterns exclude each other: a dot there is no newline.
    "gsm8k-xml on one line": (
        "xml",
        {"xml_correctness": 2.0, "xml_integer": 0.5, "xml_soft_format": 0.5},
        "<reasoning>{working}</reasoning> <answer>{answer}</answer>",
    ),
    "gsm8k-lite": (
        "xml",
        {"lite_correctness": 1.0, "lite_numeric": 0.1, "lite_tags": 0.1},
        "<reasoning>\n{working}\n</reasoning>\n<answer>\n{answer}\n</answer>",
    ),
    "openmath-dapo": (
        "tags",
        {"tags_exact": 3.0, "tags_approximate": 1.5, "tags_answer": 5.0, "tags_number": 4.0},
        "<start_working_out>\n{working}\n<end_working_out>\n<SOLUTION>{answer}</SOLUTION>",
    ),
}
"""Prompt format, the most that each function pays, and a completion that all pay the most."""


@pytest.mark.parametrize("system", SYSTEMS)
def test_functions_of_users_pay_every_right_completion_the_most(
    system: str, shared_data: Path
) -> None:
    name, most, layout = SYSTEMS[system]
    fmt = FORMATS[name]
    source = SourceConfig(source="gsm8k", path=str(shared_data / "gsm8k"), split="test", limit=300)
    stack = build_rewards([RewardConfig(name=f"{REFERENCE}:{n}") for n in most], fmt)
    problems = load_problems(source, seed=0).problems
    assert len(problems) == 300
    # The raw column is the whole worked solution, and some have commas between the thousands.
    assert all("####" in str(problem.columns["answer"]) for problem in problems)
    assert any("," in str(problem.columns["answer"]).rpartition("####")[2] for problem in problems)
    for problem in problems:
        working = " ".join((problem.solution or "").split())
        text = layout.format(working=working, answer=problem.answer)
        completion = Completion(
            token_ids=(1,),
            logprobs=(0.0,),
            text=text,
            finish_reason=FinishReason.STOP_TOKEN,
            policy_version=0,
        )
        (reward,) = stack.score(
            problem=problem,
            prompt=example_prompt(problem, fmt),
            completions=[completion],
            grades=[RIGHT],
        )
        assert stack.take_events() == ()
        digits = problem.answer.isdigit()  # the one thing that pays a negative answer less
        wanted = {n: v if digits or n != "xml_integer" else 0.0 for n, v in most.items()}
        assert reward.components == pytest.approx(wanted), (problem.id, text)


def test_our_fields_win_over_columns_which_stay_reachable() -> None:
    columns = {
        "answer": "2+2=5\n#### 5",
        "solution": "raw",
        "reference_answer": "9",
        "reference_solution": "raw",
        "question": "raw?",
        "prompts": "p",
        "completions": "c",
        "grades": "A",
        "finish_reasons": "f",
        "completion_ids": "i",
        "completion": "one",
        "self": "me",
        "source_solution": "a column of its own",
        "unit": "m",
        "a b": 1,
    }
    problem = Problem(
        id="a/0", question="2+2?", answer="4", source="a", solution="so 4", columns=columns
    )
    completion = Completion(
        token_ids=(1,),
        logprobs=(0.0,),
        text="<answer>4</answer>",
        finish_reason=FinishReason.STOP_TOKEN,
        policy_version=0,
    )
    given = arguments_of(problem, PLAIN, [completion], [RIGHT])
    assert {name: values[0] for name, values in given.items()} == {
        "answer": "4",
        "solution": "so 4",
        "reference_answer": "4",
        "reference_solution": "so 4",
        "question": "2+2?",
        "prompts": "2+2?",
        "completions": "<answer>4</answer>",
        "grades": RIGHT,
        "finish_reasons": FinishReason.STOP_TOKEN,
        "completion_ids": [1],
        **{
            f"source_{name}": value
            for name, value in columns.items()
            if name not in ("solution", "source_solution", "unit", "a b")
        },
        "source_solution": "a column of its own",
        "unit": "m",
        "a b": 1,
    }


def test_a_column_breaks_no_reward_whatever_its_name() -> None:
    """Built-in, a class of the user's, one by one, and a parameter of the same name."""
    columns = {"self": "me", "reference_answer": "5", "most": 7, "completion": "x", "answer": "5"}
    assert totals("brevity", columns=columns, most=10) == [0.0, -1.8]
    assert totals("Judge", columns=columns) == [1.0, 0.0]
    problem = Problem(id="a/0", question="2+2?", answer="4", source="a", columns=columns)
    text = "<reasoning>\n4\n</reasoning>\n<answer>\n4\n</answer>"
    for name in ("correctness", "xml_correctness", "lite_correctness"):
        stack = build_rewards([RewardConfig(name=name, max_failure_rate=0.0)], XML)
        (reward,) = stack.score(
            problem=problem,
            prompt=CHAT,
            completions=[
                Completion(
                    token_ids=(1,),
                    logprobs=(0.0,),
                    text=text,
                    finish_reason=FinishReason.STOP_TOKEN,
                    policy_version=0,
                )
            ],
            grades=[RIGHT],
        )
        assert (reward.total or 0) > 0, name


def test_a_column_cannot_hide_the_completion() -> None:
    def seen(completion: Any, prompt: Any, **columns: Any) -> float:
        return float(completion == "x" and prompt == "q")

    values = one_by_one(seen)(
        prompts=["q"], completions=["x"], prompt=["of the data"], completion=["of the data"]
    )
    assert values == [1.0]


def test_what_a_function_changes_no_other_function_sees() -> None:
    def vandal(prompts: Any, completions: Any, **_: Any) -> list[float]:
        completions[0][0]["content"] = "changed"
        prompts[0].clear()
        completions.reverse()
        return [0.0] * len(completions)

    arguments = {
        "prompts": [[{"role": "user", "content": "q"}]] * 2,
        "completions": [[{"role": "assistant", "content": text}] for text in ("a", "b")],
    }
    assert call("vandal", vandal, arguments) == [0.0, 0.0]
    assert arguments["prompts"][0] == [{"role": "user", "content": "q"}]
    assert [c[0]["content"] for c in arguments["completions"]] == ["a", "b"]


ONE = {"prompts": ["q"], "completions": ["4"]}


def _exits(**_: Any) -> list[float]:
    sys.exit("bye")


async def _exits_later(**_: Any) -> list[float]:
    sys.exit("bye")


def _cancels(**_: Any) -> list[float]:
    raise asyncio.CancelledError


async def _cancels_later(**_: Any) -> list[float]:
    raise asyncio.CancelledError


async def _exits_in_a_task(**_: Any) -> list[float]:
    return await asyncio.gather(_exits_later())


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (_exits, "raised SystemExit: bye"),
        (_exits_later, "raised SystemExit: bye"),
        (_exits_in_a_task, "raised SystemExit: bye"),
        (_cancels, "raised CancelledError"),
        (_cancels_later, "raised CancelledError"),
    ],
)
def test_a_function_cannot_end_the_run_by_itself(function: Any, told: str) -> None:
    with pytest.raises(RewardError, match=told):
        call("mine", function, ONE)


def test_ctrl_c_still_ends_it() -> None:
    def interrupted(**_: Any) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call("mine", interrupted, ONE)


def test_the_time_limit_comes_from_the_recipe_and_is_counted_as_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "hangs.py"
    file.write_text(
        "import asyncio\n\n\nasync def judge(completions, **kwargs):\n"
        "    if len(completions) < 2:\n        raise AssertionError('tried again')\n"
        "    await asyncio.sleep(60)\n"
    )
    config = RewardConfig(name=f"{file}:judge", timeout_seconds=0.05, max_failure_rate=0.05)
    stack = build_rewards([config], XML)
    problem = Problem(id="a/0", question="2+2?", answer="4", source="a")
    answered = Completion(
        token_ids=(1,),
        logprobs=(0.0,),
        text="4",
        finish_reason=FinishReason.STOP_TOKEN,
        policy_version=0,
    )

    def score() -> list[Any]:
        rewards = stack.score(
            problem=problem, prompt=CHAT, completions=[answered] * 2, grades=[RIGHT] * 2
        )
        return [reward.total for reward in rewards]

    assert score() == [None, None]
    assert stack.failures == {"judge": 1}
    assert "did not return within 0.05 s" in stack.take_events()[0]
    # No completion is tried alone: each could take as long again.
    with pytest.raises(RewardError, match="It fails on this group, of whose completions the first"):
        score()


def test_a_function_that_is_slow_and_not_async_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def slow(**_: Any) -> list[float]:
        time.sleep(0.2)
        return [0.0]

    with caplog.at_level(logging.WARNING, "grouper"):
        assert call("mine", slow, ONE, seconds=5) == [0.0]
        assert caplog.messages == []
        assert call("mine", slow, ONE, seconds=0.02) == [0.0]
    (warning,) = caplog.messages
    assert "'mine' has been running for 0.02 s" in warning


def test_minus_zero_is_zero() -> None:
    assert str(call("mine", lambda **_: [-0.0], ONE)) == "[0.0]"


TOO_LARGE = [1e308, -1e308, 1.1e15, 10**400, 10**5000, math.nan, math.inf, "1", Fraction(10**40, 3)]


@pytest.mark.parametrize("value", TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_values_that_sums_cannot_hold_are_refused_in_one_paragraph(value: Any) -> None:
    """Finite ones as well: two of 1e308 have no mean (R5)."""
    with pytest.raises(RewardError, match=r"for completion 0.*-1e\+15 to 1e\+15"):
        call("mine", lambda **_: [value], ONE)


@pytest.mark.parametrize("value", [1e15, -1e15, 10**15, Fraction(1, 3), True])
def test_values_up_to_there_are_taken(value: Any) -> None:
    assert call("mine", lambda **_: [value], ONE) == [float(value)]


FAULTY = """\
import json


def direct(completions, **kwargs):
    total = 1
    return [total / 0 for _ in completions]


def deeper(completions, **kwargs):
    return helper(completions)


def helper(texts):
    return [json.loads(text + "{") for text in texts]


async def later(completions, **kwargs):
    return helper(completions)


def single(completion, **kwargs):
    return 1 / 0
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("direct", "ZeroDivisionError: division by zero (faulty.py, line 6, in <listcomp>)."),
        ("deeper", "(faulty.py, line 14, in <listcomp>)."),  # not the line of json's own
        ("later", "(faulty.py, line 14, in <listcomp>)."),
        ("single", "ZeroDivisionError: division by zero (faulty.py, line 22, in single)."),
    ],
)
def test_an_exception_names_the_line_of_the_users_file(
    tmp_path: Path, name: str, told: str
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    config = RewardConfig(name=f"{tmp_path}/faulty.py:{name}")
    with pytest.raises(RewardError) as caught:
        call("mine", find_reward(config, XML), ONE)
    assert told in str(caught.value)
