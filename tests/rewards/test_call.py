"""Users' functions in the shape of each system, per item, and async, named as in a recipe."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_calls import RIGHT, WRONG, XML, call, stack_of

from grouper.config.schema import RewardConfig, SourceConfig
from grouper.data import load_problems
from grouper.errors import RewardError
from grouper.prompts.formats import FORMATS
from grouper.rewards import Completed, Group, RewardLog, RewardStack, build_rewards, reward
from grouper.rewards.attacks import example_prompt
from grouper.rewards.call import StoppedError, arguments_of, started
from grouper.rewards.core import find_reward
from grouper.types import Completion, FinishReason, Problem, Prompt

FILE = Path(__file__).with_name("users_functions.py")
TEXTS = ("<answer>4</answer>", "<answer>5</answer>")
CHAT = Prompt(
    problem_id="a/0", text="2+2?", token_ids=(1,), messages=({"role": "user", "content": "2+2?"},)
)
PLAIN = Prompt(problem_id="a/0", text="2+2?", token_ids=(1,))


def users(name: str, **params: Any) -> RewardStack:
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
    stack = users(name, **params)
    stack.check(problem=problem, prompt=prompt, right="4")
    rewards = stack.score(
        Group(problem=problem, prompt=prompt, completions=completions, grades=[RIGHT, WRONG])
    )
    return [scored.total for scored in rewards]


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

    @reward()
    async def waits(done: Completed) -> float:
        running.append(1)
        await asyncio.sleep(0.01)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.pop()
        return 0.0

    problem = Problem(id="a/0", question="2+2?", answer="4", source="a")
    stack_of(waits=waits(XML)).check(problem=problem, prompt=PLAIN, right="4")
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
        (scored,) = stack.score(
            Group(
                problem=problem,
                prompt=example_prompt(problem, fmt),
                completions=[completion],
                grades=[RIGHT],
            )
        )
        digits = problem.answer.isdigit()  # the one thing that pays a negative answer less
        wanted = {n: v if digits or n != "xml_integer" else 0.0 for n, v in most.items()}
        assert scored.components == pytest.approx(wanted), (problem.id, text)


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
        (scored,) = stack.score(
            Group(
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
        )
        assert (scored.total or 0) > 0, name


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
    assert call(RewardConfig(name="vandal"), vandal, arguments) == [0.0, 0.0]
    assert arguments["prompts"][0] == [{"role": "user", "content": "q"}]
    assert [c[0]["content"] for c in arguments["completions"]] == ["a", "b"]


MINE = RewardConfig(name="mine")
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
        call(MINE, function, ONE)


def test_ctrl_c_still_ends_it() -> None:
    def interrupted(**_: Any) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(MINE, interrupted, ONE)


def test_the_time_limit_comes_from_the_recipe_and_is_counted_as_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "hangs.py"
    file.write_text(
        "import asyncio\n\n\nasync def judge(completions, **kwargs):\n"
        "    if len(completions) < 2:\n        raise AssertionError('tried again')\n"
        "    await asyncio.sleep(60)\n"
    )
    config = RewardConfig(name=f"{file}:judge", timeout_seconds=0.05, max_failure_rate=0.0)
    stack = build_rewards([config], XML)
    problem = Problem(id="a/0", question="2+2?", answer="4", source="a")
    answered = Completion(
        token_ids=(1,),
        logprobs=(0.0,),
        text="4",
        finish_reason=FinishReason.STOP_TOKEN,
        policy_version=0,
    )

    notes = RewardLog()
    rewards = stack.score(
        Group(problem=problem, prompt=CHAT, completions=[answered] * 2, grades=[RIGHT] * 2), notes
    )
    assert [scored.total for scored in rewards] == [None, None]
    assert "did not return within 0.05 s" in notes.events[0]
    # No completion is tried alone: each could take as long again.
    with pytest.raises(RewardError, match="It fails on this group, of whose completions the first"):
        stack.end_step(notes)


async def _waits_long(**_: Any) -> list[float]:
    await asyncio.sleep(60)
    return [0.0]


def test_a_function_that_is_slow_and_not_async_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def slow(**_: Any) -> list[float]:
        time.sleep(0.2)
        return [0.0]

    with caplog.at_level(logging.WARNING, "grouper"):
        assert call(RewardConfig(name="mine", timeout_seconds=5), slow, ONE) == [0.0]
        with pytest.raises(RewardError, match="did not return"):  # stopped, not warned of
            call(RewardConfig(name="mine", timeout_seconds=0.02), _waits_long, ONE)
        assert caplog.messages == []
        assert call(RewardConfig(name="mine", timeout_seconds=0.02), slow, ONE) == [0.0]
    (warning,) = caplog.messages
    assert "'mine' has been running for 0.02 s" in warning


def test_minus_zero_is_zero() -> None:
    assert str(call(MINE, lambda **_: [-0.0], ONE)) == "[0.0]"


TOO_LARGE = [1e308, -1e308, 1.1e15, 10**400, 10**5000, math.nan, math.inf, "1", Fraction(10**40, 3)]


@pytest.mark.parametrize("value", TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_values_that_sums_cannot_hold_are_refused_in_one_paragraph(value: Any) -> None:
    """Finite ones as well: two of 1e308 have no mean (R5)."""
    with pytest.raises(RewardError, match=r"for completion 0.*-1e\+15 to 1e\+15"):
        call(MINE, lambda **_: [value], ONE)


class _Unshown:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("value", [np.ones(2), np.ones((1, 2)), torch.ones(2), [1.0], _Unshown()])
def test_what_is_not_one_number_is_refused_whatever_it_is(value: Any) -> None:
    with pytest.raises(RewardError, match="for completion 0"):
        call(MINE, lambda **_: [value], ONE)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("one\n\n  two\n"), "ValueError: one two"),
        (type("Odd", (Exception,), {"__str__": None})(), "Odd: <Odd that cannot be shown>"),
    ],
)
def test_whatever_it_raises_is_one_paragraph(error: Exception, told: str) -> None:
    def fails(**_: Any) -> list[float]:
        raise error

    with pytest.raises(RewardError, match=rf"raised {told} \(.*\. It was given"):
        call(MINE, fails, ONE)


@pytest.mark.parametrize(
    "value",
    [1e15, -1e15, 10**15, Fraction(1, 3), True, np.float32(0.5), torch.ones(1), torch.tensor(0.5)],
)
def test_values_up_to_there_are_taken(value: Any) -> None:
    assert call(MINE, lambda **_: [value], ONE) == [float(value)]


FAULTY = """\
import json; from grouper import reward


