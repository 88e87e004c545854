"""The stack: columns by name, weights, and every way a reward function can be wrong."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from grouper.config.schema import RewardConfig
from grouper.errors import RewardError
from grouper.rewards import RewardStack, build_rewards
from grouper.rewards.calling import one_by_one
from grouper.rewards.stack import FailureRate
from grouper.types import (
    AnswerContract,
    AnswerFormat,
    AnswerKind,
    Completion,
    FinishReason,
    Grade,
    Problem,
    Prompt,
    Verdict,
)

LAYOUT = AnswerFormat(
    name="t",
    template="{reasoning}{answer}",
    contract=AnswerContract(kind=AnswerKind.TAG, open="<answer>", close="</answer>"),
    tags=("<think>", "</think>", "<answer>", "</answer>"),
)
PROBLEM = Problem(
    id="gsm8k/test/0",
    question="2+2?",
    answer="4",
    source="gsm8k",
    solution="2+2=4\n#### 4",
    columns={"question": "2+2?", "answer": "2+2=4\n#### 4", "difficulty": 3},
)
PLAIN = Prompt(problem_id=PROBLEM.id, text="Q: 2+2?", token_ids=(1,))
CHAT = Prompt(
    problem_id=PROBLEM.id,
    text="<user>2+2?",
    token_ids=(1,),
    messages=({"role": "user", "content": "2+2?"},),
)


def completion(text: str) -> Completion:
    return Completion(
        token_ids=(7, 8),
        logprobs=(-0.1, -0.2),
        text=text,
        finish_reason=FinishReason.LENGTH,
        policy_version=0,
    )


def grade(verdict: Verdict) -> Grade:
    return Grade(verdict=verdict, extracted="4", rung="text", reason="")


RIGHT, WRONG = grade(Verdict.CORRECT), grade(Verdict.INCORRECT)
TWO = [completion("<think>a</think><answer>4</answer>"), completion("no")]


def run(function: Any, *, prompt: Prompt = PLAIN) -> list[Any]:
    return score(RewardStack([("mine", 1.0, function)], {"mine": 0.0}), prompt=prompt)


def score(stack: RewardStack, *, prompt: Prompt = PLAIN) -> list[Any]:
    return stack.score(problem=PROBLEM, prompt=prompt, completions=TWO, grades=[RIGHT, WRONG])


def test_components_weights_and_totals() -> None:
    configs = [
        RewardConfig(name="correctness", weight=2.0),
        RewardConfig(name="format", weight=0.5),
    ]
    stack = build_rewards(configs, LAYOUT)
    assert stack.names == ("correctness", "format")
    assert stack.weights == {"correctness": 2.0, "format": 0.5}
    first, second = stack.score(
        problem=PROBLEM, prompt=PLAIN, completions=TWO, grades=[RIGHT, WRONG]
    )
    assert first.components == {"correctness": 1.0, "format": 1.0}
    assert (first.total, second.total) == (2.5, 0.0)


def test_an_unscored_reference_is_none_not_zero() -> None:
    stack = build_rewards([RewardConfig(name="correctness")], LAYOUT)
    (reward,) = stack.score(
        problem=PROBLEM, prompt=PLAIN, completions=TWO[:1], grades=[grade(Verdict.NOT_SCORED)]
    )
    assert reward.components == {"correctness": None}
    assert reward.total is None


def test_columns_arrive_under_their_own_names() -> None:
    seen: dict[str, Any] = {}

    def function(*, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [1.0, 0.0]

    run(function)
    assert seen["difficulty"] == [3, 3]
    assert seen["answer"] == seen["reference_answer"] == ["4", "4"]
    assert seen["source_answer"] == ["2+2=4\n#### 4"] * 2  # the source's own column, unchanged
    assert seen["solution"] == seen["reference_solution"] == ["2+2=4\n#### 4"] * 2
    assert seen["question"] == ["2+2?"] * 2
    assert seen["grades"] == [RIGHT, WRONG]
    assert seen["finish_reasons"] == [FinishReason.LENGTH] * 2
    assert seen["completion_ids"] == [[7, 8], [7, 8]]
    assert seen["prompts"] == ["Q: 2+2?"] * 2
    assert seen["completions"] == [c.text for c in TWO]


def test_chat_completions_are_messages() -> None:
    def trl_style(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        assert prompts[0][-1]["content"] == "2+2?"
        texts = [c[0]["content"] for c in completions]
        return [2.0 if f"<answer>{a}" in t else 0.0 for a, t in zip(answer, texts, strict=True)]

    assert [r.total for r in run(trl_style, prompt=CHAT)] == [2.0, 0.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], r"'mine' returned \[1.0\], a list of 1, for 2 completions"),
        ([1.0, 2.0, 3.0], "a list of 3, for 2"),
        (1.0, "a float, for 2 completions"),
        (None, "a NoneType, for 2"),
        ([1.0, math.nan], "returned nan for completion 1"),
        ([math.inf, 0.0], "returned inf for completion 0"),
        ([1.0, "x"], "returned 'x' for completion 1"),
        ([1.0, 1j], "returned 1j"),
        ("ab", "a str"),
    ],
)
def test_wrong_results_are_named(returned: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        run(lambda **columns: returned)


def test_none_bools_arrays_and_async_are_accepted() -> None:
    import numpy as np

    async def later(**columns: Any) -> list[float]:
        return [1.0, 0.5]

    assert [r.total for r in run(lambda **columns: [True, None])] == [1.0, None]
    assert [r.total for r in run(lambda **columns: np.array([1, 0]))] == [1.0, 0.0]
    assert [r.total for r in run(later)] == [1.0, 0.5]


def test_an_exception_is_told_with_the_function_and_its_columns() -> None:
    with pytest.raises(RewardError, match=r"'mine' raised KeyError: 'level'.*difficulty"):
        run(lambda **columns: [float(x) for x in columns["level"]])


def test_a_failure_is_contained_counted_and_told() -> None:
    calls = itertools.count()

    def sometimes(**columns: Any) -> list[float]:
        if next(calls) == 1:
            raise RuntimeError("boom")
        return [1.0, 0.0]

    stack = RewardStack([("mine", 1.0, sometimes), ("fine", 0.5, lambda **columns: [2.0, 2.0])])
    assert [r.total for r in score(stack)] == [2.0, 1.0]
    assert stack.take_events() == ()
    failed = score(stack)
    assert [r.components for r in failed] == [{"mine": None, "fine": 2.0}] * 2
    assert [r.total for r in failed] == [None, None]  # not scored, never zero
    assert stack.failures == {"mine": 1, "fine": 0}
    (event,) = stack.take_events()
    assert "rewards/failed on gsm8k/test/0: the reward 'mine' raised RuntimeError: boom" in event
    assert stack.take_events() == ()
    assert [r.total for r in score(stack)] == [2.0, 1.0]


def test_wrong_results_are_contained_too() -> None:
    stack = RewardStack([("short", 1.0, lambda **columns: [0.0])])
    assert [r.total for r in score(stack)] == [None, None]
    assert "returned [0.0], a list of 1" in stack.take_events()[0]


def test_too_many_failures_stop_the_run_and_show_the_input() -> None:
    def chokes(completions: Any, **columns: Any) -> list[float]:
        return [1.0 / (text != "no") for text in completions]

    stack = RewardStack([("mine", 1.0, chokes)], {"mine": 0.1})
    score(stack)
    score(stack)
    with pytest.raises(RewardError) as caught:
        score(stack)
    text = str(caught.value)
    assert "rewards.mine" in text
    assert "ZeroDivisionError" in text
    assert "3 of 3 groups" in text
    assert "It fails on the completion 'no' to 'Q: 2+2?'." in text
    assert "max_failure_rate, 0.1" in text


def test_the_count_of_failures_goes_on_in_another_process() -> None:
    def breaks(**columns: Any) -> list[float]:
        raise ValueError("no")

    def fine(**columns: Any) -> list[float]:
        return [0.0, 0.0]

    first = RewardStack([("mine", 1.0, breaks), ("fine", 1.0, fine)])
    score(first)
    score(first)
    state = json.loads(json.dumps(first.state()))
    second = RewardStack([("mine", 1.0, breaks), ("new", 1.0, fine)])
    second.load_state(state)
    assert second.failures == {"mine": 2, "new": 0}
    with pytest.raises(RewardError, match="3 of 3 groups"):
        score(second)


def test_a_group_that_fails_only_together_is_shown_too() -> None:
    def pairs(completions: Any, **columns: Any) -> list[float]:
        assert len(completions) == 1
        return [0.0]

    with pytest.raises(RewardError, match="on none of its completions alone; the first is"):
        run(pairs)


def test_the_rate_comes_from_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def breaks(completions, **kwargs):\n    raise ValueError('no')\n")
    for limit, tolerated in ((0.0, 0), (0.2, 4), (1.0, 50)):
        stack = build_rewards([RewardConfig(name=f"{file}:breaks", max_failure_rate=limit)], LAYOUT)
        for _ in range(tolerated):
            score(stack)
        if limit < 1:
            with pytest.raises(RewardError, match="ValueError: no"):
                score(stack)


def test_a_stated_range_is_kept() -> None:
    def wild(**columns: Any) -> list[float]:
        return [1.0, 2.0]

    wild.bounds = (0.0, 1.5)  # type: ignore[attr-defined] # how a user states a range
    with pytest.raises(RewardError, match=r"returned 2.0 for completion 1, outside its range 0 to"):
        run(wild)
    assert RewardStack([("mine", 1.0, wild)]).bounds == (0.0, 1.5)


def test_the_range_of_the_total() -> None:
    configs = [
        RewardConfig(name="correctness", weight=2.0),
        RewardConfig(name="cosine", weight=-1.0),
        RewardConfig(name="xml_tag_count", weight=0.0),
    ]
    assert build_rewards(configs, LAYOUT).bounds == (-1.0, 2.5)
    assert RewardStack([("mine", 1.0, lambda **columns: [0.0])]).bounds is None


def test_one_grade_a_completion() -> None:
    stack = build_rewards([RewardConfig(name="correctness")], LAYOUT)
    with pytest.raises(ValueError, match="2 completions but 1 grades"):
        stack.score(problem=PROBLEM, prompt=PLAIN, completions=TWO, grades=[RIGHT])


def test_check_finds_what_varies_and_reports_all_at_once() -> None:
    ticks = itertools.count()
    stack = RewardStack(
        [
            ("varies", 1.0, lambda **columns: [float(next(ticks))] * len(columns["completions"])),
            ("short", 1.0, lambda **columns: [0.0]),
            ("fine", 1.0, lambda **columns: [0.0] * len(columns["completions"])),
        ]
    )
    with pytest.raises(RewardError) as caught:
        stack.check(problem=PROBLEM, prompt=CHAT)
    text = str(caught.value)
    assert "'varies' gave" in text
    assert "'short' returned" in text
    assert "fine" not in text


def test_a_reward_that_is_declared_to_vary_is_allowed_and_said(tmp_path: Path) -> None:
    file = tmp_path / "judges.py"
    file.write_text(
        "import random\n\n\ndef judge(completions, **kwargs):\n"
        "    return [random.random() + (len(text) > 9) for text in completions]\n"
    )
    plain = build_rewards([RewardConfig(name=f"{file}:judge")], LAYOUT)
    with pytest.raises(RewardError, match="declare it with `deterministic: false`"):
        plain.check(problem=PROBLEM, prompt=PLAIN, right="long enough")
    declared = build_rewards([RewardConfig(name=f"{file}:judge", deterministic=False)], LAYOUT)
    (warning,) = declared.check(problem=PROBLEM, prompt=PLAIN, right="long enough")
    assert "'judge' is declared as not deterministic: the run cannot be repeated" in warning
    assert declared.for_measuring().check(problem=PROBLEM, prompt=PLAIN, right="long enough")


def test_check_passes_the_built_ins() -> None:
    names = ("correctness", "format", "soft_format", "tag_count", "boxed_format")
    build_rewards([RewardConfig(name=name) for name in names], LAYOUT).check()


def least(function: Any, weight: float = 1.0) -> list[str]:
    right = "<think>2+2=4</think><answer>4</answer>"
    stack = RewardStack([("mine", weight, function)])
    return stack.check(problem=PROBLEM, prompt=PLAIN, right=right)


def test_check_warns_of_a_reward_that_pays_a_right_completion_its_minimum() -> None:
    def against(column: str) -> Any:
        return lambda completions, **columns: [
            2.0 * (f">{wanted}<" in text)
            for text, wanted in zip(completions, columns[column], strict=True)
        ]

    (warning,) = least(against("source_answer"))
    assert "'mine' pays 0 for a right completion of gsm8k/test/0" in warning
    assert "<answer>4</answer>" in warning
    assert "`answer` was '4'" in warning
    assert least(against("answer")) == []


def test_a_reward_of_length_is_not_warned_of() -> None:
    assert least(lambda completions, **_: [-float(len(text)) for text in completions]) == []
    assert least(lambda completions, **_: [float(len(text)) for text in completions]) == []


def test_the_stated_range_says_what_the_minimum_is() -> None:
    def constant(completions: Any, **_: Any) -> list[float]:
        return [0.5] * len(completions)

    assert len(least(constant)) == 1
    constant.bounds = (0.0, 1.0)  # type: ignore[attr-defined] # how a user states a range
    assert least(constant) == []
    constant.bounds = (0.5, 1.0)  # type: ignore[attr-defined]
    assert len(least(constant)) == 1


def test_no_warning_of_what_is_subtracted_or_not_scored_or_ours() -> None:
    assert least(lambda completions, **_: [0.0] * len(completions), weight=-1.0) == []
    assert least(lambda completions, **_: [None] * len(completions)) == []
    names = ("xml_integer", "lite_numeric", "boxed_format", "repetition_penalty")
    stack = build_rewards([RewardConfig(name=name) for name in names], LAYOUT)
    assert stack.check(problem=PROBLEM, prompt=PLAIN) == []


def test_two_rewards_of_one_label_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def format(completions, **kwargs):\n    return [0.0] * len(completions)\n")
    configs = [RewardConfig(name="format"), RewardConfig(name=f"{file}:format")]
    with pytest.raises(RewardError, match="two rewards are called 'format'"):
        build_rewards(configs, LAYOUT)


@pytest.mark.parametrize(("value", "weight"), [(1e10, 1e6), (-1e10, 1e6), (1e300, 0.0)])
def test_a_weight_cannot_make_of_a_value_what_sums_cannot_hold(value, weight):
    stack = RewardStack([("mine", weight, lambda completions, **_: [value] * len(completions))])
    with pytest.raises(RewardError, match=r"'mine' returned 1e\+300|its weight 1e\+06 makes more"):
        stack.check(problem=PROBLEM, prompt=PLAIN)


@pytest.mark.parametrize("weight", [1e16, -1e308, math.nan, math.inf])
def test_a_weight_is_a_number_that_sums_can_hold(weight):
    with pytest.raises(ValueError, match="weight"):
        RewardConfig(name="correctness", weight=weight)


class _Logging:
    """A function that uses what TRL passes beside the columns, all of it required."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, completions, *, trainer_state, log_metric, log_extra, **kwargs):
        self.seen.append((trainer_state.global_step, trainer_state.max_steps))
        log_extra("upper", [text.upper() for text in completions])
        log_metric("words", sum(len(text.split()) for text in completions))
        return [1.0] * len(completions)


