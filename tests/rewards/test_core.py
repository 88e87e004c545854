"""One reward, the stack of them: names, parameters, weights, and every way to be wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from reward_calls import (
    BOXED,
    DAPO,
    HOSTILE,
    R1_ZERO,
    RIGHT,
    THINK,
    UNREADABLE,
    WRONG,
    XML,
    stack_of,
)

from grouper.config.schema import RewardConfig
from grouper.errors import ConfigError, RewardError, RunFolderError
from grouper.rewards import REWARDS, Completed, Group, RewardLog, RewardStack, build_rewards, reward
from grouper.rewards.core import AT_ONCE
from grouper.types import (
    AnswerFormat,
    Completion,
    FinishReason,
    Problem,
    Prompt,
    Reward,
    Tally,
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
RIGHT_TEXT = "<think>a</think><answer>4</answer>"
NEEDED = {"soft_overlong": {"max_tokens": 100, "buffer_tokens": 20}}


def completion(text: str) -> Completion:
    return Completion(
        token_ids=(7, 8),
        logprobs=(-0.1, -0.2),
        text=text,
        finish_reason=FinishReason.LENGTH,
        policy_version=0,
    )


TWO = [completion(RIGHT_TEXT), completion("no")]


def score(
    stack: RewardStack,
    notes: RewardLog | None = None,
    prompt: Prompt = PLAIN,
    completions: Sequence[Completion] = TWO,
) -> list[Reward]:
    grades = [RIGHT, WRONG][: len(completions)]
    return stack.score(
        Group(problem=PROBLEM, prompt=prompt, completions=completions, grades=grades), notes
    )


def run(function: Any, *, prompt: Prompt = PLAIN) -> list[Any]:
    return [r.total for r in score(stack_of(mine=function), prompt=prompt)]


def check(stack: RewardStack, right: str = RIGHT_TEXT) -> list[str]:
    return stack.check(problem=PROBLEM, prompt=PLAIN, right=right)


# --- one reward


def test_the_shortest_reward_of_the_docs_works_as_it_stands(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    code = page.partition("The shortest reward")[2].partition("```python\n")[2].partition("```")[0]
    assert len([line for line in code.splitlines() if line]) <= 5
    (tmp_path / "my_rewards.py").write_text(code)
    name = f"{tmp_path}/my_rewards.py:brevity"
    stack = build_rewards([RewardConfig(name=name, params={"most": 4})], XML)
    assert [r.total for r in score(stack)] == [-1.0, -0.5]
    assert stack.bounds == (-1.0, 0.0)


@reward(-1.0, 0.0)
def brevity(done: Completed, *, most: int = 400) -> float:
    return -min(1.0, len(done.text) / most)


@reward()
async def asks(done: Completed) -> float:
    return float(done.columns["difficulty"])


def test_a_function_of_ones_own_is_one_function_with_the_decorator() -> None:
    function = brevity(XML, most=2)
    assert function(prompts=["q", "q"], completions=["", [{"role": "a", "content": "xyz"}]]) == [
        0.0,
        -1.0,
    ]
    assert (function.bounds, function.__name__) == ((-1.0, 0.0), "brevity")
    assert run(function) == [-1.0, -1.0]
    assert run(asks(XML)) == [3.0, 3.0]


def test_what_a_completion_is_to_a_reward() -> None:
    seen: list[Completed] = []

    @reward()
    def look(done: Completed) -> float:
        seen.append(done)
        return 0.0

    fmt = R1_ZERO
    texts = [" 2+2 </think> <answer> 4 </answer>", "no"]
    score(stack_of(look=look(fmt)), completions=[completion(text) for text in texts])
    first, second = seen
    assert (first.text, first.whole) == (texts[0], f"<think>{texts[0]}")
    assert (first.answer, first.reference, second.answer) == ("4", "4", None)
    assert (first.grade, first.correct, second.correct) == (RIGHT, True, False)
    assert first.tags == ("<think>", "</think>", "<answer>", "</answer>")
    assert (first.columns["difficulty"], first.columns["prompts"]) == (3, "Q: 2+2?")
    assert first.columns["completion_ids"] == [7, 8]
    assert list(first.group) == [first, second]
    with pytest.raises(ValueError, match="format boxed has no tags"):
        _ = Completed(text="", format=BOXED).tags


@pytest.mark.parametrize(
    ("column", "reference"),
    [
        ("72", "72"),
        ("48 / 2 = 24\n#### 72", "72"),
        (r"so it is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("", ""),
    ],
)
def test_references(column: str, reference: str) -> None:
    for columns in ({"solution": column}, {"solution": "other", "answer": column}):
        assert Completed(text="", format=XML, columns=columns).reference == reference


def test_a_reward_outside_trl_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="needs a column"):
        REWARDS["correctness"](XML)(prompts=["q"], completions=["4"])


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("correctness", {"vlaue": 2.0}, "no setting 'vlaue' here. Did you mean value=2.0"),
        ("xml_tag_count", {"variant": "orignal"}, "should be 'default' or 'original'"),
        ("format", {"value": "much"}, "value: should be a number"),
        ("soft_overlong", {}, "max_tokens: this is required"),
        ("cosine", {"scale": 0.0, "unit": "lines"}, "greater than 0.*'tokens', 'characters'"),
    ],
)
def test_parameters_are_checked_when_a_reward_is_built(
    name: str, params: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=rf"rewards\.{name}\.params") as caught:
        REWARDS[name](XML, **params)
    caught.match(f"(?s){told}")


def test_tag_rewards_need_tags() -> None:
    for name in ("format", "soft_format", "tag_count", "xml_soft_format", "dapo_answer"):
        with pytest.raises(RewardError, match=f"'{name}' needs a prompt format with tags"):
            build_rewards([RewardConfig(name=name)], BOXED)
    check(build_rewards([RewardConfig(name="boxed_format")], BOXED))


@pytest.mark.parametrize("fmt", [XML, THINK, R1_ZERO, DAPO], ids=["xml", "think", "r1", "dapo"])
@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_keeps_its_range_on_hostile_text(name: str, fmt: AnswerFormat) -> None:
    function = REWARDS[name](fmt, **NEEDED.get(name, {}))
    low, high = function.bounds
    started = time.perf_counter()
    for grades in ([RIGHT] * len(HOSTILE), [WRONG] * len(HOSTILE)):
        values = function(
            prompts=["q"] * len(HOSTILE),
            completions=list(HOSTILE),
            grades=grades,
            reference_answer=["42"] * len(HOSTILE),
            completion_ids=[[1] * len(text) for text in HOSTILE],
        )
        assert all(math.isfinite(v) and low <= v <= high for v in values)
    assert time.perf_counter() - started < 2.0


ORIGINALS = {
    "xml": (XML, [name for name in REWARDS if name.startswith(("xml_", "lite_"))]),
    "think": (THINK, ["format", "reasoning_steps", "repetition_penalty"]),
    "dapo": (DAPO, [name for name in REWARDS if name.startswith("dapo_")]),
}


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_holds_up_an_original(text: str) -> None:
    for fmt, names in ORIGINALS.values():
        tags = fmt.tags
        assert tags is not None
        texts = (text, tags[0] + text, "".join(tags) + text, f"{tags[1]} {tags[2]}" * 2_000)
        for name in names:
            function = REWARDS[name](fmt, variant="original")
            started = time.perf_counter()
            function(prompts=["q"] * 4, completions=texts, reference_answer=["4"] * 4)
            assert time.perf_counter() - started < 1.0, name


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_can_be_pickled_and_explains_itself(name: str) -> None:
    """TRL's asynchronous worker sends the functions to another process."""
    valued = ("correctness", "format", "xml_correctness", "lite_numeric")
    params = {**NEEDED.get(name, {}), **({"value": 0.25} if name in valued else {})}
    function = REWARDS[name](XML, **params)
    copy = pickle.loads(pickle.dumps(function))
    assert (copy.__name__, copy.bounds) == (function.__name__, function.bounds)
    assert function.__name__ == name
    assert "Range" in (REWARDS[name].__doc__ or "")
    text = "<reasoning>\na\n</reasoning>\n<answer>\n42\n</answer>\n"
    columns = {
        "prompts": ["q"] * 2,
        "completions": [text, "no"],
        "grades": [RIGHT, WRONG],
        "reference_answer": ["42"] * 2,
        "completion_ids": [[1] * 90, [1]],
    }
    assert copy(**columns) == function(**columns)