def direct(completions, **kwargs):
    total = 1
    return [total / 0 for _ in completions]


def deeper(completions, **kwargs):
    return helper(completions)


def helper(texts):
    return [json.loads(text + "{") for text in texts]


async def later(completions, **kwargs):
    return helper(completions)


@reward()
def single(done):
    return 1 / 0
"""


def in_list(function: str) -> str:
    """Where Python says that a list of a function is made; from 3.12 on, in the function."""
    return "<listcomp>" if sys.version_info < (3, 12) else function


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "direct",
            f"ZeroDivisionError: division by zero (faulty.py, line 6, in {in_list('direct')}).",
        ),
        # Not the line of json's own.
        ("deeper", f"(faulty.py, line 14, in {in_list('helper')})."),
        ("later", f"(faulty.py, line 14, in {in_list('helper')})."),
        ("single", "ZeroDivisionError: division by zero (faulty.py, line 23, in single)."),
    ],
)
def test_an_exception_names_the_line_of_the_users_file(
    tmp_path: Path, name: str, told: str
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    config = RewardConfig(name=f"{tmp_path}/faulty.py:{name}")
    with pytest.raises(RewardError) as caught:
        call(MINE, find_reward(config, XML), ONE)
    assert told in str(caught.value)


# --- async functions


async def _fine() -> int:
    await asyncio.sleep(0)
    return 4


async def _waits() -> None:
    await asyncio.sleep(60)


async def _blocks() -> None:
    time.sleep(5)


async def _clings() -> None:
    while True:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize("function", [_waits, _blocks, _clings])
def test_what_hangs_is_left_and_the_next_call_works(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grouper.rewards.call.GRACE_SECONDS", 0.1)
    began = time.monotonic()
    assert isinstance(started(function(), 0.05)()[1], StoppedError)
    assert started(_fine(), 10)() == (4, None)
    assert time.monotonic() - began < 3


def test_what_is_stopped_can_tidy_up() -> None:
    tidied = []

    async def tidies() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            tidied.append(True)

    assert isinstance(started(tidies(), 0.02)()[1], StoppedError)
    assert tidied == [True]


def test_a_timeout_of_its_own_is_none_of_ours() -> None:
    async def impatient() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)

    _, raised = started(impatient(), 10)()
    assert type(raised) is TimeoutError


def test_all_calls_share_a_loop_so_that_clients_can_be_kept() -> None:
    async def loop() -> object:
        return asyncio.get_running_loop()

    async def inside_another() -> object:
        return started(loop(), 10)()[0]

    first, _ = started(loop(), 10)()
    assert first is started(loop(), 10)()[0]
    assert first is asyncio.run(inside_another())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_loop_of_its_own() -> None:
    assert started(_fine(), 10)() == (4, None)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if started(_fine(), 10)() == (4, None) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