def _score(stack: RewardStack, *texts: str) -> list[Any]:
    return stack.score(
        problem=PROBLEM,
        prompt=PLAIN,
        completions=[completion(text) for text in texts],
        grades=[grade(Verdict.CORRECT) for _ in texts],
    )


def test_functions_are_told_the_step_and_log_metrics_as_in_trl():
    function = _Logging()
    stack = RewardStack([("mine", 1.0, function)])
    stack.check(problem=PROBLEM, prompt=PLAIN)  # what is logged while trying counts for nothing
    stack.begin_step(3, 10)
    _score(stack, "one two", "three")
    _score(stack, "four")
    assert function.seen == [(0, 1), (0, 1), (3, 10), (3, 10)]
    (name, tally), *_ = stack.logged().items()
    assert (name, tally.count, tally.mean) == ("rewards/words", 2, 2.0)
    stack.begin_step(4, 10)
    assert stack.logged() == {}


def test_a_function_of_one_completion_is_given_them_whole():
    def single(completion, log_metric, **kwargs):
        log_metric("length", len(completion))
        return 1.0

    stack = RewardStack([("mine", 1.0, one_by_one(single))])
    _score(stack, "1234", "12")
    assert stack.logged()["rewards/length"].mean == 3.0


@pytest.mark.parametrize("value", [math.nan, math.inf, "many"])
def test_logging_what_is_no_number_is_the_functions_failure(value):
    def bad(completions, log_metric, **kwargs):
        log_metric("x", value)
        return [1.0] * len(completions)

    stack = RewardStack([("bad", 1.0, bad)])
    with pytest.raises(RewardError, match=r"'bad' raised ValueError: .*test_stack.py, line"):
        stack.check(problem=PROBLEM, prompt=PLAIN)
    assert stack.logged() == {}


