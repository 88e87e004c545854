"""Rewards for being right, for the layout, the length and the style, by hand."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
from reward_calls import BOXED, R1_ZERO, RIGHT, THINK, UNREADABLE, WRONG, grade, score, score_grade

from grouper.errors import GrouperError
from grouper.prompts.formats import FORMATS
from grouper.rewards import REWARDS
from grouper.rewards.builtin import format_holds
from grouper.types import AnswerContract, AnswerFormat, AnswerKind, Verdict


def test_uses_the_grades_it_is_given() -> None:
    grades = [
        grade(verdict)
        for verdict in (Verdict.CORRECT, Verdict.TIMEOUT, Verdict.NO_ANSWER, Verdict.NOT_SCORED)
    ]
    function = REWARDS["correctness"](BOXED, value=2.0)
    scores = function(prompts=["q"] * 4, completions=["?"] * 4, grades=grades)
    assert scores == [2.0, 0.0, 0.0, None]


@pytest.mark.parametrize(("timeout", "expected"), [(0.0, 0.0), (-0.5, -0.5), (None, None)])
def test_the_recipe_says_what_an_unjudged_answer_earns(
    timeout: float | None, expected: float | None
) -> None:
    grades = [grade(verdict) for verdict in (Verdict.TIMEOUT, Verdict.CRASH)]
    function = REWARDS["correctness"](BOXED, timeout=timeout)
    found = function(prompts=["q"] * 2, completions=["?"] * 2, grades=grades)
    assert found == [expected, expected]


@pytest.mark.parametrize("column", ["reference_answer", "answer", "solution"])
def test_grades_by_itself_as_trl_calls_it(column: str) -> None:
    function = REWARDS["correctness"](BOXED)
    completions = [[{"role": "assistant", "content": text}] for text in (r"\boxed{4.0}", "4")]
    columns = {column: ["2+2=4\n#### 4", "4"], "trainer_state": None}
    assert function(prompts=[[]] * 2, completions=completions, **columns) == [1.0, 0.0]


def test_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="needs a column"):
        REWARDS["correctness"](BOXED)(prompts=["q"], completions=["4"])


def test_the_accuracy_of_an_unreadable_reference() -> None:
    grades = [
        grade(verdict) for verdict in (Verdict.CORRECT, Verdict.INCORRECT, Verdict.NOT_SCORED)
    ]
    given = {"prompts": ["q"] * 3, "completions": ["?"] * 3, "grades": grades}
    assert REWARDS["accuracy"](BOXED)(**given) == [1.0, 0.0, None]
    assert REWARDS["accuracy"](BOXED, variant="original")(**given) == [1.0, 0.0, 0.5]


# --- layout


CONTRACT = AnswerContract(kind=AnswerKind.TAG, open="<answer>", close="</answer>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
FORMAT = AnswerFormat(name="t", template="{reasoning}{answer}", contract=CONTRACT, tags=TAGS)
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


def form(name: str, text: str, fmt: AnswerFormat = FORMAT) -> Any:
    return score(name, fmt, text)


@pytest.mark.parametrize(("text", "strict", "soft", "tags"), CASES)
def test_formats(text: str, strict: float, soft: float, tags: float) -> None:
    assert form("format", text) == strict
    assert form("soft_format", text) == soft
    assert form("tag_count", text) == tags


def test_exact_tags_do_not_pay_where_the_grader_reads_no_answer() -> None:
    """R1-Zero's layout has a space between the pairs, and its answers are read after that."""
    fmt = FORMATS["r1-zero"]
    assert form("format", "a</think> <answer>4</answer>", fmt) == 1
    assert form("format", "a</think><answer>4</answer>", fmt) == 0


def test_what_the_prompt_opened_counts_as_written() -> None:
    rest = GOOD.removeprefix("<think>")
    assert [form(name, rest, OPENED) for name in ("format", "soft_format", "tag_count")] == [1] * 3
    assert form("format", GOOD, OPENED) == 0  # opened twice
    assert form("tag_count", GOOD, OPENED) == 0.75


def test_messages_and_strings_score_the_same() -> None:
    chat = [[{"role": "assistant", "content": GOOD}]]
    assert REWARDS["format"](FORMAT)(prompts=["q"], completions=chat) == [1.0]


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
    assert form("boxed_format", text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"so \boxed{4}", 2),
        (r"\boxed{4} or \boxed{5}", 1),
        (r"\boxed{}", 1),
        (r"\boxed{4", 1),
        ("4", 0),
        ("a box, boxed", 0),
    ],
)
def test_a_part_of_the_box_is_paid_for_a_part(text: str, value: float) -> None:
    assert score("boxed_format", BOXED, text, value=2.0, partial=0.5) == value


