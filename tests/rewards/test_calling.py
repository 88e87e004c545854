"""Users' functions in the shape of each system, per item, and async, named as in a recipe."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from reward_calls import RIGHT, WRONG, XML

from grouper.config import RewardConfig
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