# --- when failures are too many


@pytest.mark.parametrize(
    ("limit", "stops_at"), [(0.0, 1), (0.05, 2), (0.1, 3), (0.5, 11), (0.9, 19)]
)
def test_always_failing(limit: float, stops_at: int) -> None:
    rate = FailureRate(limit)
    answers = [rate.add(failed=True) for _ in range(stops_at)]
    assert answers == [False] * (stops_at - 1) + [True]
    assert rate.failures == rate.groups == stops_at


def test_a_rare_failure_never_stops_and_a_burst_does() -> None:
    rate = FailureRate(0.1)
    assert not any(rate.add(failed=i % 20 == 0) for i in range(2_000))
    assert any(rate.add(failed=True) for _ in range(10))


def test_one_is_never() -> None:
    rate = FailureRate(1.0)
    assert not any(rate.add(failed=True) for _ in range(500))


def test_a_rate_goes_on_from_its_state() -> None:
    history = [i % 11 == 0 for i in range(150)] + [True] * 9
    for cut in (0, 5, 150, 152):
        whole, before, after = FailureRate(0.1), FailureRate(0.1), FailureRate(0.1)
        expected = [whole.add(failed=failed) for failed in history]
        got = [before.add(failed=failed) for failed in history[:cut]]
        after.load_state(json.loads(json.dumps(before.state())))
        got += [after.add(failed=failed) for failed in history[cut:]]
        assert got == expected
        assert (after.failures, after.groups) == (whole.failures, whole.groups)
    assert any(expected)