ECHO = "<reasoning>\nyour working, step by step\n</reasoning>\n<answer>\n{}\n</answer>"


@pytest.mark.parametrize("name", ["format", "soft_format", "tag_count"])
def test_the_placeholder_of_the_instruction_is_no_format(name: str) -> None:
    """A third of a base model's answers were such copies, and counted as format held."""
    xml = FORMATS["xml"]
    assert form(name, ECHO.format("the final result and nothing else"), xml) == 0
    assert form(name, ECHO.format(" The final result\nand nothing else."), xml) == 0
    assert form(name, ECHO.format("72"), xml) == 1


@pytest.mark.parametrize(
    ("answer", "held"), [("answer here", False), ("Answer  Here.", False), ("here", True)]
)
def test_placeholders_of_published_prompts(answer: str, held: bool) -> None:
    fmt = FORMATS["r1-zero"]
    assert format_holds(f" so </think> <answer> {answer} </answer>", fmt) is held


@pytest.mark.parametrize(
    ("example", "answer", "held"),
    [
        # A worked example shows how to answer, and its answer may be right.
        ("42", "42", True),
        ("B", "B", True),
        ("yes", "yes", True),
        ("x + 1", "x + 1", True),
        ("...", "...", False),
        ("your answer", "your answer", False),
        ("answer", "Answer", False),
    ],
)
def test_the_answer_of_a_worked_example_is_no_placeholder(
    example: str, answer: str, held: bool
) -> None:
    fmt = replace(FORMATS["xml"], system=ECHO.format(example))
    assert format_holds(ECHO.format(answer), fmt) is held


def test_a_box_of_the_next_turn_is_not_paid_for() -> None:
    assert form("boxed_format", r"Human: so \boxed{4}", BOXED) == 0


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
    form(name, text)
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
    assert form("think_format", text, BOXED) == value
    opened = form("think_format", text.removeprefix("<think>"), R1_ZERO)
    assert opened == value * text.startswith("<think>")


# --- length


@pytest.mark.parametrize(
    ("characters", "right", "wrong"),
    [
        (0, 1.0, -0.5),
        (500, 0.9, -0.3),
        (1000, 0.8, -0.1),
        (2000, 0.8, -0.1),  # clamped
        (100_000, 0.8, -0.1),
    ],
)
def test_cosine(characters: int, right: float, wrong: float) -> None:
    text = "x" * characters
    assert score_grade("cosine", RIGHT, text) == pytest.approx(right)
    assert score_grade("cosine", WRONG, text) == pytest.approx(wrong)
    assert score_grade("cosine", UNREADABLE, text) is None


def test_the_original_cosine_rises_again() -> None:
    assert score_grade("cosine", RIGHT, "x" * 2000, variant="original") == pytest.approx(1.0)
    assert score_grade("cosine", WRONG, "x" * 2000, variant="original") == pytest.approx(-0.5)
    assert score_grade("cosine", UNREADABLE, "x" * 1000, variant="original") == pytest.approx(-0.1)


def test_cosine_is_settable() -> None:
    params = {"min_correct": 0.0, "max_correct": 2.0, "scale": 10.0}
    assert score_grade("cosine", RIGHT, "x" * 5, **params) == pytest.approx(1.0)
    assert score_grade("cosine", WRONG, "", min_wrong=-3.0) == -3.0
    with pytest.raises(GrouperError, match="scale: should be greater than 0"):
        score_grade("cosine", RIGHT, scale=0)


def lengths(prompts: list[str], sizes: list[int], grades: list[Any]) -> list[Any]:
    return list(
        REWARDS["length"](THINK)(
            prompts=prompts,
            completions=["x"] * len(sizes),
            grades=grades,
            completion_ids=[[0] * size for size in sizes],
        )
    )


def test_length_within_one_prompt() -> None:
    grades = [RIGHT, RIGHT, WRONG, WRONG, UNREADABLE]
    assert lengths(["q"] * 5, [10, 20, 10, 30, 30], grades) == [0.5, 0.0, 0.0, -0.5, None]
    assert lengths(["q"] * 2, [7, 7], [RIGHT, WRONG]) == [0.0, 0.0]


def test_length_compares_the_completions_of_one_prompt_only() -> None:
    assert lengths(["a", "b", "a", "b"], [10, 100, 20, 300], [RIGHT] * 4) == [0.5, 0.5, -0.5, -0.5]


