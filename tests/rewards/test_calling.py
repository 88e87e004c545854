"""Users' functions in the shape of each system, per item, and async, named as in a recipe."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from reward_calls import RIGHT, WRONG, XML

from grouper.config import RewardConfig
from grouper.errors import RewardError
from grouper.rewards import RewardStack, build_rewards
from grouper.rewards.calling import call, one_by_one
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
    assert totals("a_correctness", columns={"answer": "2+2=5\n#### 5"}) == [0.0, 2.0]


def test_shape_c_in_chat_and_plain_text() -> None:
    assert totals("c_correctness") == totals("c_correctness", PLAIN) == [1.0, 0.0]


def test_shape_d() -> None:
    assert totals("d_numbers") == [3.5, -1.5]
    assert totals("d_numbers", scale=2.0) == [7.0, -3.0]


def test_shape_e() -> None:
    assert totals("e_accuracy") == [1.0, 0.0]
    assert totals("e_accuracy", columns={"solution": "no box"}) == [None, None]


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
    assert max(most) == 3


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