# --- from names to functions

FILE = """
from grouper import reward

def brevity(prompts, completions, scale=1.0, **kwargs):
    return [scale / (1 + len(c)) for c in completions]

def closed(completions):
    return [0.0 for _ in completions]

@reward(0, "most")
def shortest(done, most=1.0):
    return most / (1 + len(done.text))
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    return file


def build(*configs: RewardConfig) -> RewardStack:
    return build_rewards(configs, XML)


def test_all_problems_at_once() -> None:
    with pytest.raises(RewardError) as caught:
        build(RewardConfig(name="corectness"), RewardConfig(name="missing.py:f"))
    assert "Did you mean 'correctness'" in str(caught.value)
    assert "missing.py" in str(caught.value)


def test_both_shapes_of_a_users_function_take_parameters(user_file: Path) -> None:
    stack = build(
        RewardConfig(name=f"{user_file}:brevity", params={"scale": 2.0}),
        RewardConfig(name=f"{user_file}:shortest", params={"most": 3.0}),
    )
    assert tuple(stack.weights) == ("brevity", "shortest")
    check(stack)
    assert score(stack)[1].components == {"brevity": 2 / 3, "shortest": 1.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{file}:brevty", "Did you mean 'brevity'"),
        ("{file}:closed", r"takes no \*\*kwargs.*decorator"),
        ("builtins:dir", r"'builtins:dir'.*\*\*kwargs"),  # it has no signature
    ],
)
def test_refusals(user_file: Path, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        build(RewardConfig(name=name.format(file=user_file)))


def test_two_rewards_of_one_label_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def format(completions, **kwargs):\n    return [0.0] * len(completions)\n")
    with pytest.raises(RewardError, match="two rewards are called 'format'"):
        build(RewardConfig(name="format"), RewardConfig(name=f"{file}:format"))


# --- the stack


def test_components_weights_and_totals() -> None:
    configs = [
        RewardConfig(name="correctness", weight=2.0),
        RewardConfig(name="format", weight=0.5),
    ]
    stack = build_rewards(configs, THINK)
    assert tuple(stack.weights) == ("correctness", "format")
    assert stack.weights == {"correctness": 2.0, "format": 0.5}
    first, second = score(stack)
    assert first.components == {"correctness": 1.0, "format": 1.0}
    assert (first.total, second.total) == (2.5, 0.0)


def test_an_unscored_reference_is_none_not_zero() -> None:
    (unscored,) = build(RewardConfig(name="correctness")).score(
        Group(PROBLEM, PLAIN, TWO[:1], [UNREADABLE])
    )
    assert (unscored.components, unscored.total) == ({"correctness": None}, None)


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

    assert run(trl_style, prompt=CHAT) == [2.0, 0.0]


def test_the_range_of_the_total() -> None:
    configs = [
        RewardConfig(name="correctness", weight=2.0),
        RewardConfig(name="cosine", weight=-1.0),
        RewardConfig(name="xml_tag_count", weight=0.0),
    ]
    assert build_rewards(configs, XML).bounds == (-1.0, 2.5)
    assert stack_of(mine=lambda **columns: [0.0]).bounds is None


def test_one_grade_per_completion() -> None:
    with pytest.raises(ValueError, match="not one grade per completion"):
        build(RewardConfig(name="correctness")).score(Group(PROBLEM, PLAIN, TWO, [RIGHT]))


# --- failures


def test_a_failure_is_contained_counted_and_reported() -> None:
    calls = itertools.count()

    def sometimes(**columns: Any) -> list[float]:
        if next(calls) == 1:
            raise RuntimeError("boom")
        return [1.0, 0.0]

    stack = stack_of(mine=sometimes, fine=(lambda **columns: [2.0, 2.0], {"weight": 0.5}))
    notes = RewardLog()
    assert [r.total for r in score(stack, notes)] == [2.0, 1.0]
    assert notes.events == []
    failed = score(stack, notes)
    assert [r.components for r in failed] == [{"mine": None, "fine": 2.0}] * 2
    assert [r.total for r in failed] == [None, None]  # not scored, never zero
    (event,) = notes.events
    assert "rewards/failed on gsm8k/test/0: the reward 'mine' raised RuntimeError: boom" in event
    assert [r.total for r in score(stack, notes)] == [2.0, 1.0]
    assert (notes.groups, {n: len(f) for n, f in notes.failures.items()}) == (3, {"mine": 1})
    stack.end_step(notes)


def test_without_notes_a_failure_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"'mine' returned \[0.0\], a list of 1"):
        run(lambda **columns: [0.0])


@pytest.mark.parametrize(
    ("limit", "groups", "failed", "stops"),
    [
        *[(0.0, 5, 0, False), (0.0, 5, 1, True)],
        *[(0.1, 1, 1, False), (0.1, 20, 2, False), (0.1, 3, 3, True)],  # counted as of twenty
        *[(0.1, 256, 25, False), (0.1, 256, 26, True), (1.0, 30, 30, False)],
    ],
)
def test_the_share_of_a_steps_groups_that_may_fail(
    limit: float, groups: int, failed: int, stops: bool
) -> None:
    stack = stack_of(mine=(lambda **_: [0.0, 0.0], {"max_failure_rate": limit}))
    error = RewardError("no", fix="Mend it.")
    arguments = {"completions": ["a", "b"], "prompts": ["q", "q"]}
    notes = RewardLog(
        groups=groups, failures={"mine": [(error, arguments)] * failed} if failed else {}
    )
    if not stops:
        stack.end_step(notes)
        return
    with pytest.raises(RewardError, match=f"{failed} of the step's {groups} groups"):
        stack.end_step(notes)


def test_too_many_failures_stop_the_run_and_show_the_input() -> None:
    def chokes(completions: Any, **columns: Any) -> list[float]:
        return [1.0 / (text != "no") for text in completions]

    def pairs(completions: Any, **columns: Any) -> list[float]:
        assert len(completions) == 1
        return [0.0]

    for function, told in (
        (chokes, "ZeroDivisionError.*It fails on the completion 'no' to 'Q: 2[+]2[?]'[.]"),
        (pairs, "on none of its completions alone; the first is"),
    ):
        stack, notes = stack_of(mine=function), RewardLog()
        for _ in range(3):
            score(stack, notes)
        with pytest.raises(RewardError, match=r"3 of the step's 3 groups") as caught:
            stack.end_step(notes)
        caught.match(told)
        caught.match("max_failure_rate, 0.1, of the step's groups")
        assert caught.value.where == "rewards.mine"


def test_what_took_too_long_is_not_tried_again_to_find_the_culprit() -> None:
    calls = itertools.count()

    async def waits(**_: Any) -> list[float]:
        next(calls)
        await asyncio.Event().wait()
        return []

    stack = stack_of(mine=(waits, {"timeout_seconds": 0.01, "max_failure_rate": 0}))
    notes = RewardLog()
    score(stack, notes)
    with pytest.raises(RewardError, match="It fails on this group, of whose completions the first"):
        stack.end_step(notes)
    assert next(calls) == 1


def test_functions_are_told_the_step_and_log_metrics_as_in_trl() -> None:
    seen = []

    def logs(completions, *, trainer_state, log_metric, log_extra, **kwargs):
        seen.append((trainer_state.global_step, trainer_state.max_steps))
        log_extra("upper", [text.upper() for text in completions])
        log_metric("words", sum(len(text.split()) for text in completions))
        return [1.0] * len(completions)

    stack, notes = stack_of(mine=logs), RewardLog(global_step=3, max_steps=10)
    check(stack)  # what is logged while trying counts for nothing
    score(stack, notes, completions=[completion("one two"), completion("three")])
    score(stack, notes, completions=[completion("four")])
    assert seen == [(0, 1), (0, 1), (3, 10), (3, 10)]
    ((name, tally),) = notes.tallies().items()
    assert (name, tally.count, tally.mean) == ("rewards/words", 2, 2.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, "many"])
def test_logging_what_is_no_number_is_the_functions_failure(value: Any) -> None:
    def bad(completions, log_metric, **kwargs):
        log_metric("x", value)
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=r"'bad' raised ValueError: .*test_core.py, line"):
        check(stack_of(bad=bad))


# --- tried before a run


def test_check_finds_what_varies_and_reports_all_at_once() -> None:
    ticks = itertools.count()
    stack = stack_of(
        varies=lambda **columns: [float(next(ticks))] * len(columns["completions"]),
        short=lambda **columns: [0.0],
        fine=lambda **columns: [0.0] * len(columns["completions"]),
    )
    with pytest.raises(RewardError) as caught:
        check(stack)
    text = str(caught.value)
    assert "'varies' gave" in text
    assert "declare it with `deterministic: false`" in text
    assert "'short' returned" in text
    assert "fine" not in text


def test_check_passes_the_built_ins() -> None:
    names = ("correctness", "format", "soft_format", "tag_count", "boxed_format")
    more = ("xml_integer", "lite_numeric", "repetition_penalty")
    assert check(build(*[RewardConfig(name=name) for name in names + more])) == []


def least(function: Any, weight: float = 1.0) -> list[str]:
    return check(stack_of(mine=(function, {"weight": weight})))


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
    assert least(lambda completions, **_: [0.0] * len(completions), weight=-1.0) == []
    assert least(lambda completions, **_: [None] * len(completions)) == []
    assert least(lambda **_: [None, 0.0, 0.0, 0.0]) == []
    assert least(lambda **_: [0.0, None, None, None]) == []
    for sign in (1.0, -1.0):  # of length
        assert least(lambda completions, s=sign, **_: [s * len(text) for text in completions]) == []


def test_the_stated_range_says_what_the_minimum_is() -> None:
    def constant(completions: Any, **_: Any) -> list[float]:
        return [0.5] * len(completions)

    assert len(least(constant)) == 1
    constant.bounds = (0.0, 1.0)  # type: ignore[attr-defined] # how a user states a range
    assert least(constant) == []
    constant.bounds = (0.5, 1.0)  # type: ignore[attr-defined]
    assert len(least(constant)) == 1


# --- what varies is asked once


def test_what_a_function_that_varies_answers_is_kept_at_once(tmp_path: Path) -> None:
    path, calls = tmp_path / "answers.jsonl", itertools.count(1)

    def judge(completions: Any, log_metric: Any, **_: Any) -> list[float]:
        number = next(calls)
        log_metric("asked", number)
        if number == 3:
            raise TimeoutError("busy")
        return [float(number)] * len(completions)

    def once() -> tuple[list[Any], list[str], Any]:
        stack = stack_of(judge=(judge, {"deterministic": False}), fine=brevity(XML))
        stack.remember(path)
        notes = RewardLog(place="grpo 4")
        groups = (("a", "b"), ("c",), ("d",), ("a", "b"))
        scored = [score(stack, notes, completions=[*map(completion, group)]) for group in groups]
        seen = [[r.components["judge"] for r in group] for group in scored]
        return seen, notes.events, notes.tallies()

    first = once()
    # The same question of the same step is answered alike; what failed stays failed.
    assert first[0] == [[1.0, 1.0], [2.0], [None], [1.0, 1.0]]
    assert len(first[1]) == 1
    whole = path.read_text(encoding="utf-8")
    assert "brevity" not in whole
    assert once() == first
    assert path.read_text(encoding="utf-8") == whole
    assert next(calls) == 4
    # A kill in the middle of a line: that answer is asked for again, and the file stays whole.
    path.write_text(whole[:-20], encoding="utf-8")
    assert once()[0] == [[1.0, 1.0], [2.0], [5.0], [1.0, 1.0]]
    assert [json.loads(line)["reward"] for line in path.read_text().splitlines()[-1:]] == ["judge"]
    # Another step asks anew.
    stack = stack_of(judge=(judge, {"deterministic": False}))
    stack.remember(path)
    assert score(stack, RewardLog(place="grpo 5"))[0].total == 6.0


class Judge:
    """Answers once so many groups have asked it, or else not at all."""

    def __init__(self, wanted: int) -> None:
        self.gate, self.wanted = asyncio.Event(), wanted
        self.asked = self.inside = self.most = 0

    async def __call__(self, completions: Any, log_metric: Any, **_: Any) -> list[float]:
        self.asked, self.inside = self.asked + 1, self.inside + len(completions)
        self.most = max(self.most, self.inside)
        number = self.asked
        if number >= self.wanted:
            self.gate.set()
        await asyncio.wait_for(self.gate.wait(), 10)
        self.inside -= len(completions)
        log_metric("number", number)
        if completions[0] == "bad":
            raise ValueError("no")
        return [number + len(text) / 100 for text in completions]


def score_all(stack: RewardStack, notes: RewardLog, *texts: Sequence[str]) -> list[list[Any]]:
    groups = (
        Group(PROBLEM, PLAIN, [*map(completion, of_group)], [RIGHT] * len(of_group))
        for of_group in texts
    )
    return [[r.components["judge"] for r in found] for found in stack.score_all(groups, notes)]


def test_async_functions_score_several_groups_at_once() -> None:
    """A judge that takes three seconds took 48 for the sixteen groups of a step."""
    judge, notes = Judge(wanted=4), RewardLog(place="grpo 1")
    groups = [[f"{n}" * n] * 8 for n in range(1, 7)]
    found = score_all(stack_of(judge=judge), notes, *groups)
    assert found == [[n + n / 100] * 8 for n in range(1, 7)]
    assert judge.most == AT_ONCE == 32
    assert notes.groups == 6
    assert notes.tallies()["rewards/number"] == Tally.of(range(1, 7))


def test_a_group_larger_than_what_may_be_asked_at_once_is_asked_alone() -> None:
    judge = Judge(wanted=1)
    found = score_all(stack_of(judge=judge), RewardLog(), ["a"] * 40, ["b"] * 40)
    assert [len(values) for values in found] == [40, 40]
    assert judge.most == 40


def test_one_of_several_groups_that_fails_is_noted_alone(tmp_path: Path) -> None:
    stack = stack_of(judge=(Judge(wanted=3), {"deterministic": False}))
    stack.remember(tmp_path / "answers.jsonl")
    groups, notes = (["a"], ["bad"], ["a"], ["c"]), RewardLog(place="grpo 1")
    # The same question is asked once, also while nobody has answered it yet.
    found = score_all(stack, notes, *groups)
    assert found == [[1.01], [None], [1.01], [3.01]]
    (event,) = notes.events
    assert "ValueError: no" in event
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["logged"] for row in rows] == [[["number", n]] for n in (1, 2, 3)]
    # A resumed run reads it all, and asks nobody.
    again, later = (
        stack_of(judge=(Judge(wanted=99), {"deterministic": False})),
        RewardLog(place="grpo 1"),
    )
    again._varying = stack._varying
    again.remember(tmp_path / "answers.jsonl")
    assert score_all(again, later, *groups) == found
    assert later.tallies() == notes.tallies()


def test_a_long_run_does_not_fill_the_memory_with_what_was_answered(tmp_path: Path) -> None:
    def judge(completions: Any, **_: Any) -> list[float]:
        return [0.5] * len(completions)

    path = tmp_path / "answers.jsonl"
    stack = stack_of(judge=(judge, {"deterministic": False}))
    stack.remember(path)
    for step in range(3):
        notes = RewardLog(place=f"grpo {step}")
        score(stack, notes)
        stack.end_step(notes)
    assert stack._answers == {}
    # A resumed run still needs those of the steps that it draws again, and drops each after it.
    again = stack_of(judge=(judge, {"deterministic": False}))
    again.remember(path)
    again.end_step(RewardLog(place="grpo 1"))
    assert sorted(again._answers) == ["grpo 0", "grpo 2"]


@pytest.mark.parametrize("line", ["{", "{}", "[]"])
def test_answers_that_are_damaged_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "answers.jsonl").write_text(f"{line}\n")
    with pytest.raises(RunFolderError, match="what rewards have answered cannot be read"):
        stack_of().remember(tmp_path / "answers.jsonl")


def test_a_reward_that_is_declared_to_vary_is_allowed_and_said() -> None:
    numbers = itertools.count()

    def judge(completions: Any, **_: Any) -> list[float]:
        return [next(numbers) / 1e3 + (len(text) > 9) for text in completions]

    (warning,) = check(stack_of(judge=(judge, {"deterministic": False})), right="long enough" * 9)
    assert "'judge' is declared as not deterministic: another run will differ" in warning