def test_the_unit_of_a_length_is_named() -> None:
    given: dict[str, Any] = {
        "prompts": ["q"] * 2,
        "completions": ["a b c", "abcd efgh"],
        "grades": [RIGHT, RIGHT],
        "completion_ids": [[1] * 7, [1] * 6],
    }
    assert REWARDS["length"](THINK)(**given) == [-0.5, 0.5]
    assert REWARDS["length"](THINK, unit="characters")(**given) == [0.5, -0.5]
    assert REWARDS["length"](THINK, unit="words")(**given) == [-0.5, 0.5]
    for unit, scale in (("tokens", 7), ("characters", 5), ("words", 3)):
        assert REWARDS["cosine"](THINK, unit=unit, scale=scale)(**given)[0] == pytest.approx(0.8)
    with pytest.raises(GrouperError, match="'tokens', 'characters' or 'words'"):
        REWARDS["length"](THINK, unit="bytes")


def test_tokens_are_never_guessed() -> None:
    for function in (
        REWARDS["length"](THINK),
        REWARDS["soft_overlong"](THINK, max_tokens=4, buffer_tokens=2),
        REWARDS["cosine"](THINK, unit="tokens"),
    ):
        with pytest.raises(ValueError, match="needs completion_ids"):
            function(prompts=["q"], completions=["ab"], grades=[RIGHT])


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0), (75, 0), (80, -0.2), (100, -1), (101, -1), (9999, -1)]
)
def test_soft_overlong(tokens: int, value: float) -> None:
    function = REWARDS["soft_overlong"](THINK, max_tokens=100, buffer_tokens=25)
    (got,) = function(prompts=["q"], completions=["x"], completion_ids=[[0] * tokens])
    assert got == pytest.approx(value)


@pytest.mark.parametrize("buffer", [0, 101, -1])
def test_an_impossible_buffer_is_refused(buffer: int) -> None:
    with pytest.raises(GrouperError, match="buffer_tokens"):
        REWARDS["soft_overlong"](THINK, max_tokens=100, buffer_tokens=buffer)(
            prompts=["q"], completions=["x"], completion_ids=[[0]]
        )


# --- style


@pytest.mark.parametrize(
    ("text", "markers"),
    [
        ("", 0),
        ("4 is the answer", 0),
        ("Step 1: add. Step 2: halve.", 2),
        ("1. add\n2. halve\n3. done", 3),
        ("- add\n* halve", 2),
        ("First, add. Second, halve. Next, check. Finally, 4.", 4),
        ("First add\nFinally halve", 2),
        ("firstly\n-5 + 3\n2.5 is it\nStep by step", 0),
        ("Step 1: a\n" * 50, 50),
    ],
)
def test_reasoning_steps(text: str, markers: int) -> None:
    assert score("reasoning_steps", THINK, text) == pytest.approx(min(1, markers / 3))
    assert score("reasoning_steps", THINK, text, enough=100) == pytest.approx(markers / 100)


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ("", 0),
        ("two words", 0),
        ("a b c d", 0),
        ("a b c a b c", 1 / 4),  # abc bca cab abc
        ("A b c a B c", 1 / 4),
        ("x " * 12, 9 / 10),
    ],
)
def test_repetition(text: str, repeated: float) -> None:
    assert score("repetition_penalty", THINK, text) == pytest.approx(-0.1 * repeated)
    assert score("repetition_penalty", THINK, text, max_penalty=-1) == pytest.approx(-repeated)


def test_no_repetition_is_zero_and_not_minus_zero() -> None:
    for text in ("a b c d", "two words"):
        assert math.copysign(1, score("repetition_penalty", THINK, text)) == 1


def test_repetition_in_tokens_and_characters() -> None:
    function = REWARDS["repetition_penalty"](THINK, unit="tokens", n=2)
    (value,) = function(prompts=["q"], completions=["one"], completion_ids=[[5, 6, 5, 6]])
    assert value == pytest.approx(-0.1 / 3)
    assert score("repetition_penalty", THINK, "abAb", unit="characters", n=2) == pytest.approx(
        -0.1 / 3
    )
    with pytest.raises(ValueError, match="needs completion_ids"):
        function(prompts=["q"], completions=["one"])
    with pytest.raises(GrouperError, match="unit: should be 'tokens'"):
        score("repetition_penalty", THINK, "x", unit="lines")


def test_shorter_n_grams() -> None:
    assert score("repetition_penalty", THINK, "a a b", n=1) == pytest.approx(-0.1 / 3)


def test_paying_for_repetition_is_refused() -> None:
    with pytest.raises(GrouperError, match="max_penalty: should be less than or equal to 0"):
        score("repetition_penalty", THINK, "x", max_penalty=0.1)
    with pytest.raises(GrouperError, match="enough: should be"):
        score("reasoning_steps", THINK, "x", enough=0)
