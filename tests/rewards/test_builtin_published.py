"""The published rewards by hand, and their original variants beside the published functions."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference_functions import count_xml
from reward_calls import DAPO, R1_ZERO, RIGHT, UNREADABLE, WRONG, XML, score, score_grade

from grouper.rewards.builtin import plain_number


@pytest.mark.parametrize(
    ("text", "whole", "first"),
    [
        ("42", 42, 42),
        ("-3.5", -3.5, -3.5),
        (".5", 0.5, 0.5),
        ("1,234,567.8", 1234567.8, 1234567.8),
        ("$12", 12, 12),
        ("12%", None, 12),
        ("1/2", None, 1),
        ("7-5", None, 7),
        ("1e5", 1e5, 1e5),
        ("-2.5E-1", -0.25, -0.25),
        ("7.", 7, 7),
        ("1e999", None, None),
        ("2e", None, 2),
        ("1,200.", 1200, 1200),
        ("0,1", None, 0),
        ("-330,90", None, -330),
        ("12,3456", None, 12),
        ("nan", None, None),
        ("inf", None, None),
        ("٤٢", None, None),
        ("", None, None),
        ("9" * 301, None, None),
    ],
)
def test_plain_numbers(text: str, whole: float | None, first: float | None) -> None:
    assert plain_number(text) == whole
    assert plain_number(text, first=True) == first


# --- A


ONE_LINE = "<reasoning>\nonly one\n</reasoning>\n<answer>\n42\n</answer>\n"
LINES = "<reasoning>\none\ntwo\n</reasoning>\n<answer>\n42\n</answer>"


@pytest.mark.parametrize(
    ("text", "reference", "value"),
    [
        (LINES, "42", 2.0),
        (LINES, " 42 ", 2.0),
        ("<answer>1234</answer>", "1,234", 2.0),  # commas leave the reference,
        ("<answer>1,234</answer>", "1234", 0.0),  # not the answer
        ("<answer>42.0</answer>", "42", 0.0),  # the text counts, not the number
        ("<answer>41</answer> no, <answer>42</answer>", "42", 2.0),  # the last tag
        ("<answer>42</answer> no, <answer>41</answer>", "42", 0.0),
        ("<answer>41 or 42</answer>", "42", 0.0),
        ("<answer>42", "42", 0.0),
        ("42", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_xml_correctness(text: str, reference: str, value: float) -> None:
    assert score("xml_correctness", XML, text, reference) == value


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("42", 0.5),
        ("007", 0.5),
        ("-4", 0),
        ("4.0", 0),
        ("1,000", 0),
        ("4 2", 0),
        ("٤", 0),
        ("²", 0),
    ],
)
def test_xml_integer(answer: str, value: float) -> None:
    assert score("xml_integer", XML, f"<answer>\n{answer}\n</answer>") == value
    assert score("xml_integer", XML, answer) == 0


def test_the_published_digits_are_those_of_any_script() -> None:
    for answer in ("٤", "²"):
        assert score("xml_integer", XML, f"<answer>{answer}</answer>", variant="original") == 0.5


FORMAT_CASES = [
    # text, strict, soft, original strict, original soft
    (LINES, 0.5, 0.5, 0, 0),  # reasoning over two lines
    (LINES + "\n", 0.5, 0.5, 0, 0),
    (ONE_LINE, 0.5, 0.5, 0.5, 0),  # `<reasoning>\n` already ends the original's soft line
    (ONE_LINE.rstrip(), 0.5, 0.5, 0, 0),
    ("<reasoning>a</reasoning> <answer>4</answer>", 0, 0.5, 0, 0.5),
    ("<reasoning>a</reasoning>\n\n<answer>4</answer>so", 0, 0.5, 0, 0.5),
    ("hm <reasoning>a</reasoning><answer>4</answer>", 0, 0.5, 0, 0),
    (ONE_LINE + "more", 0, 0.5, 0, 0),
    (ONE_LINE.replace("\n</answer>", "</answer>"), 0, 0.5, 0, 0),
    (" " + ONE_LINE, 0, 0.5, 0, 0),
    ("<reasoning>\n\n</reasoning>\n<answer>\n\n</answer>\n", 0, 0.5, 0.5, 0),
    ("<reasoning>a</reasoning> so <answer>4</answer>", 0, 0, 0, 0),
    (ONE_LINE.replace("one", "</answer>"), 0, 0.5, 0.5, 0),
    ("<answer>4</answer><reasoning>a</reasoning>", 0, 0, 0, 0),
    ("", 0, 0, 0, 0),
]


@pytest.mark.parametrize(("text", "strict", "soft", "old_strict", "old_soft"), FORMAT_CASES)
def test_xml_formats(
    text: str, strict: float, soft: float, old_strict: float, old_soft: float
) -> None:
    assert score("xml_strict_format", XML, text) == strict
    assert score("xml_soft_format", XML, text) == soft
    assert score("xml_strict_format", XML, text, variant="original") == old_strict
    assert score("xml_soft_format", XML, text, variant="original") == old_soft


@pytest.mark.parametrize(
    ("text", "value", "original"),
    [
        (ONE_LINE, 0.5, 0.5),
        # Without the newline at the end the original counts the whole text once, gives one back.
        (LINES, 0.5, 0.5 - 0.001 * len(LINES) + 0.001),
        (ONE_LINE + "abc", 0.5 - 0.003, 0.5 - 0.006),
        (ONE_LINE + "a" * 1000, 0.5 - 1.0, 0.5 - 2.0),
        ("<reasoning>\na", 0.125, 0.125),
        (ONE_LINE.replace("<answer>\n", "<answer>"), 0.375, 0.375),
        (ONE_LINE + "<reasoning>\n", 0.375 - 0.012, 0.375 - 0.024),
        ("", 0, 0),
        ("42", 0, 0),
    ],
)
def test_xml_tag_count(text: str, value: float, original: float) -> None:
    assert score("xml_tag_count", XML, text) == pytest.approx(value)
    assert score("xml_tag_count", XML, text, variant="original") == pytest.approx(original)


def published_strict(text: str) -> float:
    pattern = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
    return 0.5 if re.match(pattern, text) else 0.0


def published_soft(text: str) -> float:
    return 0.5 if re.match(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", text) else 0.0


PIECES = (*(XML.tags or ()), "\n", "\n", " ", "a", "\r", "<reasoning>\n", "</reasoning>\n<answer>")
WHOLE = (ONE_LINE, "<reasoning>a</reasoning>", "<answer>4</answer>")


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES + WHOLE), max_size=9).map("".join))
@example(ONE_LINE + "\n")
@example(ONE_LINE + "\n\n")
@example("<reasoning>a</reasoning>b</reasoning><answer>4</answer>")
@example("<reasoning></reasoning><answer>\n</reasoning><answer></answer>")
@example("<reasoning></reasoning><answer></reasoning>\n<answer>4</answer>")
@example("<reasoning>\n</reasoning>\n\n<answer>\n4\n</answer>\n</answer>\nmore")
@example("\n<answer>\n</answer>\n</answer>")  # two that share a newline: the first is cut at
def test_original_is_the_published_behavior(text: str) -> None:
    assert score("xml_strict_format", XML, text, variant="original") == published_strict(text)
    assert score("xml_soft_format", XML, text, variant="original") == published_soft(text)
    count = score("xml_tag_count", XML, text, variant="original")
    assert count == pytest.approx(count_xml(text))


def test_a_second_closing_tag_does_not_hide_what_trails() -> None:
    text = ONE_LINE + "x" * 100 + "\n</answer>"
    assert score("xml_tag_count", XML, text) == pytest.approx(0.375 - 0.001 * 110)


def test_xml_numbers_can_be_set() -> None:
    assert score("xml_correctness", XML, LINES, "42", value=3.0) == 3.0
    assert score("xml_tag_count", XML, ONE_LINE + "ab", value=0.25, penalty=0.1) == 0.8


@pytest.mark.parametrize("variant", ["default", "original"])
@pytest.mark.parametrize("name", ["xml_strict_format", "xml_soft_format", "xml_tag_count"])
def test_long_output_is_fast(name: str, variant: str) -> None:
    started = time.perf_counter()
    for part in ("<reasoning>", "</reasoning>\n<answer>", "<reasoning></reasoning><answer>", "\n"):
        score(name, XML, part * 20_000, variant=variant)
    pairs = "<reasoning>" + "</reasoning><answer>" * 20_000
    score(name, XML, f"{pairs}\n</answer>", variant=variant)
    assert time.perf_counter() - started < 2.0


# --- B


@pytest.mark.parametrize(
    ("text", "value", "original"),
    [
        (" so 4 </think> <answer> 4 </answer>", 1, 1),
        (" </answer> </think> <answer>", 0, 1),  # the source asks for two strings, wherever
        (" so 4 </think> <answer> </answer>", 0, 1),
        (" so 4 </think><answer> 4 </answer>", 0, 0),
        (" so 4 </think>\n<answer> 4 </answer>", 0, 0),
        (" so 4 </think> <answer> 4", 0, 0),
        ("", 0, 0),
    ],
)
def test_r1_zero_format(text: str, value: float, original: float) -> None:
    for wanted, params in ((value, {}), (original, {"variant": "original"})):
        assert score("r1_zero_format", R1_ZERO, text, **params) == wanted
        assert score_grade("r1_zero_answer", RIGHT, text, fmt=R1_ZERO, **params) == wanted
        assert score_grade("r1_zero_answer", WRONG, text, fmt=R1_ZERO, **params) == 0
        unreadable = score_grade("r1_zero_answer", UNREADABLE, text, fmt=R1_ZERO, **params)
        assert unreadable is None


def test_the_r1_zero_answer_is_symbolic() -> None:
    text = " half </think> <answer> 0.5 </answer>"
    assert score("r1_zero_answer", R1_ZERO, text, r"\frac{1}{2}") == 1


# --- C


LITE = "<reasoning>\na\n</reasoning>\n<answer>\n42\n</answer>"


@pytest.mark.parametrize(
    ("text", "reference", "correct", "numeric"),
    [
        (LITE, "42", 1.0, 0.1),
        (LITE, "42.0000009", 1.0, 0.1),
        (LITE, "42.00001", 0, 0.1),
        ("<answer>1,234</answer>", "1234", 1.0, 0.1),
        ("<answer>$5</answer>", "5", 1.0, 0.1),
        ("<answer>7.</answer>", "7", 1.0, 0.1),
        ("<answer>1e3</answer>", "1000", 1.0, 0.1),
        ("<answer>blue</answer>", "blue", 1.0, 0),
        ("<answer>Blue</answer>", "blue", 0, 0),
        ("<answer>42 apples</answer>", "42", 0, 0),
        ("<answer>41, 42</answer>", "42", 0, 0),
        ("so\n#### 42", "42", 1.0, 0.1),
        (" 42 ", "42", 1.0, 0.1),  # the whole text
        ("it is 42", "42", 0, 0),
        ("", "42", 0, 0),
        ("<answer>" + "9" * 400 + "</answer>", "42", 0, 0),
        ("<answer>nan</answer>", "nan.", 0, 0),
    ],
)
def test_lite_answers(text: str, reference: str, correct: float, numeric: float) -> None:
    assert score("lite_correctness", XML, text, reference) == correct
    assert score("lite_numeric", XML, text) == numeric


@pytest.mark.parametrize(
    ("text", "share"),
    [(LITE, 1), (LITE * 2, 1), ("<answer>4</answer>", 0.5), ("</answer>", 0.25), ("", 0)],
)
def test_lite_tags_present(text: str, share: float) -> None:
    assert score("lite_tags_present", XML, text) == pytest.approx(0.1 * share)


# --- D


SOLVED = "a\nb<end_working_out><SOLUTION>100</SOLUTION>"


@pytest.mark.parametrize(
    ("text", "exact", "approximate"),
    [
        (SOLVED, 3, 1.5),
        ("<start_working_out>" + SOLVED, 3, 1.5),
        ("a <end_working_out>\n\n<SOLUTION> 1 </SOLUTION>\n", 3, 1.5),
        (SOLVED + "so", 0, 1.5),
        ("a<end_working_out> so <SOLUTION>1</SOLUTION>", 0, 1.5),
        ("a<end_working_out><SOLUTION> </SOLUTION>", 0, 1.5),
        ("a<start_working_out>" + SOLVED, 0, 1.5),  # opened again in the middle
        ("a<SOLUTION>1</SOLUTION>", 0, 0),
        (SOLVED + "</SOLUTION>", 0, 0),
        (SOLVED + SOLVED, 0, -3),
        ("a<end_working_out>", 0, -1.5),
        ("", 0, -3),
    ],
)
def test_dapo_formats(text: str, exact: float, approximate: float) -> None:
    assert score("dapo_exact_format", DAPO, text) == exact
    assert score("dapo_approximate_format", DAPO, text) == approximate


@pytest.mark.parametrize(
    ("answer", "reference", "value", "number", "old_value", "old_number"),
    [
        ("100", "100", 5, 3, 5, 4),
        (" 100\n", "100", 5, 3, 5, 4),  # the layout that the format itself prints
        ("\n100\n", "100", 5, 3, 5, 4),
        ("1 00", "100", 3.5, -1.5, 3.5, -2),  # the first number is 1
        ("1\n00", "100", 3.5, -1.5, -2.5, -2),
        ("100.0", "100", 2, 3, 2, 4),
        ("90", "100", 2, 2.5, 2, 2.5),
        ("110", "100", 2, 2.5, 2, 2.5),
        ("89", "100", 1.5, 1.5, 1.5, 1.5),
        ("120", "100", 1.5, 1.5, 1.5, 1.5),
        ("121", "100", -2, -1.5, -2.5, -2),
        ("1e2", "100", 2, 3, 2, -2),  # its first number is 1
        ("$100", "100", 2, 3, -2.5, 4),
        ("1,000", "1,000", 5, 3, 5, -1.5),  # a reference that `float` refuses
        ("-95", "-100", 2, 2.5, 2, 2.5),
        ("95", "-100", -2, -1.5, -2.5, -2),
        ("0", "0", 5, 3, 5, 4),
        ("0.0", "0", 2, 3, 5, 4),
        ("0.01", "0", -2, -1.5, -2.5, -2),
        ("100 or 7", "100", -2, 3, -2.5, 4),  # a list: the ladder of numbers is fooled
        ("x=100", "100", -2, 3, -2.5, 4),
        ("none", "100", -2, -1.5, -2.5, -1.5),
        ("", "100", -2, -1.5, -2.5, -1.5),
        ("a+b", "a+b", 5, -1.5, 5, -1.5),
    ],
)
def test_dapo_ladders(
    answer: str, reference: str, value: float, number: float, old_value: float, old_number: float
) -> None:
    text = f"a<end_working_out><SOLUTION>{answer}</SOLUTION>"
    assert score("dapo_answer", DAPO, text, reference) == value
    assert score("dapo_number", DAPO, text, reference) == number
    assert score("dapo_answer", DAPO, text, reference, variant="original") == old_value
    assert score("dapo_number", DAPO, text, reference, variant="original") == old_number


def total(text: str, variant: str) -> float:
    names = ("dapo_exact_format", "dapo_approximate_format", "dapo_answer", "dapo_number")
    return sum(score(name, DAPO, text, "100", variant=variant) for name in names)


def test_dapo_totals() -> None:
    assert total(SOLVED, "default") == 12.5
    assert total("<start_working_out>" + SOLVED, "original") == 13.5
    assert total(SOLVED, "original") == 10.5  # the prompt has opened the first tag
    for text in ("", "100", "<SOLUTION>" * 2):
        assert total(text, "default") == total(text, "original") == -6.5
    assert total("<SOLUTION>9</SOLUTION>" * 2, "original") == -7.5


def test_the_original_reads_the_first_solution() -> None:
    text = "<SOLUTION>1</SOLUTION><SOLUTION>100</SOLUTION>"
    assert score("dapo_answer", DAPO, text, "100", variant="original") == -2.5
    assert score("dapo_number", DAPO, text, "1", variant="original") == 4


def test_the_last_closed_solution_counts() -> None:
    text = "<SOLUTION>1</SOLUTION><SOLUTION>100</SOLUTION>"
    assert score("dapo_answer", DAPO, text, "100") == 5
    assert score("dapo_answer", DAPO, text + "<SOLUTION>", "100") == -2


def test_dapo_steps_can_be_set() -> None:
    assert score("dapo_answer", DAPO, SOLVED, "99", within_10=1.0) == 1.0
    assert score("dapo_answer", DAPO, "", "99", missing=-9.0, variant="original") == -9.0
    assert score("dapo_answer", DAPO, "", "99", wrong=-9.0) == -9.0
