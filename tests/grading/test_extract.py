"""Where the answer stands: each contract, the last one before the next turn, reasons for none."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from grouper.grading import extract
from grouper.types import AnswerContract, AnswerKind

TAG = AnswerContract(
    kind=AnswerKind.TAG, open="<answer>", close="</answer>", turn_markers=("\nUser:",)
)
BOXED = AnswerContract(kind=AnswerKind.BOXED, turn_markers=("Human:",))
HASHES = AnswerContract(kind=AnswerKind.HASHES)
LAST = AnswerContract(kind=AnswerKind.LAST_NUMBER)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>42</answer>", "42"),
        ("<answer>\n 42 \n</answer> bye", "42"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>5</answer>7</answer>", "5"),
        ("<answer><answer>5</answer></answer>", "5"),
        ("<answer>5</answer>\nUser: more\n<answer>6</answer>", "5"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("He is\nUser: Bob. <answer>42</answer>", "42"),
        ("\nUser: <answer>5</answer>\nUser: more <answer>6</answer>", "5"),
    ],
)
def test_tag(text: str, answer: str) -> None:
    assert extract(text, TAG).answer == answer


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no <answer>"),
        ("42", "no <answer>"),
        ("</answer>42<answer>", "not closed"),
        ("<answer>42", "not closed"),
        ("<answer> \n </answer>", "empty"),
        ("\nUser: 42", "no <answer>"),
    ],
)
def test_tag_without_answer(text: str, reason: str) -> None:
    found = extract(text, TAG)
    assert found.answer is None
    assert reason in found.reason


THINK = AnswerContract(
    kind=AnswerKind.TAG,
    open="<answer>",
    close="</answer>",
    reasoning=("<think>", "</think>"),
    turn_markers=("Human:", "\nQuestion:"),
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Human: is a word here. </think> <answer>5</answer>", "5"),
        ("<think>a\nQuestion: what? </think> <answer>5</answer>", "5"),
        ("<think> <answer>3</answer> Human: </think> <answer>5</answer>", "5"),
        ("x </think> <answer>5</answer> Human: y <think> z </think> <answer>6</answer>", "5"),
        ("<answer>5</answer> Human: y <think> z </think> <answer>6</answer>", "5"),
        ("x </think> <answer>5</answer> or <answer>7</answer> Human: <answer>6</answer>", "7"),
    ],
)
def test_turn_markers_count_after_a_complete_answer(text: str, answer: str) -> None:
    assert extract(text, THINK).answer == answer


def test_an_answer_before_other_reasoning_is_not_inside_it() -> None:
    assert extract("<answer>5</answer> <think> or so </think>", THINK).answer == "5"
    assert extract("<answer>5</answer> or so </think>", THINK).answer is None


def test_an_answer_that_the_end_of_the_reasoning_opens_ends_the_turn_too() -> None:
    contract = replace(THINK, open="</think> <answer>")
    text = "a Human: b </think> <answer>1</answer>\nHuman: c </think> <answer>2</answer>"
    assert extract(text, contract).answer == "1"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<think> \boxed{42} </think> Some text.", None),
        (r"<think> \boxed{42} </think> \boxed{43}", "43"),
        (r"\boxed{42} </think> \boxed{43} and \boxed{44}", "44"),
        (r"<think> \boxed{42}", None),
        (r"\boxed{41} <think> \boxed{42}", None),
        (r"<think> a </think> \boxed{41} <think> \boxed{42}", None),
        (r"<think> a </think> <think> b </think> \boxed{41}", "41"),
        (r"<think> Human: a </think> \boxed{41} Human: b \boxed{42}", "41"),
        (r"\boxed{41} Human: b <think> c </think> \boxed{42}", "41"),
        (r"<think> a </think> \boxed{41} Human: b <think> c </think> \boxed{42}", "41"),
    ],
)
def test_what_is_boxed_while_thinking_is_no_answer(text: str, answer: str | None) -> None:
    assert extract(text, BOXED).answer == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{42}", "42"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\fbox{3}", "3"),
        (r"\boxed 2$", "2"),
        (r"\boxed {7}", "7"),
        (r"\boxed{17} or \boxed{18}", "18"),
        (r"\boxed{18} Human: what? \boxed{5}", "18"),
        (r"\boxed{18}. Check: 18/2 = 9", "18"),
        ("\\boxed\n{7}", "7"),
        (r"\boxed{\boxed{310}, 527}", r"\boxed{310}, 527"),
        (r"\boxed{\boxed{1} or \boxed{2}} done", r"\boxed{1} or \boxed{2}"),
        (r"\boxed{1} and {a \boxed{2}}", "2"),
        (r"\boxed{3 so \boxed{5}", "5"),
        (r"\boxed{1} \boxed{2, \fbox{3}}", r"2, \fbox{3}"),
        (r"x &= 5 \\\boxed{5}", "5"),  # after a line break of LaTeX
        (r"so \\boxed{\frac{1}{2}}", r"\frac{1}{2}"),  # doubled, as in JSON
        (r"\\boxed{1} and \boxed{2}", "2"),
    ],
)
def test_boxed(text: str, answer: str) -> None:
    assert extract(text, BOXED).answer == answer


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("42", "no \\boxed"),
        (r"\mbox{42}", "no \\boxed"),
        (r"\boxed{42", "not closed"),
        (r"\boxed{1} then \boxed{2", "not closed"),
        (r"\boxed{}", "empty"),
        (r"\boxed", "nothing after"),
        ("the box", "no \\boxed"),
    ],
)
def test_boxed_without_answer(text: str, reason: str) -> None:
    found = extract(text, BOXED)
    assert found.answer is None
    assert reason in found.reason


def test_hashes() -> None:
    assert extract("9*8=72\n#### 72\nmore", HASHES).answer == "72"
    assert extract("#### 1\n#### -2", HASHES).answer == "-2"
    assert extract("72", HASHES).reason == "no ####"
    assert extract("####\n72", HASHES).reason == "the answer is empty"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7-5", "5"),
        ("it is -3.5.", "-3.5"),
        ("$1,234.50 in total", "$1,234.50"),
        ("3/4 of it", "3/4"),
        ("50% of 12,13", "13"),
        ("18. Good.", "18"),
        ("x=-2", "-2"),
        ("about .5", ".5"),
        (r"it is 2\times10^3.", r"2\times10^3"),
        ("2 × 10³ in all", "2 × 10³"),
        (r"so $\frac{1}{2}$.", r"\frac{1}{2}"),
        (r"so $-\dfrac{1}{2}$.", r"-\dfrac{1}{2}"),
        (r"3\frac{1}{2} cups", r"3\frac{1}{2}"),
        ("needs 3 1/2 cups", "3 1/2"),
        ("needs 3½ cups", "3½"),
        ("1 234 567 people", "1 234 567"),
        (r"1{,}234 people", r"1{,}234"),
        ("2^{10} ways", "2^{10}"),
        ("18 cm^2", "18"),
        ("5, then 12 345", "345"),
        ("2 of 3 1/x", "1"),
    ],
)
def test_last_number(text: str, answer: str) -> None:
    assert extract(text, LAST).answer == answer


def test_no_number() -> None:
    assert extract("none", LAST).reason == "no number"
    assert extract("only x^2", LAST).reason == "no number"


@pytest.mark.parametrize("contract", [TAG, BOXED, HASHES, LAST], ids=lambda c: c.kind.value)
@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 120_000,
        r"\boxed{" * 150_000,
        "#" * 1_000_000,
        "1" * 1_000_000,
        "{}\x00\u202e" * 250_000,
        r"\boxed{1} " * 100_000,
        r"\boxed{" * 70_000 + "1" + "}" * 70_000,
        r"\boxed{" * 100_000 + r"\boxed{1}",
        r"\frac{" * 150_000 + "1",
    ],
    ids=["tags", "boxes", "hashes", "digits", "binary", "closed", "nested", "open", "fractions"],
)
def test_a_megabyte_is_fast(contract: AnswerContract, text: str) -> None:
    started = time.perf_counter()
    extract(text, contract)
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so x = −5", "−5"),
        ("it is –5", "–5"),
        ("pages 3–5", "5"),
        ("about 1.5e3", "1.5e3"),
        ("5e", "5"),
    ],
)
def test_signs_and_exponents_belong_to_the_last_number(text: str, answer: str) -> None:
    assert extract(text, AnswerContract(kind=AnswerKind.LAST_NUMBER)).answer == answer
